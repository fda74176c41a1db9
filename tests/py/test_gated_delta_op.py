"""The native GatedDeltaNet step against transformers' own functions: several steps in a row, outputs and both states."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from segki import _segki
from segki.native import view

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = 6


@dataclass(frozen=True)
class Family:
    """A transformers module whose block differs from Qwen3.5's in beta's scale or in where the gated norm rounds."""

    name: str
    norm: str
    beta_scale: float = 1.0
    round_before_weight: bool = True

    def module(self) -> ModuleType:
        """The modelling module; the test is skipped where this transformers has none."""
        name = f"transformers.models.{self.name}.modeling_{self.name}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pytest.skip(f"{name} is not here")


FAMILIES = [
    Family("qwen3_5", "Qwen3_5RMSNormGated"),
    Family("qwen3_next", "Qwen3NextRMSNormGated"),
    Family("olmo_hybrid", "OlmoHybridRMSNormGated", beta_scale=2.0),
    Family("lara_mini", "LaraMiniRMSNormGated", round_before_weight=False),
]


@dataclass(frozen=True)
class Sizes:
    """Of a block: rows, key heads, value heads a key head, their widths, the convolution's width."""

    rows: int
    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    width: int = 4
    bias: bool = False

    @property
    def value_heads(self) -> int:
        """Value heads in all."""
        return self.key_heads * self.group

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


SIZES = [Sizes(1, 2, 2, 128, 128), Sizes(3, 2, 1, 20, 36, 4, True), Sizes(8, 1, 3, 33, 17, 3), Sizes(2, 3, 2, 64, 96, 2)]


@dataclass
class Block:
    """Parameters and states of one block, twice: transformers' and the op's."""

    sizes: Sizes
    family: Family
    dtype: torch.dtype
    scale: float = 4.0
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, dtype = self.sizes, self.dtype
        self.conv_weight = (torch.randn(s.channels, s.width) * 0.5).to(dtype)
        self.conv_bias = (torch.randn(s.channels) * 0.5).to(dtype) if s.bias else None
        self.a_log = torch.rand(s.value_heads).mul(16).clamp(0.01).log().to(dtype)
        self.dt_bias = torch.randn(s.value_heads).to(dtype)
        module = self.family.module()
        self.norm = getattr(module, self.family.norm)(s.value_dim, eps=1e-6)
        self.norm.weight.data = (1 + 0.3 * torch.randn(s.value_dim)).to(dtype)
        self.conv_state = torch.randn(s.rows, s.channels, s.width).to(dtype)
        self.state = torch.randn(s.rows, s.value_heads, s.key_dim, s.value_dim)
        self.own_conv_state, self.own_state = self.conv_state.clone(), self.state.clone()

    def draw(self) -> None:
        """Fresh inputs of a step, as the projections would give them."""
        s = self.sizes
        shapes = {
            "q": (s.key_heads, s.key_dim), "k": (s.key_heads, s.key_dim), "v": (s.key_heads, s.group, s.value_dim),
            "z": (s.key_heads, s.group, s.value_dim), "a": (s.key_heads, s.group), "b": (s.key_heads, s.group),
        }  # fmt: skip
        self.inputs = {name: torch.randn(s.rows, *shape).to(self.dtype) for name, shape in shapes.items()}
        self.inputs["a"] *= self.scale

    @torch.no_grad()
    def theirs(self) -> torch.Tensor:
        """One step of transformers, `[rows, value_heads * value_dim]`."""
        s, module = self.sizes, self.family.module()
        q, k, v, z, a, b = (self.inputs[name].flatten(1) for name in "qkvzab")
        mixed = torch.cat([q, k, v], 1)[:, :, None]
        mixed = module.causal_conv1d_update(mixed, self.conv_state, self.conv_weight, self.conv_bias, "silu")[:, :, 0]
        keys = s.key_heads * s.key_dim
        query, key, value = mixed.split([keys, keys, s.value_heads * s.value_dim], 1)
        beta = b[:, None].sigmoid()
        if self.family.beta_scale != 1.0:
            beta = beta * self.family.beta_scale
        out, self.state = module.torch_recurrent_gated_delta_rule(
            query.view(s.rows, 1, s.key_heads, s.key_dim),
            key.view(s.rows, 1, s.key_heads, s.key_dim),
            value.view(s.rows, 1, s.value_heads, s.value_dim),
            g=-self.a_log.float().exp() * F.softplus(a[:, None].float() + self.dt_bias),
            beta=beta,
            initial_state=self.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return self.norm(out.reshape(-1, s.value_dim), z.reshape(-1, s.value_dim)).reshape(s.rows, -1)

    def ours(self, frozen: torch.Tensor | None = None) -> torch.Tensor:
        """The same step by the op."""
        s = self.sizes
        args, norm = _segki.GatedDeltaArgs(), _segki.NormSpec()
        for name, tensor in self.inputs.items():
            setattr(args, name, view(tensor))
        for name in ("conv_weight", "conv_bias", "a_log", "dt_bias"):
            setattr(args, name, view(getattr(self, name)))
        out = torch.full((s.rows, s.value_heads * s.value_dim), torch.nan, dtype=self.dtype)
        args.norm_weight, args.out = view(self.norm.weight), view(out)
        args.conv_state, args.state, args.frozen = view(self.own_conv_state), view(self.own_state), view(frozen)
        norm.kind, norm.eps = _segki.NormKind.rms, 1e-6
        norm.round_before_weight = int(self.family.round_before_weight)
        args.norm, args.query_scale, args.beta_scale = norm, s.key_dim**-0.5, self.family.beta_scale
        _segki.gated_delta(_segki.backend("cpu"), args)
        return out


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


# Largest differences of outputs and of the recurrent state. fp32 sums in another order may round an input of the recurrence to its
# neighbour in half precision, which moves one row or column of a state by a step of the dtype.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2**-9), torch.float16: (2**-10, 2**-12)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_steps_in_a_row_are_transformers(family: Family, sizes: Sizes, dtype: torch.dtype) -> None:
    block = Block(sizes, family, dtype)
    differing = []
    for _ in range(STEPS):
        block.draw()
        want, got = block.theirs(), block.ours()
        assert torch.equal(block.own_conv_state, block.conv_state)
        assert off(got, want) <= TOLERANCE[dtype][0]
        assert off(block.own_state, block.state) <= TOLERANCE[dtype][1]
        differing.append((got != want).double().mean().item())
    if dtype != torch.float32:
        assert sum(differing) / STEPS <= 0.02, differing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("value", [-300.0, -40.0, 19.9, 20.1, 300.0])
def test_gates_far_out_are_transformers(name: str, value: float, dtype: torch.dtype) -> None:
    block = Block(SIZES[1], FAMILIES[0], dtype, scale=1.0)
    block.a_log = block.a_log - 4.0  # decays that leave something of the state
    block.draw()
    block.inputs[name].fill_(value)
    want, got = block.theirs(), block.ours()
    assert off(got, want) <= TOLERANCE[dtype][0]
    assert off(block.own_state, block.state) <= TOLERANCE[dtype][1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_row_stands_still_and_gives_zeros(dtype: torch.dtype) -> None:
    block = Block(SIZES[1], FAMILIES[0], dtype)
    block.draw()
    conv_before, state_before = block.own_conv_state.clone(), block.own_state.clone()
    want, got = block.theirs(), block.ours(torch.tensor([0, 1, 0], dtype=torch.int32))
    assert torch.equal(block.own_conv_state[1], conv_before[1])
    assert torch.equal(block.own_state[1], state_before[1])
    assert not got[1].any()
    for row in (0, 2):
        assert torch.equal(block.own_conv_state[row], block.conv_state[row])
        assert off(block.own_state[row], block.state[row]) <= TOLERANCE[dtype][1]
        assert off(got[row], want[row]) <= TOLERANCE[dtype][0]


def test_a_bad_argument_is_named() -> None:
    block = Block(SIZES[1], FAMILIES[0], torch.float32)
    block.draw()
    block.inputs["k"] = block.inputs["k"][:, :, 1:].contiguous()
    with pytest.raises(ValueError, match=r"gated_delta.*'k'.*accepted"):
        block.ours()

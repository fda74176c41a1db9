"""The native router and expert ops against torch.topk and against transformers' own blocks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from segki import _segki
from segki.native import DTYPES, view

HIDDEN, WIDTH = 72, 56
ROWS = 24
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def route(logits: Tensor, k: int, dtype: torch.dtype = FP32, bias: Tensor | None = None, **rule: Any) -> tuple[Tensor, Tensor]:
    """Experts i32 and weights f32 `[rows, k]` that the op chooses from fp32 logits `[rows, E]`."""
    args = _segki.RouterArgs()
    experts = torch.full((len(logits), k), -1, dtype=torch.int32)
    weights = torch.full((len(logits), k), torch.nan)
    args.logits, args.bias = view(logits), view(bias)
    args.experts, args.weights = view(experts), view(weights)
    args.dtype = DTYPES[dtype]
    for name, value in rule.items():
        setattr(args, name, value if name != "score" else getattr(_segki.RouterScore, value))
    _segki.route_experts(_segki.backend("cpu"), args)
    return experts, weights


# --- torch.topk's answer for ties and NaN: with k * 64 <= n it sorts partially, else it selects and sorts.


def equal_values(rows: int, n: int) -> Tensor:
    return torch.zeros(rows, n)


def few_values(rows: int, n: int) -> Tensor:
    return torch.randint(-2, 3, (rows, n)).float()


def half_precision(rows: int, n: int) -> Tensor:
    return torch.randn(rows, n).bfloat16().float()


def some_nan(rows: int, n: int) -> Tensor:
    values = few_values(rows, n)
    values[torch.rand(rows, n) < 0.1] = torch.nan
    return values


def some_infinite(rows: int, n: int) -> Tensor:
    values = few_values(rows, n)
    values[torch.rand(rows, n) < 0.5] = -torch.inf
    return values


DRAWS: list[Callable[[int, int], Tensor]] = [equal_values, few_values, half_precision, some_nan, some_infinite]
SIZES = [(1, 1), (8, 2), (8, 8), (17, 3), (60, 4), (64, 1), (64, 6), (128, 2), (128, 8), (256, 4), (256, 8), (257, 5), (512, 8), (513, 9)]


@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_ties_as_torch_topk(draw: Callable[[int, int], Tensor], n: int, k: int, ordered: bool) -> None:
    for rows in (1, 5, 64):
        logits = draw(rows, n)
        experts, _ = route(logits, k, score="softmax_chosen", sorted=int(ordered))
        for dtype in (FP32, BF16):
            want = logits.to(dtype).topk(k, dim=-1, sorted=ordered)[1]
            assert torch.equal(experts.long(), want)


@pytest.mark.parametrize("draw", [few_values, some_nan], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize(("groups", "open_groups", "k"), [(4, 2, 3), (8, 1, 2), (16, 5, 8), (128, 2, 2)])
@pytest.mark.parametrize("by_max", [False, True])
def test_ties_between_groups(draw: Callable[[int, int], Tensor], groups: int, open_groups: int, k: int, by_max: bool) -> None:
    for _ in range(20):
        logits = draw(3, 256)
        experts, weights = route(logits, k, score="sigmoid", sorted=0, groups=groups, group_top_k=open_groups, group_by_max=int(by_max))
        scores = logits.sigmoid()
        grouped = scores.view(3, groups, -1)
        values = grouped.max(-1)[0] if by_max else grouped.topk(2, dim=-1)[0].sum(-1)
        best = values.topk(open_groups, dim=-1, sorted=False)[1]
        closed = torch.ones_like(values, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
        want = choice.topk(k, dim=-1, sorted=False)[1]
        assert torch.equal(experts.long(), want)
        torch.testing.assert_close(weights, scores.gather(1, want), rtol=1e-6, atol=0, equal_nan=True)


# --- Blocks of transformers


@dataclass(frozen=True)
class Family:
    """A block of transformers and the rule that it follows.

    Attributes
    ----------
    block, sizes
        Class and configuration.
    rule
        Fields of `RouterArgs`.
    narrow_weights
        The router gives its weights in the model's dtype and not in fp32.
    wide_logits
        The logits are computed in fp32.
    """

    name: str
    block: str
    sizes: dict[str, Any]
    k: int
    rule: dict[str, Any]
    narrow_weights: bool = False
    wide_logits: bool = False
    config: str = ""
    router: str = "gate"

    def build(self, dtype: torch.dtype, implementation: str) -> nn.Module:
        """The block with random weights; biases and corrections are not zero."""
        config = AutoConfig.for_model(self.config or self.name, **self.sizes)
        config._experts_implementation = implementation
        module = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        block: nn.Module = getattr(module, self.block)(config)
        with torch.no_grad():
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                correction = "bias" in name
                tensor.copy_(torch.randn(tensor.shape) * (0.2 if correction else 2.0 / max(tensor.shape[-2:]) ** 0.5))
                if not correction:
                    tensor.data = tensor.data.to(dtype)
        return block.eval()


SIGMOID = {"score": "sigmoid", "normalise": 1, "sum_eps": 1e-20}
FAMILIES = [
    Family(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock",
        {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
        4, {"score": "softmax", "normalise": 1, "round_weights": 1}, narrow_weights=True,
    ),
    Family(
        "mixtral", "MixtralSparseMoeBlock",
        {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": 8, "num_experts_per_tok": 2},
        2, {"score": "softmax", "normalise": 1},
    ),
    Family(
        "deepseek_v3", "DeepseekV3MoE",
        {
            "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": 24, "num_experts_per_tok": 5, "n_group": 6,
            "topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
        },
        5, {**SIGMOID, "sorted": 0, "groups": 6, "group_top_k": 3, "scale": 2.5}, wide_logits=True,
    ),
    Family(
        "granitemoe", "GraniteMoeMoE",
        {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": 12, "num_experts_per_tok": 3},
        3, {"score": "softmax_chosen", "round_weights": 1}, narrow_weights=True, router="router",
    ),
    Family(
        "afmoe", "AfmoeSparseMoeBlock",
        {
            "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": 16, "num_experts_per_tok": 4,
            "num_shared_experts": 1, "route_scale": 1.7,
        },
        4, {**SIGMOID, "scale": 1.7}, router="router",
    ),
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock",
        {
            "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 2,
            "moe_norm_min": 0.5,
        },
        4, {"score": "softmax", "normalise": 1, "sum_min": 0.5, "round_weights": 1}, narrow_weights=True, wide_logits=True,
    ),
    Family(
        "aria", "AriaTextMoELayer",
        {
            "hidden_size": HIDDEN, "intermediate_size": WIDTH, "moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 2,
            "num_attention_heads": 4,
        },
        3, {"score": "softmax_chosen", "round_scores": 1}, narrow_weights=True, config="aria_text", router="router",
    ),
]  # fmt: skip


@dataclass
class Block:
    """A block of transformers beside the ops on its parameters."""

    family: Family
    dtype: torch.dtype
    implementation: str = "eager"
    module: Any = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.family.build(self.dtype, self.implementation)

    @property
    def bias(self) -> Tensor | None:
        """The correction that is added for the choice, `[E]`."""
        found = [tensor for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()] if "bias" in name]
        return found[0].detach().flatten() if found else None

    @torch.no_grad()
    def their_routing(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and experts of transformers for `[rows, H]`."""
        router = getattr(self.module, self.family.router)
        logits, weights, experts = router(x[None], self.bias) if self.family.name == "afmoe" else router(x)
        return logits, weights, experts

    def our_routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights of the op for transformers' logits."""
        return route(logits.float().contiguous(), self.family.k, self.dtype, self.bias, **self.family.rule)

    @torch.no_grad()
    def theirs(self, x: Tensor) -> Tensor:
        """The block's output, row by row as a decode step has it."""
        return torch.cat([self.module(row[None, None])[0] for row in x])

    @torch.no_grad()
    def ours(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The same by the two expert ops for a given routing."""
        parameters = self.module.experts
        transposed = self.family.name == "aria"
        both, down = parameters.gate_up_proj, parameters.down_proj
        rows, k, width = len(x), experts.shape[1], both.shape[2 if transposed else 1] // 2
        halves = both.split(width, 2 if transposed else 1)
        gate, up, second_half = (torch.tensor([m.data_ptr() for m in part]) for part in (*halves, down))
        hidden, out = x.new_full((rows, k, width), torch.nan), torch.full_like(x, torch.nan)

        first = _segki.ExpertGatedProjectionArgs()
        first.x, first.experts, first.out = view(x), view(experts), view(hidden)
        first.gate, first.up = view(gate), view(up)
        first.weight_stride, first.transposed = both.stride(1), int(transposed)
        _segki.expert_gated_projection(_segki.backend("cpu"), first)

        second = _segki.ExpertProjectionArgs()
        second.x, second.experts, second.weights = view(hidden), view(experts), view(weights)
        second.weight, second.weight_stride, second.transposed = view(second_half), down.stride(1), int(transposed)
        eager = self.implementation == "eager"
        second.round_products = int(eager or self.family.narrow_weights)
        second.round_sums = int(eager)
        shared = getattr(self.module, "shared_experts", None)
        contribution = None if shared is None else torch.cat([shared(row[None]) for row in x])
        second.shared, second.out = view(contribution), view(out)
        _segki.expert_projection(_segki.backend("cpu"), second)
        return out


families = functools.partial(pytest.mark.parametrize, "family", FAMILIES, ids=lambda family: family.name)
every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)


@every_dtype
@families()
def test_routers_are_transformers(family: Family, dtype: torch.dtype) -> None:
    block = Block(family, dtype)
    x = torch.randn(64, HIDDEN).to(dtype)
    logits, want_weights, want_experts = block.their_routing(x)
    experts, weights = block.our_routing(logits)
    assert torch.equal(experts.long(), want_experts)
    assert want_weights.dtype == (dtype if family.narrow_weights else FP32)
    equal = (weights == want_weights.float()).double().mean().item()
    if family.narrow_weights and dtype != FP32:
        assert equal > 0.98
    # narrow weights may be one step apart where fp32 sums differ
    step = torch.finfo(want_weights.dtype).eps
    torch.testing.assert_close(weights, want_weights.float(), rtol=max(step, 1e-6), atol=0)


@every_dtype
@pytest.mark.parametrize("fp32_weight", [False, True], ids=["own_weight", "fp32_weight"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.wide_logits], ids=lambda family: family.name)
def test_wide_logits_are_transformers(family: Family, fp32_weight: bool, dtype: torch.dtype) -> None:
    block = Block(family, dtype)
    router = getattr(block.module, family.router)
    if fp32_weight:
        router.weight.data = torch.randn(router.weight.shape)
    x = torch.randn(64, HIDDEN).to(dtype)
    want, _, _ = block.their_routing(x)
    args, logits = _segki.ProjectionArgs(), torch.full_like(want, torch.nan)
    args.x, args.count = view(x), 1
    args.weight, args.out = [view(router.weight)], [view(logits)]
    _segki.projection(_segki.backend("cpu"), args)
    assert want.dtype == FP32
    torch.testing.assert_close(logits, want, rtol=0, atol=2e-6 * want.abs().max().item())


@every_dtype
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@families()
def test_blocks_are_transformers(family: Family, implementation: str, dtype: torch.dtype) -> None:
    block = Block(family, dtype, implementation)
    x = torch.randn(ROWS, HIDDEN).to(dtype)
    want = block.theirs(x)
    experts, weights = block.our_routing(block.their_routing(x)[0])
    got = block.ours(x, experts, weights)
    error = (got.double() - want.double()).abs().amax(-1) / want.double().abs().amax(-1)
    if dtype == FP32:
        assert error.max() < 2e-6
    else:
        assert (got == want).double().mean() > 0.97
        assert error.max() <= 2 * torch.finfo(dtype).eps


@families()
def test_the_other_rounding_is_another(family: Family) -> None:
    """What tells the implementations apart in bf16: the test above would see a wrong flag."""
    block = Block(family, BF16, "eager")
    x = torch.randn(ROWS, HIDDEN).to(BF16)
    want = block.theirs(x)
    experts, weights = block.our_routing(block.their_routing(x)[0])
    block.implementation = "grouped_mm"
    assert (block.ours(x, experts, weights) == want).double().mean() < 0.95


def test_rows_alone_have_the_bits_of_the_batch() -> None:
    block = Block(FAMILIES[0], BF16)
    x = torch.randn(64, HIDDEN).to(BF16)
    experts, weights = block.our_routing(block.their_routing(x)[0])
    batch = block.ours(x, experts, weights)
    for r in range(64):
        assert torch.equal(block.ours(x[r : r + 1], experts[r : r + 1], weights[r : r + 1])[0], batch[r])


def test_bad_arguments_are_named() -> None:
    logits = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"route_experts.*'experts' k'.*accepted 1 to 8"):
        route(logits, 9)
    with pytest.raises(ValueError, match=r"route_experts.*'groups'.*accepted a divisor of E"):
        route(logits, 2, groups=3)
    with pytest.raises(ValueError, match=r"route_experts.*'logits'.*accepted"):
        route(logits.double().long(), 2)

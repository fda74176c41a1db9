"""Detection of GatedDeltaNet blocks: roles, factors and rounding of each, against the blocks' own forwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from families import HIDDEN, build, prompt
from segki import reference, reference_hybrid
from segki.detect import detect, resolve, rope_table
from segki.detect.numeric import max_error
from segki.plan import Detection, GdnPlan

AUTO: Any = AutoModelForCausalLM
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])


@dataclass(frozen=True)
class Facts:
    """What the tests compare of a plan."""

    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (16, 24)
    width: int = 4
    beta_scale: float = 1.0
    l2_eps: float = 1e-6
    norm_eps: float = 1e-6
    cast: str = "before_weight"
    conv_activation: str = "silu"
    conv_bias: bool = False


def facts(plan: GdnPlan) -> Facts:
    return Facts(
        (plan.key_heads, plan.value_heads), (plan.key_dim, plan.value_dim), plan.conv_width, plan.beta_scale, plan.l2_eps, plan.norm.eps,
        plan.norm.cast, plan.conv_activation, plan.conv_bias is not None,
    )  # fmt: skip


FAMILIES = {
    "qwen3_5_text": Facts(),
    "qwen3_5_moe_text": Facts(),
    "qwen3_next": Facts(),
    "lara_mini": Facts(cast="after_weight"),
    "olmo_hybrid": Facts(beta_scale=2.0, norm_eps=1e-5),
}
AVAILABLE = [name for name in FAMILIES if name in CONFIG_MAPPING]


def blocks(detection: Detection) -> list[tuple[str, GdnPlan]]:
    """(module, plan) of the blocks in the whole model's plan."""
    assert detection.plan is not None, detection.reasons
    nodes = [node for layer in detection.plan.layers for node in layer.nodes]
    return [(node.module or "", node.gdn) for node in nodes if node.gdn is not None]


def lookup(model: nn.Module) -> reference.Lookup:
    return functools.partial(resolve, model)


@torch.no_grad()
def both(model: nn.Module, name: str, plan: GdnPlan, tokens: int = 23, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """What the reference and the block itself give for the same random input."""
    x = (torch.randn(2, tokens, HIDDEN) * size).to(next(model.parameters()).dtype)
    want = model.get_submodule(name)(x)
    return reference_hybrid.gated_delta(plan, lookup(model), x), want[0] if isinstance(want, tuple) else want


def block_error(model: nn.Module, name: str, plan: GdnPlan, tokens: int = 23, size: float = 1.0) -> float:
    return max_error(*both(model, name, plan, tokens, size))


# ------------------------------------------------------------------------------------------------- blocks of our own


@dataclass(frozen=True)
class Rule:
    """What a block of this file does; see `OwnGdn.forward`."""

    layout: str = "split"  # of the projections: split, numbers-swapped, separate, interleaved
    biased: bool = False  # projections and convolution
    width: int = 4
    beta: float = 1.0
    l2_eps: float = 1e-6
    norm_eps: float = 1e-6
    norm_fp32: bool = False
    conv_activation: str = "silu"
    trick: str = ""


class OwnNorm(nn.Module):
    def __init__(self, rule: Rule, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.rule, self.norm_eps = rule, rule.norm_eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        trick = self.rule.trick
        if trick == "norm-after-gate":
            x = (x.float() * F.silu(gate.float())).to(x.dtype)
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.norm_eps)
        n = self.weight.float() * n if self.rule.norm_fp32 else self.weight * n.to(x.dtype)
        if trick == "norm-after-gate":
            return n.to(x.dtype)
        if trick == "half-gate":
            return n.to(x.dtype) * F.silu(gate)
        return (n * (gate.float().sigmoid() if trick == "sigmoid-gate" else F.silu(gate.float()))).to(x.dtype)


class OwnGdn(nn.Module):
    """A GatedDeltaNet block that does what its rule says, token by token."""

    def __init__(self, rule: Rule, key_heads: int = 2, value_heads: int = 4, key_dim: int = 16, value_dim: int = 24) -> None:
        super().__init__()
        self.rule = rule
        if rule.trick != "unnamed-eps":
            self.l2_epsilon = rule.l2_eps
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = key_heads, value_heads, key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        linear = functools.partial(nn.Linear, HIDDEN, bias=rule.biased)
        if rule.layout == "interleaved":
            self.qkvz, self.ba = linear(2 * keys + 2 * values), linear(2 * value_heads)
        elif rule.layout == "separate":
            self.q_proj, self.k_proj, self.v_proj = linear(keys), linear(keys), linear(values)
            self.a_proj, self.b_proj, self.g_proj = linear(value_heads), linear(value_heads), linear(values)
        else:
            self.qkv, self.z, self.first, self.second = linear(2 * keys + values), linear(values), linear(value_heads), linear(value_heads)
        channels = 2 * keys + values
        self.conv = nn.Conv1d(channels, channels, rule.width, groups=channels, padding=rule.width - 1, bias=rule.biased)
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.A_log = nn.Parameter(torch.zeros(value_heads))
        if rule.trick == "skip":
            self.D = nn.Parameter(torch.zeros(value_heads))
        if rule.trick == "buffer":
            self.register_buffer("added", torch.zeros(values))
        self.norm = OwnNorm(rule, value_dim)
        self.out = nn.Linear(values, HIDDEN, bias=rule.biased)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q|k|v, z, b, a with values and numbers by key head, then by its value heads."""
        group = self.value_heads // self.key_heads
        if self.rule.layout == "interleaved":
            wide = self.qkvz(x).unflatten(-1, (self.key_heads, -1))
            sizes = [self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim]
            q, k, v, z = (part.flatten(2) for part in wide.split(sizes, -1))
            b, a = (part.flatten(2) for part in self.ba(x).unflatten(-1, (self.key_heads, -1)).chunk(2, -1))
            return torch.cat([q, k, v], -1), z, b, a
        if self.rule.layout == "separate":
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1), self.g_proj(x), self.b_proj(x), self.a_proj(x)
        numbers = self.first(x), self.second(x)
        b, a = numbers[::-1] if self.rule.layout == "numbers-swapped" else numbers
        return self.qkv(x), self.z(x), b, a

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        rule, trick = self.rule, self.rule.trick
        x = hidden_states.clamp(-2.0, 2.0) if trick == "input-clamp" else hidden_states
        rows, tokens, _ = x.shape
        mixed, z, b, a = self.project(x)
        if trick == "wide-convolution":
            weight, bias = self.conv.weight.float(), None if self.conv.bias is None else self.conv.bias.float()
            mixed = F.conv1d(mixed.float().transpose(1, 2), weight, bias, padding=rule.width - 1, groups=weight.shape[0])
        else:
            mixed = self.conv(mixed.transpose(1, 2))
        mixed = mixed[..., :tokens].transpose(1, 2)
        mixed = reference.ACTIVATIONS[rule.conv_activation](mixed)  # type: ignore[index]
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        if trick == "scaled-values":
            v = v * 1.01
        if trick == "keys-first":
            q, k = k, q
        group = self.value_heads // self.key_heads
        q, k = (t.unflatten(-1, (self.key_heads, -1)) for t in (q, k))
        if trick != "half-l2":
            q, k = q.float(), k.float()
        v = v.unflatten(-1, (self.value_heads, -1)).float()
        if trick != "no-l2":
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + rule.l2_eps) for t in (q, k))
        q, k = q.float(), k.float()
        if trick == "normalize":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q = q * (1.0 if trick == "no-scale" else self.key_dim**-0.5)
        if trick == "tiled-heads":
            q, k = q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1)
        else:
            q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
        beta = (b.float() if trick == "wide-beta" else b).sigmoid()
        beta = beta * rule.beta if rule.beta != 1.0 else beta
        a = a.float() + self.dt_bias
        soft = {
            "softplus-threshold": lambda: F.softplus(a, threshold=1.0),
            "softplus-beta": lambda: F.softplus(a, beta=2.0),
            "relu-decay": lambda: F.relu(a),
            "decay-floor": lambda: F.softplus(a).clamp(min=1e-2),
            "decay-limit": lambda: F.softplus(a).clamp(max=4.0),
        }.get(trick, lambda: F.softplus(a))()
        decay = (-self.A_log.float().exp() * soft).exp()
        out = self.scan(q, k, v, decay, beta.float()).to(x.dtype)
        if trick == "skip":
            out = out + (self.D[:, None] * v).to(x.dtype)
        out = self.norm(out.reshape(-1, self.value_dim), z.reshape(-1, self.value_dim)).reshape(rows, tokens, -1)
        if trick == "buffer":
            out = out + self.added
        if trick == "inner-clamp":
            out = out.clamp(-30.0, 30.0)
        if trick == "inner-factor":
            out = out * 1.001
        out = self.out(out)
        return out.clamp(-60.0, 60.0) if trick == "output-clamp" else out

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        trick = self.rule.trick
        state = torch.zeros(q.shape[0], self.value_heads, self.key_dim, self.value_dim)
        outs = []
        for t in range(q.shape[1]):
            if trick == "forgets" and t % (self.rule.width + 2) == 0:
                state = torch.zeros_like(state)
            if trick == "decay-after":
                seen = (state * k[:, t, ..., None]).sum(-2)
                state = state * decay[:, t, :, None, None]
            else:
                state = state * decay[:, t, :, None, None]
                seen = (state * k[:, t, ..., None]).sum(-2)
            if trick == "no-delta":
                seen = torch.zeros_like(seen)
            state = state + k[:, t, ..., None] * ((v[:, t] - seen) * beta[:, t, :, None])[..., None, :]
            if trick == "half-state":
                state = state.to(torch.bfloat16).float()
            outs.append((state * q[:, t, ..., None]).sum(-2))
        return torch.stack(outs, 1)


@torch.no_grad()
def with_blocks(rule: Rule, dtype: torch.dtype = FP32, *, weights: str = "spread", seed: int = 0, **sizes: int) -> Any:
    """A tiny Llama with these blocks in place of its attention.

    Weights are "spread", or left as they were initialised and "fading": every state is gone after one token.
    """
    torch.manual_seed(seed)
    model = AUTO.from_config(families.tiny_config("llama", {"num_hidden_layers": 2}), dtype=FP32).eval()
    for layer in model.model.layers:
        block = OwnGdn(rule, **sizes)
        if weights == "fading":
            block.A_log.fill_(2.77)
        layer.self_attn = Wrapped(block)
    if weights == "spread":
        families.spread(model, seed)
    return model.to(dtype).eval()


class Wrapped(nn.Module):
    """Llama's layer expects attention weights beside the output."""

    def __init__(self, block: OwnGdn) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.block(hidden_states), None


# ------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("name", AVAILABLE)
def test_families_in_float32(name: str) -> None:
    model = build(name)
    found = blocks(detect(model))
    assert len(found) == model.config.layer_types.count("linear_attention") > 0
    for module, plan in found:
        assert facts(plan) == FAMILIES[name]
        assert plan.query_scale == 16**-0.5
        for size in (1e-3, 1.0, 30.0):
            assert block_error(model, module, plan, size=size) < 1e-4
    assert block_error(model, module, plan, tokens=150) < 1e-4  # more than two chunks of the model's own form
    ids = prompt(2, 23, seed=5)
    detection = detect(model)
    assert detection.plan is not None
    with torch.no_grad():
        want = model(ids).logits
    got = reference.forward(model, detection.plan, ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", AVAILABLE)
def test_families_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    module, plan = blocks(detect(model))[-1]
    assert facts(plan) == FAMILIES[name]
    got, want = both(model, module, plan)
    assert (got == want).float().mean() > 0.97


@pytest.mark.parametrize("name", AVAILABLE)
def test_default_initialisation_shows_enough(name: str) -> None:
    """Norm weights and step biases of one, states that fade at once: the plan must hold once the weights move."""
    torch.manual_seed(1)
    fresh = AUTO.from_config(families.tiny_config(name), dtype=FP32).eval()
    found = blocks(detect(fresh))
    fresh.load_state_dict(build(name).state_dict())
    for module, plan in found:
        assert facts(plan) == FAMILIES[name]
        assert block_error(fresh, module, plan) < 1e-4


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3_5_text", {"linear_conv_kernel_dim": 8, "linear_num_key_heads": 4}, Facts(heads=(4, 4), width=8)),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 1}, Facts(heads=(1, 4), width=2)),
        ("qwen3_5_text", {"rms_norm_eps": 1e-5, "linear_key_head_dim": 24}, Facts(dims=(24, 24), norm_eps=1e-5)),
        ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 9}, Facts(heads=(3, 9))),
        ("qwen3_next", {"linear_num_key_heads": 4, "linear_value_head_dim": 16}, Facts(heads=(4, 4), dims=(16, 16))),
        ("lara_mini", {"linear_num_key_heads": 1}, Facts(heads=(1, 4), cast="after_weight")),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}, Facts(norm_eps=1e-5)),
        ("olmo_hybrid", {"linear_num_key_heads": 4, "linear_value_head_dim": 16}, Facts((4, 4), (16, 16), beta_scale=2.0, norm_eps=1e-5)),
    ],
)
@DTYPES
def test_variants(family: str, changes: dict[str, Any], expected: Facts, dtype: torch.dtype) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(2)
    model = AUTO.from_config(families.tiny_config(family, changes), dtype=FP32).eval()
    families.spread(model, 2)
    model = model if dtype == FP32 else families.cast(model, dtype)
    module, plan = blocks(detect(model))[-1]
    assert facts(plan) == expected
    got, want = both(model, module, plan)
    assert max_error(got, want) < (1e-4 if dtype == FP32 else 2e-2)


@DTYPES
def test_gates_in_float32_beside_half_precision(dtype: torch.dtype) -> None:
    """Decay and step bias may be kept in float32."""
    model = build("qwen3_5_text", BF16)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.to(dtype)
    module, plan = blocks(detect(model))[0]
    got, want = both(model, module, plan)
    assert (got == want).float().mean() > 0.97


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "mamba", "mamba2", "bamba", "jamba", "granitemoehybrid"])
def test_other_recurrent_blocks_are_declined_by_name(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    detection = detect(build(family))
    assert detection.plan is None
    assert "a GatedDeltaNet block has two vectors" in detection.reasons[0]


# ------------------------------------------------------------------------------------------------- what blocks of our own show


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("layout", ["split", "numbers-swapped", "separate", "interleaved"])
@DTYPES
def test_layouts(layout: str, biased: bool, dtype: torch.dtype) -> None:
    model = with_blocks(Rule(layout, biased), dtype)
    found = blocks(detect(model))
    assert [module for module, _ in found] == [f"model.layers.{i}.self_attn.block" for i in (0, 1)]
    for module, plan in found:
        assert facts(plan) == Facts(conv_bias=biased)
        got, want = both(model, module, plan)
        assert max_error(got, want) < (1e-4 if dtype == FP32 else 2e-2)


def test_equal_widths_everywhere() -> None:
    """Key and value heads of one size, as many of one as of the other: only the numbers tell q, k, v and z apart."""
    sizes = {"key_heads": 4, "value_heads": 4, "key_dim": 16, "value_dim": 16}
    for layout in ("split", "separate", "interleaved"):
        model = with_blocks(Rule(layout), **sizes)
        module, plan = blocks(detect(model))[0]
        assert facts(plan) == Facts((4, 4), (16, 16))
        assert block_error(model, module, plan) < 1e-4


RULES: dict[str, tuple[Rule, Facts]] = {
    "doubled-beta": (Rule(beta=2.0), Facts(beta_scale=2.0)),
    "l2-eps": (Rule(l2_eps=1e-5), Facts(l2_eps=1e-5)),
    "odd-l2-eps": (Rule(l2_eps=3e-6), Facts(l2_eps=3e-6)),
    "unnamed-l2-eps": (Rule(l2_eps=1e-5, biased=True, trick="unnamed-eps"), Facts(l2_eps=1e-5, conv_bias=True)),
    "norm-eps": (Rule(norm_eps=1e-5), Facts(norm_eps=1e-5)),
    "odd-norm-eps": (Rule(norm_eps=3e-6), Facts(norm_eps=3e-6)),
    "norm-in-float32": (Rule(norm_fp32=True), Facts(cast="after_weight")),
    "relu": (Rule(conv_activation="relu"), Facts(conv_activation="relu")),
    "wide": (Rule(width=8), Facts(width=8)),
    "narrow": (Rule(width=2), Facts(width=2)),
}


@pytest.mark.parametrize("weights", ["spread", "fading"])
@pytest.mark.parametrize("name", RULES)
@DTYPES
def test_rules(name: str, weights: str, dtype: torch.dtype) -> None:
    rule, expected = RULES[name]
    module, plan = blocks(detect(with_blocks(rule, dtype, weights=weights)))[0]
    assert facts(plan) == expected


def test_normalised_keys_of_zeros_stay_zeros() -> None:
    """`F.normalize` divides zeros by a tiny number, and so must the plan: pads are zeros."""
    model = with_blocks(Rule(trick="normalize"))
    module, plan = blocks(detect(model))[0]
    assert 0 < plan.l2_eps <= 1e-12
    x = torch.randn(1, 9, HIDDEN)
    x[:, :5] = 0.0
    with torch.no_grad():
        want = model.get_submodule(module)(x)
    torch.testing.assert_close(reference_hybrid.gated_delta(plan, lookup(model), x), want, rtol=1e-4, atol=1e-4)


EXACT_TRICKS = (
    "norm-after-gate sigmoid-gate skip buffer input-clamp scaled-values keys-first no-l2 no-scale tiled-heads softplus-threshold "
    "softplus-beta relu-decay decay-floor decay-limit inner-clamp inner-factor output-clamp forgets decay-after no-delta half-state"
).split()
ROUNDING_TRICKS = ("half-gate", "half-l2", "wide-beta", "wide-convolution")


@pytest.mark.parametrize(("dtype", "weights"), [(FP32, "fading"), (BF16, "spread")], ids=["float32-fading", "bfloat16"])
@pytest.mark.parametrize("trick", EXACT_TRICKS)
def test_what_is_not_understood_is_declined(trick: str, dtype: torch.dtype, weights: str) -> None:
    """Also where the weights hide it: with `fading` ones, no state lives for more than a token."""
    detection = detect(with_blocks(Rule(trick=trick), dtype, weights=weights))
    assert detection.plan is None
    assert "model.layers.0.self_attn.block" in detection.reasons[0]


@pytest.mark.parametrize("trick", ROUNDING_TRICKS)
def test_other_roundings_are_declined_in_half_precision(trick: str) -> None:
    assert detect(with_blocks(Rule(trick=trick))).plan is not None
    detection = detect(with_blocks(Rule(trick=trick), BF16))
    assert detection.plan is None
    assert "model.layers.0.self_attn.block" in detection.reasons[0]


@pytest.mark.parametrize(
    "rule",
    [
        Rule(beta=1.5),
        Rule(l2_eps=3e-6, trick="unnamed-eps"),
        Rule(l2_eps=3e-6, biased=True, trick="unnamed-eps"),
        Rule(layout="separate", trick="keys-first"),
        Rule(layout="interleaved", trick="no-delta"),
    ],
    ids=str,
)
def test_other_rules_are_declined(rule: Rule) -> None:
    detection = detect(with_blocks(rule))
    assert detection.plan is None
    assert "model.layers.0.self_attn.block" in detection.reasons[0]


# ------------------------------------------------------------------------------------------------- positions, full attention, state


class Strict(nn.Module):
    """A rotary module that insists on three positions a token."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if position_ids.dim() != 3 or position_ids.shape[0] != 3:
            raise ValueError("position_ids")
        cos, sin = self.rotary(x, position_ids)
        return cos, sin


@pytest.mark.parametrize("strict", [False, True])
def test_multimodal_positions_of_text(strict: bool) -> None:
    model = build("qwen3_5_text")
    if strict:
        model.model.rotary_emb = Strict(model.model.rotary_emb)
    plan = detect(model).plan
    assert plan is not None
    ropes = {n.attention.rope for layer in plan.layers for n in layer.nodes if n.attention is not None}
    (rope,) = ropes
    assert rope is not None and rope.source == "model.rotary_emb" and rope.max_positions is None
    cos, sin = rope_table(model, rope, 40)
    ids = torch.arange(40).expand(3, 1, 40)
    own = [t[0, :, : rope.rotary_dim // 2] for t in model.model.rotary_emb(torch.zeros(1, 40, HIDDEN), ids)]
    assert torch.equal(cos, own[0]) and torch.equal(sin, own[1])


def test_a_rotary_module_that_fails_is_named() -> None:
    model = build("qwen3_5_text")
    plan = detect(model).plan
    assert plan is not None
    rope = next(n.attention.rope for layer in plan.layers for n in layer.nodes if n.attention is not None)
    assert rope is not None
    model.model.rotary_emb = nn.Identity()
    with pytest.raises(ValueError, match=r"rope: 'model.rotary_emb' gives no table for 7 positions"):
        rope_table(model, rope, 7)


@pytest.mark.parametrize("name", [name for name in AVAILABLE if name.startswith("qwen")])
def test_full_attention_of_hybrid_models(name: str) -> None:
    """Query and gate by head, norms of (1 + weight), a part of each head rotated."""
    model = build(name, BF16)
    plan = detect(model).plan
    assert plan is not None
    found = [n.attention for layer in plan.layers for n in layer.nodes if n.attention is not None]
    assert len(found) == model.config.layer_types.count("full_attention")
    for attention in found:
        assert attention.gate is not None and attention.gate.offset == attention.head_dim
        assert attention.q.group_stride == 2 * 2 * attention.head_dim
        assert attention.q_norm is not None and attention.q_norm.weight_offset == 1.0 and attention.q_norm.cast == "after_weight"
        assert attention.rope is not None and attention.rope.rotary_dim == attention.head_dim // 4


def test_the_state_goes_on() -> None:
    """Two pieces with the state and the convolution's past of the first give what the whole gives."""
    model = build("qwen3_next")
    _, plan = blocks(detect(model))[0]
    projected = [torch.randn(2, 12, p.out_features) for p in plan.projections]
    core = functools.partial(reference_hybrid.gated_delta_core, plan, lookup(model))
    whole, after = core(projected)
    first, state = core([p[:, :7] for p in projected])
    group = plan.value_heads // plan.key_heads
    parts = [
        reference.heads(projected, view, plan.key_heads, size, dim).flatten(2)
        for view, size, dim in ((plan.q, 1, plan.key_dim), (plan.k, 1, plan.key_dim), (plan.v, group, plan.value_dim))
    ]
    past = torch.cat(parts, -1)[:, 7 - plan.conv_width : 7].transpose(1, 2)
    second, last = core([p[:, 7:] for p in projected], past, state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, after)


def test_detection_changes_nothing() -> None:
    model = build("qwen3_5_text", BF16)
    before = {name: (value.data_ptr(), value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    attributes = {name: [*vars(module), *module._forward_pre_hooks, *module._forward_hooks] for name, module in model.named_modules()}
    detect(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.data_ptr() == before[name][0] and torch.equal(value, before[name][1])
    now = {name: [*vars(module), *module._forward_pre_hooks, *module._forward_hooks] for name, module in model.named_modules()}
    assert now == attributes

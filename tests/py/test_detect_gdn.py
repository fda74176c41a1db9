"""Detection of GatedDeltaNet blocks: roles, factors and rounding of each, against the blocks' own forwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from families import HIDDEN, build, prompt
from gdn_blocks import Rule, with_blocks
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

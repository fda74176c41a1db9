"""Detection of mixtures of experts: the rule, the factors and the rounding of each, against the blocks' own forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from families import HIDDEN, VOCAB, build, prompt
from segki import reference, reference_moe
from segki.detect import detect, resolve
from segki.plan import Detection, LinearPlan, MoePlan, ParamRef, RouterPlan

AUTO: Any = AutoModelForCausalLM
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SOFTMAX: dict[str, Any] = {"score": "softmax"}
NORMALISED: dict[str, Any] = {"score": "softmax", "normalise": True}
SIGMOID: dict[str, Any] = {"score": "sigmoid", "normalise": True, "sum_eps": 1e-20}

# what the router of each family does, fields at their default left out; "bias" only says whether there is a correction
ROUTERS: dict[str, dict[str, Any]] = {
    "flex_olmo": SOFTMAX,
    "granitemoe": NORMALISED,
    "granitemoeshared": NORMALISED,
    "mellum": NORMALISED,
    "mixtral": NORMALISED,
    "olmoe": SOFTMAX,
    "qwen3_moe": SOFTMAX,
    "aria_text": NORMALISED,
    "qwen2_moe": SOFTMAX,
    "qwen3_5_moe_text": NORMALISED,
    "qwen3_next": NORMALISED,
    "lara_mini": NORMALISED,
    "afmoe": {**SIGMOID, "bias": True},
    "dots1": {"score": "sigmoid", "bias": True},
    "exaone_moe": {**SIGMOID, "bias": True, "scale": 2.5},
    "glm4_moe": {**SIGMOID, "bias": True},
    "hy_v3": {**SIGMOID, "bias": True, "scale": 2.826},
    "kolibri1": {"score": "sigmoid", "bias": True, "choose_by_logit": True},
    "minimax_m2": {**SIGMOID, "sum_eps": 0.0, "bias": True},
    "solar_open": {**SIGMOID, "bias": True},
    "ernie4_5_moe": {**NORMALISED, "bias": True, "sum_min": 1e-12},
    "cohere2_moe": NORMALISED,
}
FP32_LOGITS = {"lara_mini", "dots1", "exaone_moe", "glm4_moe", "hy_v3", "kolibri1", "solar_open", "ernie4_5_moe"}
DENSE_FIRST = {"afmoe": 1, "dots1": 1, "exaone_moe": 2, "glm4_moe": 1, "hy_v3": 2, "ernie4_5_moe": 1}
SHARED_GATE = {"qwen2_moe", "qwen3_5_moe_text", "qwen3_next"}
AVAILABLE = [name for name in ROUTERS if name in CONFIG_MAPPING]


def visible(rule: dict[str, Any]) -> dict[str, Any]:
    """Without defaults, and without guards so small that only scores that underflow show them."""
    plain = vars(RouterPlan(LinearPlan(ParamRef(""), 0, 0), 2, "softmax_chosen"))
    shown = {name: value for name, value in rule.items() if value != plain[name]}
    return {name: value for name, value in shown.items() if name not in ("sum_eps", "sum_min") or value > 1e-8}


def facts(router: RouterPlan) -> dict[str, Any]:
    """Fields that are not at their default, rounding left out."""
    skipped = ("linear", "fp32_logits", "round_weights", "round_scores")
    rule = {name: value for name, value in vars(router).items() if name not in skipped}
    return visible(rule | {"bias": True if router.bias is not None else None})


def mixtures(detection: Detection) -> list[tuple[str, MoePlan]]:
    """(module, plan) of the mixtures in the whole model's plan."""
    assert detection.plan is not None, detection.reasons
    nodes = [node for layer in detection.plan.layers for node in layer.nodes]
    return [(node.module or "", node.moe) for node in nodes if node.moe is not None]


def lookup(model: nn.Module) -> reference.Lookup:
    return functools.partial(resolve, model)


@torch.no_grad()
def block_error(model: nn.Module, name: str, plan: MoePlan, x: Tensor) -> Tensor:
    """Error of each token over its largest value, `x` `[rows, T, H]`."""
    want = model.get_submodule(name)(x)
    want = want[0] if isinstance(want, tuple) else want
    got = reference_moe.moe(plan, lookup(model), x)
    return (got.float() - want.float()).abs().amax(-1) / want.float().abs().amax(-1)


@torch.no_grad()
def equal_elements(model: nn.Module, name: str, plan: MoePlan, tokens: int = 24) -> float:
    """Share of equal elements over tokens that go through the block one by one."""
    torch.manual_seed(3)
    x = torch.randn(tokens, 1, 1, HIDDEN).to(next(model.parameters()).dtype)
    module = model.get_submodule(name)
    shares = [(reference_moe.moe(plan, lookup(model), one) == module(one)).float().mean() for one in x]
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("name", AVAILABLE)
def test_families_in_float32(name: str) -> None:
    model = build(name)
    detection = detect(model)
    found = mixtures(detection)
    assert detection.plan is not None
    assert len(found) == len(detection.plan.layers) - DENSE_FIRST.get(name, 0)
    torch.manual_seed(0)
    x = torch.randn(3, 7, HIDDEN)
    for module, plan in found:
        assert facts(plan.router) == visible(ROUTERS[name])
        assert (plan.shared_gate is not None) == (name in SHARED_GATE)
        assert block_error(model, module, plan, x).max() < 1e-4
    ids = prompt(2, 23, seed=5)
    with torch.no_grad():
        want = model(ids).logits
    got = reference.forward(model, detection.plan, ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", AVAILABLE)
def test_families_in_bfloat16(name: str) -> None:
    model = build(name, BF16)
    for module, plan in mixtures(detect(model)):
        assert facts(plan.router) == visible(ROUTERS[name])
        assert plan.router.fp32_logits == (name in FP32_LOGITS)
        assert equal_elements(model, module, plan) > 0.97


@pytest.mark.parametrize("name", [name for name in AVAILABLE if name != "afmoe"])
def test_families_in_float16(name: str) -> None:
    model = build(name, FP16)
    module, plan = mixtures(detect(model))[-1]
    assert facts(plan.router) == visible(ROUTERS[name])
    assert equal_elements(model, module, plan) > 0.97


@pytest.mark.parametrize("name", AVAILABLE)
def test_default_initialisation_shows_the_rule(name: str) -> None:
    """Routers of zeros, corrections of zeros and small experts: the plan must hold once the weights move."""
    torch.manual_seed(1)
    fresh = AUTO.from_config(families.tiny_config(name), dtype=FP32).eval()
    detection = detect(fresh)
    found = mixtures(detection)
    moved = build(name)
    fresh.load_state_dict(moved.state_dict())
    with torch.no_grad():
        for key, buffer in fresh.named_buffers():
            if "correction" in key:
                buffer.copy_(0.3 * torch.randn(buffer.shape))
    for module, plan in found:
        assert facts(plan.router) == visible(ROUTERS[name])
        assert block_error(fresh, module, plan, torch.randn(2, 9, HIDDEN)).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 5}, {**NORMALISED, "top_k": 5}),
        ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 1}, {**SOFTMAX, "top_k": 1}),
        ("mixtral", {"num_experts_per_tok": 3, "hidden_act": "gelu"}, {**NORMALISED, "top_k": 3}),
        (
            "glm4_moe",
            {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7},
            {**SIGMOID, "bias": True, "groups": 4, "group_top_k": 2, "top_k": 3, "scale": 1.7},
        ),
        (
            "dots1",
            {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 4, "routed_scaling_factor": 0.4},
            {**SIGMOID, "bias": True, "groups": 2, "group_top_k": 1, "top_k": 4, "scale": 0.4},
        ),
        ("afmoe", {"route_scale": 2.25, "num_experts_per_tok": 4}, {**SIGMOID, "bias": True, "top_k": 4, "scale": 2.25}),
        ("kolibri1", {"norm_topk_prob": True}, {"score": "sigmoid", "normalise": True, "bias": True, "choose_by_logit": True}),
        (
            "cohere2_moe",
            {"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "shared_expert_combination_strategy": "sum"},
            {"score": "sigmoid", "normalise": True, "choose_by_logit": True},
        ),
        (
            "cohere2_moe",
            {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0},
            {"score": "sigmoid", "choose_by_logit": True},
        ),
        ("hy_v3", {"enable_moe_fp32_combine": True, "router_scaling_factor": 3.0}, {**SIGMOID, "bias": True, "scale": 3.0}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 1e-9}, {**NORMALISED, "bias": True, "sum_min": 1e-9}),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_variants(family: str, changes: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(2)
    model = AUTO.from_config(families.tiny_config(family, {"num_hidden_layers": 3, **changes}), dtype=FP32).eval()
    families.spread(model, 2)
    model = model if dtype == FP32 else families.cast(model, dtype)
    module, plan = mixtures(detect(model))[-1]
    got = facts(plan.router)
    if family == "cohere2_moe" and dtype == FP32:
        assert got.pop("choose_by_logit", True)
        expected = {name: value for name, value in expected.items() if name != "choose_by_logit"}
    assert got == visible(expected)
    if dtype == FP32:
        assert block_error(model, module, plan, torch.randn(2, 9, HIDDEN)).max() < 1e-4
    else:
        assert equal_elements(model, module, plan) > 0.97


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_experts_implementation_decides_the_rounding(family: str, implementation: str, dtype: torch.dtype) -> None:
    """Mixtral keeps its weights in fp32; Qwen3-MoE rounds them, and so every product. Only eager rounds each sum."""
    torch.manual_seed(2)
    changes = {"num_hidden_layers": 2, "num_experts_per_tok": 4}
    model = AUTO.from_config(families.tiny_config(family, changes), dtype=FP32).eval()
    families.spread(model, 4)
    model = families.cast(model, dtype)
    model.set_experts_implementation(implementation)
    module, plan = mixtures(detect(model))[0]
    assert plan.round_sums == (implementation == "eager")
    assert plan.round_products == (implementation == "eager" or family == "qwen3_moe")
    assert plan.router.round_weights == (family == "qwen3_moe")
    assert equal_elements(model, module, plan) > 0.97


# ------------------------------------------------------------------------------------------------- blocks of our own


@dataclass(frozen=True)
class Rule:
    """What a block of this file does; see `OwnMoe.route`."""

    score: str = "softmax"
    normalise: bool = True
    eps: float = 0.0
    scale: float = 1.0
    correction: str = ""  # "", "parameter" or "buffer"
    bias: bool = False  # of the logits
    groups: int = 1
    by_max: bool = False
    fill: float = -float("inf")
    half_scores: bool = False
    temperature: float = 1.0


class Expert(nn.Module):
    def __init__(self, width: int, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.both = nn.Linear(HIDDEN, 2 * width, bias=False)
        else:
            self.w1 = nn.Linear(HIDDEN, width, bias=False)
            self.w3 = nn.Linear(HIDDEN, width, bias=False)
        self.w2 = nn.Linear(width, HIDDEN, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1) if self.fused else (self.w1(x), self.w3(x))
        return self.w2(self.act(gate) * up)


class OwnMoe(nn.Module):
    """Routes as its rule says and loops over a list of experts, as transformers 4 did."""

    def __init__(self, rule: Rule, experts: int = 8, top_k: int = 3, width: int = 24, fused: bool = False) -> None:
        super().__init__()
        self.rule, self.top_k, self.factor = rule, top_k, rule.scale
        self.n_group, self.topk_group = rule.groups, max(rule.groups // 2, 1)
        self.router = nn.Linear(HIDDEN, experts, bias=rule.bias)
        self.experts = nn.ModuleList([Expert(width, fused) for _ in range(experts)])
        if rule.correction == "parameter":
            self.correction = nn.Parameter(torch.zeros(experts))
        elif rule.correction == "buffer":
            self.register_buffer("correction", torch.zeros(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rule = self.rule
        logits = self.router(x) / rule.temperature
        wide = logits if rule.half_scores else logits.float()
        scores = wide.softmax(-1) if rule.score == "softmax" else wide.sigmoid()
        choice = scores + self.correction if rule.correction else scores
        if rule.groups > 1:
            grouped = choice.unflatten(-1, (rule.groups, -1))
            values = grouped.amax(-1) if rule.by_max else grouped.topk(2, -1)[0].sum(-1)
            best = values.topk(self.topk_group, -1)[1]
            closed = torch.ones_like(values, dtype=torch.bool).scatter_(-1, best, False)
            choice = grouped.masked_fill(closed[..., None], rule.fill).flatten(-2)
        chosen = choice.topk(self.top_k, -1)[1]
        weights = scores.gather(-1, chosen)
        if rule.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + rule.eps)
        return chosen, (weights * self.factor).to(x.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, HIDDEN)
        chosen, weights = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, slots = (chosen == index).nonzero(as_tuple=True)
            if len(tokens):
                out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, slots, None])
        return out.view(hidden_states.shape)


def with_blocks(make: Callable[[], nn.Module], dtype: torch.dtype = FP32, seed: int = 0) -> Any:
    """A tiny Llama with these blocks in place of its MLPs."""
    torch.manual_seed(seed)
    model = AUTO.from_config(families.tiny_config("llama", {"num_hidden_layers": 2}), dtype=FP32).eval()
    for layer in model.model.layers:
        layer.mlp = make()
    families.spread(model, seed)
    return model.to(dtype).eval()


RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "softmax": (Rule(), NORMALISED),
    "plain": (Rule(normalise=False), SOFTMAX),
    "parameter": (Rule("sigmoid", correction="parameter"), {**SIGMOID, "sum_eps": 0.0, "bias": True}),
    "buffer": (Rule("sigmoid", correction="buffer", eps=1e-6), {**SIGMOID, "sum_eps": 1e-6, "bias": True}),
    "scaled": (Rule("sigmoid", normalise=False, scale=1.6), {"score": "sigmoid", "scale": 1.6}),
    "softmax-corrected": (Rule(correction="buffer", eps=1e-9), {**NORMALISED, "sum_eps": 1e-9, "bias": True}),
    "group-max": (
        Rule("sigmoid", correction="buffer", groups=4, by_max=True),
        {"score": "sigmoid", "normalise": True, "bias": True, "groups": 4, "group_top_k": 2, "group_by_max": True},
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_lists_of_experts(name: str, dtype: torch.dtype) -> None:
    rule, expected = RULES[name]
    model = with_blocks(lambda: OwnMoe(rule), dtype)
    found = mixtures(detect(model))
    assert [module for module, _ in found] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for module, plan in found:
        assert facts(plan.router) == visible({"top_k": 3, **expected})
        assert len(plan.gate.each) == 8 and plan.gate.fused is None
        if dtype == FP32:
            assert block_error(model, module, plan, torch.randn(2, 9, HIDDEN)).max() < 1e-4
        else:
            assert plan.round_products and plan.round_sums and plan.router.round_weights
            assert equal_elements(model, module, plan) > 0.97


def test_lists_of_experts_with_one_matrix_for_gate_and_up() -> None:
    model = with_blocks(lambda: OwnMoe(Rule(), fused=True))
    module, plan = mixtures(detect(model))[0]
    assert plan.up.each[2].name == "model.layers.0.mlp.experts.2.both.weight" and plan.up.each[2].rows == (24, 48)
    assert block_error(model, module, plan, torch.randn(2, 9, HIDDEN)).max() < 1e-4


def test_bias_of_the_logits_is_no_correction() -> None:
    model = with_blocks(lambda: OwnMoe(Rule(bias=True)))
    module, plan = mixtures(detect(model))[0]
    assert plan.router.linear.bias is not None and plan.router.bias is None
    assert block_error(model, module, plan, torch.randn(2, 9, HIDDEN)).max() < 1e-4


def test_scores_in_half_precision_are_told_from_rounded_weights() -> None:
    for half in (True, False):
        rule = Rule("sigmoid", half_scores=half)
        model = with_blocks(lambda rule=rule: OwnMoe(rule), BF16)
        assert mixtures(detect(model))[0][1].router.round_scores == half


class Hidden(OwnMoe):
    """Does something on the sly that depends on `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__(Rule(temperature=1.37 if kind == "temperature" else 1.0))
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("added", torch.zeros(HIDDEN))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.kind == "input":
            hidden_states = hidden_states * 1.01
        out = super().forward(hidden_states)
        if self.kind == "buffer":
            out = out + self.added
        if self.kind == "clamp":
            out = out.clamp(-0.5, 0.5)
        if self.kind == "factor":
            out = out * 1.0123
        return out


@pytest.mark.parametrize("kind", ["temperature", "buffer", "input", "clamp", "factor"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_what_is_not_understood_is_declined(kind: str, dtype: torch.dtype) -> None:
    detection = detect(with_blocks(lambda: Hidden(kind), dtype))
    assert detection.plan is None
    assert "model.layers.0.mlp" in detection.reasons[0]
    segments = {s.module: s for s in detection.segments if s.kind == "moe"}
    assert set(segments) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert all(s.plan is None and s.module in (s.reason or "") for s in segments.values())


class TwoShared(OwnMoe):
    def __init__(self) -> None:
        super().__init__(Rule())
        self.one, self.two = Expert(24), Expert(24)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.one(hidden_states) + self.two(hidden_states)


class Biased(OwnMoe):
    def __init__(self) -> None:
        super().__init__(Rule())
        for expert in self.experts:
            expert.w2 = nn.Linear(24, HIDDEN)


@pytest.mark.parametrize(("make", "reason"), [(TwoShared, "2 shared experts"), (Biased, "experts with biases")])
def test_unknown_parts_are_named(make: Callable[[], nn.Module], reason: str) -> None:
    detection = detect(with_blocks(make))
    assert detection.plan is None and reason in detection.reasons[0]


@pytest.mark.parametrize("family", ["gpt_oss", "jetmoe", "phimoe", "dbrx", "deepseek_v3", "deepseek_v2"])
def test_other_families_are_declined_with_a_reason(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    detection = detect(build(family))
    assert detection.plan is None and all(detection.reasons)


def test_mixtures_are_known_whatever_the_rest_of_the_model_is() -> None:
    segments = [s for s in detect(build("deepseek_v3")).segments if s.kind == "moe"]
    assert segments
    for segment in segments:
        assert isinstance(segment.plan, MoePlan)
        assert facts(segment.plan.router) == visible({**SIGMOID, "bias": True, "scale": 2.5})


def test_each_mixture_is_one_segment() -> None:
    model = build("qwen2_moe")
    kinds = [(s.module, s.kind) for s in detect(model).segments if ".mlp" in s.module]
    assert kinds == [(f"model.layers.{i}.mlp", "moe") for i in range(4)]


def test_detection_changes_nothing() -> None:
    model = build("glm4_moe", BF16)
    before = {name: (value.data_ptr(), value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    detect(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.data_ptr() == before[name][0] and torch.equal(value, before[name][1])
    assert {name: dict(vars(module)) for name, module in model.named_modules()}.keys() == attributes.keys()
    assert all(vars(module).keys() == attributes[name].keys() for name, module in model.named_modules())


def test_a_layer_of_other_values_has_a_plan_of_its_own_names() -> None:
    model = with_blocks(lambda: OwnMoe(Rule("sigmoid", correction="buffer")))
    first, second = mixtures(detect(model))
    assert second[1] == detect_names(first[1], "model.layers.0.", "model.layers.1.")
    ids = prompt(1, 9, VOCAB)
    with torch.no_grad():
        model.model.layers[1].mlp.correction.normal_()
        want = model(ids).logits
    plan = detect(model).plan
    assert plan is not None
    got = reference.forward(model, plan, ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def detect_names(plan: MoePlan, old: str, new: str) -> MoePlan:
    """The plan with another layer's names, by way of its printed form."""
    from segki.detect.resolve import renamed

    changed = renamed(plan, old, new)
    assert isinstance(changed, MoePlan) and old not in repr(changed)
    return replace(changed)

"""Detection: right plans for dense families, reasons for all others, and a model that is left as it was."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from families import CASES, Case, build, prompt, select
from segki import reference
from segki.detect import detect, resolve, rope_table
from segki.detect.numeric import snap
from segki.plan import Detection, LayerPlan, ParamRef, PositionScale, RopePlan

AUTO: Any = AutoModelForCausalLM
NATIVE = select("required", "welcome")
DECLINED = select("declined")
# Plans may not come from these, whatever the families' table says: no field of a plan expresses them.
NEVER = ("olmo-clipped", "falcon-alibi")


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def attributes(model: nn.Module) -> dict[str, list[str]]:
    return {name: [*vars(m), *m._forward_hooks, *m._forward_pre_hooks] for name, m in model.named_modules()}


def refs(value: Any) -> list[ParamRef]:
    if isinstance(value, ParamRef):
        return [value]
    if isinstance(value, tuple):
        return [ref for item in value for ref in refs(item)]
    if is_dataclass(value):
        return [ref for f in fields(value) for ref in refs(getattr(value, f.name))]
    return []


@torch.no_grad()
def logits_error(model: Any, detection: Detection, tokens: int = 29) -> float:
    """Largest difference between the plan's and the model's logits over the largest logit."""
    assert detection.plan is not None
    tokens = min(tokens, detection.plan.max_positions or tokens)
    ids = prompt(2, tokens, seed=5)
    want = model(ids).logits.float()
    got = reference.forward(model, detection.plan, ids).float()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", names(NATIVE))
def test_a_plan_computes_the_model(name: str) -> None:
    model = build(name)
    detection = detect(model)
    if detection.plan is None:
        assert CASES[name].native != "required" or name == "stablelm-qk-norm-biased", detection.reasons
        assert detection.reasons
        return
    assert name not in NEVER
    assert logits_error(model, detection) < 1e-4
    buffers = dict(model.named_buffers())  # a router's correction
    claimed = {id(resolve_parameter(model, ref)) for ref in refs(detection.plan) if ref.name not in buffers}
    assert claimed == {id(p) for p in model.parameters()}


def resolve_parameter(model: nn.Module, ref: ParamRef) -> nn.Parameter:
    parameter = model.get_parameter(ref.name)
    assert resolve(model, ref).untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return parameter


@pytest.mark.parametrize("name", names(DECLINED))
def test_no_family_gets_a_wrong_plan(name: str) -> None:
    model = build(name)
    before = state(model)
    detection = detect(model)
    if detection.plan is None:
        assert detection.reasons and all(detection.reasons)
    else:  # families that need nothing more than the plan expresses
        assert logits_error(model, detection) < 1e-4
    assert_mlps_right(model, detection)
    assert all(torch.equal(before[n], v) for n, v in state(model).items())


@torch.no_grad()
def assert_mlps_right(model: nn.Module, detection: Detection) -> None:
    for segment in detection.segments:
        assert (segment.plan is None) == (segment.reason is not None)
        if segment.kind == "mlp" and segment.plan is not None:
            module = model.get_submodule(segment.module)
            x = torch.randn(1, 4, segment.plan.up.in_features) * 3  # type: ignore[union-attr]
            want = module(x)
            got = reference.mlp(segment.plan, lambda ref: resolve(model, ref), x)  # type: ignore[arg-type]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", names(select("required")))
def test_default_initialisation_shows_enough(name: str) -> None:
    """Unit norms, zero biases and zero output projections hide what a model does; the plan must hold once the weights move."""
    case = CASES[name]
    torch.manual_seed(1)
    fresh = AUTO.from_config(families.tiny_config(case.family, case.overrides), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in fresh.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight", "fc2.weight", "dense_4h_to_h.weight")):
                parameter.zero_()
    detection = detect(fresh)
    fresh.load_state_dict(build(name).state_dict())
    if name == "stablelm-qk-norm-biased":
        assert detection.plan is None
        return
    assert detection.plan is not None, detection.reasons
    assert logits_error(fresh, detection) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "cohere", "glm4", "granite", "gpt_neox", "falcon", "qwen3"])
def test_half_precision_rounds_as_the_model_does(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    plan = detect(model).plan
    assert plan is not None
    ids = prompt(4, 13)
    with torch.no_grad():
        truth = copy.deepcopy(model).float()(ids).logits
        own = model(ids).logits.float()
        got = reference.forward(model, plan, ids).float()
    assert (got - truth).square().mean().sqrt() < 1.2 * (own - truth).square().mean().sqrt()


@pytest.mark.parametrize(
    ("name", "cast", "rounds"),
    [("llama", "before_weight", True), ("gemma", "after_weight", True), ("olmo2", "after_weight", False)],
)
def test_roundings_are_told_apart(name: str, cast: str, rounds: bool) -> None:
    plan = detect(build(name, torch.bfloat16)).plan
    assert plan is not None
    nodes = [node for layer in plan.layers for node in layer.nodes]
    assert {node.norm.cast for node in nodes if node.norm} == {cast}
    assert {node.attention.rope.round_products for node in nodes if node.attention and node.attention.rope} == {rounds}


def test_exact_scalars() -> None:
    granite = detect(build("granite-odd-tied-biased")).plan
    assert granite is not None
    assert granite.embedding.scale == 3.0
    assert granite.head.divisor == 0.3
    assert granite.layers[0].nodes[2].terms[1].scale == 0.22
    gemma = detect(build("gemma-odd-untied", torch.bfloat16)).plan
    assert gemma is not None
    assert gemma.embedding.scale == float(torch.tensor(60**0.5, dtype=torch.bfloat16))


def test_windows_come_layer_by_layer() -> None:
    plan = detect(build("gemma3_text")).plan
    assert plan is not None
    windows = [node.attention.window for layer in plan.layers for node in layer.nodes if node.attention]
    assert windows == [None if kind == "full_attention" else 8 for kind in build("gemma3_text").config.layer_types]


def test_a_window_longer_than_the_prompt_is_read_from_the_mask() -> None:
    config = families.tiny_config("mistral", {"sliding_window": 40, "num_hidden_layers": 1})
    model = AUTO.from_config(config, dtype=torch.float32).eval()
    detection = detect(model)
    assert detection.plan is not None
    assert [node.attention.window for node in detection.plan.layers[0].nodes if node.attention] == [40]
    assert logits_error(model, detection, tokens=60) < 1e-4


def test_position_scale_beyond_the_prompt() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 64}
    config = families.tiny_config("ministral3", {"rope_parameters": parameters, "num_hidden_layers": 1})
    model = AUTO.from_config(config, dtype=torch.float32).eval()
    detection = detect(model)
    assert detection.plan is not None, detection.reasons
    scale = next(node.attention.position_scale for node in detection.plan.layers[0].nodes if node.attention)
    assert scale is not None and (scale.beta, scale.period) == (0.3, 64)
    assert logits_error(model, detection, tokens=150) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_given_to_the_attention(dtype: torch.dtype) -> None:
    """Layers without rope scale their queries by position, in fp32; the others do not."""
    model = build("beam", dtype)
    detection = detect(model)
    assert detection.plan is not None, detection.reasons
    scales = [node.attention.position_scale for layer in detection.plan.layers for node in layer.nodes if node.attention]
    rule = PositionScale(0.1, 2048, "power", 1, round_table=dtype == torch.float32)
    assert scales == [None, rule] * 2
    if dtype == torch.float32:
        assert logits_error(model, detection, tokens=300) < 1e-4
        layers = tuple(replaced(layer, position_scale=None) for layer in detection.plan.layers)
        assert logits_error(model, replace(detection, plan=replace(detection.plan, layers=layers)), tokens=300) > 1e-4


def replaced(layer: LayerPlan, **changes: Any) -> LayerPlan:
    nodes = [n if n.attention is None else replace(n, attention=replace(n.attention, **changes)) for n in layer.nodes]
    return replace(layer, nodes=tuple(nodes))


@pytest.mark.parametrize(
    "rule",
    [
        lambda p: 1.0 + 0.1 * torch.sin(p),
        lambda p: 1.0 + 0.1 * torch.floor((p + 1) / 64).clamp(max=3),
        lambda p: torch.exp(0.1 * torch.log1p((p + 1) / 2048.4)),
    ],
    ids=["waves", "steps", "broken-period"],
)
def test_other_factors_are_declined(rule: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    if "beam" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no beam")
    home = importlib.import_module("transformers.models.beam.modeling_beam")
    monkeypatch.setattr(home, "compute_attention_scaling", lambda ids: rule(ids.float())[:, None, :, None])
    detection = detect(build("beam"))
    assert detection.plan is None and "attention_scaling scales queries by position" in detection.reasons[0]


def test_another_period_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if "beam" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no beam")
    home = importlib.import_module("transformers.models.beam.modeling_beam")
    other = PositionScale(0.35, 77, "power")
    monkeypatch.setattr(home, "compute_attention_scaling", lambda ids: reference.position_scale(other, ids)[:, None, :, None])
    plan = detect(build("beam")).plan
    assert plan is not None
    assert other in [node.attention.position_scale for layer in plan.layers for node in layer.nodes if node.attention]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_and_softcaps_in_fp32(dtype: torch.dtype) -> None:
    plan = detect(build("beam", dtype)).plan
    assert plan is not None
    nodes = [node for layer in plan.layers for node in layer.nodes]
    half = dtype != torch.float32
    assert {node.mlp.fp32_activation for node in nodes if node.mlp} == {half}
    assert {node.moe.fp32_activation for node in nodes if node.moe} == {half}
    assert plan.head.softcap == 30.0 and plan.head.fp32_softcap == half
    gemma = detect(build("gemma2", dtype)).plan
    assert gemma is not None and not gemma.head.fp32_softcap
    assert not any(node.mlp.fp32_activation for layer in gemma.layers for node in layer.nodes if node.mlp)


def test_residuals_scaled_by_depth() -> None:
    plan = detect(build("beam")).plan
    assert plan is not None
    for index, layer in enumerate(plan.layers):
        sums = [[term.scale for term in node.terms] for node in layer.nodes if node.terms]
        assert sums == [[((n - 1) / n) ** 0.5, n**-0.5] for n in (2 * index + 2, 2 * index + 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_depths_near_one_are_told_from_one(dtype: torch.dtype) -> None:
    scalar = (99 / 100) ** 0.5
    assert snap(scalar, [("size", 100)], dtype) == ([1.0] if dtype == torch.bfloat16 else [])
    assert snap(scalar, [], dtype, depths=[("index", 100)])[-1] == scalar


# ------------------------------------------------------------------------------------------------- what is declined


class Doubled(nn.Linear):
    """A linear layer that is not one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def _hook(model: Any) -> None:
    _attention(model).o_proj.register_forward_hook(lambda module, args, output: output)


def _patch(model: Any) -> None:
    own = _attention(model).forward
    _attention(model).forward = lambda *args, **kwargs: own(*args, **kwargs)


def _subclass(model: Any) -> None:
    _attention(model).q_proj.__class__ = Doubled


def _strided(model: Any) -> None:
    weight = _attention(model).v_proj.weight
    weight.data = weight.data.t().contiguous().t()


def _mixed(model: Any) -> None:
    model.model.norm.to(torch.bfloat16)


def _dropout(model: Any) -> None:
    model.train()
    _attention(model).attention_dropout = 0.1


def _extra(model: Any) -> None:
    _attention(model).register_parameter("lora", nn.Parameter(torch.ones(3)))


def _shared(model: Any) -> None:
    model.model.layers[2] = model.model.layers[1]


def _parametrised(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(_attention(model).k_proj)


def _meta(model: Any) -> None:
    model.to("meta")


SPOILT: list[tuple[Callable[[Any], None], str]] = [
    (_hook, "hooks"), (_patch, "patched"), (_subclass, "q_proj"), (_strided, "contiguous"), (_mixed, "bfloat16"),
    (_dropout, "dropout"), (_extra, "lora"), (_shared, "layers"), (_parametrised, "parametrised"), (_meta, "meta"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "reason"), SPOILT, ids=[f.__name__ for f, _ in SPOILT])
def test_a_spoilt_model_is_declined(spoil: Callable[[Any], None], reason: str) -> None:
    model = build("llama")
    spoil(model)
    detection = detect(model)
    assert detection.plan is None
    assert any(reason in r for r in detection.reasons), detection.reasons


def test_a_hooked_model_is_not_run() -> None:
    """Its hooks belong to somebody who counts on when they are called."""
    model, calls = build("llama"), []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    detection = detect(model)
    assert detection.plan is None and "hook" in detection.reasons[0]
    assert not calls


@pytest.mark.parametrize("name", NEVER)
def test_what_no_plan_expresses_is_declined(name: str) -> None:
    detection = detect(build(name))
    assert detection.plan is None and detection.reasons


# ------------------------------------------------------------------------------------------------- nothing is changed


@pytest.mark.parametrize("name", ["llama", "gemma2", "exaone4", "gpt2", "mixtral", "llama-dynamic-rope", "phi3-longrope"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        model(prompt())  # a long rope notes its tables at the first forward
    addresses = [p.data_ptr() for p in model.parameters()]
    before, names_before, random = state(model), attributes(model), torch.get_rng_state()
    detect(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(torch.equal(before[n], v) for n, v in state(model).items())
    assert attributes(model) == names_before
    assert torch.equal(torch.get_rng_state(), random)


def test_detection_is_repeatable() -> None:
    model = build("qwen3")
    assert detect(model) == detect(model)


class Fresh(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of all tensors that operations make, views of what exists left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        self.shapes |= {t.shape for t in made}
        return out


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "phi3"])
def test_no_matrix_is_copied(name: str) -> None:
    model = build(name)
    with Fresh() as fresh:
        detection = detect(model)
    assert detection.plan is not None
    matrices = {p.shape for p in model.parameters() if p.dim() == 2 and p.numel() > 64 * 64}
    assert matrices and not matrices & fresh.shapes


# ------------------------------------------------------------------------------------------------- resolve and rope_table


def test_resolve_is_a_live_view() -> None:
    model = build("phi3")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    half = resolve(model, ParamRef(name, (96, 192)))
    with torch.no_grad():
        model.get_parameter(name)[96, 0] = 42.0
    assert half.shape == (96, 64) and half[0, 0] == 42.0


@pytest.mark.parametrize("ref", [ParamRef("model.no.weight"), ParamRef("model.norm.bias"), ParamRef("model.norm.weight", (60, 65))])
def test_resolve_says_what_is_wrong(ref: ParamRef) -> None:
    with pytest.raises(ValueError, match=r"ref: .*norm|ref: .*no\.weight"):
        resolve(build("llama"), ref)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3_text", "glm4", "gptj", "cohere2", "phi"])
def test_rope_table_holds_the_models_values(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    plan = detect(model).plan
    assert plan is not None
    ropes = {n.attention.rope for la in plan.layers for n in la.nodes if n.attention and n.attention.rope}
    assert ropes
    for rope in ropes:
        cos, sin = rope_table(model, rope, 50)
        assert cos.shape == sin.shape == (50, rope.rotary_dim // 2)
        assert cos.dtype == torch.float32 and cos.is_contiguous()
        assert torch.equal(sin[0], torch.zeros_like(sin[0])) and float(sin[1, 0]) > 0
        short = rope_table(model, rope, 1)
        assert torch.equal(short[0], cos[:1])


def test_rope_table_knows_its_limit() -> None:
    model = build("llama-dynamic-rope")
    plan = detect(model).plan
    assert plan is not None
    attention = next(n.attention for n in plan.layers[0].nodes if n.attention)
    rope = attention.rope
    assert rope is not None and rope.max_positions == 16 == plan.max_positions
    with pytest.raises(ValueError, match="positions: got 17"):
        rope_table(model, rope, 17)
    with pytest.raises(ValueError, match="positions: got 0"):
        rope_table(model, rope, 0)


def test_rope_table_of_another_width() -> None:
    with pytest.raises(ValueError, match="rotary dimensions"):
        rope_table(build("llama"), RopePlan("neox", 6, "model.rotary_emb"), 4)

"""From a whole model to its plan: run its own forward once, detect every part, and check the plan against the run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call

from segki.detect.check import LayerCheck
from segki.detect.context import Context, signature
from segki.detect.dataflow import detect_layer
from segki.detect.ends import detect_embedding, detect_final, detect_head
from segki.detect.guard import hooked, segment_problem
from segki.detect.mlp import detect_mlp, has_fused_input, is_mlp_shaped
from segki.detect.moe import moe_plan
from segki.detect.moe_parts import is_moe_shaped
from segki.detect.numeric import Unknown
from segki.detect.resolve import renamed, resolve, text_parameter
from segki.detect.ropes import rope_source
from segki.detect.run import Run, beside, decoder, layer_calls, preserved, run_once, sealed
from segki.detect.scales import factor_key
from segki.detect.trace import FORWARD_ERRORS, Call
from segki.detect.windows import layer_windows
from segki.plan import Detection, LayerPlan, MlpPlan, ModelPlan, MoePlan, ParamRef, Segment


@torch.no_grad()
def detect(model: nn.Module) -> Detection:
    """What a loaded causal language model computes.

    The model's own forward runs once on a short random prompt; nothing of the model is changed and torch's random state is kept.

    Parameters
    ----------
    model
        A transformers model with `get_input_embeddings` and `get_output_embeddings`, in evaluation mode.

    Returns
    -------
    Segments found and, when every part is known and agrees with the model's own values, the plan of the whole step; else reasons.
    """
    state = torch.get_rng_state()
    try:
        with preserved(model):
            return _detect(model)
    finally:
        torch.set_rng_state(state)


def _detect(model: nn.Module) -> Detection:
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "get_output_embeddings"):
        return Detection(None, (), (f"model: {type(model).__name__} is no transformers language model",))
    if next(model.parameters(), None) is None or any(p.is_meta for p in model.parameters()):
        return Detection(None, (), ("model: it has no parameters, or some are on the meta device",))
    aside = beside(model)
    problem = segment_problem("", model, mixed=True, skip=aside)
    if problem is not None and any(hooked(module) for name, module in model.named_modules() if name not in aside):
        return Detection(None, (), (problem,))  # running the model would call somebody's hooks
    with sealed(model, aside):
        return _detect_run(model, problem)


def _detect_run(model: nn.Module, problem: str | None) -> Detection:
    """Detection by running the model; with a `problem` its segments alone."""
    try:
        run = run_once(model, text_parameter(model))
    except Unknown as error:
        return Detection(None, (), (problem or str(error),))
    segments = _segments(run.ctx)
    if problem is not None:
        return Detection(None, segments, (problem,))
    try:
        plan = _model_plan(run)
    except Unknown as error:
        return Detection(None, segments, (str(error),))
    return Detection(plan, (*segments, *_plan_segments(plan)))


def _model_plan(run: Run) -> ModelPlan:
    ctx, head, result = run.ctx, run.head, run.logits
    if head is None or result is None:
        raise Unknown("the model has no output head that is called once and gives logits")
    calls = layer_calls(ctx)
    embedding = detect_embedding(ctx, ctx.ids, calls[0])
    layers = _layers(ctx, calls, layer_windows(ctx, calls))
    final_norm, input_scale = detect_final(ctx, calls[-1], head, result.natural)
    head_plan = detect_head(ctx, head, result, input_scale)
    limits = [n.attention.rope.max_positions for la in layers for n in la.nodes if n.attention and n.attention.rope]
    if embedding.positions is not None:
        limits.append(ctx.lookup()(embedding.positions).shape[0] - embedding.position_offset)
    bounded = [limit for limit in limits if limit is not None]
    hidden = calls[0].x
    assert hidden is not None
    plan = ModelPlan(
        embedding, tuple(layers), final_norm, head_plan, hidden.shape[-1], head_plan.linear.out_features,
        min(bounded) if bounded else None,
    )  # fmt: skip
    _check_claims(ctx, plan)
    _check_dtypes(ctx, plan)
    return plan


def _layers(ctx: Context, calls: list[Call], windows: list[int | None]) -> list[LayerPlan]:
    """Plans of all layers: detected once for each signature, checked on every layer's own values."""
    known: dict[Any, LayerPlan] = {}
    check = LayerCheck(ctx)
    plans = []
    for call, window in zip(calls, windows, strict=True):
        pairs = list(call.tensor_pairs()) or [pair for inner in ctx.trace.under(call.name) for pair in inner.tensor_pairs()]
        sources = tuple(dict.fromkeys(rope_source(ctx, pair) for pair in pairs))
        factors = tuple(factor_key(inner) for inner in ctx.trace.under(call.name))
        key = (signature(call.module), window, sources, factors)
        plan = known.get(key)
        if plan is not None:
            plan = renamed(plan, f"{plan.module}.", f"{call.name}.", call.name)
            if check.problem(call, plan, whole=False) is not None:
                plan = None
        if plan is None:
            reused = bool(ctx.attentions)
            plan = detect_layer(ctx, call, window)
            problem = check.problem(call, plan, whole=True)
            if problem is not None and reused:  # an attention block like an earlier one may be another all the same
                ctx.attentions.clear()
                plan = detect_layer(ctx, call, window)
                problem = check.problem(call, plan, whole=True)
            if problem is not None:
                raise Unknown(problem)
            known.setdefault(key, plan)
        plans.append(plan)
    return plans


def _refs(value: Any) -> set[str]:
    if isinstance(value, ParamRef):
        return {value.name}
    if isinstance(value, tuple):
        return set().union(*(_refs(item) for item in value)) if value else set()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return set().union(*(_refs(getattr(value, f.name)) for f in dataclasses.fields(value)))
    return set()


def _check_claims(ctx: Context, plan: ModelPlan) -> None:
    """Every parameter must be in the plan: one that is not does something that the plan does not say.

    What lies beside the language model of a composite (a vision tower) needs no explanation as long as text does not depend on it.
    """
    claimed = {id(ctx.model.get_parameter(name)) for name in _refs(plan) if _is_parameter(ctx.model, name)}
    name, _ = decoder(ctx.model)
    outside = []
    for own, parameter in ctx.model.named_parameters():
        if id(parameter) in claimed:
            continue
        if not name or own.startswith(f"{name}."):
            raise Unknown(f"parameter {own} is not explained")
        outside.append(own)
    if outside and not _without(ctx, outside):
        raise Unknown(f"parameters beside the language model are not explained: {outside[0]}")


def _without(ctx: Context, names: list[str]) -> bool:
    """Whether a text-only forward does without these parameters: NaN in their place (another number in packed ones) does not show."""
    spoilt = {}
    for name in names:
        own = ctx.model.get_parameter(name)
        value = math.nan if own.is_floating_point() else 1
        spoilt[name] = torch.full((1,), value, dtype=own.dtype, device=own.device).expand(own.shape)
    given = {"input_ids": ctx.ids, "use_cache": False}
    try:
        answer = functional_call(ctx.model, spoilt, (), given)
        return torch.equal(answer.logits, ctx.model(**given).logits)  # NaN equals nothing
    except FORWARD_ERRORS:
        return False


def _check_dtypes(ctx: Context, plan: ModelPlan) -> None:
    """Every parameter has the model's dtype, but for those that a block reads as float32."""
    free: set[str] = set()
    for layer in plan.layers:
        for node in layer.nodes:
            if node.gdn is not None:
                free |= _refs((node.gdn.a_log, node.gdn.dt_bias))
            if node.moe is not None:
                router = node.moe.router
                free |= _refs(router.bias) | (_refs(router.linear) if router.fp32_logits else set())
    for name in _refs(plan):
        tensor = resolve(ctx.model, ParamRef(name))
        if tensor.dtype != ctx.dtype and not (name in free and tensor.dtype == torch.float32):
            raise Unknown(f"{name} is {tensor.dtype} in a model of {ctx.dtype}")


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in model.get_submodule(owner)._parameters


def _segments(ctx: Context) -> tuple[Segment, ...]:
    """The MLPs and mixtures of experts of the model: known or not whatever the rest is."""
    found = []
    moes: list[str] = []
    for name, calls in ctx.trace.by_name.items():
        call = calls[0]
        if len(calls) != 1 or any(name.startswith(f"{outer}.") for outer in moes[-1:]):
            continue  # parts of a mixture are told by its own plan
        if is_moe_shaped(call.module):
            moes.append(name)
            moe = moe_plan(ctx, call)
            found.append(Segment(name, "moe", moe) if isinstance(moe, MoePlan) else Segment(name, "moe", None, moe))
            continue
        if not is_mlp_shaped(ctx, call):
            continue
        problem = segment_problem(name, call.module)
        if problem is not None:
            found.append(Segment(name, "mlp", None, problem))
            continue
        plan = ctx.mlp(call, detect_mlp)
        if isinstance(plan, MlpPlan):
            found.append(Segment(name, "mlp", plan))
        elif not has_fused_input(ctx, call):
            found.append(Segment(name, "mlp", None, plan))
    return tuple(found)


def _plan_segments(plan: ModelPlan) -> list[Segment]:
    found = []
    for layer in plan.layers:
        for node in layer.nodes:
            kinds: tuple[Literal["attention", "gdn", "norm"], ...] = ("attention", "gdn", "norm")
            for kind in kinds:
                part = getattr(node, kind)
                if part is not None and node.module is not None:
                    found.append(Segment(node.module, kind, part))
    return found

"""Both ends of a model: from token ids to the first layer, and from the last layer to the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segki import reference
from segki.detect.context import Context
from segki.detect.dataflow import FIT_TOLERANCE
from segki.detect.guard import is_linear
from segki.detect.mlp import linear_plan
from segki.detect.norms import detect_norm
from segki.detect.numeric import TOLERANCE, Unknown, equal_share, fit, max_error, snap
from segki.detect.trace import Call, same
from segki.plan import EmbeddingPlan, HeadPlan, NormPlan, ParamRef


@dataclass
class Logits:
    """What the head was given by the model, what its linear layer gave (the last row amplified to show softcaps) and the answer."""

    raw: Tensor
    natural: Tensor
    logits: Tensor


def _scale(ctx: Context, call: Call, value: Tensor, target: Tensor) -> float | None:
    """The exact scalar with `target = value * scalar`, or None."""
    if value.shape != target.shape:
        return None
    coefficients, rest = fit(target, [value])
    if rest > FIT_TOLERANCE[ctx.dtype] or not coefficients:
        return None
    options: list[float] = []
    for scalar in snap(coefficients[0], ctx.numbers(call.module, ctx.model), ctx.dtype):
        options += [scalar, float(torch.tensor(scalar, dtype=ctx.dtype))]
    if not options:
        return None
    return max(options, key=lambda s: equal_share(value * s if s != 1.0 else value, target))


def detect_embedding(ctx: Context, ids: Tensor, first: Call) -> EmbeddingPlan:
    """How the input of the first layer comes from the token ids `[1, T]`.

    Raises
    ------
    Unknown
        If it is no scaled row of the embedding with an optional learned position and norm.
    """
    module = ctx.model.get_input_embeddings()  # type: ignore[operator]
    name = next((n for n, m in ctx.model.named_modules() if m is module), None)
    call = ctx.trace.only(name) if name else None
    target = first.x
    if not isinstance(module, nn.Embedding) or name is None or call is None or call.y is None or target is None:
        raise Unknown(f"the input embedding {name or type(module).__name__} is not a plain embedding that is called once")
    if module.max_norm is not None:
        raise Unknown(f"{name}: max_norm rewrites the embedding")
    rows = module.weight.detach()[ids]
    inner = _scale(ctx, call, rows, call.y)
    if inner is None:
        raise Unknown(f"{name}: its output is no scaled row of its weight")
    before = [c for c in ctx.trace.calls if c.order < first.order and c.module is not module]
    plan = EmbeddingPlan(ParamRef(f"{name}.weight"), inner)
    value = call.y
    positions = _positions(ctx, before, ids.shape[1])
    options = [(plan, value)]
    outer = _scale(ctx, first, value, target)
    if outer is not None and outer != 1.0:
        if inner != 1.0:
            raise Unknown(f"{name}: scaled twice")
        options.append((EmbeddingPlan(plan.weight, outer), value * outer))
    if positions is not None:
        ref, offset, vectors = positions
        options.append((EmbeddingPlan(plan.weight, inner, ref, offset), value + vectors))
    for option, got in options:
        if same(got, target):
            return option
    for option, got in options:
        for norm_call in before:
            if same(norm_call.x, got) and same(norm_call.y, target):
                norm = detect_norm(ctx, norm_call)
                if norm is not None:
                    return EmbeddingPlan(option.weight, option.scale, option.positions, option.position_offset, norm)
    raise Unknown(f"the input of {first.name} does not follow from {name}")


def _positions(ctx: Context, calls: list[Call], tokens: int) -> tuple[ParamRef, int, Tensor] | None:
    """(table, offset, its rows for the tokens) of a learned position embedding."""
    for call in calls:
        y = call.y
        if not isinstance(call.module, nn.Embedding) or y is None:
            continue
        weight = call.module.weight.detach()
        start = (weight == y.reshape(-1, y.shape[-1])[0]).all(-1).nonzero()
        for offset in start.flatten().tolist():
            if same(weight[offset : offset + tokens], y.reshape(-1, y.shape[-1])):
                return ParamRef(f"{call.name}.weight"), int(offset), y
    return None


def detect_final(ctx: Context, last: Call, head: Call, natural: Tensor) -> tuple[NormPlan | None, float]:
    """(final norm, input scale of the head) between the last layer's output and the head's own input `natural`."""
    y = last.y
    if y is None:
        raise Unknown(f"{last.name}: gives no hidden state")
    kept = natural.shape[1]
    scale = _scale(ctx, head, y[:, -kept:], natural)
    if scale is not None:
        return None, scale
    for call in ctx.trace.calls:
        if call.order > last.order and call.module is not head.module and call.y is not None and same(call.x, y):
            norm = detect_norm(ctx, call)
            scale = _scale(ctx, head, call.y[:, -kept:], natural) if norm is not None else None
            if scale is not None:
                return norm, scale
    raise Unknown("the head's input is not the last layer's output or its norm")


def detect_head(ctx: Context, head: Call, result: Logits, input_scale: float) -> HeadPlan:
    """Linear layer, scale and softcap of the logits.

    Raises
    ------
    Unknown
        If the logits do not follow.
    """
    if not is_linear(head.module):
        raise Unknown(f"{head.name}: the output head is a {type(head.module).__name__}, not a plain linear layer")
    plan = HeadPlan(linear_plan(head.name, head.module))
    raw = result.raw
    if raw.shape != result.logits.shape:
        raise Unknown(f"logits have shape {tuple(result.logits.shape)}, the head gives {tuple(raw.shape)}")
    numbers = ctx.numbers(ctx.model)
    half = ctx.dtype != torch.float32
    wanted = result.logits.to(ctx.dtype)
    coefficients, _ = fit(wanted[:, :1], [raw[:, :1]])
    ratio = coefficients[0] if coefficients else 1.0
    options: list[tuple[float, float]] = [(1.0, 1.0)]
    for _, number in numbers:
        if number > 0 and number != 1.0:
            options += [(float(number), 1.0)] if abs(number / ratio - 1) < 0.02 else []
            options += [(1.0, float(number))] if abs(1 / number / ratio - 1) < 0.02 else []
    caps = [None, *dict.fromkeys(float(v) for n, v in numbers if "cap" in n and v > 0)]
    plans = [
        HeadPlan(plan.linear, input_scale, scale, divisor, cap, wide)
        for cap in caps
        for wide in ((False, True) if half and cap is not None and result.logits.dtype == torch.float32 else (False,))
        for scale, divisor in dict.fromkeys(options)
    ]
    errors = [
        max(
            max_error(row, want)
            for row, want in zip(
                reference.head_epilogue(p, raw)[0], (result.logits if p.fp32_softcap else wanted)[0], strict=True
            )
        )
        for p in plans
    ]
    best = min(range(len(plans)), key=lambda i: errors[i])
    if errors[best] > TOLERANCE[ctx.dtype] / 4:
        raise Unknown(f"logits are no known function of {head.name} (nearest differs by {errors[best]:.1e} of the largest)")
    return plans[best]

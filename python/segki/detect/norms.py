"""Norms: which one, found by running the module on perturbed parameters."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segki import reference
from segki.detect.context import Context, has_linear, perturbed, signature
from segki.detect.numeric import equal_share, max_error
from segki.detect.trace import FORWARD_ERRORS, Call, flat_tensors
from segki.plan import CastOrder, NormKind, NormPlan, ParamRef

SMALL_INPUT = 3e-3  # makes eps visible
CASTS: tuple[CastOrder, ...] = ("before_weight", "after_weight")
KINDS: tuple[NormKind, ...] = ("rms", "layer")


def detect_norm(ctx: Context, call: Call) -> NormPlan | None:
    """The plan of a called norm, or None when the module is not a known norm."""
    module, x = call.module, call.x
    y = call.y
    if x is None or y is None or x.shape != y.shape or has_linear(module) or isinstance(module, nn.modules.dropout._DropoutNd):
        return None
    parameters = [name for name, _ in module.named_parameters()]
    if len(parameters) > 2 or any(p.dim() > 2 for p in module.parameters()):
        return None
    key = (signature(module), tuple(x.shape[-2:]) if any(p.dim() == 2 for p in module.parameters()) else x.shape[-1])
    if key not in ctx.norms:
        ctx.norms[key] = _probe(ctx, call, x, parameters)
    plan = ctx.norms[key]
    if plan is None:
        return None

    def qualified(ref: ParamRef | None) -> ParamRef | None:
        return None if ref is None else ParamRef(f"{call.name}.{ref.name}")

    return replace(plan, weight=qualified(plan.weight), bias=qualified(plan.bias))


def _run(call: Call, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    args, kwargs = call.with_input(x)
    buffers = {n: b.to(x.dtype) for n, b in call.module.named_buffers() if b.is_floating_point()}
    try:
        out = functional_call(call.module, {**buffers, **parameters}, args, kwargs)
    except FORWARD_ERRORS:
        return None
    return next(flat_tensors(out), None)


def _probe(ctx: Context, call: Call, x: Tensor, names: list[str]) -> NormPlan | None:
    parameters = perturbed(ctx, call.module, torch.float32, matrices=True)
    small = (ctx.randn(*x.shape) + 0.5) * SMALL_INPUT
    got = _run(call, parameters, small)
    if got is None or got.shape != small.shape:
        return None
    epsilons = [v for _, v in ctx.numbers(call.module) if 0 < v <= 1e-2] + [1e-5, 1e-6, torch.finfo(torch.float32).eps, 1e-12]
    roles: list[tuple[str | None, str | None]] = [(None, None)]
    if len(names) == 1:
        roles = [(names[0], None)]
    elif len(names) == 2:
        roles = [(names[0], names[1]), (names[1], names[0])]
    offsets = (0.0, 1.0) if names else (0.0,)
    best: tuple[float, NormPlan] | None = None
    for kind, (weight, bias), offset, eps in itertools.product(KINDS, roles, offsets, dict.fromkeys(epsilons)):
        plan = NormPlan(kind, eps, ParamRef(weight) if weight else None, ParamRef(bias) if bias else None, offset)
        error = max_error(reference.norm(plan, lambda ref: parameters[ref.name], small), got)
        if best is None or error < best[0]:
            best = (error, plan)
        if error < 2e-6:
            break
    if best is None or best[0] > 2e-5:
        return None
    return _with_cast(ctx, call, best[1], x)


def _with_cast(ctx: Context, call: Call, plan: NormPlan, x: Tensor) -> NormPlan | None:
    """Choose the order of rounding and weight: the one that agrees bit for bit most often in half precision."""
    if plan.kind == "layer" and type(call.module) is nn.LayerNorm:
        return plan
    parameters = perturbed(ctx, call.module, ctx.half, matrices=True)
    rounded = ctx.randn(*x.shape).to(ctx.half)
    got = _run(call, parameters, rounded)
    if got is None or got.dtype != ctx.half:
        return plan if ctx.dtype == torch.float32 else None
    plans = [replace(plan, cast=cast) for cast in CASTS]
    shares = [equal_share(reference.norm(p, lambda ref: parameters[ref.name], rounded), got) for p in plans]
    return plans[0] if shares[0] > shares[1] else plans[1]

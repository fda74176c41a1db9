"""Attention blocks: candidates from the shapes, settled by comparing a reference with the block's own output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from segki import reference
from segki.detect.context import Context, perturbed
from segki.detect.guard import is_linear
from segki.detect.layout import Layout, layouts
from segki.detect.mlp import linear_plan
from segki.detect.norms import detect_norm
from segki.detect.numeric import Unknown, max_error, mean_error
from segki.detect.ropes import RopeChoice, has_parameters, rope_choices
from segki.detect.scales import factor_name, given_scale
from segki.detect.trace import FORWARD_ERRORS, Call, Trace, is_pair, recording, same
from segki.plan import AttentionPlan, NormPlan, ParamRef, PositionScale

PRECISE = 2e-4  # fp32 probes
LARGE = 60.0  # scores that show softcaps
SHARP = 8.0  # scores that show how q and k were rounded
ROUNDING_RUNS = 10


@dataclass
class Parts:
    """The linear layers and norms of a block, by what they are connected to; `vector` is a parameter of the block itself."""

    projections: list[Call]
    out: Call
    norms: list[tuple[Call, NormPlan]]
    vector: tuple[ParamRef, int] | None = None


@dataclass
class Probe:
    """One fp32 run of the block on random input."""

    trace: Trace
    projected: list[Tensor]
    mixed: Tensor
    overrides: dict[str, Tensor]
    pairs: list[tuple[Tensor, Tensor]]


def find_parts(ctx: Context, call: Call) -> Parts:
    """Sort the called submodules of a block into input projections, output projection and norms."""
    projections, outs, norms = [], [], []
    vector: tuple[ParamRef, int] | None = None
    for name, module in call.module.named_modules(prefix=call.name):
        if name == call.name:
            for own, parameter in module.named_parameters(recurse=False):
                if vector is not None or parameter.dim() != 1:
                    raise Unknown(f"{name}: parameter {own} is not explained")
                vector = ParamRef(f"{name}.{own}"), parameter.shape[0]
            continue
        calls = ctx.trace.by_name.get(name, [])
        if is_linear(module):
            if len(calls) != 1:
                raise Unknown(f"{name}: called {len(calls)} times in one pass")
            if same(calls[0].x, call.x):
                projections.append(calls[0])
            elif same(calls[0].y, call.own_y):
                outs.append(calls[0])
            else:
                raise Unknown(f"{name}: neither reads the block's input nor gives its output")
            continue
        plans = [(inner, detect_norm(ctx, inner)) for inner in calls]
        norms += [(inner, plan) for inner, plan in plans if plan is not None]
        if any(plan is None for _, plan in plans) and next(module.parameters(recurse=False), None) is not None:
            raise Unknown(f"{name}: a {type(module).__name__} inside {call.name} is not known")
        if not calls and next(module.parameters(recurse=False), None) is not None:
            raise Unknown(f"{name}: its parameters are not used by the pass")
    if len(outs) != 1 or not 1 <= len(projections) <= 4:
        raise Unknown(f"{call.name}: {len(projections)} projections of the input and {len(outs)} of the output")
    projections.sort(key=lambda c: c.order)
    return Parts(projections, outs[0], norms, vector)


def run_probe(ctx: Context, call: Call, parts: Parts, x: Tensor, changed: dict[str, Tensor], gain: float = 1.0) -> Probe:
    """Run the block in the dtype of `x` (fp32, or the model's) with perturbed parameters and record what went through it."""
    module = call.module
    local = perturbed(ctx, module, gain=gain, matrices=x.dtype != ctx.dtype or x.dtype == torch.float32, dtype=x.dtype)
    args, kwargs = call.with_input(x, changed)
    buffers: dict[str, Tensor] = {}
    if x.dtype != ctx.dtype:
        buffers = {n: b.float() for n, b in module.named_buffers() if b.is_floating_point()}
        args, kwargs = _wide(args), _wide(kwargs)
    with recording(module, prefix=call.name) as trace:
        functional_call(module, {**buffers, **local}, args, kwargs)
    values = [trace.by_name[c.name][0].y for c in parts.projections]
    mixed = trace.by_name[parts.out.name][0].x
    assert mixed is not None
    overrides = {f"{call.name}.{name}": value for name, value in local.items()}
    own = trace.by_name[call.name][0]
    pairs = list(own.tensor_pairs())
    if not pairs:
        inner = [c for c in trace.under(call.name) if is_pair(c.output) and not has_parameters(c.module)]
        pairs = [(c.output[0], c.output[1]) for c in inner]
    return Probe(trace, [v for v in values if v is not None], mixed.reshape(*x.shape[:2], -1), overrides, pairs)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        least = torch.finfo(value.dtype).min  # "never seen" in an additive mask
        return value.float().masked_fill(value == least, torch.finfo(torch.float32).min)
    if type(value) in (tuple, list):
        return type(value)(_wide(item) for item in value)
    if type(value) is dict:
        return {key: _wide(item) for key, item in value.items()}
    return value


def head_sizes(ctx: Context, call: Call, mixed: int) -> list[int]:
    """Head sizes to try: those that attributes name first."""
    numbers = [(n, int(v)) for n, v in ctx.numbers(call.module) if v == int(v) and 2 <= v <= 1024]
    named = [v for n, v in numbers if "head" in n and ("dim" in n or "size" in n)]
    counted = [mixed // v for n, v in numbers if "head" in n and mixed % v == 0]
    rest = [v for _, v in numbers]
    return [v for v in dict.fromkeys(named + counted + rest) if v >= 2 and mixed % v == 0]


def scales(ctx: Context, call: Call, dim: int) -> list[float]:
    """Score scales to try."""
    own = [(n, v) for n, v in ctx.numbers(call.module) if v > 0]
    likely = [v for n, v in own if "scal" in n or "mult" in n]
    roots = [v**-0.5 for n, v in own if "scalar" in n]
    rest = [v for _, v in own] + [1 / v for _, v in own]
    return list(dict.fromkeys([*likely[:4], dim**-0.5, 1.0, 1.0 / dim, *roots, *likely, *rest]))


def qk_norms(parts: Parts, probe: Probe, layout: Layout, dim: int) -> tuple[NormPlan | None, NormPlan | None, str, bool] | None:
    """Give each norm of the block to queries or keys: (q norm, k norm, width, after rope), or None when one is left over."""
    if not parts.norms:
        return None, None, "head", False
    group = layout.q_heads // layout.kv_heads
    sides = {
        "q": reference.heads(probe.projected, layout.q, layout.kv_heads, group, dim),
        "k": reference.heads(probe.projected, layout.k, layout.kv_heads, 1, dim),
    }
    seen: dict[str, int] = {}
    found: dict[str, tuple[NormPlan, str, bool]] = {}
    for call, plan in parts.norms:
        index = seen.get(call.name, 0)
        seen[call.name] = index + 1
        value = probe.trace.by_name[call.name][index].x
        match = _norm_side(value, sides, found)
        if match is None:
            return None
        side, width, after = match
        found[side] = (plan, width, after)
    kinds = {(width, after) for _, width, after in found.values()}
    if len(kinds) != 1:
        return None
    width, after = kinds.pop()
    plans = {side: plan for side, (plan, _, _) in found.items()}
    return plans.get("q"), plans.get("k"), width, after


def _norm_side(value: Tensor | None, sides: dict[str, Tensor], taken: dict[str, Any]) -> tuple[str, str, bool] | None:
    if value is None:
        return None
    for side, heads in sides.items():
        if side in taken:
            continue
        rows = heads.shape[0] * heads.shape[1]
        if same(value, heads) or same(value, heads.transpose(1, 2)) or same(value, heads.reshape(rows, *heads.shape[2:])):
            return side, "head", False
        if same(value, heads.flatten(-2)):
            return side, "full", False
    for side, heads in sides.items():
        if side not in taken and value.shape in (heads.shape, heads.transpose(1, 2).shape):
            return side, "head", True
    return None


def softcaps(ctx: Context, call: Call) -> list[float | None]:
    """Score caps to try."""
    return [None, *dict.fromkeys(v for n, v in ctx.numbers(call.module) if "cap" in n and v > 0)]


def candidates(
    ctx: Context, call: Call, parts: Parts, probe: Probe, window: int | None
) -> Iterator[tuple[AttentionPlan, RopeChoice]]:
    """Plans that the shapes allow, likely ones first."""
    width = probe.mixed.shape[-1]
    projections = tuple(linear_plan(c.name, c.module) for c in parts.projections)
    names = [c.name.rpartition(".")[2] for c in parts.projections]
    out = linear_plan(parts.out.name, parts.out.module)
    for dim in head_sizes(ctx, call, width):
        for layout in layouts(names, [p.out_features for p in projections], width, dim):
            norms = qk_norms(parts, probe, layout, dim)
            bias = None if parts.vector is None else parts.vector[0]
            if norms is None or (parts.vector is not None and (layout.gate is None or parts.vector[1] != layout.q_heads)):
                continue
            q_norm, k_norm, norm_width, after = norms
            for choice, scale in itertools.product(rope_choices(ctx, call, probe.pairs, dim), scales(ctx, call, dim)):
                yield AttentionPlan(
                    projections, layout.q, layout.k, layout.v, out, layout.q_heads, layout.kv_heads, dim, scale, dim,
                    layout.gate, q_norm, k_norm, "full" if norm_width == "full" else "head", after, choice.plan, window=window,
                    gate_bias=bias,
                ), choice  # fmt: skip


def mixed_values(ctx: Context, plan: AttentionPlan, probe: Probe, choice: RopeChoice, factors: Tensor | None = None) -> Tensor:
    """What the reference hands to the output projection, queries being multiplied with `factors` (fp32 `[1, T]`)."""
    tokens = probe.mixed.shape[1]
    index = torch.arange(tokens, device=ctx.device)[None]
    tables = None if plan.rope is None else choice.tables(probe.pairs)
    bare = replace(plan, position_scale=None)
    q, k, v, gate = reference.qkv(bare, ctx.lookup(probe.overrides), probe.projected, tables, index)
    if plan.position_scale is not None and factors is not None:
        q = reference.scale_queries(q, factors, round_table=plan.position_scale.round_table)
    visible = reference.causal_mask(tokens, plan.window, ctx.device)[None]
    return reference.attend(q, k, v, visible, scale=plan.scale, softcap=plan.softcap, gate=gate)


def score_size(plan: AttentionPlan, ctx: Context, probe: Probe, choice: RopeChoice) -> float:
    """Root mean square of the scores before a softcap."""
    index = torch.arange(probe.mixed.shape[1], device=ctx.device)[None]
    tables = None if plan.rope is None else choice.tables(probe.pairs)
    q, k, _, _ = reference.qkv(replace(plan, position_scale=None), ctx.lookup(probe.overrides), probe.projected, tables, index)
    k = k.repeat_interleave(plan.q_heads // plan.kv_heads, 2)
    return float(torch.einsum("rthd,rphd->rhtp", q.float(), k.float()).square().mean().sqrt()) * plan.scale


def detect_attention(ctx: Context, call: Call, window: int | None) -> AttentionPlan:
    """The plan of a called attention block.

    Raises
    ------
    Unknown
        If no candidate gives the block's output on small and large inputs.
    """
    x = call.x
    if x is None or x.dim() != 3:
        raise Unknown(f"{call.name}: no hidden state among its arguments")
    parts = find_parts(ctx, call)
    base = ctx.randn(*x.shape)
    still = _moved(call, x.shape[1], 0)
    name = factor_name(call)
    if name is not None:
        still[name] = torch.ones_like(call.kwargs[name])
    try:
        probe = run_probe(ctx, call, parts, base, still)
        deviation = max(float(p.std()) for p in probe.projected)
        size = 1.5 / max(deviation, 1e-6)
        probe = run_probe(ctx, call, parts, base * size, still)
        plan, choice = _search(ctx, call, parts, probe, window)
        plan = _confirm_large(ctx, call, parts, plan, choice, base * size, probe, still)
        if name is None:
            plan = _position_scale(ctx, call, parts, plan, choice, base * size)
        else:
            plan = _given_scale(ctx, call, parts, plan, choice, base * size, still, name)
        plan = _rounding(ctx, call, parts, plan, choice, base * size, still)
        return _table_rounding(ctx, call, parts, plan, choice, base * size, still, name)
    except FORWARD_ERRORS as error:
        raise Unknown(f"{call.name}: probing failed: {type(error).__name__}: {error}") from error


def _search(ctx: Context, call: Call, parts: Parts, probe: Probe, window: int | None) -> tuple[AttentionPlan, RopeChoice]:
    nearest = math.inf
    for plan, choice in candidates(ctx, call, parts, probe, window):
        for cap in softcaps(ctx, call):
            capped = replace(plan, softcap=cap)
            error = max_error(mixed_values(ctx, capped, probe, choice), probe.mixed)
            nearest = min(nearest, error)
            if error < PRECISE:
                return capped, choice
    if parts.vector is not None and nearest == math.inf:
        raise Unknown(f"{call.name}: parameter {parts.vector[0].name.rpartition('.')[2]} is not explained")
    raise Unknown(f"{call.name}: no known attention gives its output (nearest differs by {nearest:.1e} of the largest value)")


def _confirm_large(
    ctx: Context,
    call: Call,
    parts: Parts,
    plan: AttentionPlan,
    choice: RopeChoice,
    x: Tensor,
    probe: Probe,
    still: dict[str, Tensor],
) -> AttentionPlan:
    """Large scores show softcaps; inputs of a thousand show clamps on the first token, which sees only itself."""
    factor = math.sqrt(LARGE / max(score_size(plan, ctx, probe, choice), 1e-6))
    factor = max(factor, 1.0)
    normed = plan.q_norm is not None
    large = run_probe(ctx, call, parts, x if normed else x * factor, still, gain=factor if normed else 1.0)
    caps = [plan.softcap, *(c for c in softcaps(ctx, call) if c != plan.softcap)]
    errors = [max_error(mixed_values(ctx, replace(plan, softcap=cap), large, choice), large.mixed) for cap in caps]
    best = min(range(len(caps)), key=lambda i: errors[i])
    if errors[best] > 20 * PRECISE:
        raise Unknown(f"{call.name}: with large scores the attention differs by {errors[best]:.1e} of its largest value")
    plan = replace(plan, softcap=caps[best])
    huge = run_probe(ctx, call, parts, x * 1e3, still)
    error = max_error(mixed_values(ctx, plan, huge, choice)[:, 0], huge.mixed[:, 0])
    if error > PRECISE:
        raise Unknown(f"{call.name}: with large inputs the attention differs by {error:.1e} of its largest value (a clamp?)")
    return plan


def _position_scale(ctx: Context, call: Call, parts: Parts, plan: AttentionPlan, choice: RopeChoice, x: Tensor) -> AttentionPlan:
    """Queries scaled by position show only far out: shift the positions, keep the tables."""
    changed = _moved(call, x.shape[1], 100_003)
    if not changed:
        return plan
    far = run_probe(ctx, call, parts, x, changed)
    positions = next(iter(changed.values())).reshape(-1, x.shape[1])[:1]
    numbers = ctx.numbers(call.module)
    betas = dict.fromkeys(v for n, v in numbers if "beta" in n and v > 0)
    periods = dict.fromkeys(int(v) for _, v in numbers if v == int(v) and v >= 2)
    options = [None, *(PositionScale(beta, period) for beta in betas for period in periods)]
    for option in options:
        candidate = replace(plan, position_scale=option)
        factors = None if option is None else reference.position_scale(option, positions)
        if max_error(mixed_values(ctx, candidate, far, choice, factors), far.mixed) < PRECISE:
            return candidate
    raise Unknown(f"{call.name}: it depends on positions in a way that is not known")


def _given_scale(
    ctx: Context,
    call: Call,
    parts: Parts,
    plan: AttentionPlan,
    choice: RopeChoice,
    x: Tensor,
    still: dict[str, Tensor],
    name: str,
) -> AttentionPlan:
    """A block that is given one number a token: it multiplies the queries, or does nothing."""
    drawn = _drawn(ctx, call.kwargs[name])
    probe = run_probe(ctx, call, parts, x, {**still, name: drawn})
    if max_error(mixed_values(ctx, plan, probe, choice), probe.mixed) < PRECISE:
        return plan
    scaled = replace(plan, position_scale=given_scale(ctx, call))
    if max_error(mixed_values(ctx, scaled, probe, choice, drawn.reshape(1, -1)), probe.mixed) < PRECISE:
        return scaled
    raise Unknown(f"{call.name}: it depends on {name} in a way that is not known")


def _drawn(ctx: Context, like: Tensor) -> Tensor:
    """Random fp32 factors around 1."""
    return (0.4 * ctx.randn(*like.shape)).exp()


def _moved(call: Call, tokens: int, step: int) -> dict[str, Tensor]:
    """Position arguments of a block that is given its rope tables, with other positions: 0, step, 2 step..."""
    if not list(call.tensor_pairs()):
        return {}
    given = {name: call.kwargs.get(name) for name in ("position_ids", "cache_position")}
    return {
        name: (torch.arange(tokens, device=value.device) * step).expand_as(value)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.shape[-1] == tokens
    }


def _rounding(
    ctx: Context, call: Call, parts: Parts, plan: AttentionPlan, choice: RopeChoice, x: Tensor, still: dict[str, Tensor]
) -> AttentionPlan:
    """In half precision, take the rope rounding that is nearer to the block's own values; sharp scores make it plain."""
    if plan.rope is None or ctx.dtype == torch.float32:
        return plan
    plans = [replace(plan, rope=replace(plan.rope, round_products=rounded)) for rounded in (True, False)]
    errors = [0.0, 0.0]
    size = score_size(plan, ctx, run_probe(ctx, call, parts, x.to(ctx.dtype), still), choice)
    factor = max(math.sqrt(SHARP / max(size, 1e-6)), 1.0)
    for _ in range(ROUNDING_RUNS):
        fresh = ctx.randn(*x.shape) * float(x.std())
        sharp = (fresh if plan.q_norm else fresh * factor).to(ctx.dtype)
        probe = run_probe(ctx, call, parts, sharp, still, gain=factor if plan.q_norm else 1.0)
        for index, candidate in enumerate(plans):
            errors[index] += mean_error(mixed_values(ctx, candidate, probe, choice), probe.mixed)
    return plans[0] if errors[0] <= errors[1] else plans[1]


def _table_rounding(
    ctx: Context,
    call: Call,
    parts: Parts,
    plan: AttentionPlan,
    choice: RopeChoice,
    x: Tensor,
    still: dict[str, Tensor],
    name: str | None,
) -> AttentionPlan:
    """In half precision, whether factors of the queries are rounded before the product."""
    scale = plan.position_scale
    if scale is None or ctx.dtype == torch.float32:
        return plan
    plans = [replace(plan, position_scale=replace(scale, round_table=rounded)) for rounded in (True, False)]
    errors = [0.0, 0.0]
    for run in range(ROUNDING_RUNS):
        if name is None:
            changed = _moved(call, x.shape[1], 1003 + 97 * run)
            factors = reference.position_scale(scale, next(iter(changed.values())).reshape(-1, x.shape[1])[:1])
        else:
            drawn = _drawn(ctx, call.kwargs[name])
            changed, factors = {**still, name: drawn}, drawn.reshape(1, -1)
        probe = run_probe(ctx, call, parts, (ctx.randn(*x.shape) * float(x.std())).to(ctx.dtype), changed)
        for index, candidate in enumerate(plans):
            errors[index] += mean_error(mixed_values(ctx, candidate, probe, choice, factors), probe.mixed)
    return plans[0] if errors[0] <= errors[1] else plans[1]

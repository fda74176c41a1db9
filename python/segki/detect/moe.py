"""Mixture-of-experts blocks: candidates from the shapes, settled by comparing the reference with the block's own output.

A router's rule shows only where it matters, so the block runs on probes of its own: peaked and distinct logits, corrections that change
the choice, logits so small or so large that guards of divisions and ties show. The shared expert is silenced meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from segki import reference_moe
from segki.detect.context import Context, signature
from segki.detect.guard import segment_problem
from segki.detect.moe_parts import Parts, find_parts
from segki.detect.numeric import Unknown, equal_share, fit, snap
from segki.detect.resolve import renamed
from segki.detect.router import extremes, rules
from segki.detect.trace import FORWARD_ERRORS, Call, flat_tensors
from segki.plan import MoePlan, ParamRef, RouterPlan

TOKENS = 32
GOOD = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # error of a token over its largest value
SHARE = 0.9  # of the tokens that must be good: near ties may fall either way
OWN_SHARE = 0.75  # the same on the few tokens of the model's own pass
MIN_EQUAL = 0.8  # share of the elements that agree bit for bit once every rounding is known
SHIFT = 8.0  # logits per unit of the probe's common direction


@dataclass(frozen=True)
class Setting:
    """How hard a probe pulls: spread of the logits, what all logits of a token are shifted by (in turn), spread of the corrections."""

    spread: float
    shifts: tuple[float, ...]
    correction: float


NORMAL = Setting(2.0, (0.0,), 0.5)
PEAKED = Setting(30.0, (0.0,), 3.0)  # corrections choose experts of tiny probability
SHIFTED = Setting(3.0, (-12.0, -20.0, -30.0, -45.0, 10.0, 30.0), 0.5)
TIED = {torch.float16: Setting(0.003, (0.0,), 0.003), torch.bfloat16: Setting(0.02, (0.0,), 0.02)}  # rounded scores are often equal


@dataclass
class Probe:
    """One run of the block on tokens of their own."""

    x: Tensor  # [N, H]
    y: Tensor  # [N, H]
    overrides: dict[str, Tensor]  # by qualified name


def moe_plan(ctx: Context, call: Call) -> MoePlan | str:
    """The plan of a mixture of experts, or why it is not known; probed once for each signature, checked on each block's own values."""
    if call.name in ctx.moes:
        return ctx.moes[call.name]
    key = signature(call.module)
    found: MoePlan | str | None = None
    if key in ctx.moe_kinds:
        origin, kind = ctx.moe_kinds[key]
        found = renamed(kind, f"{origin}.", f"{call.name}.") if isinstance(kind, MoePlan) else kind.replace(origin, call.name)
        if isinstance(found, MoePlan) and (_reason(call) or not agrees(ctx, call, found)):
            found = None
    if found is None:
        try:
            found = detect_moe(ctx, call)
        except Unknown as error:
            found = str(error)
        ctx.moe_kinds.setdefault(key, (call.name, found))
    ctx.moes[call.name] = found
    return found


def _reason(call: Call) -> str | None:
    return segment_problem(call.name, call.module, mixed=True)


def agrees(ctx: Context, call: Call, plan: MoePlan) -> bool:
    """Whether a plan gives what the block gave in the model's own pass."""
    if call.x is None or call.own_y is None:
        return False
    got = reference_moe.moe(plan, ctx.lookup(), call.x)
    errors = token_errors(got.flatten(0, -2), call.own_y.reshape(got.shape).flatten(0, -2))
    return bool((errors < GOOD[ctx.dtype]).float().mean() >= OWN_SHARE)


def token_errors(got: Tensor, want: Tensor) -> Tensor:
    """Largest difference of each token over its largest wanted value (or the least normal one), `[N, H]` -> `[N]`."""
    least = torch.finfo(want.dtype).tiny
    got, want = got.float(), want.float()
    return (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=least)


def detect_moe(ctx: Context, call: Call) -> MoePlan:
    """The plan of a called mixture of experts.

    Raises
    ------
    Unknown
        If no candidate gives the block's output.
    """
    problem = _reason(call)
    if problem is not None:
        raise Unknown(problem)
    parts = find_parts(ctx, call)
    try:
        plan, factor = _search(ctx, call, parts)
        plan = _extremes(ctx, call, parts, plan, factor)
        plan = _rounding(ctx, call, parts, list(_scaled(ctx, call, parts, plan, factor)))
    except FORWARD_ERRORS as error:
        raise Unknown(f"{call.name}: probing failed: {type(error).__name__}: {error}") from error
    if not agrees(ctx, call, plan):
        raise Unknown(f"{call.name}: the plan agrees with the block on random inputs, not in the model's own pass")
    return plan


def run_probe(ctx: Context, call: Call, parts: Parts, setting: Setting, *, silent: bool, single: bool = False) -> Probe:
    """Run the block with a random router, its other parameters being the model's own where they are not constant.

    Parameters
    ----------
    silent
        Set the shared expert's output to zero.
    single
        One call a token, as in a decode step of one row: an implementation may be chosen by the number of tokens.
    """
    linear = parts.routers[0][0]
    hidden, prefix = linear.in_features, f"{call.name}."
    own = {**dict(call.module.named_parameters()), **dict(call.module.named_buffers())}
    common = ctx.randn(hidden)
    common = common / common.norm()
    x = ctx.randn(TOKENS, hidden)
    shifts = torch.tensor([setting.shifts[i % len(setting.shifts)] for i in range(TOKENS)], device=x.device)
    x = (x - (x @ common)[:, None] * common + (shifts / SHIFT)[:, None] * common).to(ctx.dtype)
    changed: dict[str, Tensor] = {}

    def change(ref: ParamRef | None, value: Tensor) -> None:
        if ref is not None:
            local = ref.name.removeprefix(prefix)
            changed[local] = value.reshape(own[local].shape).to(own[local].dtype)

    change(linear.weight, ctx.randn(parts.experts, hidden) * (setting.spread * hidden**-0.5) + SHIFT * common)
    change(linear.bias, ctx.randn(parts.experts) * 0.5)
    for ref in parts.vectors:
        change(ref, ctx.randn(parts.experts) * setting.correction)
    for ref in parts.others:
        local = ref.name.removeprefix(prefix)
        change(ref, own[local] + ctx.randn(*own[local].shape))
    if parts.shared_gate is not None:
        change(parts.shared_gate.weight, ctx.randn(1, hidden) * (setting.spread * hidden**-0.5))
    if parts.shared is not None and silent:
        for last in (parts.shared.down.weight, parts.shared.down.bias):
            if last is not None:
                change(last, torch.zeros_like(own[last.name.removeprefix(prefix)]))
    for local, tensor in own.items():
        if local not in changed and tensor.dim() >= 2 and tensor.is_floating_point() and bool(tensor.min() == tensor.max()):
            change(ParamRef(prefix + local), ctx.randn(*tensor.shape) * tensor.shape[-1] ** -0.5)
    if parts.shared is not None and not silent:
        _balance(parts, own, changed, prefix)
    rows = [x[i : i + 1] for i in range(TOKENS)] if single else [x]
    outputs = []
    for part in rows:
        given = part[:, None] if call.x is not None and call.x.dim() == 3 else part
        args, kwargs = call.with_input(given)
        outputs.append(next(flat_tensors(functional_call(call.module, changed, args, kwargs))).reshape(part.shape))
    return Probe(x, torch.cat(outputs), {prefix + local: value for local, value in changed.items()})


def _balance(parts: Parts, own: dict[str, Tensor], changed: dict[str, Tensor], prefix: str) -> None:
    """Scale the shared expert by a power of two where the routed sum would drown in it, or it in the routed sum."""
    assert parts.shared is not None

    def size(name: str) -> float:
        local = name.removeprefix(prefix)
        return float(changed.get(local, own[local]).float().square().mean().sqrt())

    _, _, down = parts.layouts[0]
    routed = down.fused if down.fused is not None else down.each[0]
    ratio = torch.tensor(size(routed.name) / max(size(parts.shared.down.weight.name), 1e-20)).log2().round()
    if abs(float(ratio)) >= 3:
        local = parts.shared.down.weight.name.removeprefix(prefix)
        changed[local] = changed.get(local, own[local]) * float(2.0**ratio)


class Trial:
    """Tries plans on a probe; an expert is computed once, for every token, when a plan first chooses it."""

    def __init__(self, ctx: Context, base: MoePlan, probe: Probe, *, single: bool = False) -> None:
        self.lookup = ctx.lookup(probe.overrides)
        self.base, self.probe, self.dtype = base, probe, ctx.dtype
        rows = [probe.x[i : i + 1] for i in range(TOKENS)] if single else [probe.x]
        self._rows = rows
        self._outputs: dict[int, Tensor] = {}
        self._logits: dict[RouterPlan, Tensor] = {}
        shared = [reference_moe.shared_expert(base, self.lookup, row) for row in rows]
        self.shared = None if base.shared is None else torch.cat([value for value in shared if value is not None])

    def _logits_of(self, plan: RouterPlan) -> Tensor:
        key = RouterPlan(plan.linear, 1, "softmax", plan.fp32_logits)
        if key not in self._logits:
            self._logits[key] = torch.cat([reference_moe.router_logits(plan, self.lookup, row) for row in self._rows])
        return self._logits[key]

    def routed(self, plan: MoePlan) -> Tensor:
        """The plan's output without the shared expert, `[N, H]`."""
        return self.output(replace(plan, shared=None, shared_gate=None, out_scale=1.0))

    def output(self, plan: MoePlan) -> Tensor:
        """The plan's output, `[N, H]`."""
        router = plan.router
        bias = None if router.bias is None else self.lookup(router.bias)
        chosen, weights = reference_moe.route(router, self._logits_of(router), bias, self.dtype)
        picked = self.probe.x.new_empty(*chosen.shape, self.probe.x.shape[-1])
        for index in sorted(set(chosen.flatten().tolist())):
            if index not in self._outputs:
                parts = [reference_moe.expert(self.base, self.lookup, index, row) for row in self._rows]
                self._outputs[index] = torch.cat(parts)
            tokens, slots = (chosen == index).nonzero(as_tuple=True)
            picked[tokens, slots] = self._outputs[index][tokens]
        return reference_moe.combine(plan, picked, chosen, weights, None if plan.shared is None else self.shared)

    def share(self, got: Tensor) -> float:
        """Share of the tokens that agree."""
        return float((token_errors(got, self.probe.y) < GOOD[self.dtype]).float().mean())


def _widths(ctx: Context, plan: RouterPlan) -> tuple[bool, ...]:
    """Values of `fp32_logits` to try."""
    if ctx.dtype == torch.float32:
        return (False,)
    return (False, True) if ctx.lookup()(plan.linear.weight).dtype == ctx.dtype else (True,)


def _search(ctx: Context, call: Call, parts: Parts) -> tuple[MoePlan, float]:
    """The first candidate that gives the routed sum up to a factor, and the factor."""
    probe = run_probe(ctx, call, parts, NORMAL, silent=True)
    numbers = ctx.numbers(*call.module.modules())
    best = 0.0
    for (gate, up, down), activation in itertools.product(parts.layouts, parts.activations):
        base = RouterPlan(parts.routers[0][0], 1, "softmax")
        trial = Trial(ctx, MoePlan(base, parts.experts, gate, up, down, activation, parts.shared, parts.shared_gate), probe)
        for linear, correction in parts.routers:
            for rule in rules(RouterPlan(linear, 1, "softmax", bias=correction), parts.experts, numbers):
                for wide in _widths(ctx, rule):
                    plan = replace(trial.base, router=replace(rule, fp32_logits=wide))
                    got = trial.routed(plan).float()
                    factors = (got * probe.y.float()).sum(-1) / got.square().sum(-1).clamp(min=1e-30)
                    factor = float(factors.median())
                    share = trial.share(got * factor) if factor > 0 else 0.0
                    best = max(best, share)
                    if share >= SHARE:
                        return plan, factor
    raise Unknown(f"{call.name}: no known router and experts give its output (the nearest agrees on {best:.0%} of the tokens)")


def _extremes(ctx: Context, call: Call, parts: Parts, plan: MoePlan, factor: float) -> MoePlan:
    """What shows only at extreme logits: guards of the normalisation, and whether scores or logits are compared."""
    numbers = ctx.numbers(*call.module.modules())
    probes = [run_probe(ctx, call, parts, setting, silent=True) for setting in (PEAKED, SHIFTED)]
    trials = [Trial(ctx, plan, probe) for probe in probes]
    best: tuple[float, MoePlan] = (-1.0, plan)
    for rule in extremes(plan.router, numbers, ctx.dtype != torch.float32):
        for wide in _widths(ctx, rule):
            option = replace(plan, router=replace(rule, fp32_logits=wide))
            share = min(trial.share(trial.routed(option).float() * factor) for trial in trials)
            if share > best[0]:
                best = (share, option)
    if best[0] < SHARE:
        raise Unknown(f"{call.name}: with extreme logits no known router agrees (the nearest on {best[0]:.0%} of the tokens)")
    return best[1]


def _scaled(ctx: Context, call: Call, parts: Parts, plan: MoePlan, factor: float) -> Iterator[MoePlan]:
    """The plan with each known number that its factors may stand for: of the weights, of the routed sum, of the whole."""
    numbers = ctx.numbers(*call.module.modules())
    outs = [1.0]
    if parts.shared is not None:
        trial_probe = run_probe(ctx, call, parts, NORMAL, silent=False)
        trial = Trial(ctx, plan, trial_probe)
        assert trial.shared is not None
        coefficients, rest = fit(trial_probe.y, [trial.routed(plan), trial.shared])
        if rest > GOOD[ctx.dtype] or abs(coefficients[0] / factor - 1) > GOOD[ctx.dtype]:
            raise Unknown(f"{call.name}: its output is no sum of the routed and the shared experts (it differs by {rest:.1e})")
        outs = snap(coefficients[1], [*numbers, ("half", 0.5)], ctx.dtype, noise=rest)
    options = [
        (scale, out) for out in outs for scale in snap(factor / out, numbers, ctx.dtype, noise=GOOD[ctx.dtype] / 10)
    ]
    if not options:
        raise Unknown(f"{call.name}: no known number gives the factor {factor:.4g} of its routed sum")
    for scale, out in options:
        yield replace(plan, router=replace(plan.router, scale=scale), out_scale=out)
        if scale != 1.0:
            yield replace(plan, routed_scale=scale, out_scale=out)


def _rounding(ctx: Context, call: Call, parts: Parts, plans: list[MoePlan]) -> MoePlan:
    """The plan that agrees best on single tokens, in half precision bit for bit and with every place of rounding tried.

    transformers 5 picks the experts' implementation by the configuration (`experts_implementation`) and never by the number of tokens;
    on other devices than the CPU its `generate` takes batched_mm where grouped_mm is set, which rounds alike. A forward that does
    choose by the number of tokens is taken as it acts on one, which is what it does in a decode step of one row.
    """
    half = ctx.dtype != torch.float32
    settings = [NORMAL, TIED[ctx.dtype]] if half else [NORMAL]
    probes = [run_probe(ctx, call, parts, setting, silent=False, single=True) for setting in settings]
    best: tuple[float, MoePlan] = (-1.0, plans[0])
    for wide in (False, True) if half else (False,):
        inner = [replace(plan, fp32_activation=wide) for plan in plans]
        trials = [Trial(ctx, inner[0], probe, single=True) for probe in probes]
        for option in [option for plan in inner for option in _roundings(ctx, plan)] if half else inner:
            share = _share(trials, option, half)
            if share > best[0]:
                best = (share, option)
        if best[0] == 1.0:
            break
    if best[0] < (MIN_EQUAL if half else SHARE):
        what = "elements, bit for bit" if half else "tokens"
        raise Unknown(f"{call.name}: no known rounding gives its output (the nearest agrees on {best[0]:.0%} of the {what})")
    return best[1]


def _share(trials: list[Trial], option: MoePlan, half: bool) -> float:
    """Share of the elements (in half precision) or tokens on which a plan agrees with every probe."""
    got = [trial.output(option) for trial in trials]
    if not half:
        return trials[0].share(got[0])
    return sum(equal_share(value, trial.probe.y) for value, trial in zip(got, trials, strict=True)) / len(trials)


def _roundings(ctx: Context, plan: MoePlan) -> Iterator[MoePlan]:
    flags = (False, True)
    routers = [plan.router]
    if plan.router.score == "softmax" and plan.router.normalise and plan.router.bias is None and plan.router.sum_eps == plan.router.sum_min:
        routers.append(replace(plan.router, score="softmax_chosen", normalise=False))  # the same but for rounding
    for scores, router, wide, weights in itertools.product(flags, routers, _widths(ctx, plan.router), flags):
        for products, sums in itertools.product(flags, flags):
            changed = replace(router, fp32_logits=wide, round_weights=weights, round_scores=scores)
            yield replace(plan, router=changed, round_products=products, round_sums=sums)

"""Mixture-of-experts blocks: parts from the shapes of the parameters, the router's rule from the block's own values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segki import reference, reference_moe
from segki.detect.context import Context
from segki.detect.guard import is_linear, segment_problem
from segki.detect.mlp import detect_mlp, linear_plan
from segki.detect.numeric import Unknown
from segki.detect.router import rules
from segki.detect.trace import FORWARD_ERRORS, Call, flat_tensors
from segki.plan import Activation, ExpertWeights, LinearPlan, MlpPlan, MoePlan, ParamRef, RouterPlan

TOKENS = 32
PEAK = 2.0  # standard deviation of the router's logits in a probe
GOOD = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # error of a token over its largest value
SHARE = 0.9  # of the tokens that must be good


@dataclass
class Parts:
    """What a block holds, by role; names are qualified."""

    router: LinearPlan
    bias: ParamRef | None
    experts: int
    options: list[tuple[ExpertWeights, ExpertWeights, ExpertWeights]]  # gate, up, down
    activations: list[Activation]
    shared: MlpPlan | None
    shared_gate: LinearPlan | None


@dataclass
class Probe:
    """One run of the block on rows of one token with a peaked router."""

    x: Tensor  # [N, H]
    y: Tensor  # [N, H]
    overrides: dict[str, Tensor]


def expert_holder(module: nn.Module) -> tuple[str, nn.Module] | None:
    """(local name, module) that holds the experts: two 3-D parameters, or a list of MLPs of one class."""
    for name, child in module.named_modules():
        own = [p for p in child.parameters(recurse=False)]
        if len([p for p in own if p.dim() == 3]) == 2 and all(p.dim() == 3 for p in own):
            return name, child
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(m) for m in child}) == 1:
            if all(len([m for m in expert.modules() if is_linear(m)]) == 3 for expert in child):
                return name, child
    return None


def is_moe_shaped(module: nn.Module) -> bool:
    """Experts, and beside them a matrix with one row an expert."""
    if isinstance(module, nn.ModuleList):
        return False
    found = expert_holder(module)
    if found is None or found[1] is module:
        return False
    count = _count(found[1])
    inside = {id(p) for p in found[1].parameters()}
    return any(p.dim() == 2 and p.shape[0] == count for p in module.parameters() if id(p) not in inside)


def _count(holder: nn.Module) -> int:
    return len(holder) if isinstance(holder, nn.ModuleList) else next(holder.parameters(recurse=False)).shape[0]


def find_parts(ctx: Context, call: Call) -> Parts:
    """Give each parameter of a block its role.

    Raises
    ------
    Unknown
        If one is left over.
    """
    hidden = call.x.shape[-1] if call.x is not None else 0
    found = expert_holder(call.module)
    if found is None or hidden == 0:
        raise Unknown(f"{call.name}: no experts")
    local, holder = found
    name = f"{call.name}.{local}"
    experts = _count(holder)
    router: list[LinearPlan] = []
    shared: list[MlpPlan] = []
    shared_gate: list[LinearPlan] = []
    biases: list[ParamRef] = []
    for inner, module in _outside(call, holder):
        if is_linear(module):
            plan = linear_plan(inner, module)
            (router if plan.out_features == experts else shared_gate).append(plan)
            if plan.out_features not in (experts, 1) or plan.in_features != hidden:
                raise Unknown(f"{inner}: a linear layer of {plan.in_features} to {plan.out_features} inside of experts is not known")
            continue
        seen = ctx.trace.only(inner)
        mlp = ctx.mlp(seen, detect_mlp) if seen is not None and any(is_linear(m) for m in module.modules()) else None
        if isinstance(mlp, MlpPlan):
            shared.append(mlp)
            continue
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            ref = ParamRef(f"{inner}.{own}")
            if tensor.shape == (experts, hidden):
                router.append(LinearPlan(ref, experts, hidden))
            elif tensor.numel() == experts and tensor.dim() == 1:
                biases.append(ref)
            elif isinstance(tensor, nn.Parameter):
                raise Unknown(f"{ref.name}: a parameter of shape {list(tensor.shape)} inside of experts is not known")
    if len(router) != 1 or len(shared) > 1 or len(shared_gate) > 1 or len(biases) > 1:
        raise Unknown(
            f"{call.name}: {len(router)} routers, {len(biases)} corrections, {len(shared)} shared experts and {len(shared_gate)} gates"
        )
    return Parts(
        router[0],
        biases[0] if biases else None,
        experts,
        _weight_options(name, holder, hidden),
        _activations(holder),
        shared[0] if shared else None,
        shared_gate[0] if shared_gate else None,
    )


def _outside(call: Call, holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the block beside the experts, MLPs as a whole."""
    stack = [(call.name, call.module)]
    while stack:
        name, module = stack.pop()
        yield name, module
        if is_linear(module) or (module is not call.module and any(is_linear(m) for m in module.children())):
            continue  # an MLP
        stack += [(f"{name}.{n}", child) for n, child in module.named_children() if child is not holder]


def _weight_options(name: str, holder: nn.Module, hidden: int) -> list[tuple[ExpertWeights, ExpertWeights, ExpertWeights]]:
    """(gate, up, down) that the shapes allow, the usual order first."""
    found = []
    if isinstance(holder, nn.ModuleList):
        locals_ = [n for n, m in holder[0].named_modules() if is_linear(m)]
        sizes = {n: tuple(holder[0].get_submodule(n).weight.shape) for n in locals_}  # type: ignore[union-attr]
        if any(m.bias is not None for m in holder.modules() if isinstance(m, nn.Linear)):
            raise Unknown(f"{name}: experts with biases are not known")
        for gate, up, down in sorted(itertools.permutations(locals_), key=lambda o: ("gate" not in o[0], "up" not in o[1])):
            width = sizes[gate][0]
            if sizes[gate] == sizes[up] == (width, hidden) and sizes[down] == (hidden, width):
                found.append(
                    tuple(
                        ExpertWeights(*sizes[n], each=tuple(ParamRef(f"{name}.{e}.{n}.weight") for e in range(len(holder))))
                        for n in (gate, up, down)
                    )
                )
        return found  # type: ignore[return-value]
    parameters = dict(holder.named_parameters(recurse=False))
    for (first, wide), (second, narrow) in itertools.permutations(parameters.items()):
        for transposed in (False, True):
            ins, outs = (wide.shape[1], wide.shape[2]) if transposed else (wide.shape[2], wide.shape[1])
            width = outs // 2
            expected = (width, hidden) if transposed else (hidden, width)
            if ins != hidden or outs != 2 * width or tuple(narrow.shape[1:]) != expected:
                continue
            fused, down = ParamRef(f"{name}.{first}"), ParamRef(f"{name}.{second}")
            halves = [ExpertWeights(width, hidden, fused, at, transposed) for at in (0, width)]
            last = ExpertWeights(hidden, width, down, 0, transposed)
            found += [(halves[0], halves[1], last), (halves[1], halves[0], last)]
    return found


def _activations(holder: nn.Module) -> list[Activation]:
    """Activations that a callable of the experts computes, else all."""
    grid = torch.linspace(-6.0, 6.0, 121)
    found: list[Activation] = []
    for module in [holder, *itertools.islice(holder.modules(), 1, 8)]:
        for value in [*vars(module).values(), *module._modules.values()]:
            if not callable(value) or isinstance(value, (nn.Linear, nn.ModuleList, type)):
                continue
            try:
                got = value(grid)
            except FORWARD_ERRORS:
                continue
            if isinstance(got, Tensor) and got.shape == grid.shape:
                found += [n for n, f in reference.ACTIVATIONS.items() if torch.allclose(got, f(grid), atol=1e-6)]
    return list(dict.fromkeys(found)) or list(reference.ACTIVATIONS)


def run_probe(ctx: Context, call: Call, parts: Parts) -> Probe:
    """Run the block with a random peaked router and a correction that matters; the experts' weights are the model's own."""
    hidden = parts.router.in_features
    x = ctx.randn(TOKENS, 1, hidden).to(ctx.dtype)
    own = dict(call.module.named_parameters()) | dict(call.module.named_buffers())
    prefix = f"{call.name}."
    changed = {}
    for ref, gain in ((parts.router.weight, PEAK * hidden**-0.5), (parts.router.bias, 0.5), (parts.bias, 0.3)):
        if ref is not None:
            local = ref.name.removeprefix(prefix)
            changed[local] = (ctx.randn(*own[local].shape) * gain).to(own[local].dtype)
    args, kwargs = call.with_input(x)
    y = next(flat_tensors(functional_call(call.module, changed, args, kwargs)))
    return Probe(x[:, 0], y.reshape(TOKENS, hidden), {f"{prefix}{n}": v for n, v in changed.items()})


class Trial:
    """Tries router rules on a probe; every expert has been computed for every token once."""

    def __init__(self, ctx: Context, plan: MoePlan, probe: Probe) -> None:
        self.lookup = ctx.lookup(probe.overrides)
        self.probe = probe
        self.dtype = ctx.dtype
        self.outputs = torch.stack([reference_moe.expert(plan, self.lookup, e, probe.x) for e in range(plan.experts)], 1)
        self.shared = reference_moe.shared_expert(plan, self.lookup, probe.x)
        self.bias = None if plan.router.bias is None else self.lookup(plan.router.bias)
        self.logits = {
            wide: reference_moe.router_logits(replace(plan.router, fp32_logits=wide), self.lookup, probe.x) for wide in (False, True)
        }

    def errors(self, plan: MoePlan) -> Tensor:
        """`[N]`: error of each token over its largest value."""
        chosen, weights = reference_moe.route(plan.router, self.logits[plan.router.fp32_logits], self.bias, self.dtype)
        picked = self.outputs.gather(1, chosen[..., None].expand(-1, -1, self.outputs.shape[-1]))
        got = reference_moe.combine(plan, picked, chosen, weights, self.shared).float()
        want = self.probe.y.float()
        return (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-20)

    def share(self, plan: MoePlan) -> float:
        """Share of the tokens that agree."""
        return float((self.errors(plan) < GOOD[self.dtype]).float().mean())


def detect_moe(ctx: Context, call: Call) -> MoePlan:
    """The plan of a called mixture of experts.

    Raises
    ------
    Unknown
        If no candidate gives the block's output.
    """
    problem = segment_problem(call.name, call.module, mixed=True)
    if problem is not None:
        raise Unknown(problem)
    parts = find_parts(ctx, call)
    try:
        probe = run_probe(ctx, call, parts)
        plan, trial = _search(ctx, call, parts, probe)
    except FORWARD_ERRORS as error:
        raise Unknown(f"{call.name}: probing failed: {type(error).__name__}: {error}") from error
    return _rounding(ctx, call, plan, trial)


def _search(ctx: Context, call: Call, parts: Parts, probe: Probe) -> tuple[MoePlan, Trial]:
    numbers = ctx.numbers(*call.module.modules())
    best = 0.0
    for (gate, up, down), activation in itertools.product(parts.options, parts.activations):
        router = RouterPlan(parts.router, 1, "softmax", bias=parts.bias)
        base = MoePlan(router, parts.experts, gate, up, down, activation, parts.shared, parts.shared_gate)
        trial = Trial(ctx, base, probe)
        for rule, scales in itertools.product(rules(router, parts.experts, numbers), _scales(numbers, parts)):
            routed, out = scales
            plan = replace(base, router=rule, routed_scale=routed, out_scale=out)
            share = max(trial.share(replace(plan, router=replace(rule, fp32_logits=wide))) for wide in (False, True))
            best = max(best, share)
            if share >= SHARE:
                return plan, trial
    raise Unknown(f"{call.name}: no known router and experts give its output (nearest agrees on {best:.0%} of the tokens)")


def _scales(numbers: list[tuple[str, float]], parts: Parts) -> list[tuple[float, float]]:
    """(factor of the routed sum, factor of the whole) to try."""
    factors = [v for n, v in numbers if ("scal" in n or "factor" in n or "mult" in n) and v not in (0.0, 1.0)]
    found = [(1.0, 1.0), *((v, 1.0) for v in dict.fromkeys(factors))]
    return found + [(1.0, 0.5)] if parts.shared is not None else found


def _rounding(ctx: Context, call: Call, plan: MoePlan, trial: Trial) -> MoePlan:
    """Where a half-precision block rounds: the options that agree with its values best; in fp32 there is nothing to choose."""
    widths = (False, True)
    if ctx.dtype == torch.float32:
        return replace(plan, router=replace(plan.router, fp32_logits=False))
    options: list[MoePlan] = []
    flags: Any = itertools.product(widths, (True, False), (False, True), (True, False), (False, True))
    for wide, weights, scores, products, sums in flags:
        router = replace(plan.router, fp32_logits=wide, round_weights=weights, round_scores=scores)
        options.append(replace(plan, router=router, round_products=products, round_sums=sums))
        if plan.router.scale != 1.0:  # the same factor after the sum
            later = replace(router, scale=1.0)
            options.append(replace(options[-1], router=later, routed_scale=plan.router.scale))
    errors = [trial.errors(option).clamp(max=1.0) for option in options]
    return min(zip(options, errors, strict=True), key=lambda pair: float(pair[1].mean()))[0]

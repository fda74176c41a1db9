"""Roles of the parameters of a mixture-of-experts block, from their shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segki import reference
from segki.detect.context import Context
from segki.detect.guard import is_linear
from segki.detect.mlp import detect_mlp, is_mlp_shaped, linear_plan
from segki.detect.numeric import Unknown
from segki.detect.trace import FORWARD_ERRORS, Call
from segki.plan import Activation, ExpertWeights, LinearPlan, MlpPlan, ParamRef

Layout = tuple[ExpertWeights, ExpertWeights, ExpertWeights]  # gate, up, down


@dataclass
class Experts:
    """The routed experts of a block: fused parameters, or a list of MLPs; names are local to the block."""

    count: int
    fused: dict[str, Tensor]
    listed: tuple[str, nn.ModuleList] | None
    owned: set[int]  # ids of their parameters

    @property
    def name(self) -> str:
        """For messages."""
        return self.listed[0] if self.listed is not None else next(iter(self.fused))


@dataclass
class Parts:
    """What a block holds, by role; names are qualified.

    Attributes
    ----------
    routers
        (linear layer with or without its bias, correction) that the vectors of one number an expert allow.
    vectors
        Those vectors.
    others
        Floating buffers without a role: if they matter, no candidate will agree.
    """

    experts: int
    routers: list[tuple[LinearPlan, ParamRef | None]]
    vectors: list[ParamRef]
    layouts: list[Layout]
    activations: list[Activation]
    shared: MlpPlan | None
    shared_gate: LinearPlan | None
    others: list[ParamRef]


def find_experts(module: nn.Module) -> Experts | None:
    """Two or three 3-D parameters with one matrix an expert, or a list of equal MLPs, anywhere in a module."""
    fused = {name: p for name, p in module.named_parameters() if p.dim() == 3}
    counts = {p.shape[0] for p in fused.values()}
    if len(fused) in (2, 3) and len(counts) == 1 and max(counts) > 1:
        return Experts(max(counts), dict(fused), None, {id(p) for p in fused.values()})
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(m) for m in child}) == 1:
            linears = [[m for m in expert.modules() if is_linear(m)] for expert in child]
            if all(len(found) in (2, 3) for found in linears):
                return Experts(len(child), {}, (name, child), {id(p) for p in child.parameters()})
    return None


def is_moe_shaped(module: nn.Module) -> bool:
    """Experts, and beside them a matrix with one row an expert; the innermost module that has both."""
    return _has_moe(module) and not any(_has_moe(inner) for inner in module.modules() if inner is not module)


def _has_moe(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return False
    experts = find_experts(module)
    return experts is not None and any(
        p.dim() == 2 and p.shape[0] == experts.count for p in module.parameters() if id(p) not in experts.owned
    )


def find_parts(ctx: Context, call: Call) -> Parts:
    """Give each parameter of a block its role.

    Raises
    ------
    Unknown
        If one is left over.
    """
    experts = find_experts(call.module)
    hidden = call.x.shape[-1] if call.x is not None else 0
    if experts is None or hidden == 0:
        raise Unknown(f"{call.name}: no experts, or no hidden state among its arguments")
    routers: list[LinearPlan] = []
    gates: list[LinearPlan] = []
    shared: list[MlpPlan] = []
    vectors: list[ParamRef] = []
    others: list[ParamRef] = []
    for name, module in _beside(ctx, call, experts):
        if isinstance(module, nn.Linear) or is_linear(module):
            if not is_linear(module):
                raise Unknown(f"{name}: a {type(module).__name__} beside experts is not known")
            linear = linear_plan(name, module)
            if linear.in_features != hidden or linear.out_features not in (experts.count, 1):
                raise Unknown(f"{name}: a linear layer of {linear.in_features} to {linear.out_features} beside experts is not known")
            (routers if linear.out_features == experts.count else gates).append(linear)
            continue
        inner = ctx.trace.only(name)
        if inner is not None and module is not call.module and is_mlp_shaped(ctx, inner):
            mlp = ctx.mlp(inner, detect_mlp)
            if not isinstance(mlp, MlpPlan):
                raise Unknown(mlp)
            shared.append(mlp)
            continue
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in experts.owned:
                continue
            ref = ParamRef(f"{name}.{own}")
            if tuple(tensor.shape) == (experts.count, hidden):
                routers.append(LinearPlan(ref, experts.count, hidden))
            elif tuple(tensor.shape) == (1, hidden):
                gates.append(LinearPlan(ref, 1, hidden))
            elif tensor.numel() == experts.count == tensor.shape[-1] and tensor.is_floating_point():
                vectors.append(ref)
            elif isinstance(tensor, nn.Parameter):
                raise Unknown(f"{ref.name}: a parameter of shape {list(tensor.shape)} beside experts is not known")
            elif tensor.is_floating_point() and tensor.numel() > 1:
                others.append(ref)
    if len(routers) != 1 or len(shared) > 1 or len(gates) > 1 or len(vectors) > 2:
        raise Unknown(
            f"{call.name}: {len(routers)} matrices and {len(vectors)} vectors of one row an expert, {len(shared)} shared experts and "
            f"{len(gates)} gates; known are one matrix, up to two vectors, one shared expert and one gate"
        )
    if gates and not shared:
        raise Unknown(f"{gates[0].weight.name}: a gate without a shared expert is not known")
    return Parts(
        experts.count,
        _router_roles(routers[0], vectors),
        vectors,
        _layouts(call.name, experts, hidden),
        _activations(call.module, experts),
        shared[0] if shared else None,
        gates[0] if gates else None,
        others,
    )


def _beside(ctx: Context, call: Call, experts: Experts) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block but for listed experts; linear layers and MLPs are given as a whole."""
    stack = [(call.name, call.module)]
    while stack:
        name, module = stack.pop()
        yield name, module
        inner = ctx.trace.only(name)
        if isinstance(module, nn.Linear) or is_linear(module):
            continue
        if module is not call.module and inner is not None and is_mlp_shaped(ctx, inner):
            continue
        listed = None if experts.listed is None else experts.listed[1]
        stack += [(f"{name}.{n}", child) for n, child in module.named_children() if child is not listed]


def _router_roles(linear: LinearPlan, vectors: list[ParamRef]) -> list[tuple[LinearPlan, ParamRef | None]]:
    """A vector may correct the choice, be a bias of the logits, or be nothing; the usual roles first."""
    options: list[tuple[LinearPlan, ParamRef | None]] = []
    for correction, bias in itertools.product((*vectors, None), (None, *vectors)):
        if correction is not None and correction == bias or (bias is not None and linear.bias is not None):
            continue
        biased = linear if bias is None else LinearPlan(linear.weight, linear.out_features, linear.in_features, bias)
        options.append((biased, correction))
    return options


def _layouts(name: str, experts: Experts, hidden: int) -> list[Layout]:
    """(gate, up, down) that the shapes allow, the usual order first."""
    if experts.listed is not None:
        return _listed_layouts(f"{name}.{experts.listed[0]}", experts.listed[1], hidden)
    found: list[Layout] = []
    refs = {f"{name}.{local}": tuple(tensor.shape[1:]) for local, tensor in experts.fused.items()}
    for names in sorted(itertools.permutations(refs), key=_unusual):
        for transposed in (False, True):
            shapes = [refs[n][::-1] if transposed else refs[n] for n in names]  # [out, in]
            fused = [ParamRef(n) for n in names]
            width = shapes[-1][1]
            if shapes[-1][0] != hidden:
                continue
            down = ExpertWeights(hidden, width, fused[-1], 0, transposed)
            if len(names) == 2 and shapes[0] == (2 * width, hidden):
                halves = [ExpertWeights(width, hidden, fused[0], at, transposed) for at in (0, width)]
                found += [(halves[0], halves[1], down), (halves[1], halves[0], down)]
            if len(names) == 3 and shapes[0] == shapes[1] == (width, hidden):
                gate, up = (ExpertWeights(width, hidden, ref, 0, transposed) for ref in fused[:2])
                found.append((gate, up, down))
    if not found:
        raise Unknown(f"{name}.{experts.name}: experts of shapes {[list(s) for s in refs.values()]} are no gated MLPs of width {hidden}")
    return found


def _unusual(names: tuple[str, ...]) -> list[bool]:
    """Sorts orders of names so that those that the names hint at come first."""
    hints = ("gate", "up", "down") if len(names) == 3 else ("gate", "down")
    return [hint not in name.rpartition(".")[2] for hint, name in zip(hints, names, strict=True)]


def _listed_layouts(name: str, experts: nn.ModuleList, hidden: int) -> list[Layout]:
    found: list[Layout] = []
    first = experts[0]
    shapes: dict[str, tuple[int, int]] = {}
    for local, module in first.named_modules():
        if not is_linear(module) and next(module.parameters(recurse=False), None) is not None:
            raise Unknown(f"{name}.0.{local}: a {type(module).__name__} inside of an expert is not known")
        if is_linear(module):
            plan = linear_plan(local, module)
            if plan.bias is not None or plan.transposed:
                raise Unknown(f"{name}.0.{local}: experts with biases or transposed linear layers are not known")
            shapes[local] = (plan.out_features, plan.in_features)

    def each(local: str, rows: tuple[int, int] | None = None) -> ExpertWeights:
        outs = shapes[local][0] if rows is None else rows[1] - rows[0]
        refs = tuple(ParamRef(f"{name}.{index}.{local}.weight", rows) for index in range(len(experts)))
        return ExpertWeights(outs, shapes[local][1], each=refs)

    for names in sorted(itertools.permutations(shapes), key=_unusual):
        width = shapes[names[-1]][1]
        if shapes[names[-1]] != (hidden, width):
            continue
        if len(names) == 2 and shapes[names[0]] == (2 * width, hidden):
            halves = [each(names[0], (at, at + width)) for at in (0, width)]
            found += [(halves[0], halves[1], each(names[1])), (halves[1], halves[0], each(names[1]))]
        if len(names) == 3 and shapes[names[0]] == shapes[names[1]] == (width, hidden):
            found.append((each(names[0]), each(names[1]), each(names[2])))
    if not found:
        raise Unknown(f"{name}: experts with linear layers of shapes {list(shapes.values())} are no gated MLPs of width {hidden}")
    return found


def _activations(block: nn.Module, experts: Experts) -> list[Activation]:
    """Activations that a callable beside the experts' weights computes; else of the whole block; else all."""
    grid = torch.linspace(-6.0, 6.0, 121)
    if experts.listed is not None:
        homes = list(experts.listed[1][0].modules())
    else:
        homes = [block.get_submodule(name.rpartition(".")[0]) for name in experts.fused]
    for modules in (homes, list(block.children()), [block]):
        found: list[Activation] = []
        for module in modules:
            named = [value for name, value in vars(module).items() if "act" in name and callable(value)]
            bare = [m for m in module._modules.values() if m is not None and next(m.parameters(), None) is None]
            for value in [*named, *bare]:
                if isinstance(value, (nn.ModuleList, nn.Identity, nn.modules.dropout._DropoutNd)):
                    continue
                try:
                    got = value(grid)
                except FORWARD_ERRORS:
                    continue
                if isinstance(got, Tensor) and got.shape == grid.shape:
                    found += [n for n, f in reference.ACTIVATIONS.items() if torch.allclose(got, f(grid), atol=1e-6)]
        if found:
            return list(dict.fromkeys(found))
    return list(reference.ACTIVATIONS)

"""MLPs: two or three linear layers around an activation, read from a trace and confirmed on large inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segki import reference
from segki.detect.context import Context, perturbed, signature
from segki.detect.guard import is_conv1d, is_linear
from segki.detect.numeric import TOLERANCE, Unknown, max_error, mean_error
from segki.detect.trace import FORWARD_ERRORS, Call, flat_tensors, same
from segki.plan import Activation, LinearPlan, MlpPlan, ParamRef

LARGE_INPUT = 40.0  # shows clamps


def linear_plan(name: str, module: nn.Module, rows: tuple[int, int] | None = None) -> LinearPlan:
    """Plan of an `nn.Linear` or `Conv1D` (or of a range of an `nn.Linear`'s outputs)."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    transposed = is_conv1d(module)
    outs, ins = (weight.shape[1], weight.shape[0]) if transposed else (weight.shape[0], weight.shape[1])
    if rows is not None:
        outs = rows[1] - rows[0]
    bias_ref = None if bias is None else ParamRef(f"{name}.bias", rows)
    return LinearPlan(ParamRef(f"{name}.weight", rows), outs, ins, bias_ref, transposed)


def linears_under(ctx: Context, call: Call) -> list[Call] | None:
    """Calls of the linear layers of a block, each called once; None when another kind of module with parameters is among them."""
    found = []
    for name, module in call.module.named_modules(prefix=call.name):
        if is_linear(module):
            inner = ctx.trace.only(name)
            if inner is None:
                return None
            found.append(inner)
        elif next(module.parameters(recurse=False), None) is not None:
            return None
    return sorted(found, key=lambda c: c.order)


def is_mlp_shaped(ctx: Context, call: Call) -> bool:
    """Two or three linear layers of fitting widths, all but one on the block's input and the last one giving its output."""
    linears = linears_under(ctx, call)
    if linears is None or len(linears) not in (2, 3):
        return False
    *ups, down = [linear_plan(c.name, c.module) for c in linears]
    fused = len(ups) == 1 and ups[0].out_features == 2 * down.in_features
    if not fused and any(up.out_features != down.in_features for up in ups):
        return False
    return all(same(c.x, call.x) for c in linears[:-1]) and same(linears[-1].y, call.own_y) and not list(call.tensor_pairs())


def has_fused_input(ctx: Context, call: Call) -> bool:
    """Whether one linear layer alone reads the input: a fused MLP, or attention with a fused projection."""
    return len(linears_under(ctx, call) or ()) == 2


def detect_mlp(ctx: Context, call: Call) -> MlpPlan:
    """The plan of a called MLP.

    Raises
    ------
    Unknown
        If the block is no gated or plain MLP with a known activation.
    """
    linears = linears_under(ctx, call)
    x, y = call.x, call.own_y
    if linears is None or len(linears) not in (2, 3) or x is None or y is None:
        raise Unknown(f"{call.name}: not an MLP of two or three linear layers")
    ups, down = linears[:-1], linears[-1]
    inner = down.x
    if not all(same(c.x, x) for c in ups) or not same(down.y, y) or inner is None:
        raise Unknown(f"{call.name}: its linear layers are not connected as in an MLP")
    key = signature(call.module)
    activations = ctx.confirmed[key] if key in ctx.confirmed else _activations(call.module)
    width, half = inner.shape[-1], ctx.dtype != torch.float32
    best: tuple[float, MlpPlan] | None = None
    for gate, up, gate_value, up_value in _roles(ups, width):
        for name, wide in itertools.product(activations, (False, True) if gate is not None and half else (False,)):
            if gate_value is None:
                value = reference.ACTIVATIONS[name](up_value)
            else:
                value = reference.gated(name, gate_value, up_value, fp32=wide)
            error = mean_error(value, inner)
            if best is None or error < best[0]:
                best = (error, MlpPlan(up, linear_plan(down.name, down.module), name, gate, wide))
    if best is None or best[0] > (2e-6 if ctx.dtype == torch.float32 else TOLERANCE[ctx.dtype] / 8):
        raise Unknown(f"{call.name}: no known activation and layout gives its inner values")
    if key not in ctx.confirmed:
        _confirm(ctx, call, best[1], x)
        ctx.confirmed[key] = [best[1].activation]
    return best[1]


def captured(ctx: Context, plan: LinearPlan) -> Tensor | None:
    """What the linear layer of a plan gave in the traced pass."""
    call = ctx.trace.only(plan.weight.name.removesuffix(".weight"))
    if call is None or call.y is None or plan.weight.rows is None:
        return None if call is None else call.y
    return call.y[..., plan.weight.rows[0] : plan.weight.rows[1]]


def _roles(ups: list[Call], width: int) -> Iterator[tuple[LinearPlan | None, LinearPlan, Tensor | None, Tensor]]:
    """(gate, up, gate's output, up's output) for every layout that the shapes allow."""
    values = [c.y for c in ups]
    if any(v is None for v in values):
        return
    outs: list[Tensor] = [v for v in values if v is not None]
    if len(ups) == 2:
        first, second = (linear_plan(c.name, c.module) for c in ups)
        if outs[0].shape[-1] == width == outs[1].shape[-1]:
            yield first, second, outs[0], outs[1]
            yield second, first, outs[1], outs[0]
    elif outs[0].shape[-1] == width:
        yield None, linear_plan(ups[0].name, ups[0].module), None, outs[0]
    elif outs[0].shape[-1] == 2 * width and not is_conv1d(ups[0].module):
        first = linear_plan(ups[0].name, ups[0].module, (0, width))
        second = linear_plan(ups[0].name, ups[0].module, (width, 2 * width))
        yield first, second, outs[0][..., :width], outs[0][..., width:]
        yield second, first, outs[0][..., width:], outs[0][..., :width]


def _activations(module: nn.Module) -> list[Activation]:
    """Activations to try: only the one that a callable of the module computes, if it has one that can be called alone."""
    grid = torch.linspace(-6.0, 6.0, 241)
    candidates = [m for m in module.modules() if m is not module and not is_linear(m) and not list(m.parameters())]
    functions = [value for name, value in vars(module).items() if callable(value) and "act" in name]
    found: list[Activation] = []
    for function in [*candidates, *functions]:
        if isinstance(function, (nn.modules.dropout._DropoutNd, nn.Identity, nn.ModuleList)):
            continue
        try:
            got = function(grid)
        except FORWARD_ERRORS:
            continue
        if isinstance(got, Tensor):
            found += [name for name, f in reference.ACTIVATIONS.items() if max_error(got, f(grid)) < 1e-6]
    return list(dict.fromkeys(found)) or list(reference.ACTIVATIONS)


def _confirm(ctx: Context, call: Call, plan: MlpPlan, x: Tensor) -> None:
    """Run the block on small and large inputs with perturbed biases and compare with the reference."""
    local = perturbed(ctx, call.module, ctx.dtype, matrices=False)
    lookup = ctx.lookup({f"{call.name}.{name}": value for name, value in local.items()})
    for gain in (1.0, LARGE_INPUT / 8, LARGE_INPUT):
        probe = (ctx.randn(*x.shape) * gain).to(ctx.dtype)
        args, kwargs = call.with_input(probe)
        got = next(flat_tensors(functional_call(call.module, local, args, kwargs)))
        if gain > 1.0 and not bool(torch.isfinite(got).all()):
            break  # float16 overflows before a clamp would show
        error = max_error(reference.mlp(plan, lookup, probe), got)
        if not error <= TOLERANCE[ctx.dtype] and bool((got != 0).any()):
            raise Unknown(f"{call.name}: on random inputs of size {gain:g} the MLP differs by {error:.1e} of its largest output")

"""GatedDeltaNet blocks: roles of the projections from their widths, settled by comparing the reference with the block's own values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segki import reference, reference_hybrid
from segki.detect.context import Context, perturbed
from segki.detect.guard import is_linear
from segki.detect.mlp import linear_plan
from segki.detect.numeric import Unknown, equal_share, max_error
from segki.detect.trace import FORWARD_ERRORS, Call, Trace, flat_tensors, recording, same
from segki.plan import Activation, GdnPlan, HeadView, NormPlan, ParamRef

PRECISE = 2e-4  # fp32 probes; the model may compute in chunks
TINY = 3e-3  # q and k whose squares sum up to the order of the L2 norm's epsilon show it
LARGE = 12.0
HUGE = 1e3  # shows clamps
ALIKE = 0.9  # share of the values of a half-precision run that must agree bit for bit
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu_erf", "relu", "relu2")


@dataclass
class Parts:
    """Submodules and own parameters of a block by their role."""

    projections: list[Call]
    out: Call
    conv: tuple[str, nn.Conv1d]
    norm: Call
    vectors: tuple[str, str]  # qualified names of the two own one-dimensional parameters, in the order of registration


@dataclass
class Probe:
    """One run of the block on random input."""

    projected: list[Tensor]
    x: Tensor
    core: Tensor  # output of the delta rule, [1, T, Hv, Dv]
    gate: Tensor  # the norm's second argument, of the same shape
    mixed: Tensor  # what the output projection was given
    overrides: dict[str, Tensor]


@dataclass(frozen=True)
class Roles:
    """Where the parts lie in the projections' outputs."""

    q: HeadView
    k: HeadView
    v: HeadView
    z: HeadView
    a: HeadView
    b: HeadView
    key_heads: int
    key_dim: int


def is_gdn_shaped(module: nn.Module) -> bool:
    """A convolution beside linear layers: linear attention, a state-space model or their like; `find_parts` says which are known."""
    return any(isinstance(m, nn.Conv1d) for m in module.children()) and any(is_linear(m) for m in module.children())


def find_parts(ctx: Context, call: Call) -> Parts:
    """Sort the submodules of a block by what they are connected to.

    Raises
    ------
    Unknown
        If the block's own parameters and submodules are not those of a GatedDeltaNet block.
    """
    own = dict(call.module.named_parameters(recurse=False))
    if len(own) != 2 or any(p.dim() != 1 or p.shape != next(iter(own.values())).shape for p in own.values()):
        shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in own.items()) or "none"
        raise Unknown(f"{call.name}: own parameters {shapes}; a GatedDeltaNet block has two vectors with a number a head")
    buffer = next((name for name, value in call.module.named_buffers(prefix=call.name) if value.is_floating_point()), None)
    if buffer is not None:
        raise Unknown(f"{buffer}: a buffer inside of a linear-attention block is not known")
    projections, outs, norms, convs = [], [], [], []
    for name, module in call.module.named_modules(prefix=call.name):
        if name == call.name:
            continue
        if isinstance(module, nn.Conv1d):
            if not module.groups == module.in_channels == module.out_channels:
                raise Unknown(f"{name}: a convolution that mixes channels is not known")
            convs.append((name, module))
            continue
        inner = ctx.trace.only(name)
        if is_linear(module):
            if inner is None:
                raise Unknown(f"{name}: not called once in one pass")
            if same(inner.x, call.x):
                projections.append(inner)
            elif same(inner.y, call.own_y):
                outs.append(inner)
            else:
                raise Unknown(f"{name}: neither reads the block's input nor gives its output")
        elif next(module.parameters(), None) is not None:
            if inner is None or len(list(module.parameters())) != 1:
                raise Unknown(f"{name}: a {type(module).__name__} inside of a linear-attention block is not known")
            norms.append(inner)
    if len(outs) != 1 or len(norms) != 1 or len(convs) != 1 or not 1 <= len(projections) <= 8:
        raise Unknown(
            f"{call.name}: {len(projections)} projections of the input, {len(outs)} of the output, {len(convs)} convolutions and "
            f"{len(norms)} norms"
        )
    vectors = [f"{call.name}.{name}" for name, _ in call.module.named_parameters(recurse=False)]
    projections.sort(key=lambda c: c.order)
    return Parts(projections, outs[0], convs[0], norms[0], (vectors[0], vectors[1]))


def run_probe(ctx: Context, call: Call, parts: Parts, x: Tensor, gain: float = 1.0) -> Probe:
    """Run the block in the dtype of `x` with perturbed parameters and record what went through it.

    `gain` is a factor of the biases: with theirs left as they are, tiny inputs would not make tiny keys.

    Raises
    ------
    Unknown
        If something lies between the block's input and its projections, or between the output projection and the block's output.
    """
    local = perturbed(ctx, call.module, x.dtype, gain=gain, matrices=True)
    for name in parts.vectors:  # redrawn: a model whose states fade at once, or never, hides how they fade
        own = name.removeprefix(f"{call.name}.")
        local[own] = (0.7 * ctx.randn(*local[own].shape) - 0.5).to(local[own].dtype)
    args, kwargs = call.with_input(x)
    with recording(call.module, prefix=call.name) as trace:
        functional_call(call.module, local, args, kwargs)
    if not all(same(trace.by_name[c.name][0].x, x) for c in parts.projections):
        raise Unknown(f"{call.name}: its projections do not read its input as it is")
    core, gate = _two_tensors(trace, parts.norm.name)
    out, tokens, dim = trace.by_name[parts.out.name][0], x.shape[1], core.shape[-1]
    if out.x is None or not same(out.y, trace.by_name[call.name][0].y):
        raise Unknown(f"{parts.out.name}: its output is not the block's as it is")
    return Probe(
        [value for c in parts.projections if (value := trace.by_name[c.name][0].y) is not None],
        x,
        core.reshape(1, tokens, -1, dim),
        gate.reshape(1, tokens, -1, dim),
        out.x.reshape(1, tokens, -1),
        {f"{call.name}.{name}": value for name, value in local.items()},
    )


def _two_tensors(trace: Trace, name: str) -> tuple[Tensor, Tensor]:
    call = trace.by_name[name][0]
    given = list(flat_tensors((call.args, call.kwargs)))
    if len(given) != 2 or given[0].shape != given[1].shape:
        raise Unknown(f"{name}: takes {len(given)} tensors, a gated norm takes a value and a gate of one shape")
    return given[0], given[1]


def roles(names: Sequence[str], widths: Sequence[int], keys: int, values: int, value_heads: int, key_heads: int) -> Iterator[Roles]:
    """Every layout that the widths allow; `keys` and `values` are the widths of all keys and of all values."""
    dim, value_dim, group = keys // key_heads, values // value_heads, value_heads // key_heads
    for order in _orders(names, len(widths)):
        sizes = [widths[i] for i in order]
        flat = _flat(order, sizes, keys, values, value_heads)
        if flat is not None:
            (q, k, v, z), numbers = flat[:4], flat[4:]
            for b, a in (numbers, numbers[::-1]):
                yield Roles(
                    HeadView(*q, dim, 0), HeadView(*k, dim, 0), HeadView(*v, group * value_dim, value_dim),
                    HeadView(*z, group * value_dim, value_dim), HeadView(*a, group, 1), HeadView(*b, group, 1), key_heads, dim,
                )  # fmt: skip
        if sizes == [2 * keys + 2 * values, 2 * value_heads]:
            stride, first, second = 2 * dim + 2 * group * value_dim, order[0], order[1]
            heads = [HeadView(first, at, stride, 0) for at in (0, dim)]
            wide = [HeadView(first, 2 * dim + i * group * value_dim, stride, value_dim) for i in (0, 1)]
            pair = [HeadView(second, i * group, 2 * group, 1) for i in (0, 1)]
            for (v_at, z_at), (b_at, a_at) in itertools.product((wide, wide[::-1]), (pair, pair[::-1])):
                yield Roles(heads[0], heads[1], v_at, z_at, a_at, b_at, key_heads, dim)


def _orders(names: Sequence[str], count: int) -> Iterator[tuple[int, ...]]:
    """Orders of the projections to try: as called, then by what their names hint at, then all others."""
    hints = {"q": 0, "k": 1, "v": 2, "z": 3, "g": 3, "b": 4, "a": 5}
    hinted = tuple(sorted(range(count), key=lambda i: hints.get(names[i].removeprefix("in_proj_")[:1], 6)))
    yield from dict.fromkeys([tuple(range(count)), hinted, *itertools.permutations(range(count))])


def _flat(order: Sequence[int], sizes: Sequence[int], keys: int, values: int, numbers: int) -> list[tuple[int, int]] | None:
    """(projection, offset) of q, k, v, z and the two numbers, when the projections in this order are runs of these, side by side."""
    found, index, offset = [], 0, 0
    for width in (keys, keys, values, values, numbers, numbers):
        if index >= len(sizes):
            return None
        found.append((order[index], offset))
        offset += width
        if offset > sizes[index]:
            return None
        if offset == sizes[index]:
            index, offset = index + 1, 0
    return found if index == len(sizes) else None


def candidates(ctx: Context, call: Call, parts: Parts, value_heads: int, value_dim: int) -> Iterator[GdnPlan]:
    """Plans that the shapes allow, likely ones first."""
    conv_name, conv = parts.conv
    values = value_heads * value_dim
    keys = (conv.in_channels - values) // 2
    if keys <= 0 or conv.in_channels != 2 * keys + values:
        return
    names = [c.name.rpartition(".")[2] for c in parts.projections]
    widths = [linear_plan(c.name, c.module).out_features for c in parts.projections]
    numbers = [int(v) for _, v in ctx.numbers(call.module) if v == int(v) and v >= 1]
    counts = [n for n in dict.fromkeys([*numbers, *range(1, value_heads + 1)]) if value_heads % n == 0 and keys % n == 0]
    vectors = [ParamRef(name) for name in parts.vectors]
    vectors.sort(key=lambda ref: "log" not in ref.name.lower())
    norm = NormPlan("rms", 1e-6, ParamRef(f"{parts.norm.name}.{next(iter(dict(parts.norm.module.named_parameters())))}"))
    seen: set[GdnPlan] = set()
    for heads in counts:
        dim = keys // heads
        for role, (a_log, dt_bias) in itertools.product(
            roles(names, widths, keys, values, value_heads, heads), (vectors, vectors[::-1])
        ):
            plan = GdnPlan(
                tuple(linear_plan(c.name, c.module) for c in parts.projections), role.q, role.k, role.v, role.z, role.a, role.b,
                heads, value_heads, dim, value_dim, ParamRef(f"{conv_name}.weight"), conv.kernel_size[0], a_log, dt_bias, norm,
                linear_plan(parts.out.name, parts.out.module), dim**-0.5,
                None if conv.bias is None else ParamRef(f"{conv_name}.bias"),
            )  # fmt: skip
            if plan not in seen:
                seen.add(plan)
                yield plan


def detect_gdn(ctx: Context, call: Call) -> GdnPlan:
    """The plan of a called GatedDeltaNet block.

    Raises
    ------
    Unknown
        If no candidate gives the block's values on small and large inputs.
    """
    x = call.x
    if x is None or x.dim() != 3:
        raise Unknown(f"{call.name}: no hidden state among its arguments")
    parts = find_parts(ctx, call)
    tokens = max(x.shape[1], parts.conv[1].kernel_size[0] + 5)
    base = ctx.randn(1, tokens, x.shape[2])
    try:
        probe = run_probe(ctx, call, parts, base)
        size = 1.0 / max(max(float(p.std()) for p in probe.projected), 1e-6)
        probe = run_probe(ctx, call, parts, base * size)
        plan = _search(ctx, call, parts, probe)
        tiny = run_probe(ctx, call, parts, base * (size * TINY), TINY)
        plan = _epsilon(ctx, call, plan, tiny)
        plan = replace(plan, norm=_norm(ctx, call, parts, plan, probe))
        large, huge = (run_probe(ctx, call, parts, base * (size * factor)) for factor in (LARGE, HUGE))
        _confirm(ctx, call, plan, [probe, tiny, large, huge])
        if ctx.dtype != torch.float32:
            _confirm_rounding(ctx, call, plan, run_probe(ctx, call, parts, (base * size).to(ctx.dtype)))
        return plan
    except FORWARD_ERRORS as error:
        raise Unknown(f"{call.name}: probing failed: {type(error).__name__}: {error}") from error


def _confirm(ctx: Context, call: Call, plan: GdnPlan, probes: Sequence[Probe]) -> None:
    """Compare the delta rule on large inputs, on huge ones for the first token alone, and what is given to the output on all."""
    large, huge = probes[-2:]
    error = max_error(core(ctx, plan, large), large.core)
    if error > 10 * PRECISE:
        raise Unknown(f"{call.name}: with large inputs its delta rule differs by {error:.1e} of the largest value")
    error = max_error(core(ctx, plan, huge)[:, 0], huge.core[:, 0])
    if error > PRECISE:
        raise Unknown(f"{call.name}: with huge inputs its delta rule differs by {error:.1e} of the largest value (a clamp?)")
    for probe in probes:
        mixed = reference_hybrid.gated_norm(plan, ctx.lookup(probe.overrides), probe.core, probe.gate).flatten(2)
        error = max_error(mixed, probe.mixed)
        if error > PRECISE / 10:
            raise Unknown(f"{call.name}: what its output projection reads differs by {error:.1e} from the gated norm's output")


def _confirm_rounding(ctx: Context, call: Call, plan: GdnPlan, probe: Probe) -> None:
    """In half precision nearly every value must come out the same: whatever else the block rounds shows."""
    share = equal_share(core(ctx, plan, probe), probe.core)
    if share < ALIKE:
        raise Unknown(f"{call.name}: in {ctx.dtype} only {share:.0%} of its delta rule's values are the expected ones")


def core(ctx: Context, plan: GdnPlan, probe: Probe) -> Tensor:
    """The reference's delta rule on a probe's projections."""
    return reference_hybrid.gated_delta_core(plan, ctx.lookup(probe.overrides), probe.projected)[0]


def _search(ctx: Context, call: Call, parts: Parts, probe: Probe) -> GdnPlan:
    value_heads, value_dim = probe.core.shape[2:]
    vector = probe.overrides[parts.vectors[0]]
    nearest = math.inf
    for plan in candidates(ctx, call, parts, value_heads, value_dim):
        if vector.shape[0] != value_heads or not torch.equal(_gate(plan, probe), probe.gate):
            continue
        for activation, factor in itertools.product(ACTIVATIONS, (1.0, 2.0)):
            option = replace(plan, conv_activation=activation, beta_scale=factor)
            error = max_error(core(ctx, option, probe), probe.core)
            nearest = min(nearest, error)
            if error < PRECISE:
                return option
    raise Unknown(f"{call.name}: no known linear attention gives its values (nearest differs by {nearest:.1e} of the largest)")


def _gate(plan: GdnPlan, probe: Probe) -> Tensor:
    group = plan.value_heads // plan.key_heads
    return reference.heads(probe.projected, plan.z, plan.key_heads, group, plan.value_dim)


def _epsilon(ctx: Context, call: Call, plan: GdnPlan, probe: Probe) -> GdnPlan:
    """The L2 norm's epsilon."""
    named = [v for _, v in ctx.numbers(call.module) if 0 < v <= 1e-2]
    options = dict.fromkeys([plan.l2_eps, *named, 1e-5, 1e-12, 1e-24])  # the last is F.normalize's, squared
    plans = [replace(plan, l2_eps=eps) for eps in options]
    errors = [max_error(core(ctx, option, probe), probe.core) for option in plans]
    best = min(range(len(plans)), key=lambda i: errors[i])
    if errors[best] > 5 * PRECISE:
        raise Unknown(f"{call.name}: with tiny inputs its delta rule differs by {errors[best]:.1e} of the largest value")
    return plans[0] if errors[0] <= 1.01 * errors[best] else plans[best]


def _norm(ctx: Context, call: Call, parts: Parts, plan: GdnPlan, probe: Probe) -> NormPlan:
    """Weight, epsilon, cast order and gate of the gated norm, found on the norm by itself."""
    module, name = parts.norm.module, parts.norm.name
    local = next(iter(dict(module.named_parameters())))
    weight = probe.overrides[f"{name}.{local}"]
    assert plan.norm.weight is not None
    shape = (16, plan.value_dim)

    def run(value: Tensor, gate: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        given = {local: weight.to(dtype)}
        got = next(flat_tensors(functional_call(module, given, (value.to(dtype), gate.to(dtype)))))
        return {f"{name}.{local}": given[local]}, got

    def error(option: GdnPlan, overrides: dict[str, Tensor], value: Tensor, gate: Tensor, want: Tensor) -> float:
        return max_error(reference_hybrid.gated_norm(option, ctx.lookup(overrides), value, gate), want)

    small = ctx.randn(*shape) * 1e-3
    gate = ctx.randn(*shape) * 3.0
    overrides, want = run(small, gate, torch.float32)
    epsilons = dict.fromkeys([v for _, v in ctx.numbers(module, call.module) if 0 < v <= 1e-2] + [1e-5, 1e-6, 1e-12])
    for eps, offset, activation in itertools.product(epsilons, (0.0, 1.0), ACTIVATIONS):
        option = replace(plan, norm=NormPlan("rms", eps, plan.norm.weight, None, offset), gate_activation=activation)
        if error(option, overrides, small, gate, want) < 1e-5:
            break
    else:
        raise Unknown(f"{name}: no known gated norm gives its output")
    if option.gate_activation != plan.gate_activation:
        raise Unknown(f"{name}: a gate with {option.gate_activation} is not known")
    value = ctx.randn(*shape).to(ctx.half)
    overrides, want = run(value, gate, ctx.half)
    if want.dtype != ctx.half:
        if ctx.dtype != torch.float32:
            raise Unknown(f"{name}: gives {want.dtype} for {ctx.half}")
        return option.norm
    casts = [replace(option, norm=replace(option.norm, cast=cast)) for cast in ("before_weight", "after_weight")]
    shares = [
        equal_share(reference_hybrid.gated_norm(c, ctx.lookup(overrides), value, gate.to(ctx.half)), want) for c in casts
    ]
    if ctx.dtype != torch.float32 and max(shares) < ALIKE:
        raise Unknown(f"{name}: in {ctx.dtype} it rounds in a way that is not known")
    return casts[0].norm if shares[0] > shares[1] else casts[1].norm

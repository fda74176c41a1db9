"""How values flow through a decoder layer, found by numbers: each input and the output is a known value or a sum of some."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from segki import reference
from segki.detect.attention import detect_attention
from segki.detect.context import Context, has_linear, is_container, signature
from segki.detect.gdn import detect_gdn, is_gdn_shaped
from segki.detect.guard import is_linear
from segki.detect.mlp import detect_mlp, has_fused_input, is_mlp_shaped
from segki.detect.moe import moe_plan
from segki.detect.moe_parts import is_moe_shaped
from segki.detect.norms import detect_norm
from segki.detect.numeric import Unknown, equal_share, fit, module_numbers, snap
from segki.detect.resolve import renamed
from segki.detect.ropes import real_pairs, rope_source
from segki.detect.scales import factor_key
from segki.detect.trace import Call, find_same
from segki.plan import AttentionPlan, LayerPlan, MlpPlan, Node, Term

FIT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
MIN_EQUAL = 0.97  # share of the elements of a sum that must agree bit for bit


@dataclass
class Flow:
    """Values known so far and the nodes that gave them."""

    values: list[tuple[str, Tensor]]
    nodes: list[Node] = field(default_factory=list)

    def fresh(self, name: str) -> str:
        """A node name that is not taken."""
        taken = {known for known, _ in self.values}
        options = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        return next(option for option in options if option not in taken)

    def add(self, node: Node, value: Tensor) -> None:
        """Append a node and its value."""
        self.nodes.append(node)
        self.values.append((node.name, value))


def find_sum(ctx: Context, call: Call, values: list[tuple[str, Tensor]], target: Tensor) -> tuple[Term, ...] | None:
    """Terms whose sum is `target`: as few as possible, with the scalars and the order that agree most often bit for bit."""
    tolerance = FIT_TOLERANCE[ctx.dtype]
    known = [(name, value) for name, value in values if value.shape == target.shape]
    best: tuple[float, tuple[Term, ...]] | None = None
    for count in (1, 2, 3):
        for chosen in itertools.combinations(reversed(known), count):
            coefficients, rest = fit(target, [value for _, value in chosen])
            if rest > tolerance or min(abs(c) for c in coefficients) < 1e-3:
                continue
            numbers, depths = ctx.numbers(call.module), module_numbers(call.module)
            options = [snap(c, numbers, ctx.dtype, noise=rest, depths=depths) for c in coefficients]
            for terms in _orders(chosen, options):
                lookup = dict(known)
                got = reference.scaled_sum([(lookup[t.value], t.scale) for t in terms])
                share = equal_share(got, target)
                if best is None or share > best[0]:
                    best = (share, terms)
        if best is not None and best[0] >= MIN_EQUAL:
            return best[1]
    return None


def _orders(chosen: tuple[tuple[str, Tensor], ...], options: list[list[float]]) -> list[tuple[Term, ...]]:
    """Every order that rounds differently (the first two terms commute), with every choice of scalars."""
    names = [name for name, _ in chosen]
    found = []
    for scalars in itertools.product(*options):
        terms = [Term(name, scalar) for name, scalar in zip(names, scalars, strict=True)]
        if len(terms) < 3:
            found.append(tuple(reversed(terms)))
        else:
            found += [(terms[(i + 1) % 3], terms[(i + 2) % 3], terms[i]) for i in range(3)]
    return found


def source(ctx: Context, call: Call, flow: Flow, value: Tensor | None, what: str) -> str:
    """Name of the node that holds a value, after adding a sum where one is needed."""
    if value is None:
        raise Unknown(f"{what}: no hidden state among its arguments")
    found = find_same(value, flow.values)
    if found is not None:
        return found
    terms = find_sum(ctx, call, flow.values, value)
    if terms is None:
        raise Unknown(f"{what}: neither a known value nor a sum of up to three of them")
    name = flow.fresh("sum")
    flow.add(Node(name, terms=terms), value)
    return name


def detect_layer(ctx: Context, call: Call, window: int | None) -> LayerPlan:
    """The plan of a called decoder layer.

    Raises
    ------
    Unknown
        If a part of the layer, or how values flow between parts, is not known.
    """
    x, y = call.x, call.y
    if x is None or y is None or x.shape != y.shape:
        raise Unknown(f"{call.name}: its first output is no hidden state")
    flow = Flow([("x", x)])
    _walk(ctx, call, call, flow, window)
    last = source(ctx, call, flow, y, f"output of {call.name}")
    names = [node.name for node in flow.nodes]
    if not names or last != names[-1]:
        raise Unknown(f"{call.name}: its output does not depend on {names[-1] if names else 'any part'}")
    return LayerPlan(call.name, tuple(flow.nodes))


def _walk(ctx: Context, layer: Call, parent: Call, flow: Flow, window: int | None) -> None:
    depth = parent.name.count(".") + 1
    inner = ctx.trace.under(parent.name)
    # children of a ModuleList are called without their parent: take the outermost called ones
    called = {c.name for c in inner}
    children = [c for c in inner if not any(c.name.startswith(f"{other}.") for other in called if other.count(".") >= depth)]
    for call in sorted(children, key=lambda c: c.order):
        if len(ctx.trace.by_name[call.name]) != 1:
            if any(True for _ in call.module.parameters()):
                raise Unknown(f"{call.name}: called {len(ctx.trace.by_name[call.name])} times in one pass")
            continue
        _visit(ctx, layer, call, flow, window)


def _visit(ctx: Context, layer: Call, call: Call, flow: Flow, window: int | None) -> None:
    label = call.name.rpartition(".")[2]
    y = call.y
    if is_moe_shaped(call.module):
        src = source(ctx, layer, flow, call.x, f"input of {call.name}")
        if y is None:
            raise Unknown(f"{call.name}: gives no hidden state")
        moe = moe_plan(ctx, call)
        if isinstance(moe, str):
            raise Unknown(moe)
        flow.add(Node(flow.fresh(label), call.name, src, moe=moe), y)
        return
    if not has_linear(call.module):
        plan = detect_norm(ctx, call)
        if plan is not None and y is not None and find_same(y, flow.values) is None:
            src = source(ctx, layer, flow, call.x, f"input of {call.name}")
            flow.add(Node(flow.fresh(label), call.name, src, norm=plan), y)
        elif plan is None and next(call.module.parameters(), None) is not None:
            raise Unknown(f"{call.name}: a {type(call.module).__name__} is not known")
        return
    if is_linear(call.module):
        raise Unknown(f"{call.name}: a linear layer of its own inside the decoder layer is not known")
    shaped = is_mlp_shaped(ctx, call)
    if not shaped and is_container(call.module):
        _walk(ctx, layer, call, flow, window)
        return
    src = source(ctx, layer, flow, call.x, f"input of {call.name}")
    mlp = ctx.mlp(call, detect_mlp) if shaped else None
    if is_gdn_shaped(call.module):
        node = Node(flow.fresh(label), call.name, src, gdn=detect_gdn(ctx, call))
    elif isinstance(mlp, MlpPlan):
        node = Node(flow.fresh(label), call.name, src, mlp=mlp)
    elif mlp is not None and not has_fused_input(ctx, call):
        raise Unknown(mlp)
    else:
        node = Node(flow.fresh(label), call.name, src, attention=_attention(ctx, call, window))
    if y is None:
        raise Unknown(f"{call.name}: gives no hidden state")
    flow.add(node, y)


def _attention(ctx: Context, call: Call, window: int | None) -> AttentionPlan:
    """The plan of an attention block, probed once for each signature: layers may differ in nothing but a scalar of their sums."""
    key = (signature(call.module), window, tuple(rope_source(ctx, pair) for pair in real_pairs(ctx, call)), factor_key(call))
    if key not in ctx.attentions:
        ctx.attentions[key] = (call.name, detect_attention(ctx, call, window))
    origin, plan = ctx.attentions[key]
    found: AttentionPlan = renamed(plan, f"{origin}.", f"{call.name}.")
    return found

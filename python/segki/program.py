"""A model's plan turned into a step program: ops over the live weights, the cache and a few activation buffers."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from segki import _segki
from segki.blocks import add_gdn, add_moe, conv_channels
from segki.native import Resolve, heads, norm_spec, view
from segki.plan import (
    AttentionPlan,
    GdnPlan,
    LinearPlan,
    MlpPlan,
    ModelPlan,
    Node,
    NormPlan,
    ParamRef,
    PositionScale,
    RopePlan,
    Term,
)

MOST_SPLITS = 8  # pieces into which the keys of a row are cut; the same for every batch size, so that bits are, too

RopeTable = Callable[[RopePlan, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class StepState:
    """Per-row state of a decode, in host tensors at fixed addresses.

    `next` i64 `[rows]`, `lengths`, `positions`, `generated`, `finished`, `frozen` i32 `[rows]`, `history` i64 `[rows, capacity]`,
    `log_prob` f32 `[rows, capacity]`, `logits` f32 `[rows, V]`.
    """

    next: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    generated: torch.Tensor
    finished: torch.Tensor
    frozen: torch.Tensor
    history: torch.Tensor
    log_prob: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, capacity: int, vocab: int) -> StepState:
        """Fresh state of `rows` rows with room for `capacity` new tokens each."""
        return cls(
            next=torch.zeros(rows, dtype=torch.int64),
            lengths=torch.zeros(rows, dtype=torch.int32),
            positions=torch.zeros(rows, dtype=torch.int32),
            generated=torch.zeros(rows, dtype=torch.int32),
            finished=torch.zeros(rows, dtype=torch.int32),
            frozen=torch.zeros(rows, dtype=torch.int32),
            history=torch.zeros(rows, capacity, dtype=torch.int64),
            log_prob=torch.zeros(rows, capacity, dtype=torch.float32),
            logits=torch.zeros(rows, vocab, dtype=torch.float32),
        )

    def native(self, with_log_prob: bool) -> _segki.DecodeState:
        """The same memory as the decode loop takes it."""
        state = _segki.DecodeState()
        for name in ("next", "lengths", "positions", "generated", "finished", "history"):
            setattr(state, name, view(getattr(self, name)))
        if with_log_prob:
            state.log_prob = view(self.log_prob)
        return state


@dataclass
class Step:
    """A finished program with everything that its addresses depend on."""

    program: _segki.StepProgram
    state: StepState
    rows: int
    keep: list[torch.Tensor] = field(default_factory=list)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activation buffers and tables."""
        return sum(t.numel() * t.element_size() for t in self.keep)


class Buffers:
    """Activation buffers `[rows, width]`, reused once their last reader has run."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.all: list[torch.Tensor] = []

    def take(self, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer nobody reads any more, else a new one; in the model's dtype unless another is named."""
        dtype = self._dtype if dtype is None else dtype
        free = self._free[width, dtype]
        if free:
            return free.pop()
        buffer = torch.zeros(self._rows, width, dtype=dtype)
        self.all.append(buffer)
        return buffer

    def give(self, *buffers: torch.Tensor) -> None:
        """The buffers' values are not needed any more."""
        for buffer in buffers:
            self._free[buffer.shape[1], buffer.dtype].append(buffer)


def position_scale_table(plan: PositionScale, positions: int) -> torch.Tensor:
    """f32 `[positions]`: what queries at each position are multiplied with, not rounded."""
    at = torch.arange(positions, dtype=torch.float32)
    if plan.kind == "power":
        return torch.exp(plan.beta * torch.log1p((at + plan.offset) / plan.period))
    return 1.0 + plan.beta * torch.log1p(torch.floor(at / plan.period))


class StepBuilder:
    """Builds a step of `rows` rows over a cache of `max_len` tokens a row."""

    def __init__(
        self,
        plan: ModelPlan,
        resolve: Resolve,
        rope_table: RopeTable,
        cache: _segki.HybridCache,
        state: StepState,
        dtype: torch.dtype,
        backend: _segki.Backend,
    ) -> None:
        self.plan = plan
        self.resolve = resolve
        self.rope_table = rope_table
        self.cache = cache
        self.state = state
        self.rows = int(state.next.shape[0])
        self.dtype = dtype
        self.buffers = Buffers(self.rows, dtype)
        self.tables: dict[RopePlan | PositionScale, tuple[torch.Tensor, ...]] = {}
        self.partials: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.keep: list[torch.Tensor] = []
        self.ops = _segki.StepProgramBuilder(backend)

    def build(self) -> Step:
        """The program: token in `state.next` -> `state.logits`."""
        plan = self.plan
        embedded = self._embedding()
        nodes = flatten(plan)
        last = nodes[-1].name if nodes else "x"
        self._run_nodes(nodes, {"x": embedded}, keep={last})
        x = self._values[last]
        if plan.head.input_scale != 1.0:
            x = self._sum([(x, plan.head.input_scale)], self.buffers.take(plan.hidden_size))
        args = _segki.LmHeadArgs()
        args.x = view(x)
        args.weight = view(self.resolve(plan.head.linear.weight))
        args.bias = self.param(plan.head.linear.bias)
        args.logits = view(self.state.logits)
        args.scale = plan.head.scale
        args.divisor = plan.head.divisor
        args.softcap = plan.head.softcap or 0.0
        args.transposed = int(plan.head.linear.transposed)
        if plan.head.fp32_softcap:
            args.fp32_softcap = 1
        self.ops.add(args)
        tables = [table for pair in self.tables.values() for table in pair]
        return Step(
            self.ops.finish(), self.state, self.rows, self.buffers.all + tables + self.keep
        )

    def param(self, ref: ParamRef | None) -> _segki.View:
        """The live parameter; None is the absent view."""
        return view(None if ref is None else self.resolve(ref))

    def _embedding(self) -> torch.Tensor:
        plan = self.plan.embedding
        out = self.buffers.take(self.plan.hidden_size)
        args = _segki.EmbeddingArgs()
        args.tokens = view(self.state.next)
        args.table = view(self.resolve(plan.weight))
        args.scale = plan.scale
        args.out = view(out)
        if plan.positions is not None:
            args.positions = view(self.state.positions)
            args.position_table = view(self.resolve(plan.positions))
            args.position_offset = plan.position_offset
        self.ops.add(args)
        if plan.norm is not None:
            self._norm(out, plan.norm, out)
        return out

    def _norm(self, x: torch.Tensor, plan: NormPlan, out: torch.Tensor) -> None:
        args = _segki.NormArgs()
        args.x = view(x)
        args.weight = self.param(plan.weight)
        args.bias = self.param(plan.bias)
        args.out = view(out)
        args.norm = norm_spec(plan)
        self.ops.add(args)

    def _sum(
        self,
        terms: Sequence[tuple[torch.Tensor, float]],
        out: torch.Tensor,
        norm: NormPlan | None = None,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        args = _segki.SumNormArgs()
        args.terms = [view(value) for value, _ in terms]
        args.scales = [scale for _, scale in terms]
        args.count = len(terms)
        args.sum = view(out)
        if norm is not None:
            args.norm = norm_spec(norm)
            args.weight = self.param(norm.weight)
            args.bias = self.param(norm.bias)
            args.out = view(normed)
        self.ops.add(args)
        return out

    def _run_nodes(
        self, nodes: Sequence[Node], values: dict[str, torch.Tensor], keep: set[str]
    ) -> None:
        self._values = values
        readers = last_readers(nodes)
        skip = False
        for i, node in enumerate(nodes):
            if skip:  # the norm ran with the sum before it
                skip = False
            elif node.terms:
                follower = nodes[i + 1] if i + 1 < len(nodes) else None
                fused = follower is not None and follower.norm is not None and follower.src == node.name
                out = self.buffers.take(self.plan.hidden_size)
                values[node.name] = out
                terms = [(values[term.value], term.scale) for term in node.terms]
                if fused and follower is not None:
                    values[follower.name] = self.buffers.take(self.plan.hidden_size)
                    self._sum(terms, out, follower.norm, values[follower.name])
                    skip = True
                else:
                    self._sum(terms, out)
            else:
                self._block(node, values)
            for name in readers.get(i, ()):
                if name not in keep:
                    self.buffers.give(values.pop(name))

    def _block(self, node: Node, values: dict[str, torch.Tensor]) -> None:
        assert node.src is not None
        x = values[node.src]
        out = self.buffers.take(self.plan.hidden_size)
        values[node.name] = out
        if node.norm is not None:
            self._norm(x, node.norm, out)
        elif node.mlp is not None:
            self.mlp(x, node.mlp, out)
        elif node.attention is not None:
            self._attention(x, node.attention, out)
        elif node.gdn is not None:
            add_gdn(self, x, node.gdn, out)
        elif node.moe is not None:
            add_moe(self, x, node.moe, out)

    def linear(
        self,
        x: torch.Tensor,
        linears: Sequence[LinearPlan],
        outs: Sequence[torch.Tensor],
        activation: str = "none",
    ) -> None:
        """Linear layers that share an input, up to 4 a product."""
        for begin in range(4, len(linears), 4):
            self.linear(x, linears[begin : begin + 4], outs[begin : begin + 4], activation)
        linears, outs = linears[:4], outs[:4]
        args = _segki.ProjectionArgs()
        args.x = view(x)
        args.weight = [view(self.resolve(linear.weight)) for linear in linears]
        args.bias = [self.param(linear.bias) for linear in linears]
        args.out = [view(out) for out in outs]
        args.count = len(linears)
        args.transposed = int(linears[0].transposed)
        args.activation = getattr(_segki.Activation, activation)
        self.ops.add(args)

    def mlp(self, x: torch.Tensor, plan: MlpPlan, out: torch.Tensor) -> None:
        """A gated or plain MLP."""
        hidden = self.buffers.take(plan.down.in_features)
        if plan.gate is None:
            self.linear(x, [plan.up], [hidden], plan.activation)
        else:
            args = _segki.GatedProjectionArgs()
            args.x = view(x)
            args.gate = view(self.resolve(plan.gate.weight))
            args.up = view(self.resolve(plan.up.weight))
            args.gate_bias = self.param(plan.gate.bias)
            args.up_bias = self.param(plan.up.bias)
            args.out = view(hidden)
            args.activation = getattr(_segki.Activation, plan.activation)
            if plan.fp32_activation:
                args.fp32_activation = 1
            self.ops.add(args)
        self.linear(hidden, [plan.down], [out])
        self.buffers.give(hidden)

    def _attention(self, x: torch.Tensor, plan: AttentionPlan, out: torch.Tensor) -> None:
        group = plan.q_heads // plan.kv_heads
        projected = [self.buffers.take(linear.out_features) for linear in plan.projections]
        self.linear(x, plan.projections, projected)
        q_out = self.buffers.take(plan.q_heads * plan.head_dim)
        mixed = self.buffers.take(plan.q_heads * plan.v_head_dim)
        layer = self.next_layer()
        args = _segki.RopeKvWriteArgs()
        args.q = heads(projected, plan.q, plan.kv_heads, plan.head_dim, group)
        args.k = heads(projected, plan.k, plan.kv_heads, plan.head_dim)
        args.v = heads(projected, plan.v, plan.kv_heads, plan.v_head_dim)
        args.q_norm, args.k_norm = norm_spec(plan.q_norm), norm_spec(plan.k_norm)
        if plan.q_norm is not None:
            args.q_weight, args.q_bias = self.param(plan.q_norm.weight), self.param(plan.q_norm.bias)
        if plan.k_norm is not None:
            args.k_weight, args.k_bias = self.param(plan.k_norm.weight), self.param(plan.k_norm.bias)
        args.norm_full_width = int(plan.qk_norm_width == "full")
        args.norm_after_rope = int(plan.qk_norm_after_rope)
        if plan.rope is not None:
            cos, sin = self._table(plan.rope)
            args.cos, args.sin = view(cos), view(sin)
            args.rope = getattr(_segki.RopeKind, plan.rope.kind)
            args.round_products = int(plan.rope.round_products)
        if plan.position_scale is not None:
            args.position_scale = view(self._table(plan.position_scale)[0])
        args.positions = view(self.state.positions)
        args.lengths = view(self.state.lengths)
        args.q_out = view(q_out, (self.rows, plan.q_heads, plan.head_dim), (q_out.stride(0), plan.head_dim, 1))
        args.k_cache, args.v_cache = self.cache.keys(layer), self.cache.values(layer)
        self.ops.add(args)

        attention = _segki.AttentionArgs()
        attention.q = args.q_out
        attention.k_cache, attention.v_cache = args.k_cache, args.v_cache
        attention.lengths = view(self.state.lengths)
        if plan.gate is not None:
            attention.gate = heads(projected, plan.gate, plan.kv_heads, plan.v_head_dim, group)
            if plan.gate_bias is not None:
                attention.gate_bias = self.param(plan.gate_bias)
        attention.out = view(mixed)
        attention.partial, attention.arrived = self._partial(plan.kv_heads, group, plan.v_head_dim)
        attention.scale = plan.scale
        attention.softcap = plan.softcap or 0.0
        attention.window = plan.window or 0
        self.ops.add(attention)
        self.linear(mixed, [plan.out], [out])
        self.buffers.give(*projected, q_out, mixed)

    def _partial(self, kv_heads: int, group: int, dim: int) -> tuple[_segki.View, _segki.View]:
        """Where pieces of a row's attention meet: one pair of buffers for all layers of a shape, since ops run one after the other."""
        key = (kv_heads, group, dim)
        if key not in self.partials:
            sums = torch.zeros(self.rows, kv_heads, MOST_SPLITS, group * (dim + 2), dtype=torch.float32)
            self.partials[key] = (sums, torch.zeros(self.rows, kv_heads, dtype=torch.int32))
            self.keep += self.partials[key]
        sums, arrived = self.partials[key]
        return view(sums), view(arrived)

    _layer = 0

    def next_layer(self) -> int:
        """Index of the next block's cache layer; blocks are added in the cache's order."""
        self._layer += 1
        return self._layer - 1

    def _table(self, plan: RopePlan | PositionScale) -> tuple[torch.Tensor, ...]:
        """One table for all layers that share a rule."""
        if plan not in self.tables:
            positions = self.cache.max_len
            if isinstance(plan, RopePlan):
                self.tables[plan] = self.rope_table(plan, positions)
            else:
                table = position_scale_table(plan, positions)
                self.tables[plan] = (table.to(self.dtype).float() if plan.round_table else table,)
        return self.tables[plan]


def flatten(plan: ModelPlan) -> list[Node]:
    """All layers' nodes and the final norm as one straight line, names made unique, "x" being the embedding's output."""
    nodes: list[Node] = []
    layer_input = "x"
    for index, layer in enumerate(plan.layers):
        names = {"x": layer_input} | {node.name: f"{index}.{node.name}" for node in layer.nodes}
        for node in layer.nodes:
            nodes.append(
                dataclasses.replace(
                    node,
                    name=names[node.name],
                    src=None if node.src is None else names[node.src],
                    terms=tuple(Term(names[term.value], term.scale) for term in node.terms),
                )
            )
        layer_input = names[layer.nodes[-1].name]
    if plan.final_norm is not None:
        nodes.append(Node(name="final", src=layer_input, norm=plan.final_norm))
    return nodes


def last_readers(nodes: Sequence[Node]) -> dict[int, list[str]]:
    """For each node's index the values that no later node reads."""
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        last.setdefault(node.name, i)
        for name in [term.value for term in node.terms] + ([node.src] if node.src else []):
            last[name] = i
    result: dict[int, list[str]] = defaultdict(list)
    for name, i in last.items():
        result[i].append(name)
    return dict(result)


def cached_blocks(plan: ModelPlan) -> list[AttentionPlan | GdnPlan]:
    """The blocks that keep something between steps, in order: one cache layer each."""
    found: list[AttentionPlan | GdnPlan] = []
    for layer in plan.layers:
        for node in layer.nodes:
            block = node.attention or node.gdn
            if block is not None:
                found.append(block)
    return found


def cache_layers(plan: ModelPlan, dtype: _segki.DType) -> list[_segki.KvLayer | _segki.LinearLayer]:
    """What the cache holds for each of `cached_blocks`."""
    layers: list[_segki.KvLayer | _segki.LinearLayer] = []
    for block in cached_blocks(plan):
        if isinstance(block, AttentionPlan):
            layers.append(_segki.KvLayer(block.kv_heads, block.head_dim, block.v_head_dim, block.window or 0, dtype))
        else:
            layers.append(
                _segki.LinearLayer(
                    conv_channels(block), block.conv_width, block.value_heads, block.key_dim, block.value_dim, dtype
                )
            )
    return layers

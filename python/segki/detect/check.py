"""Check a layer's plan against the values of the model's own pass, node by node."""

from __future__ import annotations

import torch
from torch import Tensor

from segki import reference, reference_hybrid
from segki.detect.context import Context
from segki.detect.mlp import captured
from segki.detect.moe import agrees
from segki.detect.numeric import TOLERANCE, max_error
from segki.detect.resolve import rope_table
from segki.detect.trace import Call, same
from segki.plan import AttentionPlan, GdnPlan, LayerPlan, LinearPlan, MlpPlan, Node, RopePlan


class LayerCheck:
    """Computes each node with the reference from the model's own input of that node and compares with the model's own output."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.tables: dict[RopePlan, tuple[Tensor, Tensor]] = {}

    def problem(self, call: Call, plan: LayerPlan, *, whole: bool) -> str | None:
        """Where a plan and the pass disagree, or None.

        With `whole`, linear layers are computed too; without, their traced outputs are taken (they are known to be plain linear
        layers), which costs next to nothing.
        """
        x, y = call.x, call.y
        if x is None or y is None:
            return f"{call.name}: no hidden state"
        values = {"x": x}
        for node in plan.nodes:
            if node.terms:
                values[node.name] = reference.scaled_sum([(values[t.value], t.scale) for t in node.terms])
                continue
            own = self.ctx.trace.only(node.module or "")
            if own is None or own.y is None or own.x is None or node.src is None:
                return f"{node.module}: not called once"
            if not max_error(values[node.src], own.x) <= TOLERANCE[self.ctx.dtype] / 10:
                return f"{node.module}: its input is not what the plan says"
            problem = self._node_problem(node, own.x, own.own_y, whole)
            if problem is not None:
                return f"{node.module}: {problem}"
            values[node.name] = own.y
        if not max_error(values[plan.nodes[-1].name], y) <= TOLERANCE[self.ctx.dtype] / 10:
            return f"{call.name}: the plan's output is not the layer's"
        return None

    def _node_problem(self, node: Node, x: Tensor, y: Tensor | None, whole: bool) -> str | None:
        got: Tensor | None = None
        want = y
        lookup = self.ctx.lookup()
        if node.norm is not None:
            got = reference.norm(node.norm, lookup, x)
        elif node.mlp is not None:
            if whole:
                got = reference.mlp(node.mlp, lookup, x)
            else:
                got, want = self._mlp_inner(node.mlp), self._input_of(node.mlp.down, y)
        elif node.moe is not None:
            own = self.ctx.moes.get(node.module or "")
            call = self.ctx.trace.only(node.module or "")
            if own == node.moe or (call is not None and agrees(self.ctx, call, node.moe)):  # known plans agree already
                return None
            return "the plan of its experts does not give its output"
        elif node.gdn is not None:
            got, want = self._gdn_inner(node.gdn), self._input_of(node.gdn.out, y)
        elif node.attention is not None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            tables = self._tables(node.attention.rope, x.shape[1])
            if whole:
                got = reference.attention(node.attention, lookup, x, tables, positions)
            else:
                got = self._attention_inner(node.attention, tables, positions)
                want = self._input_of(node.attention.out, y)
        if got is None or want is None:
            return "its linear layers are not connected as in the plan"
        error = max_error(got, want.reshape(got.shape))
        return None if error <= TOLERANCE[self.ctx.dtype] else f"the plan differs by {error:.1e} of the largest value"

    def _tables(self, rope: RopePlan | None, tokens: int) -> tuple[Tensor, Tensor] | None:
        if rope is None:
            return None
        if rope not in self.tables:
            self.tables[rope] = rope_table(self.ctx.model, rope, tokens)
        return self.tables[rope]

    def _input_of(self, last: LinearPlan, y: Tensor | None) -> Tensor | None:
        call = self.ctx.trace.only(last.weight.name.removesuffix(".weight"))
        return call.x if call is not None and same(call.y, y) else None

    def _mlp_inner(self, plan: MlpPlan) -> Tensor | None:
        up = captured(self.ctx, plan.up)
        if up is None or plan.gate is None:
            return None if up is None else reference.ACTIVATIONS[plan.activation](up)
        gate = captured(self.ctx, plan.gate)
        return None if gate is None else reference.gated(plan.activation, gate, up, fp32=plan.fp32_activation)

    def _gdn_inner(self, plan: GdnPlan) -> Tensor | None:
        projected = [value for value in (captured(self.ctx, p) for p in plan.projections) if value is not None]
        if len(projected) != len(plan.projections):
            return None
        return reference_hybrid.gated_delta_inner(plan, self.ctx.lookup(), projected)

    def _attention_inner(self, plan: AttentionPlan, tables: tuple[Tensor, Tensor] | None, positions: Tensor) -> Tensor | None:
        projected = [value for value in (captured(self.ctx, p) for p in plan.projections) if value is not None]
        if len(projected) != len(plan.projections):
            return None
        q, k, v, gate = reference.qkv(plan, self.ctx.lookup(), projected, tables, positions)
        visible = reference.causal_mask(positions.shape[1], plan.window, positions.device)[None]
        return reference.attend(q, k, v, visible, scale=plan.scale, softcap=plan.softcap, gate=gate)

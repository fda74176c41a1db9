"""GatedDeltaNet and mixture-of-experts blocks as ops of a step program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from segki import _segki
from segki.native import DTYPES, Resolve, heads, norm_spec, numbers, view
from segki.plan import ExpertWeights, GdnPlan, LinearPlan, MoePlan, RouterPlan

if TYPE_CHECKING:
    from segki.program import StepBuilder


def conv_channels(plan: GdnPlan) -> int:
    """Channels of a GatedDeltaNet block's convolution: queries, keys and values."""
    return 2 * plan.key_heads * plan.key_dim + plan.value_heads * plan.value_dim


def add_gdn(builder: StepBuilder, x: torch.Tensor, plan: GdnPlan, out: torch.Tensor) -> None:
    """Projections, the recurrent step and the output projection."""
    layer = builder.next_layer()
    projected = [builder.buffers.take(linear.out_features) for linear in plan.projections]
    builder.linear(x, plan.projections, projected)
    mixed = builder.buffers.take(plan.value_heads * plan.value_dim)
    args = _segki.GatedDeltaArgs()
    fill_gdn(args, plan, projected, builder.resolve)
    args.conv_state = builder.cache.conv_state(layer)
    args.state = builder.cache.recurrent_state(layer)
    args.frozen = view(builder.state.frozen)
    args.out = view(mixed)
    builder.ops.add(args)
    builder.linear(mixed, [plan.out], [out])
    builder.buffers.give(*projected, mixed)


def fill_gdn(
    args: _segki.GatedDeltaArgs | _segki.GatedDeltaPrefillArgs, plan: GdnPlan, projected: Sequence[torch.Tensor], resolve: Resolve
) -> None:
    """Set what the one-token and the prompt form of the op share; `projected` are the projections' outputs `[rows or tokens, width]`."""
    group = plan.value_heads // plan.key_heads
    args.q = heads(projected, plan.q, plan.key_heads, plan.key_dim)
    args.k = heads(projected, plan.k, plan.key_heads, plan.key_dim)
    args.v = heads(projected, plan.v, plan.key_heads, plan.value_dim, group)
    args.z = heads(projected, plan.z, plan.key_heads, plan.value_dim, group)
    args.a = numbers(projected, plan.a, plan.key_heads, group)
    args.b = numbers(projected, plan.b, plan.key_heads, group)
    args.conv_weight = view(resolve(plan.conv_weight), (conv_channels(plan), plan.conv_width), (plan.conv_width, 1))
    args.conv_bias = view(None if plan.conv_bias is None else resolve(plan.conv_bias))
    args.a_log = view(resolve(plan.a_log))
    args.dt_bias = view(resolve(plan.dt_bias))
    if plan.norm.weight is not None:
        args.norm_weight = view(resolve(plan.norm.weight))
    args.norm = norm_spec(plan.norm)
    args.l2_eps, args.query_scale, args.beta_scale = plan.l2_eps, plan.query_scale, plan.beta_scale
    args.conv_activation = getattr(_segki.Activation, plan.conv_activation)
    args.gate_activation = getattr(_segki.Activation, plan.gate_activation)


def add_moe(builder: StepBuilder, x: torch.Tensor, plan: MoePlan, out: torch.Tensor) -> None:
    """Router, chosen experts and the shared expert."""
    take, give = builder.buffers.take, builder.buffers.give
    chosen = plan.router.top_k
    experts, weights = take(chosen, torch.int32), take(chosen, torch.float32)
    _add_router(builder, x, plan.router, experts, weights)
    hidden = take(chosen * plan.down.in_features)
    hidden_view = view(hidden, (builder.rows, chosen, plan.down.in_features), (hidden.stride(0), plan.down.in_features, 1))

    first = _segki.ExpertGatedProjectionArgs()
    first.x = view(x)
    first.experts = view(experts)
    first.gate, first.up = _addresses(builder, plan.gate), _addresses(builder, plan.up)
    first.weight_stride = _row_stride(builder, plan.gate)
    first.transposed = int(plan.gate.transposed)
    first.out = hidden_view
    first.activation = getattr(_segki.Activation, plan.activation)
    if plan.fp32_activation:
        first.fp32_activation = 1
    builder.ops.add(first)

    second = _segki.ExpertProjectionArgs()
    second.x = hidden_view
    second.experts, second.weights = view(experts), view(weights)
    second.weight = _addresses(builder, plan.down)
    second.weight_stride = _row_stride(builder, plan.down)
    second.transposed = int(plan.down.transposed)
    second.round_products, second.round_sums = int(plan.round_products), int(plan.round_sums)
    second.routed_scale, second.out_scale = plan.routed_scale, plan.out_scale
    second.out = view(out)
    used = [experts, weights, hidden]
    if plan.shared is not None:
        shared = take(plan.shared.down.out_features)
        builder.mlp(x, plan.shared, shared)
        second.shared = view(shared)
        used.append(shared)
    if plan.shared_gate is not None:
        gate = take(1)
        builder.linear(x, [plan.shared_gate], [gate])
        second.shared_gate = view(gate)
        used.append(gate)
    builder.ops.add(second)
    give(*used)


def _add_router(builder: StepBuilder, x: torch.Tensor, plan: RouterPlan, experts: torch.Tensor, weights: torch.Tensor) -> None:
    logits = builder.buffers.take(plan.linear.out_features, torch.float32)
    if plan.fp32_logits:
        builder.linear(x, [plan.linear], [logits])
    else:
        _add_rounded_logits(builder, x, plan.linear, logits)
    args = _segki.RouterArgs()
    args.logits = view(logits)
    if plan.bias is not None:
        args.bias = view(builder.resolve(plan.bias), (plan.linear.out_features,), (1,))
    args.experts, args.weights = view(experts), view(weights)
    args.score = getattr(_segki.RouterScore, plan.score)
    args.dtype = DTYPES[builder.dtype]
    for name in ("choose_by_logit", "group_by_max", "mask_with_zero", "sorted", "normalise", "round_weights", "round_scores"):
        setattr(args, name, int(getattr(plan, name)))
    for name in ("groups", "group_top_k", "sum_eps", "sum_min", "scale"):
        setattr(args, name, getattr(plan, name))
    builder.ops.add(args)
    builder.buffers.give(logits)


def _add_rounded_logits(builder: StepBuilder, x: torch.Tensor, linear: LinearPlan, logits: torch.Tensor) -> None:
    """`x @ W.T` rounded to the model's dtype and kept as fp32, which is what the op of the output head does."""
    args = _segki.LmHeadArgs()
    args.x = view(x)
    args.weight = builder.param(linear.weight)
    args.bias = builder.param(linear.bias)
    args.logits = view(logits)
    args.transposed = int(linear.transposed)
    builder.ops.add(args)


def _matrices(builder: StepBuilder, plan: ExpertWeights) -> list[torch.Tensor]:
    """Each expert's matrix, a view of the live parameter."""
    if plan.fused is None:
        return [builder.resolve(ref) for ref in plan.each]
    fused = builder.resolve(plan.fused)
    return list(fused.narrow(2 if plan.transposed else 1, plan.first, plan.out_features))


def _addresses(builder: StepBuilder, plan: ExpertWeights) -> _segki.View:
    """i64 `[E]`: where each expert's matrix begins."""
    table = torch.tensor([matrix.data_ptr() for matrix in _matrices(builder, plan)], dtype=torch.int64)
    builder.keep.append(table)
    return view(table)


def _row_stride(builder: StepBuilder, plan: ExpertWeights) -> int:
    """Elements between two rows of a stored matrix."""
    return _matrices(builder, plan)[0].stride(0)

"""Executable specification of a GatedDeltaNet block, token by token, with the rounding points of `segki::GatedDeltaArgs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from segki.plan import GdnPlan, HeadView
from segki.reference import ACTIVATIONS, Lookup, heads, linear


def _numbers(projected: Sequence[Tensor], where: HeadView, groups: int, group: int) -> Tensor:
    """One number a value head: `[rows, T, groups * group]`."""
    return heads(projected, where, groups, group, 1)[..., 0]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution of `[rows, T, C]` with `[C, W]`, fp32 sums rounded to the dtype of `x`.

    `past` are the inputs before the first one, `[rows, C, W]`, oldest first (zeros by default).
    """
    width = weight.shape[1]
    before = torch.zeros(x.shape[0], x.shape[2], width, dtype=x.dtype, device=x.device) if past is None else past
    full = torch.cat([before[..., 1:], x.transpose(1, 2)], -1).float()
    windows = full.unfold(-1, width, 1)  # [rows, C, T, W]
    total = (windows * weight.float()[:, None, :]).sum(-1)
    if bias is not None:
        total = total + bias.float()[:, None]
    return total.to(x.dtype).transpose(1, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gated delta rule in fp32: `S = S exp(g); S = S + k (beta (v - S^T k))^T; o = S^T q`.

    Parameters
    ----------
    q, k, v
        `[rows, T, heads, Dk]`, `[rows, T, heads, Dk]`, `[rows, T, heads, Dv]`; q and k normalised and scaled.
    log_decay, beta
        g and beta, `[rows, T, heads]`.
    state
        `[rows, heads, Dk, Dv]` before the first token; zeros by default.

    Returns
    -------
    o `[rows, T, heads, Dv]` and the state after the last token.
    """
    q, k, v, log_decay, beta = (t.float() for t in (q, k, v, log_decay, beta))
    now = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], device=q.device) if state is None else state.clone()
    outs = []
    for t in range(q.shape[1]):
        now = now * log_decay[:, t, :, None, None].exp()
        seen = (now * k[:, t, :, :, None]).sum(-2)
        delta = (v[:, t] - seen) * beta[:, t, :, None]
        now = now + k[:, t, :, :, None] * delta[..., None, :]
        outs.append((now * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, 1), now


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_core(
    plan: GdnPlan, lookup: Lookup, projected: Sequence[Tensor], past: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output of the delta rule, rounded: o `[rows, T, Hv, Dv]`, and the state after the last token, f32 `[rows, Hv, Dk, Dv]`."""
    group = plan.value_heads // plan.key_heads
    dtype = projected[plan.q.source].dtype
    parts = [
        heads(projected, plan.q, plan.key_heads, 1, plan.key_dim),
        heads(projected, plan.k, plan.key_heads, 1, plan.key_dim),
        heads(projected, plan.v, plan.key_heads, group, plan.value_dim),
    ]
    mixed = torch.cat([part.flatten(2) for part in parts], -1)
    weight = lookup(plan.conv_weight).reshape(mixed.shape[-1], plan.conv_width)
    bias = None if plan.conv_bias is None else lookup(plan.conv_bias)
    mixed = ACTIVATIONS[plan.conv_activation](convolution(mixed, weight, bias, past))
    keys = plan.key_heads * plan.key_dim
    q, k, v = mixed[..., :keys], mixed[..., keys : 2 * keys], mixed[..., 2 * keys :]
    q = _normalised(q.reshape(*q.shape[:2], plan.key_heads, plan.key_dim), plan.l2_eps) * plan.query_scale
    k = _normalised(k.reshape(*k.shape[:2], plan.key_heads, plan.key_dim), plan.l2_eps)
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    v = v.reshape(*v.shape[:2], plan.value_heads, plan.value_dim)
    beta = _numbers(projected, plan.b, plan.key_heads, group).sigmoid()
    if plan.beta_scale != 1.0:
        beta = beta * plan.beta_scale
    a = _numbers(projected, plan.a, plan.key_heads, group)
    log_decay = -lookup(plan.a_log).float().exp() * F.softplus(a.float() + lookup(plan.dt_bias))
    out, after = delta_rule(q, k, v, log_decay, beta, state)
    return out.to(dtype), after


def gated_norm(plan: GdnPlan, lookup: Lookup, o: Tensor, z: Tensor) -> Tensor:
    """`round(norm(o) * gate(z))` over the last dimension."""
    assert plan.norm.weight is not None
    weight = lookup(plan.norm.weight)
    n = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + plan.norm.eps)
    scale = weight.float() + plan.norm.weight_offset if plan.norm.weight_offset else weight
    n = scale * n.to(o.dtype) if plan.norm.cast == "before_weight" else scale.float() * n
    return (n * ACTIVATIONS[plan.gate_activation](z.float())).to(o.dtype)


def gated_delta_inner(plan: GdnPlan, lookup: Lookup, projected: Sequence[Tensor]) -> Tensor:
    """What the output projection is given, `[rows, T, Hv * Dv]`."""
    group = plan.value_heads // plan.key_heads
    o, _ = gated_delta_core(plan, lookup, projected)
    z = heads(projected, plan.z, plan.key_heads, group, plan.value_dim)
    return gated_norm(plan, lookup, o, z).flatten(2)


def gated_delta(plan: GdnPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """A whole GatedDeltaNet block on `[rows, T, H]`, from an empty state."""
    projected = [linear(p, lookup, x) for p in plan.projections]
    return linear(plan.out, lookup, gated_delta_inner(plan, lookup, projected))

"""Executable specification of mixture-of-experts blocks, with the rounding points of `segki::RouterArgs` and the expert ops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segki.plan import ExpertWeights, MoePlan, RouterPlan
from segki.reference import Lookup, gated, linear, mlp


def router_logits(plan: RouterPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """fp32 `[N, E]`: rounded to the dtype of `x` `[N, H]`, or with `fp32_logits` not."""
    if not plan.fp32_logits:
        return linear(plan.linear, lookup, x).float()
    weight = lookup(plan.linear.weight).float()
    bias = None if plan.linear.bias is None else lookup(plan.linear.bias).float()
    return F.linear(x.float(), weight.T if plan.linear.transposed else weight, bias)


def route(plan: RouterPlan, logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Chosen experts i64 and their weights f32, `[N, k]` each, from fp32 logits `[N, E]`."""

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).float() if plan.round_scores else value

    scores = logits
    if plan.score == "softmax":
        scores = rounded(logits.softmax(-1))
    elif plan.score == "sigmoid":
        scores = rounded(logits.sigmoid())
    choice = logits if plan.choose_by_logit else scores
    if bias is not None:
        choice = choice + bias.float().reshape(-1)
    if plan.groups > 1:
        choice = _masked(plan, choice)
    chosen = choice.topk(plan.top_k, dim=-1, sorted=plan.sorted)[1]
    weights = scores.gather(-1, chosen)
    if plan.score == "softmax_chosen":
        weights = rounded(weights.softmax(-1))
    if plan.normalise:
        total = rounded(weights.sum(-1, keepdim=True)) + plan.sum_eps
        weights = rounded(weights / total.clamp(min=plan.sum_min))
    if plan.scale != 1.0:
        weights = weights * plan.scale
    return chosen, weights.to(dtype).float() if plan.round_weights else weights


def _masked(plan: RouterPlan, choice: Tensor) -> Tensor:
    grouped = choice.reshape(*choice.shape[:-1], plan.groups, -1)
    most = 1 if plan.group_by_max else min(2, grouped.shape[-1])
    values = grouped.topk(most, dim=-1)[0].sum(-1)
    best = values.topk(plan.group_top_k, dim=-1, sorted=False)[1]
    open_groups = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, best, True)
    fill = 0.0 if plan.mask_with_zero else -math.inf
    return grouped.masked_fill(~open_groups[..., None], fill).flatten(-2)


def expert_matrix(plan: ExpertWeights, lookup: Lookup, expert: int) -> Tensor:
    """`[out, in]` of one expert, a view."""
    if plan.fused is None:
        return lookup(plan.each[expert])
    matrix = lookup(plan.fused)[expert]
    if plan.transposed:
        return matrix[:, plan.first : plan.first + plan.out_features].T
    return matrix[plan.first : plan.first + plan.out_features]


def expert(plan: MoePlan, lookup: Lookup, index: int, x: Tensor) -> Tensor:
    """One routed expert on `[N, H]`, not weighted."""
    gate, up, down = (expert_matrix(part, lookup, index) for part in (plan.gate, plan.up, plan.down))
    return F.linear(gated(plan.activation, F.linear(x, gate), F.linear(x, up), fp32=plan.fp32_activation), down)


def combine(plan: MoePlan, outputs: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """The weighted sum `[N, H]` of the chosen experts' outputs `[N, k, H]` with the shared expert's."""
    dtype = outputs.dtype
    products = outputs.float() * weights[..., None]
    if plan.round_products:
        products = products.to(dtype).float()
    if plan.round_sums:
        order = chosen.argsort(-1)
        total = torch.zeros_like(outputs[:, 0])
        for slot in range(chosen.shape[1]):
            index = order[:, slot, None, None].expand(-1, 1, products.shape[-1])
            total = (total.float() + products.gather(1, index)[:, 0]).to(dtype)
    else:
        total = products.sum(1).to(dtype)
    if plan.routed_scale != 1.0:
        total = total * plan.routed_scale
    if shared is not None:
        total = total + shared
    if plan.out_scale != 1.0:
        total = total * plan.out_scale
    return total


def shared_expert(plan: MoePlan, lookup: Lookup, x: Tensor) -> Tensor | None:
    """The shared expert's contribution `[N, H]`."""
    if plan.shared is None:
        return None
    value = mlp(plan.shared, lookup, x)
    if plan.shared_gate is not None:
        value = linear(plan.shared_gate, lookup, x).sigmoid() * value
    return value


def moe(plan: MoePlan, lookup: Lookup, x: Tensor) -> Tensor:
    """A whole block, `[..., H]` -> `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    bias = None if plan.router.bias is None else lookup(plan.router.bias)
    chosen, weights = route(plan.router, router_logits(plan.router, lookup, flat), bias, x.dtype)
    outputs = flat.new_zeros(*chosen.shape, flat.shape[-1])
    for index in sorted(set(chosen.flatten().tolist())):
        tokens, slots = (chosen == index).nonzero(as_tuple=True)
        outputs[tokens, slots] = expert(plan, lookup, index, flat[tokens])
    return combine(plan, outputs, chosen, weights, shared_expert(plan, lookup, flat)).reshape(x.shape)

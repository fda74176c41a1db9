"""The executable specification of every op, in plain PyTorch.

Each function says what the compiled op of the same name computes and where it rounds: "rounded" always means converted to the
dtype of the input; everything between two roundings is fp32. Letters for shapes are those of `segki.plan`; `T` is the number of
tokens of a causal pass (1 in a decode step). Parameters are passed as tensors, or looked up with a `Lookup`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segki.plan import (
    Activation,
    AttentionPlan,
    CastOrder,
    EmbeddingPlan,
    HeadPlan,
    HeadView,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    ModelPlan,
    NormPlan,
    ParamRef,
    PositionScale,
    RopeKind,
    RopePlan,
)

Lookup = Callable[[ParamRef], Tensor]
RopeTables = Mapping[RopePlan, tuple[Tensor, Tensor]]

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    cast: CastOrder = "after_weight",
) -> Tensor:
    """RMSNorm over the last dimension: `[..., D]` -> `[..., D]`, same dtype.

    "before_weight" rounds the normalised value, then the product with the weight (in the input's dtype); "after_weight" multiplies
    and adds the bias in fp32 and rounds once.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _apply_norm_weight(normed, x.dtype, weight, bias, weight_offset, cast)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    cast: CastOrder = "after_weight",
) -> Tensor:
    """LayerNorm over the last dimension with the biased variance; dtypes and roundings as in `rms_norm`."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _apply_norm_weight(normed, x.dtype, weight, bias, weight_offset, cast)


def _apply_norm_weight(
    normed: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, weight_offset: float, cast: CastOrder
) -> Tensor:
    if cast == "before_weight":
        rounded = normed.to(dtype)
        if weight is not None:
            rounded = (weight + weight_offset if weight_offset else weight) * rounded
        return rounded if bias is None else rounded + bias
    if weight is not None:
        normed = normed * (weight.float() + weight_offset)
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(dtype)


def norm(plan: NormPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """`rms_norm` or `layer_norm` with the parameters of a plan."""
    function = rms_norm if plan.kind == "rms" else layer_norm
    weight = None if plan.weight is None else lookup(plan.weight)
    bias = None if plan.bias is None else lookup(plan.bias)
    return function(x, weight, plan.eps, bias=bias, weight_offset=plan.weight_offset, cast=plan.cast)


def scaled_sum(terms: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Sum of `value * scale` from left to right; each product with a scale other than 1 and each addition is rounded."""
    total: Tensor | None = None
    for value, scale in terms:
        product = value if scale == 1.0 else value * scale
        total = product if total is None else total + product
    if total is None:
        raise ValueError("terms: got none, a sum needs at least one")
    return total


def linear(plan: LinearPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """`x @ W.T + b` (`x @ W + b` when transposed): `[..., in]` -> `[..., out]`, fp32 sums, rounded once after the bias."""
    weight = lookup(plan.weight)
    bias = None if plan.bias is None else lookup(plan.bias)
    return F.linear(x, weight.t() if plan.transposed else weight, bias)


def gated(activation: Activation, gate: Tensor, up: Tensor, *, fp32: bool = False) -> Tensor:
    """`act(gate) * up`: the activation and the product are rounded; with `fp32` the product alone."""
    if fp32:
        return (ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype)
    return ACTIVATIONS[activation](gate) * up


def mlp(plan: MlpPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """Gated or plain MLP, `[..., H]` -> `[..., H]`; gate, up, activation (but see `gated`), product and the result are each rounded."""
    up = linear(plan.up, lookup, x)
    if plan.gate is None:
        inner = ACTIVATIONS[plan.activation](up)
    else:
        inner = gated(plan.activation, linear(plan.gate, lookup, x), up, fp32=plan.fp32_activation)
    return linear(plan.down, lookup, inner)


def rope(x: Tensor, cos: Tensor, sin: Tensor, kind: RopeKind, *, round_products: bool = True) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` elements of each head.

    Parameters
    ----------
    x
        `[..., heads, D]`.
    cos, sin
        `[..., R / 2]`, fp32, one row for each position (no head dimension).
    round_products
        True: the table, both products and their sum are rounded; False: fp32 with one rounding at the end.
    """
    half, cos, sin = cos.shape[-1], cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if round_products:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    else:
        rotated = rotated.float()
    if kind == "neox":
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    out_first = first * cos + (-second) * sin
    out_second = second * cos + first * sin
    pair = (out_first, out_second)
    turned = torch.cat(pair, -1) if kind == "neox" else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


def position_scale(plan: PositionScale, positions: Tensor) -> Tensor:
    """The factor of the plan's formula in fp32, same shape as `positions`."""
    if plan.kind == "power":
        return torch.exp(plan.beta * torch.log1p((positions.float() + plan.offset) / plan.period))
    return 1.0 + plan.beta * torch.log(1.0 + torch.floor(positions.float() / plan.period))


def scale_queries(q: Tensor, factor: Tensor, *, round_table: bool) -> Tensor:
    """`[rows, T, Hq, D]` times fp32 `[rows, T]`; the factor is rounded with `round_table`, the product always."""
    factor = factor[..., None, None]
    return q * factor.to(q.dtype) if round_table else (q.float() * factor).to(q.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention under a mask.

    Parameters
    ----------
    q, k, v
        `[rows, T, Hq, D]`, `[rows, P, Hkv, D]`, `[rows, P, Hkv, Dv]`; query head `h` reads key head `h // (Hq / Hkv)`.
    visible
        bool `[rows, T, P]`; each query sees at least one key.
    gate
        `[rows, T, Hq * Dv]`; its sigmoid is rounded and so is the product.

    Returns
    -------
    `[rows, T, Hq * Dv]`; scores, softmax and the weighted sum are fp32, the result is rounded once.
    """
    rows, tokens, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.float().reshape(rows, tokens, kv_heads, q_heads // kv_heads, dim)
    scores = torch.einsum("rtjgd,rpjd->rjgtp", grouped, k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    mixed = torch.einsum("rjgtp,rpjd->rtjgd", scores.softmax(-1), v.float())
    out = mixed.reshape(rows, tokens, -1).to(q.dtype)
    return out if gate is None else out * torch.sigmoid(gate)


def causal_mask(tokens: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """bool `[tokens, tokens]`: a query at p sees keys at positions <= p and, with a window, > p - window."""
    age = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)[None]
    return age >= 0 if window is None else (age >= 0) & (age < window)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a row over cached keys and values.

    Parameters
    ----------
    q, k, v
        `[rows, Hq, D]`, `[rows, P, Hkv, D]`, `[rows, P, Hkv, Dv]`.
    lengths
        int `[rows]`: cached positions of a row, the new token's own included.
    first
        int `[rows]`: positions before it are left padding; None is 0.
    gate
        `[rows, Hq * Dv]`.

    Returns
    -------
    `[rows, Hq * Dv]` in the dtype of `q`.
    """
    positions = torch.arange(k.shape[1], device=k.device)[None]
    last = lengths[:, None]
    visible = positions < last
    if first is not None:
        visible = visible & (positions >= first[:, None])
    if window is not None:
        visible = visible & (positions >= last - window)
    gate = None if gate is None else gate[:, None]
    return attend(q[:, None], k, v, visible[:, None], scale=scale, softcap=softcap, gate=gate)[:, 0]


def heads(projected: Sequence[Tensor], view: HeadView, groups: int, group_size: int, dim: int) -> Tensor:
    """Gather the heads of a view from the projections' outputs `[..., out]`: `[..., groups * group_size, dim]`."""
    source = projected[view.source]
    groups_at = torch.arange(groups)[:, None] * view.group_stride
    heads_at = torch.arange(group_size)[None] * view.head_stride
    index = (view.offset + (groups_at + heads_at).reshape(-1, 1) + torch.arange(dim)).to(source.device)
    return source[..., index]


def qkv(
    plan: AttentionPlan,
    lookup: Lookup,
    projected: Sequence[Tensor],
    tables: tuple[Tensor, Tensor] | None,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Heads, q/k norm, rope and position scale.

    Parameters
    ----------
    projected
        Outputs of `plan.projections`, `[rows, T, out]` each.
    tables
        `rope_table`'s (cos, sin) of the plan's rope, None without rope.
    positions
        int `[rows, T]`.

    Returns
    -------
    q, k, v as `attend` takes them and the gate `[rows, T, Hq * Dv]` or None; q and k are rounded after the norm, after rope and
    after the position scale, the gate after its bias.
    """
    groups, size = plan.kv_heads, plan.q_heads // plan.kv_heads
    q = heads(projected, plan.q, groups, size, plan.head_dim)
    k = heads(projected, plan.k, groups, 1, plan.head_dim)
    v = heads(projected, plan.v, groups, 1, plan.v_head_dim)
    gate = None
    if plan.gate is not None:
        gate = heads(projected, plan.gate, groups, size, plan.v_head_dim)
        gate = (gate if plan.gate_bias is None else gate + lookup(plan.gate_bias)[:, None]).flatten(-2)
    if not plan.qk_norm_after_rope:
        q, k = _qk_norm(plan, plan.q_norm, lookup, q), _qk_norm(plan, plan.k_norm, lookup, k)
    if plan.rope is not None:
        if tables is None:
            raise ValueError(f"tables: the plan has a rope from {plan.rope.source}, got no table")
        cos, sin = (table.to(q.device)[positions] for table in tables)
        q, k = (rope(t, cos, sin, plan.rope.kind, round_products=plan.rope.round_products) for t in (q, k))
    if plan.qk_norm_after_rope:
        q, k = _qk_norm(plan, plan.q_norm, lookup, q), _qk_norm(plan, plan.k_norm, lookup, k)
    if plan.position_scale is not None:
        factor = position_scale(plan.position_scale, positions)
        q = scale_queries(q, factor, round_table=plan.position_scale.round_table)
    return q, k, v, gate


def _qk_norm(plan: AttentionPlan, norm_plan: NormPlan | None, lookup: Lookup, x: Tensor) -> Tensor:
    if norm_plan is None:
        return x
    if plan.qk_norm_width == "head":
        return norm(norm_plan, lookup, x)
    return norm(norm_plan, lookup, x.flatten(-2)).reshape(x.shape)


def attention(
    plan: AttentionPlan,
    lookup: Lookup,
    x: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    positions: Tensor,
) -> Tensor:
    """Attention block on a causal pass without padding: `x` `[rows, T, H]`, `positions` int `[rows, T]` -> `[rows, T, H]`."""
    projected = [linear(projection, lookup, x) for projection in plan.projections]
    q, k, v, gate = qkv(plan, lookup, projected, tables, positions)
    visible = causal_mask(x.shape[1], plan.window, x.device).expand(x.shape[0], -1, -1)
    mixed = attend(q, k, v, visible, scale=plan.scale, softcap=plan.softcap, gate=gate)
    return linear(plan.out, lookup, mixed)


def embedding(plan: EmbeddingPlan, lookup: Lookup, input_ids: Tensor, positions: Tensor) -> Tensor:
    """int `[rows, T]` token ids and positions -> `[rows, T, H]`; rounded after the scale, after the addition and after the norm."""
    x = lookup(plan.weight)[input_ids]
    if plan.scale != 1.0:
        x = x * plan.scale
    if plan.positions is not None:
        x = x + lookup(plan.positions)[positions + plan.position_offset]
    return x if plan.norm is None else norm(plan.norm, lookup, x)


def head_epilogue(plan: HeadPlan, logits: Tensor) -> Tensor:
    """Scale, divisor and softcap of raw logits; rounded after each operation (tanh included), with `fp32_softcap` not in the softcap."""
    if plan.scale != 1.0:
        logits = logits * plan.scale
    if plan.divisor != 1.0:
        logits = logits / plan.divisor
    if plan.softcap is None:
        return logits
    return torch.tanh((logits.float() if plan.fp32_softcap else logits) / plan.softcap) * plan.softcap


def head(plan: HeadPlan, lookup: Lookup, x: Tensor) -> Tensor:
    """Final hidden states `[..., H]` -> logits `[..., V]`."""
    scaled = x if plan.input_scale == 1.0 else x * plan.input_scale
    return head_epilogue(plan, linear(plan.linear, lookup, scaled))


def argmax(logits: Tensor) -> Tensor:
    """`torch.argmax` over the last dimension: a NaN is larger than every number; of equal values the lowest index is taken.

    `[..., V]` -> int64 `[...]`.
    """
    nan = logits.isnan()
    has_nan = nan.any(-1)
    best = logits.float().masked_fill(nan, -torch.inf).amax(-1, keepdim=True)
    is_best = torch.where(has_nan[..., None], nan, logits.float() == best)
    index = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    return index.masked_fill(~is_best, logits.shape[-1]).amin(-1)


def log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """fp32 log-probability of the chosen token: `[..., V]`, int `[...]` -> fp32 `[...]`."""
    wide = logits.float()
    return wide.gather(-1, tokens[..., None])[..., 0] - wide.logsumexp(-1)


def layer(plan: LayerPlan, lookup: Lookup, x: Tensor, tables: RopeTables, positions: Tensor) -> Tensor:
    """One decoder layer, `[rows, T, H]` -> `[rows, T, H]`."""
    from segki import reference_hybrid, reference_moe

    values, last = {"x": x}, x
    for node in plan.nodes:
        if node.terms:
            last = scaled_sum([(values[term.value], term.scale) for term in node.terms])
        else:
            if node.src is None:
                raise ValueError(f"plan: node {node.name} of {plan.module} has neither terms nor src")
            source = values[node.src]
            if node.norm is not None:
                last = norm(node.norm, lookup, source)
            elif node.mlp is not None:
                last = mlp(node.mlp, lookup, source)
            elif node.attention is not None:
                table = tables[node.attention.rope] if node.attention.rope else None
                last = attention(node.attention, lookup, source, table, positions)
            elif node.gdn is not None:
                last = reference_hybrid.gated_delta(node.gdn, lookup, source)
            elif node.moe is not None:
                last = reference_moe.moe(node.moe, lookup, source)
        values[node.name] = last
    return last


@torch.no_grad()
def forward(model: nn.Module, plan: ModelPlan, input_ids: Tensor) -> Tensor:
    """Logits `[rows, T, V]` of a causal pass over `input_ids` (int `[rows, T]`, no padding), computed from the plan alone."""
    from segki.detect.resolve import resolve, rope_table

    lookup = functools.partial(resolve, model)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    ropes = {n.attention.rope for la in plan.layers for n in la.nodes if n.attention is not None and n.attention.rope is not None}
    tables = {rope_plan: rope_table(model, rope_plan, input_ids.shape[1]) for rope_plan in ropes}
    x = embedding(plan.embedding, lookup, input_ids, positions)
    for layer_plan in plan.layers:
        x = layer(layer_plan, lookup, x, tables, positions)
    if plan.final_norm is not None:
        x = norm(plan.final_norm, lookup, x)
    return head(plan.head, lookup, x)

"""Plans: plain data that says what each piece of a model computes.

Detection (`segki.detect`) produces a plan, the numeric probe confirms it, binding (`segki.bind`) turns it into forwards and a
step program. A plan holds no tensors: a parameter is named by its qualified name in the model (`ParamRef`), so that a plan can be
compared, printed, serialised and resolved again after the model has moved.

Shapes use these letters: `rows` (batch rows), `H` hidden size, `F` MLP width, `V` vocabulary, `Hq`/`Hkv` query and key/value heads,
`D` head size, `P` positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu", "relu2"]
NormKind = Literal["rms", "layer"]
CastOrder = Literal["before_weight", "after_weight"]
RopeKind = Literal["neox", "interleaved"]


@dataclass(frozen=True)
class ParamRef:
    """A parameter or buffer of the model, or a range of its first dimension.

    Attributes
    ----------
    name
        Qualified name, as in `model.named_parameters()` or `model.named_buffers()`.
    rows
        Half-open range of the first dimension, for a matrix that holds several (fused `gate|up`, `q|k|v`); None is all of it.
    """

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class NormPlan:
    """RMSNorm or LayerNorm over the last dimension.

    rms: `n = x * rsqrt(mean(x^2) + eps)`; layer: `n = (x - mean) * rsqrt(var + eps)`, in fp32. With `s = weight_offset + weight`:
    cast "before_weight" gives `s * n.to(dtype)` (Llama), "after_weight" gives `(n * s + bias).to(dtype)` (Gemma, LayerNorm).
    `weight` may be `[D]`, `[Hq, D]` (one weight a head) or None.
    """

    kind: NormKind
    eps: float
    weight: ParamRef | None = None
    bias: ParamRef | None = None
    weight_offset: float = 0.0
    cast: CastOrder = "after_weight"


@dataclass(frozen=True)
class LinearPlan:
    """`y = x @ W.T + b`; `W` is `[out, in]`, or `[in, out]` when `transposed` (GPT-2's Conv1D)."""

    weight: ParamRef
    out_features: int
    in_features: int
    bias: ParamRef | None = None
    transposed: bool = False


@dataclass(frozen=True)
class MlpPlan:
    """Gated (`down(act(gate(x)) * up(x))`) or, with `gate` None, plain (`down(act(up(x)))`) MLP.

    A fused `gate|up` matrix is two `LinearPlan`s over row ranges of one parameter. With `fp32_activation` the activation is not rounded
    before the product.
    """

    up: LinearPlan
    down: LinearPlan
    activation: Activation
    gate: LinearPlan | None = None
    fp32_activation: bool = False


@dataclass(frozen=True)
class HeadView:
    """Where heads lie in the output of a projection of an attention block.

    Head `g` of group `j` (query heads: `j` in `Hkv`, `g` in `Hq / Hkv`; keys and values: `g` is 0) starts at element
    `offset + j * group_stride + g * head_stride` of a row of `AttentionPlan.projections[source]`'s output.
    """

    source: int
    offset: int
    group_stride: int
    head_stride: int


@dataclass(frozen=True)
class RopePlan:
    """Rotary position embedding of the first `rotary_dim` elements of a head.

    neox pairs element `i` with `i + rotary_dim / 2`; interleaved pairs `2i` with `2i + 1`. The table (cos, sin; attention scaling and
    any scaling rule included) is read from the model itself by `segki.detect.rope_table`.

    Attributes
    ----------
    source
        Qualified name of the rotary module, or of a buffer that holds a sin|cos table (GPT-J).
    source_kind
        "module": called with positions and gives (cos, sin); "sincos_buffer": `[P, rotary_dim]`, sin then cos.
    layer_type
        Passed to a rotary module that serves several layer types (Gemma 3), else None.
    round_products
        True: cos and sin are rounded to the model's dtype and so is each product and sum; False: fp32 inside, one rounding at the end.
    max_positions
        Positions for which the table is valid; past it the native step declines (dynamic and long rope change their table).
    negate_sin
        The model rotates the other way round; `rope_table` already includes the sign.
    """

    kind: RopeKind
    rotary_dim: int
    source: str
    source_kind: Literal["module", "sincos_buffer"] = "module"
    layer_type: str | None = None
    round_products: bool = True
    max_positions: int | None = None
    negate_sin: bool = False


@dataclass(frozen=True)
class PositionScale:
    """What queries are multiplied with after rope.

    "log": `1 + beta * log(1 + floor(position / period))` (Ministral 3, Llama 4); "power": `(1 + (position + offset) / period) ** beta`
    (Beam). `round_table`: the factor is rounded to the model's dtype before the product.
    """

    beta: float
    period: int
    kind: Literal["log", "power"] = "log"
    offset: int = 0
    round_table: bool = True


@dataclass(frozen=True)
class AttentionPlan:
    """Grouped-query attention with its projections.

    `scores = softcap(q . k * scale)`; `out_proj(attention [* sigmoid(gate [+ gate_bias])])`.

    Attributes
    ----------
    projections
        1 to 4 linears that share the block's input.
    q, k, v, gate
        Where the heads lie in the projections' outputs.
    qk_norm_width
        "head": the norm runs over each head (`weight` `[D]` or `[heads, D]`); "full": over all heads at once.
    window
        A query at position p sees keys at positions > p - window; None is unlimited.
    gate_bias
        `[Hq]`, added to every element of a head's gate and rounded.
    """

    projections: tuple[LinearPlan, ...]
    q: HeadView
    k: HeadView
    v: HeadView
    out: LinearPlan
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int
    gate: HeadView | None = None
    q_norm: NormPlan | None = None
    k_norm: NormPlan | None = None
    qk_norm_width: Literal["head", "full"] = "head"
    qk_norm_after_rope: bool = False
    rope: RopePlan | None = None
    position_scale: PositionScale | None = None
    softcap: float | None = None
    window: int | None = None
    gate_bias: ParamRef | None = None


@dataclass(frozen=True)
class GdnPlan:
    """GatedDeltaNet block (Gated Delta Networks, 2024): projections, causal convolution, gated delta rule, gated norm, output projection.

    `Hk` key heads serve `R = value_heads / key_heads` value heads each. The maths between the projections is `segki::GatedDeltaArgs`.

    Attributes
    ----------
    projections
        1 to 8 linears that share the block's input.
    q, k, v, z, a, b
        Where the heads lie in the projections' outputs; for q and k head `j` is a key head (`group_stride`), for v and z head `(j, g)` is a
        value head (`head_stride` for g), for a and b likewise with one number a value head.
    conv_weight, conv_bias
        `[C, 1, W]` or `[C, W]`, channels q, k, v; `[C]`.
    a_log, dt_bias
        `[value_heads]`.
    beta_scale
        2 where negative eigenvalues are allowed (OLMo hybrid), else 1.
    norm
        Of each value head's output, before the gate `gate_activation(z)`.
    """

    projections: tuple[LinearPlan, ...]
    q: HeadView
    k: HeadView
    v: HeadView
    z: HeadView
    a: HeadView
    b: HeadView
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: ParamRef
    conv_width: int
    a_log: ParamRef
    dt_bias: ParamRef
    norm: NormPlan
    out: LinearPlan
    query_scale: float
    conv_bias: ParamRef | None = None
    l2_eps: float = 1e-6
    beta_scale: float = 1.0
    conv_activation: Activation = "silu"
    gate_activation: Activation = "silu"


@dataclass(frozen=True)
class RouterPlan:
    """Choice of the experts of a token; the rule is `segki::RouterArgs`, whose fields have the same names.

    Attributes
    ----------
    linear
        `[E, H]`: logits.
    fp32_logits
        The logits are computed in fp32 and not rounded to the model's dtype.
    bias
        `[E]` correction that is added for the choice only.
    """

    linear: LinearPlan
    top_k: int
    score: Literal["softmax", "softmax_chosen", "sigmoid"]
    fp32_logits: bool = False
    bias: ParamRef | None = None
    choose_by_logit: bool = False
    groups: int = 1
    group_top_k: int = 1
    group_by_max: bool = False
    mask_with_zero: bool = False
    sorted: bool = True
    normalise: bool = False
    sum_eps: float = 0.0
    sum_min: float = 0.0
    scale: float = 1.0
    round_weights: bool = False
    round_scores: bool = False


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix of every expert, read where it lies.

    Either `fused` names a parameter `[E, rows, columns]` and expert e's matrix is `fused[e, first : first + out_features]` (with
    `transposed` `fused[e, :, first : first + out_features]`), or `each` names one parameter `[out, in]` an expert.
    """

    out_features: int
    in_features: int
    fused: ParamRef | None = None
    first: int = 0
    transposed: bool = False
    each: tuple[ParamRef, ...] = ()


@dataclass(frozen=True)
class MoePlan:
    """Mixture of experts: `sum_j weight_j * expert_j(x)`, with or without a shared expert.

    Attributes
    ----------
    router, gate, up, down, activation
        Routed experts are gated MLPs `down(act(gate(x)) * up(x))`; with `fp32_activation` as in `MlpPlan`.
    round_products, round_sums, routed_scale, out_scale
        As in `segki::ExpertProjectionArgs`.
    shared
        MLP of every token, added to the routed sum.
    shared_gate
        `[1, H]`: the shared expert's output is multiplied with `sigmoid(linear(x))`.
    """

    router: RouterPlan
    experts: int
    gate: ExpertWeights
    up: ExpertWeights
    down: ExpertWeights
    activation: Activation
    shared: MlpPlan | None = None
    shared_gate: LinearPlan | None = None
    round_products: bool = False
    round_sums: bool = False
    routed_scale: float = 1.0
    out_scale: float = 1.0
    fp32_activation: bool = False


@dataclass(frozen=True)
class Term:
    """`value * scale`, rounded to the model's dtype when scale is not 1."""

    value: str
    scale: float = 1.0


@dataclass(frozen=True)
class Node:
    """One value of a layer: exactly one of the fields below `src` is set.

    `src` names the input of a norm, attention, GDN, MLP or MoE node: "x" (the layer's input) or an earlier node. `terms` is a sum, added
    from left to right with a rounding after each addition.
    """

    name: str
    module: str | None = None
    src: str | None = None
    norm: NormPlan | None = None
    attention: AttentionPlan | None = None
    mlp: MlpPlan | None = None
    gdn: GdnPlan | None = None
    moe: MoePlan | None = None
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer as a straight-line program; the value of the last node is the layer's output."""

    module: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class EmbeddingPlan:
    """`weight[token] * scale [+ positions[position + position_offset]]`, then `norm`; rounded after each operation.

    `scale` is the value that the model multiplies with, already rounded to its dtype where the model does so.
    """

    weight: ParamRef
    scale: float = 1.0
    positions: ParamRef | None = None
    position_offset: int = 0
    norm: NormPlan | None = None


@dataclass(frozen=True)
class HeadPlan:
    """`logits = softcap(linear(x * input_scale) * scale / divisor)`, rounded after each operation in the model's dtype.

    With `fp32_softcap` the operations of the softcap are not rounded and the logits are fp32.
    """

    linear: LinearPlan
    input_scale: float = 1.0
    scale: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None
    fp32_softcap: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """All that a decode step needs to know of a model."""

    embedding: EmbeddingPlan
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan | None
    head: HeadPlan
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None


def has_linear_state(plan: ModelPlan) -> bool:
    """Whether some layer keeps a recurrent state, from which no token can be taken back."""
    return any(node.gdn is not None for layer in plan.layers for node in layer.nodes)


@dataclass(frozen=True)
class Segment:
    """One detected (or declined) piece of the module tree."""

    module: str
    kind: Literal["mlp", "attention", "gdn", "moe", "norm", "layer", "embedding", "head", "model"]
    plan: MlpPlan | AttentionPlan | GdnPlan | MoePlan | NormPlan | None = None
    reason: str | None = None  # why it is not known, when plan is None


@dataclass(frozen=True)
class Detection:
    """What `segki.detect.detect` found: segments always, a whole-model plan only when every module on the path is known."""

    plan: ModelPlan | None
    segments: tuple[Segment, ...]
    reasons: tuple[str, ...] = field(default=())

"""The executable specification against PyTorch's own functions, transformers' formulas and double precision."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from segki import reference
from segki.plan import HeadPlan, HeadView, LinearPlan, MlpPlan, ParamRef, PositionScale
from segki.program import position_scale_table

HALF = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *HALF]


def test_rms_norm_rounds_before_the_weight() -> None:
    x, w = torch.randn(5, 33).bfloat16(), torch.randn(33).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(reference.rms_norm(x, w, 1e-5, cast="before_weight"), w * normed.bfloat16())


def test_rms_norm_rounds_after_the_weight() -> None:
    x, w = torch.randn(5, 33).bfloat16(), torch.randn(33).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    got = reference.rms_norm(x, w, 1e-5, weight_offset=1.0, cast="after_weight")
    assert torch.equal(got, (normed * (1.0 + w.float())).bfloat16())


def test_the_two_orders_of_rounding_differ() -> None:
    x, w = torch.randn(64, 33).bfloat16(), torch.randn(33).bfloat16()
    before, after = (reference.rms_norm(x, w, 1e-5, cast=cast) for cast in ("before_weight", "after_weight"))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_is_pytorchs(dtype: torch.dtype, biased: bool) -> None:
    x, w = (torch.randn(6, 48) * 3 + 1).to(dtype), torch.randn(48).to(dtype)
    b = torch.randn(48).to(dtype) if biased else None
    want = F.layer_norm(x, (48,), w, b, 1e-5)
    torch.testing.assert_close(reference.layer_norm(x, w, 1e-5, bias=b), want)


def test_scaled_sum_rounds_each_step() -> None:
    a, b, c = (torch.randn(400).bfloat16() for _ in range(3))
    got = reference.scaled_sum([(a, 1.0), (b, 0.22), (c, 1.0)])
    want = ((a.float() + (b.float() * 0.22).bfloat16().float()).bfloat16().float() + c.float()).bfloat16()
    assert torch.equal(got, want)


def test_scaled_sum_needs_a_term() -> None:
    with pytest.raises(ValueError, match="terms"):
        reference.scaled_sum([])


@pytest.mark.parametrize("transposed", [False, True])
def test_linear_takes_both_ways_a_weight_may_lie(transposed: bool) -> None:
    x, weight, bias = torch.randn(3, 7), torch.randn(5, 7), torch.randn(5)
    values = {"w": weight.t().contiguous() if transposed else weight, "b": bias}
    plan = LinearPlan(ParamRef("w"), 5, 7, ParamRef("b"), transposed)
    torch.testing.assert_close(reference.linear(plan, lambda ref: values[ref.name], x), x @ weight.T + bias)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu_erf", "relu", "relu2"])
def test_mlp_rounds_activation_and_product(name: str) -> None:
    values = {n: torch.randn(s).bfloat16() for n, s in (("g", (9, 6)), ("u", (9, 6)), ("d", (6, 9)))}
    linears = {n: LinearPlan(ParamRef(n), *v.shape) for n, v in values.items()}
    plan = MlpPlan(linears["u"], linears["d"], name, linears["g"])  # type: ignore[arg-type]
    x = torch.randn(4, 6).bfloat16()
    gate, up = F.linear(x, values["g"]), F.linear(x, values["u"])
    by_name = {"silu": F.silu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"), "gelu_erf": F.gelu, "relu": F.relu}
    wide = by_name[name](gate.float()) if name in by_name else F.relu(gate.float()) ** 2
    want = F.linear((wide.bfloat16().float() * up.float()).bfloat16(), values["d"])
    torch.testing.assert_close(reference.mlp(plan, lambda ref: values[ref.name], x), want, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", ALL)
def test_a_product_in_fp32_is_rounded_once(dtype: torch.dtype) -> None:
    gate, up = torch.randn(500).to(dtype), torch.randn(500).to(dtype)
    once = reference.gated("silu", gate, up, fp32=True)
    assert torch.equal(once, (F.silu(gate.float()) * up.float()).to(dtype))
    assert torch.equal(reference.gated("silu", gate, up), F.silu(gate) * up)
    assert torch.equal(once, F.silu(gate) * up) == (dtype == torch.float32)


def _table(positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("rotary", [8, 12])
def test_neox_rope_is_the_rotate_half_formula(rotary: int) -> None:
    x, (cos, sin) = torch.randn(5, 3, 12), _table(5, rotary // 2)
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = turned.chunk(2, -1)
    full_cos, full_sin = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))
    want = torch.cat((turned * full_cos + torch.cat((-b, a), -1) * full_sin, rest), -1)
    torch.testing.assert_close(reference.rope(x, cos, sin, "neox"), want)


def test_interleaved_rope_is_a_complex_product() -> None:
    x, (cos, sin) = torch.randn(5, 3, 12), _table(5, 6)
    pairs = torch.view_as_complex(x.reshape(5, 3, 6, 2)) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(reference.rope(x, cos, sin, "interleaved"), torch.view_as_real(pairs).flatten(-2))


def test_rope_roundings_differ_and_keep_the_norm() -> None:
    x, (cos, sin) = torch.randn(40, 3, 16).bfloat16(), _table(40, 8)
    once = reference.rope(x, cos, sin, "neox", round_products=False)
    wide = reference.rope(x.float(), cos, sin, "neox")
    assert torch.equal(once, wide.bfloat16())
    assert not torch.equal(once, reference.rope(x, cos, sin, "neox", round_products=True))
    torch.testing.assert_close(wide.norm(dim=-1), x.float().norm(dim=-1))


def test_position_scale_is_one_within_the_first_period() -> None:
    got = reference.position_scale(PositionScale(0.1, 8), torch.tensor([0, 7, 8, 100]))
    want = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(13)]
    torch.testing.assert_close(got, torch.tensor(want))


def test_position_scale_by_a_power() -> None:
    got = reference.position_scale(PositionScale(0.1, 2048, "power", 1), torch.tensor([0, 2047, 100_000]))
    torch.testing.assert_close(got, torch.tensor([(1 + (p + 1) / 2048) ** 0.1 for p in (0, 2047, 100_000)]))


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_programs_table_is_the_references(kind: Literal["log", "power"]) -> None:
    plan = PositionScale(0.3, 50, kind, 1 if kind == "power" else 0)
    torch.testing.assert_close(position_scale_table(plan, 4000), reference.position_scale(plan, torch.arange(4000)))


def test_factors_of_queries_are_rounded_or_not() -> None:
    q, factor = torch.randn(2, 5, 3, 8).bfloat16(), 1 + torch.rand(2, 5)
    wide = factor[..., None, None]
    assert torch.equal(reference.scale_queries(q, factor, round_table=False), (q.float() * wide).bfloat16())
    assert torch.equal(reference.scale_queries(q, factor, round_table=True), q * wide.bfloat16())


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_decode_attention_in_double_precision(window: int | None, softcap: float | None) -> None:
    rows, q_heads, kv_heads, dim, cached = 3, 6, 2, 8, 10
    q = torch.randn(rows, q_heads, dim) * 3
    k, v = torch.randn(rows, cached, kv_heads, dim) * 3, torch.randn(rows, cached, kv_heads, dim)
    gate = torch.randn(rows, q_heads * dim)
    lengths, first = torch.tensor([10, 4, 7]), torch.tensor([0, 2, 6])
    got = reference.decode_attention(
        q, k, v, lengths, scale=0.3, first=first, window=window, softcap=softcap, gate=gate
    )  # fmt: skip
    for row in range(rows):
        length = int(lengths[row])
        start = max(int(first[row]), 0 if window is None else length - window)
        for head in range(q_heads):
            keys, values = (t[row, start:length, head // 3].double() for t in (k, v))
            scores = keys @ q[row, head].double() * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            mixed = scores.softmax(0) @ values * torch.sigmoid(gate[row, head * dim : (head + 1) * dim].double())
            torch.testing.assert_close(got[row, head * dim : (head + 1) * dim].double(), mixed, atol=1e-5, rtol=1e-5)


def test_heads_of_a_fused_projection() -> None:
    output = torch.arange(2 * 4 * 3).reshape(1, -1)  # two groups of [q, q, k, v] with three elements a head
    q = reference.heads([output], HeadView(0, 0, 12, 3), 2, 2, 3)
    v = reference.heads([output], HeadView(0, 9, 12, 3), 2, 1, 3)
    assert q[0].tolist() == [[0, 1, 2], [3, 4, 5], [12, 13, 14], [15, 16, 17]]
    assert v[0].tolist() == [[9, 10, 11], [21, 22, 23]]


def test_head_epilogue_order() -> None:
    linear = LinearPlan(ParamRef("w"), 4, 4)
    logits = torch.randn(8) * 100
    got = reference.head_epilogue(HeadPlan(linear, scale=0.5, divisor=4.0, softcap=3.0), logits)
    torch.testing.assert_close(got, 3.0 * torch.tanh(logits * 0.5 / 4.0 / 3.0))


@pytest.mark.parametrize("wide", [False, True])
def test_softcap_in_fp32(wide: bool) -> None:
    plan = HeadPlan(LinearPlan(ParamRef("w"), 4, 4), softcap=3.0, fp32_softcap=wide)
    logits = (torch.randn(300) * 3).bfloat16()
    want = torch.tanh((logits.float() if wide else logits) / 3.0) * 3.0
    assert torch.equal(reference.head_epilogue(plan, logits), want)


@pytest.mark.parametrize("dtype", ALL)
def test_argmax_is_pytorchs(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    rows = [
        [1, 3, 3, 2], [nan, 1, nan, 5], [1, 2, nan, nan], [-inf, -inf, -inf, -inf], [inf, nan, inf, 0], [0.0, -0.0, -1, 0],
        [nan, nan, nan, nan], [-5, -3, -3, -inf],
    ]  # fmt: skip
    logits = torch.tensor(rows, dtype=dtype)
    assert torch.equal(reference.argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", ALL)
def test_log_prob_is_log_softmax(dtype: torch.dtype) -> None:
    logits, tokens = (torch.randn(5, 100) * 8).to(dtype), torch.randint(0, 100, (5,))
    got = reference.log_prob(logits, tokens)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0])

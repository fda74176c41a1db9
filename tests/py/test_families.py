"""Every decoder family: the dense ones decode natively with transformers' results, no other one is changed by inject."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

import families
import segki
from families import CASES, Case
from harness import (
    assert_same_modules,
    assert_same_weights,
    compare_decode,
    compare_rounding,
    greedy,
    module_state,
    torch_products,
    weights,
)

ROWS = (13, 9, 4)
"""Prompt lengths of a left-padded batch; the longest exceeds every sliding window of the tiny models."""

NATIVE = families.select("required")
OTHERS = families.select("declined", "welcome")


def by_name(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def assert_native(report: Any) -> None:
    assert report.rung == 1, f"rung {report.rung}, not the native step: {report.reasons}"


def test_list_is_complete() -> None:
    assert len(families.FAMILIES) == len(set(families.FAMILIES)) == 137
    assert len(families.DENSE_NATIVE) == 39
    assert len(families.MOE_NATIVE) == 23
    if "lfm3" in CONFIG_MAPPING:  # the version that the list was made from, or a newer one
        assert [name for name in families.FAMILIES if name not in CONFIG_MAPPING] == []


@by_name(NATIVE)
def test_native_step_in_float32(case: Case) -> None:
    comparison = compare_decode(families.build(case), lengths=(13,))
    assert comparison.rung == 1, segki.inject(families.build(case)).reasons
    comparison.assert_close()
    comparison.assert_same_tokens()


@by_name(NATIVE)
def test_native_step_with_left_padded_rows(case: Case) -> None:
    """The batch equals transformers' batch, and each row equals the row alone."""
    comparison = compare_decode(families.build(case), lengths=ROWS)
    assert comparison.rung == 1
    comparison.assert_close()
    comparison.assert_same_tokens()

    model = families.build(case)
    segki.inject(model)
    ids, _ = families.left_padded(ROWS)
    for row, length in enumerate(ROWS):
        alone = greedy(model, ids[row : row + 1, -length:], None, 12)
        largest = comparison.reference.logits[row].abs().max()
        assert torch.equal(alone.tokens[0], comparison.decoded.tokens[row]), f"row {row} alone has other tokens"
        assert (alone.logits[0] - comparison.decoded.logits[row]).abs().max() <= 1e-4 * largest


@by_name(NATIVE)
def test_native_step_in_bfloat16(case: Case) -> None:
    comparison = compare_rounding(families.build(case, torch.bfloat16))
    assert comparison.rung == 1
    comparison.assert_no_worse(routed=case.family in families.MOE_NATIVE)


@pytest.mark.parametrize("name", ["beam", "ministral3-scaled-queries"])
def test_queries_scaled_far_from_the_start(name: str) -> None:
    if CASES[name] not in NATIVE:
        pytest.skip(f"this transformers has no {CASES[name].family}")
    comparison = compare_decode(families.build(name), lengths=(300, 40))
    comparison.assert_close()
    comparison.assert_same_tokens()
    compare_rounding(families.build(name, torch.bfloat16), lengths=(300,)).assert_no_worse(routed=name == "beam")


@by_name([case for case in NATIVE if case.name == case.family])
def test_native_step_in_float16(case: Case) -> None:
    model = families.build(case, torch.float16)
    comparison = compare_rounding(model)
    if case.family in families.FLOAT32_NORMS:  # transformers keeps them so in float16
        assert comparison.rung == 4 and "is torch.float32 in a model of torch.float16" in segki.explain(model).reasons[0]
    else:
        assert comparison.rung == 1
    comparison.assert_no_worse(routed=case.family in families.MOE_NATIVE)


@by_name(NATIVE)
def test_no_torch_product_in_the_loop(case: Case) -> None:
    """More tokens cost no more of torch's matrix products: the steps after the prefill are native."""
    model = families.build(case)
    assert_native(segki.inject(model))
    ids, mask = families.left_padded((5, 3))

    def products(steps: int) -> int:
        return torch_products(
            lambda: model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        )

    products(3)  # transformers 4.57 multiplies once more in the first call
    assert products(3) == products(9) > 0


@by_name(OTHERS)
def test_other_families_keep_their_results(case: Case) -> None:
    """Whatever segki finds to rebind, results stay, the reason is told, and eject restores the model."""
    original = families.build(case)
    model = copy.deepcopy(original)
    with torch.no_grad():  # what a family's first forward sets up by itself (rwkv rescales its weights) is not segki's doing
        model(families.prompt(1, 5), use_cache=False)
    modules, values = module_state(model), weights(model)
    for lengths in ((13,), (11, 6)):
        comparison = compare_decode(original, lengths=lengths, steps=8)
        comparison.assert_close()
        comparison.assert_same_tokens()

    segki.inject(model)
    report = segki.explain(model)
    if report.rung != 1:
        assert report.reasons, "not native, and no reason given"
        assert all(str(reason).strip() for reason in report.reasons)
    assert_same_weights(model, values)
    segki.eject(model)
    assert_same_modules(model, modules)
    assert_same_weights(model, values)


@by_name(OTHERS)
def test_other_families_keep_their_results_in_bfloat16(case: Case) -> None:
    compare_rounding(families.build(case, torch.bfloat16), lengths=(13, 9), steps=8).assert_no_worse()


# ------------------------------------------------------------------------------------------------- the tests can fail


def _first_down_projection(model: Any) -> nn.Module:
    return model.model.layers[1].mlp.down_proj


def _scale_output(model: Any, factor: float) -> None:
    """An error of the decode steps only, in one projection."""
    _first_down_projection(model).register_forward_hook(lambda m, a, out: out * factor if out.shape[1] == 1 else out)


def _late_position(model: Any) -> None:
    """Rotary position off by one in the decode steps."""

    def shift(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("position_ids") is not None and kwargs["position_ids"].shape[-1] == 1:
            kwargs = kwargs | {"position_ids": kwargs["position_ids"] + 1}
        return args, kwargs

    model.model.rotary_emb.register_forward_pre_hook(shift, with_kwargs=True)


def _extra_rounding(model: Any) -> None:
    """A residual stream that is rounded to a few bits fewer than bfloat16 has."""
    model.model.norm.register_forward_pre_hook(lambda m, args: ((args[0].float() * 16).round().div(16).to(args[0].dtype),))


class _AsRung4:
    """A report of the transformers path: forced logits come from the patched model's own generate."""

    rung = 4
    reasons = ("a deliberately wrong model",)


@pytest.mark.parametrize("patch", [lambda m: _scale_output(m, 1.005), _late_position], ids=["scaled", "late-position"])
def test_harness_notices_a_wrong_step(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segki, "explain", lambda model: _AsRung4())
    compare_decode(families.build("llama"), patch=lambda model: None).assert_close()
    with pytest.raises(AssertionError, match="step 1: logits differ"):
        compare_decode(families.build("llama"), patch=patch).assert_close()


def test_harness_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segki, "explain", lambda model: _AsRung4())
    right = compare_decode(families.build("llama"), patch=lambda model: None)
    right.assert_same_tokens()
    wrong = compare_decode(families.build("llama"), patch=lambda model: _scale_output(model, -4.0))
    with pytest.raises(AssertionError, match="transformers chose"):
        wrong.assert_same_tokens()


def test_harness_notices_extra_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segki, "explain", lambda model: _AsRung4())

    model = families.build("llama", torch.bfloat16)
    compare_rounding(model, lambda model: None).assert_no_worse()
    with pytest.raises(AssertionError, match="times transformers' own"):
        compare_rounding(model, _extra_rounding).assert_no_worse()

"""Rules by which a router may choose experts and weigh them: what its numbers allow, the usual ones first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from segki.plan import RouterPlan

Score = Literal["softmax", "softmax_chosen", "sigmoid"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "softmax_chosen")


def rules(base: RouterPlan, experts: int, numbers: list[tuple[str, float]]) -> Iterator[RouterPlan]:
    """Every rule to try for a router of `experts` experts.

    Parameters
    ----------
    base
        Linear layer and correction.
    numbers
        (name, value) of attributes and configuration.
    """
    factors = [v for n, v in numbers if ("scal" in n or "factor" in n) and v not in (0.0, 1.0)]
    scales = [1.0, *dict.fromkeys(factors)]
    logits = (False, True) if base.bias is not None else (False,)
    for top_k, grouping in itertools.product(top_ks(experts, numbers), groupings(experts, numbers)):
        for score, normalise, by_logit, scale in itertools.product(SCORES, (False, True), logits, scales):
            if score == "softmax_chosen" and (normalise or by_logit):
                continue
            groups, group_top_k, by_max, zero = grouping
            if groups > 1 and experts // groups * group_top_k < top_k:
                continue
            yield replace(
                base,
                top_k=top_k,
                score=score,
                normalise=normalise,
                sum_eps=1e-20 if normalise and score == "sigmoid" else 0.0,
                choose_by_logit=by_logit,
                scale=scale,
                groups=groups,
                group_top_k=group_top_k,
                group_by_max=by_max,
                mask_with_zero=zero,
            )


def top_ks(experts: int, numbers: list[tuple[str, float]]) -> list[int]:
    """Numbers of chosen experts to try: those that names hint at first."""
    whole = [(n, int(v)) for n, v in numbers if v == int(v) and 1 <= v <= experts]
    named = [v for n, v in whole if "top" in n or "per_tok" in n]
    return list(dict.fromkeys([*named, *(v for n, v in whole if "expert" in n)]))


def groupings(experts: int, numbers: list[tuple[str, float]]) -> list[tuple[int, int, bool, bool]]:
    """(groups, groups that stay, value of a group by its maximum, masked experts count as zero) to try."""
    whole = [(n, int(v)) for n, v in numbers if v == int(v) and v >= 1 and "group" in n]
    counts = dict.fromkeys(v for _, v in whole if v > 1 and experts % v == 0)
    kept = dict.fromkeys(v for _, v in whole)
    found = [(1, 1, False, False)]
    for groups, keep, by_max, zero in itertools.product(counts, kept, (False, True), (False, True)):
        if keep < groups:
            found.append((groups, keep, by_max, zero))
    return found[1:] + found[:1] if len(found) > 1 else found

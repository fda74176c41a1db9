"""Rules by which a router may choose experts and weigh them: what its numbers allow, the usual ones first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from segki.plan import RouterPlan

Score = Literal["softmax", "softmax_chosen", "sigmoid"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "softmax_chosen")
EPSILONS = (1e-20, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
MAX_UNNAMED = 16  # chosen experts to try when no number says how many

Numbers = list[tuple[str, float]]


def rules(base: RouterPlan, experts: int, numbers: Numbers) -> Iterator[RouterPlan]:
    """Every rule to try for a router of `experts` experts, without what only shows at extreme logits (see `extremes`).

    Parameters
    ----------
    base
        Linear layer and correction.
    numbers
        (name, value) of attributes and configuration.
    """
    by_logit = (False, True) if base.bias is not None else (False,)
    for top_k, grouping in itertools.product(top_ks(experts, numbers), groupings(experts, numbers)):
        groups, group_top_k, by_max, zero = grouping
        if experts // groups * group_top_k < top_k:
            continue
        for score, normalise, logit in itertools.product(SCORES, (False, True), by_logit):
            if score == "softmax_chosen" and (normalise or logit):
                continue
            yield replace(
                base,
                top_k=top_k,
                score=score,
                normalise=normalise,
                choose_by_logit=logit,
                groups=groups,
                group_top_k=group_top_k,
                group_by_max=by_max,
                mask_with_zero=zero,
            )


def top_ks(experts: int, numbers: Numbers) -> list[int]:
    """Numbers of chosen experts to try: those that names hint at first, then every small one."""
    whole = [(n, int(v)) for n, v in numbers if v == int(v) and 1 <= v <= experts]
    named = [v for n, v in whole if "top" in n or "per_tok" in n]
    return list(dict.fromkeys([*named, *(v for n, v in whole if "expert" in n), *range(1, min(experts, MAX_UNNAMED) + 1)]))


def groupings(experts: int, numbers: Numbers) -> list[tuple[int, int, bool, bool]]:
    """(groups, groups that stay, value of a group by its maximum, masked experts count as zero) to try."""
    whole = [(n, int(v)) for n, v in numbers if v == int(v) and v >= 1 and "group" in n]
    counts = dict.fromkeys(v for _, v in whole if v > 1 and experts % v == 0)
    kept = dict.fromkeys(v for _, v in whole)
    found = [
        (groups, keep, by_max, zero)
        for groups, keep, by_max, zero in itertools.product(counts, kept, (False, True), (False, True))
        if keep < groups
    ]
    return [*found, (1, 1, False, False)]


def extremes(rule: RouterPlan, numbers: Numbers, half: bool) -> Iterator[RouterPlan]:
    """Variants of a rule that differ only where probabilities are tiny or saturated: the guard of a division and ties.

    Parameters
    ----------
    half
        Whether the model is in half precision, where rounded scores tie sooner.
    """
    small = [v for n, v in numbers if 0 < v <= 1e-2 and ("eps" in n or "min" in n)]
    guards = [(0.0, 0.0)]
    if rule.normalise:
        sizes = dict.fromkeys([*EPSILONS, *small])
        guards += [(eps, 0.0) for eps in sizes] + [(0.0, least) for least in sizes]
    # without a correction, choosing by the score or by the logit differs only where scores tie
    by_logit = (rule.choose_by_logit,) if rule.bias is not None or rule.score != "sigmoid" else (False, True)
    for rounded, logit, (eps, least) in itertools.product((False, True) if half else (False,), by_logit, guards):
        yield replace(rule, round_scores=rounded, choose_by_logit=logit, sum_eps=eps, sum_min=least)

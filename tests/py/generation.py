"""Comparing `generate` of a transformers model with that of an injected copy of it."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

import families
import segki
from harness import FP32_TOLERANCE

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


@dataclass(frozen=True)
class Pair:
    """A transformers model and an injected one with the same weights."""

    original: Any
    model: Any

    def check(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Both generate with these arguments; the results must be the same. Returns the original's result."""
        want = run(self.original, args, kwargs, seed)
        assert_same_output(run(self.model, args, kwargs, seed), want)
        return want


def run(model: Any, args: Any, kwargs: Any, seed: int | None) -> Any:
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(*copy.deepcopy(args), **copy.deepcopy(kwargs))


def assert_same_output(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert_same_tokens(got, want)
        return
    for name in (field.name for field in fields(want)):
        value: Any = getattr(got, name, None)
        expected: Any = getattr(want, name)
        if name == "sequences":
            assert_same_tokens(value, expected)
        elif name in ("cache", "past_key_values"):
            assert (value is None) == (expected is None)
            if expected is not None:
                assert int(value.get_seq_length()) == int(expected.get_seq_length())
        else:
            assert_same_logits(name, value, expected)


def assert_same_tokens(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.device == want.device
    assert torch.equal(got, want), f"{got.tolist()}, transformers gives {want.tolist()}"


def assert_same_logits(name: str, got: Any, want: Any) -> None:
    assert type(got) is type(want), f"{name} is a {type(got).__name__}, transformers returns a {type(want).__name__}"
    if isinstance(want, tuple):
        assert len(got) == len(want), f"{name} has {len(got)} entries, transformers returns {len(want)}"
        for entry, expected in zip(got, want, strict=True):
            assert_same_logits(name, entry, expected)
    elif isinstance(want, torch.Tensor):
        assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}"
        finite = torch.isfinite(want)
        assert torch.equal(finite, torch.isfinite(got)), f"{name}: other entries are infinite"
        if finite.any():
            largest = want[finite].abs().max()
            assert (got[finite] - want[finite]).abs().max() <= FP32_TOLERANCE * largest, f"{name} differs"
    else:
        assert got == want


def new_pair(case: str = "llama", dtype: torch.dtype = torch.float32) -> Pair:
    original = families.build(case, dtype)
    model = copy.deepcopy(original)
    report = segki.inject(model)
    assert report.rung == 1, report.reasons
    return Pair(original, model)


@functools.cache
def _stops_apart(case: str) -> tuple[torch.Tensor, list[int]]:
    ids = families.prompt(32, 9)
    tokens = families.build(case).generate(ids, **GREEDY)[:, 9:].tolist()
    for i, first in enumerate(tokens):
        for j, second in enumerate(tokens):
            eos = [first[3], second[6]]
            stops = [next((step for step, token in enumerate(row) if token in eos), 12) for row in tokens]
            late = next((k for k, step in enumerate(stops) if step in (8, 9, 10)), None)
            if stops[i] == 3 and stops[j] == 6 and late is not None:
                return ids[[i, j, late]], eos
    raise AssertionError("no prompts whose rows stop apart")


def stops_apart(case: str = "llama") -> tuple[torch.Tensor, list[int]]:
    """Three prompts, and two end ids at which the rows stop after 4, 7 and at most 11 tokens."""
    ids, eos = _stops_apart(case)
    return ids.clone(), list(eos)

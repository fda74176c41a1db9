"""SmolLM2-135M and Gemma 3 270M with their real weights: tokens of transformers' greedy decoding, logits step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segki
from harness import Prompts, compare_decode, compare_rounding
from segki.models import load_gemma3_270m, load_smollm2

pytestmark = pytest.mark.real

LOADERS: dict[str, Callable[[torch.dtype], Any]] = {"smollm2-135m": load_smollm2, "gemma3-270m": load_gemma3_270m}
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
)
STEPS = 16


@functools.lru_cache(maxsize=1)
def load(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer; only the latest pair is kept in memory."""
    loaded = LOADERS[name](dtype)
    loaded.model.generation_config.eos_token_id = None
    return loaded.model.eval(), loaded.tokenizer


def prompts(name: str, dtype: torch.dtype, texts: tuple[str, ...], steps: int) -> Prompts:
    """The texts as left-padded rows, and a text's worth of tokens to force after them."""
    _, tokenizer = load(name, dtype)
    rows = [tokenizer(text).input_ids for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    story = tokenizer("She walked along the river until the bridge, where 12 boats waited for the rain to stop; nobody spoke.")
    forced = torch.tensor([(story.input_ids[row + 1 :] * 3)[:steps] for row in range(len(rows))])
    return Prompts(ids, None if bool(mask.all()) else mask, forced)


@pytest.fixture(params=LOADERS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("text", TEXTS, ids=["fact", "code", "story"])
def test_single_prompts_in_float32(name: str, text: str) -> None:
    model, _ = load(name, torch.float32)
    comparison = compare_decode(model, steps=STEPS, prompts=prompts(name, torch.float32, (text,), STEPS))
    assert comparison.rung == 1
    comparison.assert_close()
    comparison.assert_same_tokens()


def test_left_padded_batch_in_float32(name: str) -> None:
    model, _ = load(name, torch.float32)
    comparison = compare_decode(model, steps=STEPS, prompts=prompts(name, torch.float32, TEXTS, STEPS))
    assert comparison.rung == 1
    comparison.assert_close()
    comparison.assert_same_tokens()


def test_stops_at_the_models_own_end_id(name: str) -> None:
    """A chat answer ends where transformers ends it."""
    model, tokenizer = load(name, torch.float32)
    ids = tokenizer("2, 4, 6, 8, 10,", return_tensors="pt").input_ids
    plain = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
    eos = int(plain[0, ids.shape[1] + 9])
    want = model.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=[eos, 0], pad_token_id=0)
    with segki.injected(model):
        got = model.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=[eos, 0], pad_token_id=0)
    assert torch.equal(got, want)
    assert want.shape[1] <= ids.shape[1] + 10


def test_long_prompt_beyond_the_sliding_window(name: str) -> None:
    """Gemma 3 attends to 512 tokens in its sliding layers."""
    model, tokenizer = load(name, torch.float32)
    rows = (tokenizer(" ".join(TEXTS)).input_ids * 20)[:600]
    some = prompts(name, torch.float32, TEXTS[:1], 8)
    comparison = compare_decode(model, steps=8, prompts=Prompts(torch.tensor([rows]), None, some.forced))
    assert comparison.rung == 1
    comparison.assert_close()
    comparison.assert_same_tokens()


def test_rounding_in_bfloat16(name: str) -> None:
    model, _ = load(name, torch.bfloat16)
    comparison = compare_rounding(model, prompts=prompts(name, torch.bfloat16, TEXTS, STEPS))
    assert comparison.rung == 1
    comparison.assert_no_worse()

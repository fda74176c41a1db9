"""The number of native threads: what it follows, how it is set, and that no result depends on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import families
import harness
import segki
from segki import _segki, parallel

FOLDER = str(Path(_segki.__file__).parent)
# The extension by itself: without torch a process starts in no time.
PRINT_THREADS = f"import sys; sys.path.insert(0, {FOLDER!r}); import _segki; print(_segki.threads())"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = segki.threads()
    yield
    segki.set_threads(before)


def default_threads(code: str = PRINT_THREADS, **variables: str) -> str:
    """What a fresh process prints; `variables` are the only ones about threads in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("SEGKI_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, timeout=300)
    return done.stdout.strip() or done.stderr


def test_set_threads_is_what_threads_says() -> None:
    for count in (1, 3, 2, 2):
        segki.set_threads(count)
        assert segki.threads() == count


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_number_out_of_range_is_an_error_and_changes_nothing(count: int) -> None:
    segki.set_threads(2)
    with pytest.raises(ValueError, match=rf"'threads' is {count}, accepted 1 to 1024"):
        segki.set_threads(count)
    assert segki.threads() == 2


def test_the_default_follows_the_environment() -> None:
    cores = int(default_threads())
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert default_threads(OMP_NUM_THREADS="1") == "1"
    assert default_threads(SEGKI_NUM_THREADS="1") == "1"
    assert default_threads(SEGKI_NUM_THREADS="1000", OMP_NUM_THREADS="1") == str(cores)
    assert "SEGKI_NUM_THREADS is 'all', accepted 1 to 1024" in default_threads(SEGKI_NUM_THREADS="all")


def test_the_default_follows_the_affinity() -> None:
    one = min(os.sched_getaffinity(0))
    assert default_threads(f"import os; os.sched_setaffinity(0, {{{one}}}); {PRINT_THREADS}") == "1"


@pytest.mark.parametrize(("case", "dtype"), [("llama", torch.float32), ("qwen3_5_text", torch.bfloat16)])
def test_no_bit_depends_on_the_number_of_threads(case: str, dtype: torch.dtype) -> None:
    model = families.build(case, dtype)
    segki.inject(model)
    prompt = families.prompt(2)
    tokens = families.prompt(2, 6, seed=3)
    with torch.no_grad():
        segki.set_threads(1)
        expected = harness.native_forced_logits(model, prompt, None, tokens)
        greedy = harness.greedy_tokens(model, prompt, None, 8)
        for count in (2, 3, 5, 1):
            segki.set_threads(count)
            assert torch.equal(harness.native_forced_logits(model, prompt, None, tokens), expected), f"{count} threads"
            assert torch.equal(harness.greedy_tokens(model, prompt, None, 8), greedy), f"{count} threads"


def test_generation_takes_no_more_threads_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_chosen", False)
    most = int(default_threads())
    before = torch.get_num_threads()
    model = families.build("llama")
    segki.inject(model)
    parallel._at_start.cache_clear()
    segki._segki.set_threads(most)
    try:
        for wanted in (1, most, 1):
            torch.set_num_threads(wanted)
            model.generate(families.prompt(1, 5), do_sample=False, max_new_tokens=3, pad_token_id=0)
            assert segki.threads() == wanted
        segki.set_threads(most)  # chosen: torch's number does not count
        model.generate(families.prompt(1, 5), do_sample=False, max_new_tokens=3, pad_token_id=0)
        assert segki.threads() == most
    finally:
        torch.set_num_threads(before)

"""`segki demo`: a real model's own `generate` and segki side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from segki.bandwidth import ReadBandwidth, Share, step_weight_bytes
from segki.bench import dtype_name
from segki.models import Loaded
from segki.peers import pad_id, stop_ids, twin

__all__ = ["PROMPTS", "Comparison", "Side", "compare"]

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Name three uses of a hammer.",
)


@dataclass
class Side:
    """What one of the two did.

    Attributes
    ----------
    tokens : list of list of int
        The new tokens of each row up to and with the one that ended it; pads are left out.
    steps : int
        Decode steps whose tokens came back. A row that ended early leaves them invalid.
    prefill_s, total_s : list of float
        Seconds of a call for one token, and for all, in each round.
    """

    tokens: list[list[int]] = field(default_factory=list)
    steps: int = 0
    prefill_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)

    @property
    def prefill_ms(self) -> float:
        """Prompt, first token and what the call costs, in ms."""
        return statistics.median(self.prefill_s) * 1e3

    @property
    def decode_ms(self) -> float:
        """A decode step for all rows, in ms; NaN where a busy machine hides it or there was none."""
        pairs = zip(self.total_s, self.prefill_s, strict=True)
        seconds = statistics.median(total - first for total, first in pairs)
        return seconds / self.steps * 1e3 if self.steps and seconds > 0 else math.nan

    @property
    def valid_tokens(self) -> int:
        """Tokens of all rows, without pads."""
        return sum(len(row) for row in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens that decode steps brought, a second of decoding."""
        decoded = self.valid_tokens - len(self.tokens)
        return decoded / (self.decode_ms * self.steps) * 1e3 if self.steps else math.nan


@dataclass
class Comparison:
    """Both sides in one dtype, and what is needed to judge them."""

    dtype: str
    own: Side
    segki: Side
    report: Any
    inject_s: float
    step_bytes: int
    texts: list[str]
    difference: str | None

    def share(self, side: Side, bandwidth: ReadBandwidth) -> Share:
        """Return the share of the read bandwidth that a side's decode steps reach."""
        return bandwidth.share(self.step_bytes, side.decode_ms / 1e3)


def compare(
    loaded: Loaded,
    prompts: Sequence[str],
    tokens: int,
    rounds: int,
    progress: Callable[[str], None],
) -> Comparison:
    """Generate greedily with the model's own `generate` and with segki, in turns.

    Parameters
    ----------
    loaded : Loaded
        A model with a tokenizer; it is left as it was.
    prompts : sequence of str
        One a row; several are padded on the left.
    tokens : int
        The most new tokens a row gets; it ends earlier at the model's own end mark.
    rounds : int
        How often each side is timed.
    progress : callable
        Called with a short sentence before each part.
    """
    import segki

    inputs = _chat_inputs(loaded.tokenizer, prompts, pad_id(loaded.model))
    ours, theirs = twin(loaded.model), twin(loaded.model)
    name = dtype_name(loaded.model.dtype)
    progress(f"{name}: injecting")
    start = time.perf_counter()
    report = segki.inject(ours)
    inject_s = time.perf_counter() - start
    sides = {"the model's own generate": (theirs, Side()), "segki": (ours, Side())}
    for label, (model, _) in sides.items():
        progress(f"{name}: warming up {label}")
        _generate(model, inputs, min(tokens, 4))
    for number in range(rounds):
        for label, (model, side) in sides.items():
            progress(f"{name}: {label}, round {number + 1} of {rounds}")
            _time(model, inputs, tokens, side)
    own, fast = (side for _, side in sides.values())
    segki.eject(ours)
    texts = [loaded.tokenizer.decode(row, skip_special_tokens=True) for row in fast.tokens]
    difference = _difference(theirs, inputs, own.tokens, fast.tokens)
    size = step_weight_bytes(theirs)
    return Comparison(name, own, fast, report, inject_s, size, texts, difference)


def _chat_inputs(tokenizer: Any, prompts: Sequence[str], pad: int) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `[rows, length]`, padded on the left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    length = max(len(row) for row in rows)
    pads = [length - len(row) for row in rows]
    ids = [[pad] * count + row for count, row in zip(pads, rows, strict=True)]
    mask = [[0] * count + [1] * len(row) for count, row in zip(pads, rows, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _generate(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
    output: torch.Tensor = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=pad_id(model)
    )
    return output[:, inputs["input_ids"].shape[1] :]


def _time(model: Any, inputs: dict[str, torch.Tensor], tokens: int, side: Side) -> None:
    start = time.perf_counter()
    _generate(model, inputs, 1)
    middle = time.perf_counter()
    output = _generate(model, inputs, tokens)
    side.total_s.append(time.perf_counter() - middle)
    side.prefill_s.append(middle - start)
    side.steps = output.shape[1] - 1
    side.tokens = [_valid(row, stop_ids(model)) for row in output.tolist()]


def _valid(row: list[int], stops: list[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in stops:
            return row[: position + 1]
    return row


def _difference(
    model: Any, inputs: dict[str, torch.Tensor], own: list[list[int]], fast: list[list[int]]
) -> str | None:
    """Describe the first difference, with how close the model itself found the two tokens."""
    for number, (a, b) in enumerate(zip(own, fast, strict=True)):
        if a == b:
            continue
        position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if position is None:
            return f"row {number}: {len(a)} tokens against {len(b)}"
        mask = inputs["attention_mask"][number].bool()
        prompt = inputs["input_ids"][number][mask]
        ids = torch.cat([prompt, torch.tensor(a[:position], dtype=prompt.dtype)])[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        first, second = float(logits[a[position]]), float(logits[b[position]])
        spacing = abs(first) * torch.finfo(logits.dtype).eps
        return (
            f"row {number}, token {position}: the model's own forward gives the two candidates the "
            f"logits {first:.4f} and {second:.4f} (one rounding step there is {spacing:.4f})"
        )
    return None

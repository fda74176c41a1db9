"""Checks of what a caller hands in: each error names what was given and what is accepted, before anything has changed."""

from __future__ import annotations

from typing import Any

import torch


def check_inputs(input_ids: Any, inputs_embeds: Any, attention_mask: Any, vocab_size: int) -> None:
    """Refuse inputs that no model could serve rightly.

    Raises
    ------
    ValueError
        An empty batch or prompt, ids outside `[0, vocab_size)`, ids that are not integers, a mask of another shape, a mask that is
        all zero or zero on the right in some row.
    """
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: given shape {list(input_ids.shape)}, accepted [rows, tokens]")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids: given dtype {input_ids.dtype}, accepted torch.int64 or torch.int32")
        if input_ids.shape[0] == 0:
            raise ValueError("input_ids: given an empty batch (0 rows), accepted at least 1 row")
        if input_ids.shape[1] == 0 and inputs_embeds is None:
            raise ValueError("input_ids: given empty prompts (0 tokens), accepted at least 1 token")
        check_ids(input_ids, vocab_size)
    if isinstance(inputs_embeds, torch.Tensor) and 0 in inputs_embeds.shape:
        raise ValueError(f"inputs_embeds: given shape {list(inputs_embeds.shape)}, accepted no empty dimension")
    source = input_ids if inputs_embeds is None else inputs_embeds
    if isinstance(attention_mask, torch.Tensor) and isinstance(source, torch.Tensor) and attention_mask.dim() == 2:
        if attention_mask.shape[0] != source.shape[0]:
            raise ValueError(
                f"attention_mask: given {attention_mask.shape[0]} rows, accepted {source.shape[0]} as in the prompt"
            )
        check_mask(attention_mask)


def check_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary (`ValueError` naming the first)."""
    if input_ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(input_ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids: given id {wrong}, accepted 0 to {vocab_size - 1} (the vocabulary has {vocab_size} ids)")


def check_mask(mask: torch.Tensor) -> None:
    """Refuse a 2-D mask with a row that has no token, or that has padding on the right (`ValueError` naming the row)."""
    real = mask != 0
    empty = (~real.any(dim=1)).nonzero()
    if len(empty) > 0:
        raise ValueError(f"attention_mask: row {int(empty[0])} is all zero, accepted at least one real token a row")
    padded = (~real[:, -1]).nonzero()
    if len(padded) > 0:
        raise ValueError(
            f"attention_mask: row {int(padded[0])} is padded on the right (its last entry is 0), accepted left padding: "
            "set padding_side='left' on the tokenizer"
        )


def left_padding(mask: torch.Tensor | None, rows: int, tokens: int) -> torch.Tensor | None:
    """Padding tokens on the left of each row, i64 `[rows]`; None when the mask is not plain left padding."""
    if mask is None:
        return torch.zeros(rows, dtype=torch.int64)
    if mask.dim() != 2 or mask.shape != (rows, tokens):
        return None
    real = mask != 0
    first = tokens - real.sum(dim=1)
    expected = torch.arange(tokens)[None] >= first[:, None]
    return first if bool((real == expected).all()) else None

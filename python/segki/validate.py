"""Checks of what a caller hands in: each error names what was given and what is accepted, before anything has changed."""

from __future__ import annotations

from typing import Any

import torch

CACHE_NAMES = ("cache", "past_key_values")


def check_inputs(embedding: torch.Tensor, input_ids: Any, kwargs: dict[str, Any]) -> None:
    """Refuse inputs that no model could serve rightly.

    Parameters
    ----------
    embedding
        The model's embedding weight, `[V, H]`.
    input_ids
        What the caller gave as prompt, i64 or i32 `[rows, tokens]`, or None.
    kwargs
        The other arguments of `generate`.

    Raises
    ------
    ValueError
        An empty batch or prompt, ids outside `[0, V)`, ids that are not integers or lie on another device, embeddings of another dtype or
        width, a mask of another shape, all zero in some row or zero on the right, a prompt longer than a given cache of fixed size.
    """
    embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    if isinstance(input_ids, torch.Tensor):
        check_prompt(embedding, input_ids, embeds is not None)
    if isinstance(embeds, torch.Tensor):
        check_embeds(embedding, embeds)
    source = input_ids if embeds is None else embeds
    if not isinstance(source, torch.Tensor):
        return
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        past = any(kwargs.get(name) is not None for name in CACHE_NAMES)
        if mask.shape[0] not in (1, source.shape[0]) or (mask.shape[1] != source.shape[1] and not past):
            raise ValueError(
                f"attention_mask: given shape {list(mask.shape)}, accepted {list(source.shape[:2])} as the prompt's"
            )
        check_mask(mask)
    for name in CACHE_NAMES:
        cache: Any = kwargs.get(name)
        if not getattr(cache, "layers", None) or any(getattr(cache, "is_sliding", ())):
            continue
        room = cache.get_max_length() if hasattr(cache, "get_max_length") else cache.get_max_cache_shape()
        if 0 < int(room) < source.shape[1]:
            raise ValueError(
                f"input_ids: given prompts of {source.shape[1]} tokens, accepted up to {int(room)}, the size of the given {name}"
            )


def check_prompt(embedding: torch.Tensor, input_ids: torch.Tensor, has_embeds: bool) -> None:
    """Refuse ids of a wrong shape, dtype, device or value (`ValueError`)."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: given shape {list(input_ids.shape)}, accepted [rows, tokens]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids: given dtype {input_ids.dtype}, accepted torch.int64 or torch.int32")
    if input_ids.is_meta or (embedding.device.type == "cpu" and input_ids.device.type != "cpu"):
        raise ValueError(f"input_ids: given on device {input_ids.device}, accepted {embedding.device}, the model's")
    if input_ids.shape[0] == 0:
        raise ValueError("input_ids: given an empty batch (0 rows), accepted at least 1 row")
    if input_ids.shape[1] == 0 and not has_embeds:
        raise ValueError("input_ids: given empty prompts (0 tokens), accepted at least 1 token")
    check_ids(input_ids, embedding.shape[0])


def check_embeds(embedding: torch.Tensor, embeds: torch.Tensor) -> None:
    """Refuse prompt embeddings of a wrong shape or dtype (`ValueError`)."""
    if embeds.dim() != 3 or 0 in embeds.shape or embeds.shape[2] != embedding.shape[1]:
        raise ValueError(f"inputs_embeds: given shape {list(embeds.shape)}, accepted [rows, tokens, {embedding.shape[1]}]")
    if embeds.dtype != embedding.dtype:
        raise ValueError(f"inputs_embeds: given dtype {embeds.dtype}, accepted {embedding.dtype}, the model's")


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

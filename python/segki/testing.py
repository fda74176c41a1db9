"""Helpers for tests of code that embeds segki."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from segki.cache import Decline, Prompt, divert
from segki.inject import injection_of
from segki.probe import forced_decode
from segki.validate import CACHE_NAMES, left_padding


@torch.no_grad()
def teacher_forced_logits(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, forced_tokens: torch.Tensor
) -> torch.Tensor:
    """Logits of the native decode along given tokens, after the model's own prefill.

    Parameters
    ----------
    input_ids, attention_mask
        i64 `[rows, P]`, left-padded where the mask is 0.
    forced_tokens
        i64 `[rows, T]`.

    Returns
    -------
    f32 `[rows, T, V]`: entry t is what token t would have been chosen from.

    Raises
    ------
    RuntimeError
        If the model has no native step.
    """
    injection = injection_of(model)
    if injection is None:
        raise RuntimeError("teacher_forced_logits: the model is not injected")
    try:
        engine = injection.ready()
    except Decline as reason:
        raise RuntimeError(f"teacher_forced_logits: {reason}") from reason
    rows, tokens = input_ids.shape
    first = left_padding(attention_mask, rows, tokens)
    if first is None:
        raise RuntimeError("teacher_forced_logits: the attention mask has holes")
    limit = engine.max_positions
    if limit is not None and tokens + forced_tokens.shape[1] > limit:
        raise RuntimeError(f"teacher_forced_logits: {tokens + forced_tokens.shape[1]} positions, this model's tables end at {limit}")
    engine.step(rows, tokens + forced_tokens.shape[1])
    assert engine.cache is not None
    config: Any = model.config
    cache = DynamicCache(config=config)
    divert(cache, engine.plan, Prompt(engine.cache, engine.memory, first))
    name = next(name for name in CACHE_NAMES if name in inspect.signature(type(model).forward).parameters)
    kwargs: dict[str, Any] = {name: cache}
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
        kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        kwargs.pop("position_ids", None)
    logits = model(input_ids, use_cache=True, **kwargs).logits[:, -1].float()
    return forced_decode(engine, logits, forced_tokens, tokens - first)

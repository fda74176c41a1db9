"""Sliding windows: what the model's cache and its blocks say, confirmed by the masks that the model makes for a long prompt."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from segki.detect.context import Context
from segki.detect.numeric import Unknown
from segki.detect.ropes import table_limit
from segki.detect.trace import FORWARD_ERRORS, Call, flat_tensors

MAX_PROMPT = 4200  # tokens of a mask probe
LAYER_TYPES = (None, "full_attention", "sliding_attention", "attention", "linear_attention")


def layer_windows(ctx: Context, calls: list[Call]) -> list[int | None]:
    """Sliding window of each decoder layer, None where attention is not limited.

    Raises
    ------
    Unknown
        If a layer's type is not known, or its attributes, its cache and its mask do not agree.
    """
    types = getattr(ctx.config, "layer_types", None)
    try:
        layers = transformers.DynamicCache(config=ctx.config).layers
    except FORWARD_ERRORS as error:
        raise Unknown(f"transformers makes no cache for the configuration: {type(error).__name__}: {error}") from error
    windows: list[int | None] = []
    wanted: list[int | None] = []  # what the mask must show: a band of the block's own is not in it
    doubts: list[str | None] = []
    sizes: set[int] = set()
    for index, call in enumerate(calls):
        kind = types[index] if isinstance(types, (list, tuple)) and index < len(types) else None
        if kind not in LAYER_TYPES:
            raise Unknown(f"{call.name}: layer type {kind} is not known")
        layer = layers[index] if index < len(layers) else None
        window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        doubt, banded = None, False
        for name, module in call.module.named_modules(prefix=call.name):
            own = vars(module).get("sliding_window")
            if isinstance(own, int) and not isinstance(own, bool) and own > 0 and own != window:
                doubt = f"{name}: sliding_window is {own}, the cache's is {window}"
                sizes.add(own)
            for buffer in module.buffers(recurse=False):
                inner = band(buffer) if window is None else None
                if inner is not None:
                    window, banded = inner, True
        windows.append(window if window is None else int(window))
        doubts.append(doubt)
        wanted.append(None if banded else windows[-1])
    sizes |= {w for w in wanted if w is not None}
    tokens = ctx.trace_tokens
    limits = [table_limit(ctx, m, None) for m in ctx.model.modules() if hasattr(m, "rope_type")]
    most = min([MAX_PROMPT, *(limit for limit in limits if limit is not None)])  # a longer prompt would change such a table
    longer = [size for size in sizes if size >= tokens and size + 2 <= most]
    shorter = [size for size in sizes if size < tokens]
    if longer:
        masks = _masks(ctx, calls, max(longer) + 2)
    elif shorter:
        masks = [_mask(call) for call in calls]
    else:
        masks = [None] * len(calls)
    for call, window, doubt, mask in zip(calls, wanted, doubts, masks, strict=True):
        problem = _disagreement(mask, window)
        if problem is not None:
            raise Unknown(f"{call.name}: {problem}")
        if doubt is not None and not (longer or shorter):
            raise Unknown(doubt)
    return windows


def band(buffer: Tensor) -> int | None:
    """Window of a boolean buffer `[..., P, P]` that is a band below the diagonal; None for another buffer or a full triangle."""
    if (
        buffer.dtype not in (torch.bool, torch.uint8)
        or buffer.dim() < 2
        or buffer.shape[-1] != buffer.shape[-2]
        or buffer.shape[-1] < 2
    ):
        return None
    table = buffer.reshape(-1, *buffer.shape[-2:])[0].bool()
    width = int(table[-1].sum())
    return width if width < table.shape[-1] and bool(table[-1, -width:].all()) else None


def _mask(call: Call) -> Tensor | None:
    """The attention mask that a layer was given, as bool `[T, T]`; None where attention is causal without a mask."""
    given = call.kwargs.get("attention_mask")
    options = [given] if given is not None else list(call.args)
    for value in flat_tensors(options):
        if value.dim() == 4 and value.shape[-1] == value.shape[-2]:
            square = value[0, 0]
            return square if square.dtype == torch.bool else square > torch.finfo(square.dtype).min / 2
    return None


def _disagreement(mask: Tensor | None, window: int | None) -> str | None:
    if mask is None:
        return None
    tokens = mask.shape[-1]
    last = mask[-1]
    seen = int(last.sum())
    wanted = tokens if window is None else min(window, tokens)
    if seen != wanted or not bool(last[-seen:].all()):
        limit = "all" if window is None else f"the last {window}"
        return f"its mask shows {seen} of {tokens} keys to the last query, expected {limit}"
    return None


def _masks(ctx: Context, calls: list[Call], tokens: int) -> list[Tensor | None]:
    """Masks that the layers are given for a prompt of `tokens`; the layers themselves do not run."""
    given: dict[str, Call] = {}
    accepted = inspect.signature(type(ctx.model).forward).parameters
    extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    ids = torch.zeros(1, tokens, dtype=torch.long, device=ctx.device) + int(ctx.ids[0, 0])
    with _skipped(calls, given):
        try:
            ctx.model(input_ids=ids, use_cache=False, **extra)
        except FORWARD_ERRORS as error:
            raise Unknown(f"the forward failed on {tokens} tokens: {type(error).__name__}: {error}") from error
    return [_mask(given[call.name]) if call.name in given else None for call in calls]


@contextmanager
def _skipped(calls: list[Call], given: dict[str, Call]) -> Iterator[None]:
    """Layers that hand on their input and note their arguments while the context is open."""

    def stand_in(call: Call) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            noted = Call(call.name, call.module, args, kwargs)
            given[call.name] = noted
            return (noted.x, *call.output[1:]) if isinstance(call.output, tuple) else noted.x

        return forward

    patched: list[nn.Module] = []
    try:
        for call in calls:
            patched.append(call.module)
            vars(call.module)["forward"] = stand_in(call)
        yield
    finally:
        for module in patched:
            vars(module).pop("forward", None)

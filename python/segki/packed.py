"""Packed sequences: where they begin and end, and how the layers of a text model get to know it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Spans = list[list[tuple[int, int]]]  # for each row, the half-open ranges of its sequences

CUMULATIVE = ("cu_seq_lens_q", "cu_seqlens")
INDEX = "seq_idx"
KEYWORDS = (*CUMULATIVE, INDEX)
"""Keyword arguments that say where packed sequences lie, and that transformers hands down to every layer."""


def spans_of(kwargs: Mapping[str, Any], rows: int, tokens: int) -> Spans | None:
    """The packed sequences that a layer's keyword arguments tell of; None when every row is one sequence.

    `cu_seq_lens_q` or `cu_seqlens` are boundaries `[sequences + 1]` in the tokens of all rows one after another; `seq_idx` `[rows, tokens]`
    (or `[1, tokens]`, for all rows) changes where a sequence begins.
    """
    cumulative = next((kwargs[name] for name in CUMULATIVE if kwargs.get(name) is not None), None)
    index = kwargs.get(INDEX)
    if cumulative is not None:
        inner = {int(c) for c in cumulative if 0 < int(c) < rows * tokens}
        cuts = [[c - row * tokens for c in inner if row * tokens < c < (row + 1) * tokens] for row in range(rows)]
    elif index is not None:
        changes = (index[:, 1:] != index[:, :-1]).expand(rows, -1)
        cuts = [(row.nonzero()[:, 0] + 1).tolist() for row in changes]
    else:
        return None
    if not any(cuts):
        return None
    edges = [[0, *sorted(row), tokens] for row in cuts]
    return [list(zip(row, row[1:], strict=False)) for row in edges]


def sequence_starts(position_ids: Tensor) -> Tensor:
    """Whether a packed sequence begins at a token that is not the row's first, `[rows, tokens]`.

    Parameters
    ----------
    position_ids
        `[rows, tokens]` or `[4, rows, tokens]` (MRoPE, text positions first): by transformers' own rule a sequence begins where a text
        position does not follow the one before. `[3, rows, tokens]` (MRoPE without text positions): where all three are 0, or the
        temporal one falls; those of an image stand still.
    """
    if position_ids.dim() == 3 and position_ids.shape[0] == 3:
        falls = position_ids[0, :, 1:] < position_ids[0, :, :-1]
        later = falls | (position_ids[:, :, 1:] == 0).all(0)
    else:
        text = position_ids[0] if position_ids.dim() == 3 else position_ids
        later = text[:, 1:] - text[:, :-1] != 1
    return torch.nn.functional.pad(later, (1, 0))


def packing_notes(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments to add to a text model's call so that its layers know of the sequences in its `position_ids`.

    As in transformers' masks, positions tell of packed sequences only where there is neither a mask nor a past. MRoPE positions without
    text positions get them, so that the masks of full attention see the same sequences.
    """
    position_ids, cache = kwargs.get("position_ids"), kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] == 1 or torch.compiler.is_compiling():
        return {}
    if kwargs.get("attention_mask") is not None or any(kwargs.get(name) is not None for name in KEYWORDS):
        return {}
    if cache is not None and int(cache.get_seq_length()) > 0:
        return {}
    starts = sequence_starts(position_ids)
    if not bool(starts.any()):
        return {}
    notes: dict[str, Any] = {INDEX: starts.cumsum(-1).to(torch.int32)}
    if position_ids.dim() == 3 and position_ids.shape[0] == 3:
        places = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(starts)
        begins = torch.where(starts, places, 0).cummax(-1).values
        notes["position_ids"] = torch.cat([(places - begins)[None].to(position_ids.dtype), position_ids])
    return notes


def text_model_of(model: nn.Module, name: str) -> nn.Module | None:
    """The closest module around the named one that is called with token positions and hands keyword arguments on; None if there is none."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        parameters = inspect.signature(type(module).forward).parameters
        if {"position_ids", "inputs_embeds"} <= parameters.keys():
            hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
            return module if hands_on else None
    return None


def own_forward(module: nn.Module, previous: Any) -> Callable[..., Any]:
    """What a module runs without segki: an earlier instance attribute, else its class's method."""
    return types.MethodType(type(module).forward, module) if previous is None else previous


def text_forward(module: nn.Module) -> Callable[..., Any]:
    """A forward for a text model that tells its layers of packed sequences; all else is the module's own."""
    previous = vars(module).get("forward")
    signature = inspect.signature(own_forward(module, previous))

    @functools.wraps(type(module).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            names = list(signature.parameters)
            kwargs = dict(zip(names, args, strict=False)) | kwargs
        return own_forward(module, previous)(**kwargs | packing_notes(kwargs))

    return forward


def without(kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments but for those named."""
    return {name: value for name, value in kwargs.items() if name not in names}

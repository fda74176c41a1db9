"""Prefill into the native cache: the model's own forward runs with transformers' cache object, whose layers hand K and V over.

Layers subclass the installed `DynamicLayer` and `DynamicSlidingWindowLayer`, so that masks, lengths and `isinstance` checks stay
transformers' own. They store nothing: the first chunk's keys and values go straight into the slots of the `HybridCache` (without left
padding) and are returned to the attention as they came. For linear attention see `segki.linear_cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from segki import _segki
from segki.native import TorchMemory, view
from segki.plan import AttentionPlan, ModelPlan
from segki.program import cached_blocks


class Decline(Exception):
    """The native step cannot serve this request; the text is the reason."""


class Prompt:
    """Where the prompts of a batch go: the native cache and the number of padding tokens on the left of each row."""

    def __init__(self, cache: _segki.HybridCache, memory: TorchMemory, first: torch.Tensor) -> None:
        self.cache = cache
        self.memory = memory
        self.first = [int(count) for count in first]
        self.repeats: dict[int, int] = {}  # layer -> how often the model's own cache holds each key and value head

    def fill(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's prompt, `[rows, Hkv, T, D]`, or `[rows, Hkv * n, T, D]` of a model that caches each head n times (Falcon)."""
        if index in self.repeats:
            raise Decline(f"the model's forward writes cache layer {index} twice")
        self.repeats[index] = repeat = keys.shape[1] // self.cache.keys(index).shape[1]
        keys, values = (dense_heads(once(states, repeat)) for states in (keys, values))
        self.cache.fill(index, view(keys), view(values), self.first)

    def complete(self, plan: ModelPlan) -> bool:
        """Whether the model's forward has handed every attention layer over."""
        attends = (index for index, block in enumerate(cached_blocks(plan)) if isinstance(block, AttentionPlan))
        return all(index in self.repeats for index in attends)

    def shared(self, state: _segki.View, dtype: torch.dtype) -> torch.Tensor:
        """The slots of this batch's rows of a linear-attention state, as a tensor on the same memory."""
        return self.memory.tensor(state.address, dtype, (len(self.first), *state.shape[1:]))


def once(states: torch.Tensor, repeat: int) -> torch.Tensor:
    """Every head once of `[rows, heads * repeat, T, D]`, where each head is followed by its repetitions."""
    if repeat <= 1:
        return states
    rows, heads_in_all, tokens, dim = states.shape
    heads = states.reshape(rows, heads_in_all // repeat, repeat, tokens, dim)
    if not bool((heads == heads[:, :, :1]).all()):
        raise Decline(f"the model's cache holds {states.shape[1]} different heads, known are {states.shape[1] // repeat}")
    return heads[:, :, 0]


def dense_heads(states: torch.Tensor) -> torch.Tensor:
    """The same values with a dense last dimension."""
    return states if states.stride(-1) == 1 else states.contiguous()


class FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer during the prefill."""

    def __init__(self, prompt: Prompt, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prompt, self._index, self._tokens = prompt, index, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the prompt over; returns what was given."""
        self._prompt.fill(self._index, key_states, value_states)
        self._tokens += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens given so far, padding included."""
        return self._tokens


class SlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding-window layer during the prefill."""

    def __init__(self, prompt: Prompt, index: int, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._prompt, self._index = prompt, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the prompt over; returns what was given."""
        self._prompt.fill(self._index, key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        return key_states, value_states


def linear_layers_exist() -> bool:
    """Whether transformers' cache has layers for linear attention."""
    return hasattr(cache_utils, "LinearAttentionLayer")


def linear_layer(prompt: Prompt, index: int) -> Any:
    """A linear-attention layer on the native slots."""
    from segki.linear_cache import LinearLayer

    return LinearLayer(prompt.shared, prompt.cache, index)


def divert(cache: DynamicCache, plan: ModelPlan, prompt: Prompt) -> list[Any]:
    """Make an empty cache of transformers write into the native one; returns its own layers."""
    layers: list[Any] = []
    for index, block in enumerate(cached_blocks(plan)):
        if not isinstance(block, AttentionPlan):
            layers.append(linear_layer(prompt, index))
            continue
        own = cache.layers[index] if index < len(cache.layers) else None
        window = getattr(own, "sliding_window", None) if getattr(own, "is_sliding", False) else None
        if window is None and own is None and block.window is not None:
            window = block.window
        layers.append(FullLayer(prompt, index) if window is None else SlidingLayer(prompt, index, window))
    kept: list[Any] = cache.layers
    cache.layers = layers
    return kept


def restore(cache: DynamicCache, prompt: Prompt, lengths: list[int], tokens: int, dtype: torch.dtype) -> None:
    """Turn a diverted cache into an ordinary one of `tokens` positions a row (padding included), copied from the native cache.

    Row r holds `lengths[r]` tokens after its padding; what follows them (a row that stopped before the others) is zero.
    """
    native, rows = prompt.cache, len(prompt.first)
    layers: list[Any] = []
    for index, diverted in enumerate(cache.layers):
        if hasattr(diverted, "detached"):
            layers.append(diverted.detached(tokens))
            continue
        window = diverted.sliding_window if isinstance(diverted, SlidingLayer) else None
        begin = 0 if window is None else max(tokens - window + 1, 0)
        shapes = [part.shape for part in (native.keys(index), native.values(index))]
        parts = [torch.zeros(rows, s[1], tokens - begin, s[3], dtype=dtype) for s in shapes]
        native.gather(index, view(parts[0]), view(parts[1]), lengths, [f - begin for f in prompt.first])
        parts = [part.repeat_interleave(max(prompt.repeats[index], 1), dim=1) for part in parts]
        layer: Any = DynamicSlidingWindowLayer(sliding_window=window) if window is not None else DynamicLayer()  # type: ignore[no-untyped-call]
        layer.update(*parts)
        if window is not None:
            layer.cumulative_length = tokens
        layers.append(layer)
    cache.layers = layers

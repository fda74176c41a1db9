"""Linear-attention layers of transformers' cache on the memory of the native cache: prefill fills and decode advances the same states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import LinearAttentionLayer

from segki import _segki

Shared = Callable[[_segki.View, torch.dtype], torch.Tensor]  # a state's slots of the batch's rows as a tensor
OWN = ("_shared", "_native", "_index")


class LinearLayer(LinearAttentionLayer):
    """A linear-attention layer whose convolution and recurrent states are the native cache's."""

    def __init__(self, shared: Shared, native: _segki.HybridCache, index: int) -> None:
        super().__init__()
        self._shared, self._native, self._index = shared, native, index

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | list[torch.Tensor] | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Take the native slots in place of new buffers, zeroed; shapes must be theirs."""
        if isinstance(recurrent_states, list):  # states to go back to, the last one is the newest
            recurrent_states = recurrent_states[-1]
        if conv_states is not None:
            buffer = self._shared(self._native.conv_state(self._index), conv_states.dtype)
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            if buffer.shape != (*conv_states.shape[:-1], width):
                given = list(conv_states.shape)
                raise RuntimeError(f"cache layer {self._index}: convolution inputs {given}, known are {list(buffer.shape)}")
            vars(self).update(dtype=conv_states.dtype, device=conv_states.device)
            self.conv_kernel_size[state_idx] = width
            self.conv_states[state_idx] = buffer.zero_()
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            buffer = self._shared(self._native.recurrent_state(self._index), torch.float32)
            if buffer.shape != recurrent_states.shape or recurrent_states.dtype != torch.float32:
                raise RuntimeError(
                    f"cache layer {self._index}: a {recurrent_states.dtype} state {list(recurrent_states.shape)}, known is "
                    f"float32 {list(buffer.shape)}"
                )
            self.recurrent_states[state_idx] = buffer.zero_()
            self.is_recurrent_states_initialized[state_idx] = True

    def detached(self, tokens: int) -> LinearAttentionLayer:
        """An ordinary layer of transformers with a copy of the states, after `tokens` positions a row (padding included)."""
        layer = LinearAttentionLayer()
        vars(layer).update({name: value for name, value in vars(self).items() if name not in OWN})
        layer.conv_states = {i: None if state is None else state.clone() for i, state in self.conv_states.items()}
        layer.recurrent_states = {i: None if state is None else state.clone() for i, state in self.recurrent_states.items()}
        if "cumulative_length_linear" in vars(layer):  # since transformers 5.25, before which linear layers count nothing
            layer.cumulative_length_linear = torch.full_like(layer.cumulative_length_linear, tokens)
        return layer

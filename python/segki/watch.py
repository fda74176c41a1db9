"""Noticing that a model is not what it was when it was bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SCALARS = (bool, int, float)
PASSING = {"training", "max_seq_len_cached", "_is_hf_initialized"}  # change in the normal course of a forward


def scalars(module: nn.Module) -> dict[str, Any]:
    """Numbers and flags that a module's forward may read (eps, scaling, window, ...)."""
    return {
        name: value for name, value in vars(module).items() if type(value) in SCALARS and name not in PASSING
    }


class Watch:
    """Structure of a model at one moment: modules, their classes and scalars, and each parameter's dtype, shape, strides and device.

    Addresses and values of weights are not part of it: those may change freely.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self._entries = [
            (module, type(module), scalars(module), set(module._parameters), self._facts(module))
            for module in self.modules
        ]

    @staticmethod
    def _facts(module: nn.Module) -> list[tuple[type, torch.dtype, torch.Size, tuple[int, ...], torch.device] | None]:
        return [
            None if p is None else (type(p), p.dtype, p.shape, p.stride(), p.device) for p in module._parameters.values()
        ]

    def change(self, model: nn.Module) -> str | None:
        """The first difference to `model` as it is now, described; None when there is none."""
        modules = list(model.modules())
        if len(modules) != len(self._entries):
            return f"the module tree has {len(modules)} modules, it had {len(self._entries)}"
        for module, (bound, kind, numbers, names, facts) in zip(modules, self._entries, strict=True):
            if module is not bound or type(module) is not kind:
                return f"a {kind.__name__} has become a {type(module).__name__}"
            if module._parameters.keys() != names or self._facts(module) != facts:
                return f"the parameters of a {kind.__name__} have another type, dtype, shape, layout or device"
            attributes = vars(module)
            for name, value in numbers.items():
                now = attributes.get(name)
                if now is not value and now != value:
                    return f"{kind.__name__}.{name} has become {now}, it was {value}"
        return None

"""Replacing a method of one module instance so that it can be undone, copied and pickled."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn


class Rebound:
    """An instance attribute in place of a method of the module's class.

    A deep copy or an unpickled model carries a `Rebound` without a function: it takes itself away at its first call and the copy
    behaves like a model that was never injected.
    """

    def __init__(
        self, module: nn.Module, name: str, function: Callable[..., Any] | None = None, owner: object = None
    ) -> None:
        self.module = module
        self.name = name
        self.function = function
        self.owner = owner  # whoever installed it; not carried over to copies
        self.previous = module.__dict__.get(name) if function is not None else None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What the module would run without segki; `inspect.signature` follows it."""
        if self.previous is not None:
            return self.previous  # type: ignore[no-any-return]
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            self.remove()
            return getattr(self.module, self.name)(*args, **kwargs)
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rebound, (self.module, self.name))

    def install(self) -> None:
        """Put it in place."""
        self.module.__dict__[self.name] = self

    def remove(self) -> None:
        """Put back what was there before (an instance attribute, else the class's method)."""
        if self.module.__dict__.get(self.name) is self:
            del self.module.__dict__[self.name]
            if self.previous is not None:
                self.module.__dict__[self.name] = self.previous


def clear_copies(model: nn.Module) -> bool:
    """Take away what a copy of an injected model carries; whether there was anything."""
    carried = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Rebound) and value.function is None
    ]
    for value in carried:
        value.remove()
    return bool(carried)

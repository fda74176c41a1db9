"""The methods of generation that the native loop stands in for: a model that brings its own, on its class or itself, keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# What transformers calls between the prompt and the result; the native loop calls none of them once the prompt has run.
REPLACED = (
    "generate",
    "prepare_inputs_for_generation",
    "_sample",
    "_prefill",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
    "_get_initial_cache_position",
)
KNOWN_HOMES = ("transformers", "torch")


def _chain(function: Any) -> Iterator[Any]:
    """A function and what it wraps, from the outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _home(function: Any) -> str:
    """Name of the module that a function's code comes from; `functools.wraps` does not change it."""
    return str(getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", "")))


def foreign_method(model: nn.Module, previous: Callable[..., Any] | None) -> str | None:
    """Why generation of this model is not transformers' own, or None.

    Parameters
    ----------
    model
        A transformers model.
    previous
        The instance attribute `generate` that was there before segki's, if any.
    """
    kind = type(model)
    if previous is not None:
        return "this model's generate is patched"
    for name in REPLACED:
        if name != "generate" and name in vars(model):
            return f"this model's {name} is patched"
        function = getattr(kind, name, None)
        for link in _chain(function):
            home = _home(link)
            if home.partition(".")[0] not in KNOWN_HOMES:
                return f"{kind.__name__}.{name} is not transformers' own (it comes from {home})"
    base = next((base for base in kind.__mro__ if base.__name__ == "GenerationMixin"), None)
    if base is None or kind.generate is not base.generate:  # type: ignore[attr-defined]
        return f"{kind.__name__} has a generate of its own"
    return None

"""Run a module once and keep what went into and came out of each submodule."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MAX_KEPT = 1 << 22  # elements; larger values are kept without a copy

NOISE = 0.25  # of the root mean square of an output

# What a forward of an unknown model may raise on inputs that it does not accept.
FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError, NotImplementedError)


def flat_tensors(value: object) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flat_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flat_tensors(item)


def _keep(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= MAX_KEPT else value.detach()
    if type(value) in (tuple, list):
        return type(value)(_keep(item) for item in value)
    if type(value) is dict:
        return {key: _keep(item) for key, item in value.items()}
    return value


@dataclass
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    order: int = 0
    before_noise: Tensor | None = None

    @property
    def slot(self) -> int | str | None:
        """Where the hidden state stands: an index into `args` or a key of `kwargs`."""
        for index, value in enumerate(self.args):
            if isinstance(value, Tensor) and value.is_floating_point():
                return index
        named = self.kwargs.get("hidden_states")
        if isinstance(named, Tensor):
            return "hidden_states"
        for key, value in self.kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point() and key != "attention_mask":
                return key
        return None

    @property
    def x(self) -> Tensor | None:
        """The hidden state that went in."""
        slot = self.slot
        if slot is None:
            return None
        value = self.args[slot] if isinstance(slot, int) else self.kwargs[slot]
        return value if isinstance(value, Tensor) else None

    @property
    def y(self) -> Tensor | None:
        """The first tensor that came out, as the rest of the model saw it."""
        return next(flat_tensors(self.output), None)

    @property
    def own_y(self) -> Tensor | None:
        """The first tensor that came out, as the module gave it."""
        return self.y if self.before_noise is None else self.before_noise

    def tensor_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of floating tensors among the arguments: (cos, sin) tables."""
        for value in (*self.args, *self.kwargs.values()):
            if is_pair(value):
                yield value[0], value[1]

    def with_input(self, x: Tensor, changed: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same call with another hidden state (and other keyword arguments)."""
        slot = self.slot
        args = tuple(x if index == slot else value for index, value in enumerate(self.args))
        kwargs = {key: x if key == slot else value for key, value in self.kwargs.items()}
        return args, kwargs | dict(changed or {})


def is_pair(value: object) -> bool:
    """Whether a value is a pair of floating tensors of one shape."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(t, Tensor) and t.is_floating_point() for t in value)
        and value[0].shape == value[1].shape
    )


@dataclass
class Trace:
    """Calls in the order in which they began."""

    calls: list[Call] = field(default_factory=list)
    by_name: dict[str, list[Call]] = field(default_factory=dict)

    def under(self, name: str) -> list[Call]:
        """Calls of the submodules of `name`, the module itself excluded."""
        prefix = name + "." if name else ""
        return [call for call in self.calls if call.name.startswith(prefix) and call.name != name]

    def only(self, name: str) -> Call | None:
        """The call of a module that was called exactly once."""
        calls = self.by_name.get(name, [])
        return calls[0] if len(calls) == 1 else None


def _with_noise(output: Any, x: Tensor | None, generator: torch.Generator) -> tuple[Any, Tensor | None]:
    """A hidden state (or a tuple that begins with one) with noise on it, and what it was; (None, None) for other outputs."""
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, Tensor) or x is None or first.shape != x.shape or not first.is_floating_point():
        return None, None
    size = float(first.float().square().mean().sqrt()) or float(x.float().square().mean().sqrt())
    noise = torch.randn(first.shape, generator=generator).to(first.device) * (NOISE * size)
    changed = (first.float() + noise).to(first.dtype)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed, first.detach().clone()


@contextmanager
def recording(
    module: nn.Module, prefix: str = "", noisy: Container[str] = (), generator: torch.Generator | None = None
) -> Iterator[Trace]:
    """Record the calls of all submodules (and of `module` itself, when `prefix` names it) while the context is open.

    The modules named in `noisy` hand on their first output with noise added: two blocks with equal weights, or one whose output is
    zero, can then be told apart by what the rest of the model receives.
    """
    trace = Trace()
    open_calls: list[Call] = []
    handles: list[RemovableHandle] = []

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(name, module, _keep(args), _keep(kwargs), order=len(trace.calls))
            trace.calls.append(call)
            trace.by_name.setdefault(name, []).append(call)
            open_calls.append(call)

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = open_calls.pop()
        changed = None
        if call.name in noisy and generator is not None:
            changed, call.before_noise = _with_noise(output, call.x, generator)
        seen = output if changed is None else changed
        call.output = _keep(tuple(seen.values()) if isinstance(seen, Mapping) else seen)
        return changed

    try:
        for name, child in module.named_modules(prefix=prefix):
            if name and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                handles.append(child.register_forward_pre_hook(before(name), with_kwargs=True))
                handles.append(child.register_forward_hook(after, with_kwargs=True))
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit-equal values of one shape."""
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def find_same(value: Tensor | None, known: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the known value that equals `value` bit for bit; the latest one wins."""
    found = None
    for name, tensor in known:
        if same(value, tensor):
            found = name
    return found

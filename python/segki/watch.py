"""Noticing that a model is not what it was when it was bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (bool, int, float)
SETTINGS = (bool, int, float, str, type(None))
# Change in the normal course of a forward, or say nothing about what an evaluation computes.
PASSING = {"training", "max_seq_len_cached", "_is_hf_initialized", "gradient_checkpointing"}
PASSING_SETTINGS = {
    "architectures",
    "commit_hash",
    "gradient_checkpointing",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
}
COMPARED_BYTES = 1 << 16  # buffers up to this size are compared by value

BufferPlace = tuple[int, str]  # id of the owning module's buffers, name


def scalars(module: nn.Module) -> dict[str, Any]:
    """Numbers and flags that a module's forward may read (eps, scaling, window, ...)."""
    return {
        name: value for name, value in vars(module).items() if type(value) in SCALARS and name not in PASSING
    }


def settings(config: object) -> dict[str, Any]:
    """Values of a configuration that a forward may read; lists and dictionaries of such values are copied."""
    found = {}
    for name, value in vars(config).items():
        if name.lstrip("_") not in PASSING_SETTINGS and not name.endswith("_token_id") and _plain(value):
            found[name] = _copy(value)
    return found


def _plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(_plain, value.values()))
    return type(value) in SETTINGS


def _copy(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


def _same(now: object, then: object) -> bool:
    return now is then or (type(now) is type(then) and now == then)


@dataclass
class Buffer:
    """A buffer as it was: where it lay and, when it is small, its values."""

    place: tuple[Any, ...]
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> Buffer:
        """As it is now."""
        small = tensor.numel() * tensor.element_size() <= COMPARED_BYTES and not tensor.is_meta
        return cls(cls.placed(tensor), tensor.detach().clone() if small else None)

    @staticmethod
    def placed(tensor: Tensor) -> tuple[Any, ...]:
        """Address, version, shape and dtype."""
        version = None if tensor.is_inference() else tensor._version
        return (tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device)

    def same(self, tensor: Tensor) -> bool:
        """Whether a tensor is still this one, or has the same values."""
        place = self.placed(tensor)
        if place == self.place and place[1] is not None:
            return True
        if self.values is None or place[2:] != self.place[2:]:
            return place == self.place
        if not torch.equal(self.values, tensor):
            return False
        self.place = place
        return True


@dataclass
class Entry:
    """One module as it was."""

    module: nn.Module
    kind: type
    forward: Callable[..., Any]
    scalars: dict[str, Any]
    children: list[nn.Module | None]
    parameters: set[str]
    facts: list[Any]
    buffers: dict[str, Buffer]

    def scalars_moved(self) -> bool:
        """Whether any scalar is another one; lists compare identities first, so that a NaN is itself."""
        return list(map(vars(self.module).get, self.scalars)) != list(self.scalars.values())


class Watch:
    """A model at one moment: its modules, their classes, forwards, scalars and buffers, its configurations, and each parameter's dtype,
    shape, strides and device.

    Addresses and values of weights are not part of it: those may change freely.

    Parameters
    ----------
    model
        The model.
    followed
        Buffers that the native step reads where they are, like weights; None: no buffer is watched.
    passing
        (module, attribute) of values that the model's own forward changes; see `settle`.
    """

    def __init__(
        self, model: nn.Module, followed: Collection[BufferPlace] | None = (), passing: Collection[tuple[nn.Module, str]] = ()
    ) -> None:
        self.modules = list(model.modules())
        present = set(self.modules)
        self.passing = {place for place in passing if place[0] in present}
        self._entries = [self._entry(module, followed) for module in self.modules]
        self._configs = [(config, settings(config)) for config in _configs(self.modules)]

    def _entry(self, module: nn.Module, followed: Collection[BufferPlace] | None) -> Entry:
        buffers = {
            name: Buffer.of(tensor)
            for name, tensor in module._buffers.items()
            if followed is not None
            and tensor is not None
            and (id(module._buffers), name) not in followed
            and (module, name) not in self.passing
        }
        numbers = {name: value for name, value in scalars(module).items() if (module, name) not in self.passing}
        kind = type(module)
        children = list(module._modules.values())
        return Entry(module, kind, kind.forward, numbers, children, set(module._parameters), self._facts(module), buffers)

    @staticmethod
    def _facts(module: nn.Module) -> list[tuple[type, torch.dtype, torch.Size, tuple[int, ...], torch.device] | None]:
        parameters = module._parameters
        if not parameters:
            return []
        return [None if p is None else (type(p), p.dtype, p.shape, p.stride(), p.device) for p in parameters.values()]

    def change(self, model: nn.Module) -> str | None:
        """The first difference to `model` as it is now, described; None when there is none."""
        if model is not self.modules[0]:
            return "it is another model"
        for entry in self._entries:
            module, kind = entry.module, entry.kind
            if type(module) is not kind:
                return f"a {kind.__name__} has become a {type(module).__name__}"
            if list(module._modules.values()) != entry.children:
                return f"the modules inside of a {kind.__name__} are others"
            if kind.forward is not entry.forward:
                return f"{kind.__name__}.forward has become another function"
            if module._parameters.keys() != entry.parameters or self._facts(module) != entry.facts:
                return f"the parameters of a {kind.__name__} have another type, dtype, shape, layout or device"
            if entry.scalars_moved():
                name = next(_moved_scalars(entry))
                return f"{kind.__name__}.{name} has become {vars(module).get(name)}, it was {entry.scalars[name]}"
            if entry.buffers and (buffer := next(_moved_buffers(entry), None)) is not None:
                return f"the buffer {buffer} of a {kind.__name__} has other values"
        for config, before in self._configs:
            now = vars(config)
            for name, value in before.items():
                if not _same(now.get(name), value):
                    return f"{type(config).__name__}.{name} has become {now.get(name)}, it was {value}"
        return None

    def settle(self) -> None:
        """Stop watching what is different now: to be called when `change` found nothing and only the model's own forward has run since."""
        for entry in self._entries:
            for name in list(_moved_scalars(entry)) if entry.scalars_moved() else ():
                del entry.scalars[name]
                self.passing.add((entry.module, name))
            for name in list(_moved_buffers(entry)) if entry.buffers else ():
                del entry.buffers[name]
                self.passing.add((entry.module, name))


def _moved_scalars(entry: Entry) -> Iterator[str]:
    attributes = vars(entry.module)
    yield from (name for name, value in entry.scalars.items() if [attributes.get(name)] != [value])


def _moved_buffers(entry: Entry) -> Iterator[str]:
    for name, buffer in entry.buffers.items():
        now = entry.module._buffers.get(name)
        if now is None or not buffer.same(now):
            yield name


def _configs(modules: Collection[nn.Module]) -> list[object]:
    """The configurations that modules hold, and the ones inside of them, each once."""
    found: dict[int, object] = {}
    waiting = [vars(module)["config"] for module in modules if hasattr(vars(module).get("config"), "to_dict")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())

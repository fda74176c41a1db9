"""Reasons not to touch a module: quantised, wrapped, hooked, sharded, on several devices, training with dropout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Hashable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segki.rebind import Rebound

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is `nn.Linear`, transformers' `Conv1D`, or a subclass of `nn.Linear` that is found to compute the same."""
    if type(module) is nn.Linear or is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _public(module) == _LINEAR_ATTRIBUTES and _acts_as_linear(cast(Hashable, type(module)))


def _public(module: nn.Module) -> set[str]:
    return {name for name in vars(module) if not name.startswith("_")}


_LINEAR_ATTRIBUTES = _public(nn.Linear(1, 1, device="meta"))


@functools.lru_cache(maxsize=64)
def _acts_as_linear(kind: Any) -> bool:
    """Compare a small instance of a subclass of `nn.Linear` with the function."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            module = kind(5, 3, bias=True)
            x = torch.randn(4, 5)
            named = [n for n, _ in module.named_parameters()]
            return named == ["weight", "bias"] and torch.allclose(module(x), F.linear(x, *module.parameters()), atol=1e-6)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False


def is_conv1d(module: nn.Module) -> bool:
    """Exactly transformers' `Conv1D` (a linear layer whose weight lies transposed)."""
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and type(module) is utils.Conv1D


def tensor_problem(name: str, tensor: Tensor) -> str | None:
    """Why a parameter cannot be read in place, or None."""
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"{name} is a {type(tensor).__name__}, only plain parameters are known"
    if tensor.is_meta:
        return f"{name} is on the meta device"
    if tensor.dtype not in DTYPES:
        return f"{name} has dtype {tensor.dtype}, known are float32, bfloat16 and float16"
    if not tensor.is_contiguous():
        return f"{name} is not contiguous (strides {tuple(tensor.stride())})"
    return None


def hooked(module: nn.Module) -> bool:
    """Whether a forward would call a hook, those of transformers' own that change no value aside."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    return not all(map(_harmless, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]))


def _harmless(hook: Any) -> bool:
    """Installed by transformers to collect `output_hidden_states`, or to let gradients flow to the embeddings' output in training."""
    home = getattr(hook, "__module__", "")
    if home == "transformers.utils.output_capturing":
        return True
    return home.startswith("transformers.") and getattr(hook, "__qualname__", "").endswith(".<locals>.make_inputs_require_grads")


def _is_own(module: nn.Module, forward: object) -> bool:
    """Whether a forward set on a module is the one that its class gives it anyway (transformers 4 leaves it after recording outputs)."""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def module_problem(name: str, module: nn.Module) -> str | None:
    """Why a module (without its children) may compute something else than its class does, or None."""
    attributes = module.__dict__
    if not (
        module.training or "forward" in attributes or "_hf_hook" in attributes or "parametrizations" in module._modules or hooked(module)
    ):
        return None
    label = name or type(module).__name__
    if "_hf_hook" in vars(module):
        return f"{label} is dispatched by accelerate"
    forward = vars(module).get("forward")
    if isinstance(forward, Rebound) and forward.owner is not None:
        forward = forward.previous  # segki's own; what it stands for counts
    if forward is not None and not _is_own(module, forward):
        return f"{label} has a forward of its own (patched)"
    if hooked(module):
        return f"{label} has forward hooks"
    if "parametrizations" in module._modules:
        return f"{label} is parametrised"
    if module.training:
        for attribute, value in vars(module).items():
            rate = "drop" in attribute or (isinstance(module, nn.modules.dropout._DropoutNd) and attribute == "p")
            if rate and isinstance(value, (int, float)) and value > 0:
                return f"{label} is in training mode with dropout {value}"
    return None


def segment_problem(prefix: str, module: nn.Module, *, mixed: bool = False, skip: Container[str] = ()) -> str | None:
    """First problem of a module and everything below it, one dtype and device included.

    With `mixed`, float32 parameters may stand beside half-precision ones: some models keep gates and routers so, and a plan says
    where that is known. Modules named in `skip` do not count.
    """
    kinds: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, child in module.named_modules(prefix=prefix):
        if name in skip:
            continue
        problem = module_problem(name, child)
        if problem:
            return problem
        for own, parameter in child.named_parameters(prefix=name, recurse=False):
            problem = tensor_problem(own, parameter)
            if problem:
                return problem
            kinds.setdefault((parameter.dtype, parameter.device), own)
    if mixed and len(kinds) == 2 and len({device for _, device in kinds}) == 1:
        kinds = {kind: own for kind, own in kinds.items() if kind[0] != torch.float32}
    if len(kinds) > 1:
        (first, one), (second, two) = list(kinds.items())[:2]
        return f"parameters differ: {one} is {first[0]} on {first[1]}, {two} is {second[0]} on {second[1]}"
    return None

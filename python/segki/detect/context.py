"""What the detectors share while they look at one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from segki.detect.guard import is_linear
from segki.detect.numeric import Unknown, config_numbers, module_numbers
from segki.detect.resolve import resolve
from segki.detect.trace import Call, Trace
from segki.plan import Activation, AttentionPlan, MlpPlan, MoePlan, NormPlan, ParamRef

IGNORED_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_number", "training", "block_idx"})


@dataclass
class Context:
    """A model, the trace of its forward and what is already known about its parts."""

    model: nn.Module
    trace: Trace
    dtype: torch.dtype
    device: torch.device
    config: Any
    generator: torch.Generator
    ids: Tensor
    norms: dict[Any, NormPlan | None] = field(default_factory=dict)
    mlps: dict[str, MlpPlan | str] = field(default_factory=dict)
    attentions: dict[Any, tuple[str, AttentionPlan]] = field(default_factory=dict)
    moes: dict[str, MoePlan | str] = field(default_factory=dict)
    moe_kinds: dict[Any, tuple[str, MoePlan | str]] = field(default_factory=dict)
    confirmed: dict[Any, list[Activation]] = field(default_factory=dict)
    factors: dict[tuple[str, str], Tensor] | None = None  # see `segki.detect.scales`
    _numbers: list[tuple[str, float]] | None = None

    @property
    def trace_tokens(self) -> int:
        """Length of the traced prompt."""
        return int(self.ids.shape[1])

    @property
    def half(self) -> torch.dtype:
        """The dtype in which rounding is probed."""
        return self.dtype if self.dtype != torch.float32 else torch.bfloat16

    def numbers(self, *modules: nn.Module) -> list[tuple[str, float]]:
        """Named numbers of the given modules, then of the configuration."""
        if self._numbers is None:
            self._numbers = config_numbers(self.config)
        own = [pair for module in modules for pair in module_numbers(module)]
        return own + self._numbers

    def mlp(self, call: Call, detector: Callable[[Context, Call], MlpPlan]) -> MlpPlan | str:
        """The plan of an MLP, or why it is not known; found once for each module."""
        if call.name not in self.mlps:
            try:
                self.mlps[call.name] = detector(self, call)
            except Unknown as error:
                self.mlps[call.name] = str(error)
        return self.mlps[call.name]

    def randn(self, *shape: int) -> Tensor:
        """fp32 normal values from the detector's own generator."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def lookup(self, overrides: Mapping[str, Tensor] | None = None) -> Callable[[ParamRef], Tensor]:
        """A parameter lookup, with some parameters (whole names) replaced."""

        def find(ref: ParamRef) -> Tensor:
            if overrides is not None and ref.name in overrides:
                tensor = overrides[ref.name]
                return tensor if ref.rows is None else tensor[ref.rows[0] : ref.rows[1]]
            return resolve(self.model, ref)

        return find


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of one structure: classes, shapes and plain attributes, layer numbers left out."""
    attributes = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if name not in IGNORED_ATTRIBUTES and isinstance(value, (bool, int, float, str, type(None)))
    )
    tensors = tuple(
        (n, tuple(p.shape), p.dtype) for n, p in (*module._parameters.items(), *module._buffers.items()) if p is not None
    )
    children = tuple((name, signature(child)) for name, child in module._modules.items() if child is not None)
    return (type(module), attributes, tensors, children)


def has_linear(module: nn.Module) -> bool:
    """Whether a linear layer (or a subclass or stand-in of one) lies in a module."""
    return any(is_linear(m) or isinstance(m, nn.Linear) for m in module.modules())


def is_container(module: nn.Module) -> bool:
    """Whether children hold linear layers of their own while the module itself holds none."""
    children = [m for m in module.children() if has_linear(m)]
    return bool(children) and not any(is_linear(m) for m in children)


def perturbed(ctx: Context, module: nn.Module, dtype: torch.dtype, *, gain: float = 1.0, matrices: bool) -> dict[str, Tensor]:
    """Stand-ins for parameters of a module, by local name.

    One-dimensional parameters get noise (ones and zeros hide what they do) and a gain. With `matrices`, the others are converted to
    `dtype` where it differs, and constant ones are replaced by random values; without, they stay the model's own.
    """
    result: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = parameter.detach()
        if value.dim() <= 1 or not has_linear(module):
            noise = 0.25 * ctx.randn(*value.shape)
            result[name] = ((value.float() + noise) * gain).to(dtype)
        elif matrices:
            least, most = value.aminmax()
            if bool(least == most):
                result[name] = (ctx.randn(*value.shape) * value.shape[-1] ** -0.5).to(dtype)
            elif value.dtype != dtype:
                result[name] = value.to(dtype)
    return result

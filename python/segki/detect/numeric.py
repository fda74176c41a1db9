"""Comparing values, and finding the exact scalar that a model multiplies with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Unknown(Exception):
    """A piece of the model computes something that no plan expresses; the message says what."""


TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 4e-2}
SCALAR_TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def max_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest wanted value; infinite when shapes differ or a value is not finite.

    Values that are zero throughout agree only with zeros.
    """
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.float().abs().max())
    if scale == 0:
        return math.inf if bool(got.any()) else 0.0
    return float((got.float() - want.float()).abs().max()) / scale


def mean_error(got: Tensor, want: Tensor) -> float:
    """Mean absolute difference over the mean wanted value."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    scale = float(want.float().abs().mean())
    return float((got.float() - want.float()).abs().mean()) / scale if scale > 0 else math.inf


def equal_share(got: Tensor, want: Tensor) -> float:
    """Share of the elements that agree bit for bit."""
    return float((got == want).float().mean())


def _numbers(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    for name, value in values:
        if isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            yield name, value
        elif isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1 and not value.is_meta:
            yield name, float(value)
        elif isinstance(value, Mapping):
            yield from _numbers((str(key), item) for key, item in value.items())


def module_numbers(module: nn.Module) -> list[tuple[str, float]]:
    """(name, value) of the numeric attributes and one-element buffers of a module itself."""
    return [*_numbers(vars(module).items()), *_numbers((n, b) for n, b in module._buffers.items() if b is not None)]


def config_numbers(config: object) -> list[tuple[str, float]]:
    """(name, value) of the numbers in a configuration, nested mappings included."""
    return list(_numbers(vars(config).items())) if config is not None else []


def snap(
    estimate: float,
    numbers: Iterable[tuple[str, float]],
    dtype: torch.dtype,
    noise: float = 0.0,
    depths: Iterable[tuple[str, float]] = (),
) -> list[float]:
    """Exact scalars that an estimate may stand for, best first: 1, a known number, its inverse, root or inverse root.

    Of `depths` also what is left beside an inverse root, `sqrt((n - 1) / n)`; it comes so near 1 that both are given.
    """
    tolerance = max(SCALAR_TOLERANCE[dtype], noise)
    one = [1.0] if abs(estimate - 1.0) < tolerance else []
    forms: list[tuple[int, float]] = []
    if not one:
        for _, value in numbers:
            if value > 0:
                forms += enumerate((value, 1.0 / value, math.sqrt(value), value**-0.5))
    forms += [(4, math.sqrt((value - 1) / value)) for _, value in depths if value > 1]
    found: list[tuple[int, float, float]] = []
    for rank, exact in forms:
        error = abs(exact - estimate)
        if exact != 1.0 and error <= tolerance * abs(estimate):
            found.append((rank, error, exact))
    return one + list(dict.fromkeys(exact for _, _, exact in sorted(found)))


def fit(target: Tensor, terms: list[Tensor]) -> tuple[list[float], float]:
    """Least-squares coefficients of `terms` for `target` and the relative size of what is left."""
    basis = torch.stack([term.double().flatten() for term in terms], 1)
    goal = target.double().flatten()
    gram = basis.T @ basis
    scale = gram.diagonal().sqrt().clamp(min=1e-30)
    normal = gram / scale[:, None] / scale[None]
    solution, info = torch.linalg.solve_ex(normal, (basis.T @ goal) / scale)
    if int(info) != 0:
        return [], math.inf
    coefficients = solution / scale
    norm = float(goal.norm())
    rest = float((basis @ coefficients - goal).norm())
    return [float(c) for c in coefficients], rest / norm if norm > 0 else math.inf

"""Factors of the queries that a model computes from positions and hands to its attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from segki import reference
from segki.detect.context import Context
from segki.detect.numeric import Unknown, max_error
from segki.detect.trace import FORWARD_ERRORS, Call
from segki.plan import PositionScale

FARTHEST = 1e6  # a position of the probe
EXACT = 1e-6  # of the factor: some roundings of fp32
WHOLE = 1e-3  # how near a period must come to a whole number


def factor_name(call: Call) -> str | None:
    """The keyword of a block that brings one floating number a token, `[..., T, ...]` with every other dimension 1; None if it has none."""
    tokens = 0 if call.x is None or call.x.dim() != 3 else call.x.shape[1]
    for name, value in call.kwargs.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or name == call.slot or "mask" in name:
            continue
        if value.numel() == tokens > 1 and tokens in value.shape:
            return name
    return None


def factor_key(call: Call) -> tuple[Any, ...]:
    """Equal for blocks that are given the same factors in the model's own pass."""
    name = factor_name(call)
    return () if name is None else (name, *call.kwargs[name].flatten().tolist())


def given_scale(ctx: Context, call: Call) -> PositionScale:
    """The rule of the factors that a block is given, from what the model computes for positions far apart.

    Raises
    ------
    Unknown
        If they follow no known rule.
    """
    name = factor_name(call)
    assert name is not None
    near = torch.arange(ctx.trace_tokens)
    far = (torch.logspace(0, math.log10(FARTHEST), ctx.trace_tokens, dtype=torch.float64) - 1).round().long()
    positions = torch.cat((near, far))
    values = torch.cat((call.kwargs[name].flatten().float().cpu(), _far_factors(ctx, far)[call.name, name]))
    for offset in (0, 1):
        plan = _power(positions, values, offset)
        if plan is not None and max_error(reference.position_scale(plan, positions), values) < EXACT:
            return plan
    raise Unknown(f"{call.name}: {name} scales queries by position in a way that is not known")


def _power(positions: Tensor, values: Tensor, offset: int) -> PositionScale | None:
    """`(1 + (position + offset) / period) ** beta` through two of the values."""
    logs = values.double().log().tolist()
    at = (positions.double() + offset).tolist()
    last = len(at) - 1
    middle = last - len(at) // 6
    if not logs[last] or not at[middle] < at[last]:
        return None
    wanted = logs[middle] / logs[last]

    def ratio(period: float) -> float:
        return math.log1p(at[middle] / period) / math.log1p(at[last] / period)

    low, high = 1.0, 1e3 * FARTHEST  # the longer the period, the smaller the ratio
    if not ratio(high) < wanted < ratio(low):
        return None
    for _ in range(100):
        period = math.sqrt(low * high)
        low, high = (period, high) if ratio(period) > wanted else (low, period)
    period = round(low)
    if abs(period - low) > WHOLE * low:
        return None
    beta = logs[last] / math.log1p(at[last] / period)
    return PositionScale(float(f"{beta:.4g}"), period, "power", offset)


def _far_factors(ctx: Context, positions: Tensor) -> dict[tuple[str, str], Tensor]:
    """What each block is given by a pass of the whole model over tokens at these positions; (block, keyword): fp32 `[T]`."""
    if ctx.factors is None:
        if "position_ids" not in inspect.signature(type(ctx.model).forward).parameters:
            raise Unknown(f"model: {type(ctx.model).__name__} takes no positions, but scales queries by them")
        ctx.factors = {}
        with _noted(ctx, ctx.factors):
            try:
                ctx.model(input_ids=ctx.ids, position_ids=positions[None].to(ctx.device), use_cache=False)
            except FORWARD_ERRORS as error:
                raise Unknown(f"the forward failed on far positions: {type(error).__name__}: {error}") from error
    return ctx.factors


@contextmanager
def _noted(ctx: Context, factors: dict[tuple[str, str], Tensor]) -> Iterator[None]:
    """While open, blocks note the factors that they are given."""

    def note(block: str, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            factors[block, name] = kwargs[name].detach().flatten().float().cpu()

        return hook

    handles = []
    try:
        for call in ctx.trace.calls:
            name = factor_name(call)
            if name is not None:
                handles.append(call.module.register_forward_pre_hook(note(call.name, name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()

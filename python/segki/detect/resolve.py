"""From the names in a plan back to the tensors of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from segki.detect.trace import FORWARD_ERRORS
from segki.plan import ParamRef, RopePlan


def resolve(model: nn.Module, ref: ParamRef) -> Tensor:
    """Live view of a parameter or buffer (or of a range of its first dimension); nothing is copied.

    Raises
    ------
    ValueError
        If the model has no such parameter or buffer, or fewer rows than the reference names.
    """
    owner_name, _, name = ref.name.rpartition(".")
    try:
        owner = model.get_submodule(owner_name)
    except AttributeError as error:
        raise ValueError(f"ref: {ref.name!r} is not a parameter or buffer of {type(model).__name__}") from error
    tensor: Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    if tensor is None:
        raise ValueError(f"ref: {ref.name!r} is not a parameter or buffer of {type(model).__name__}")
    if ref.rows is None:
        return tensor.detach()
    start, stop = ref.rows
    if not 0 <= start < stop <= tensor.shape[0]:
        raise ValueError(f"ref: rows {start}..{stop} of {ref.name!r}, which has {tensor.shape[0]}")
    return tensor.detach()[start:stop]


def split_table(first: Tensor, second: Tensor, head_dim: int | None = None) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) `[P, R / 2]` from what a rotary module gives for positions 0..P-1 (`[P, n]` each, P >= 2); None if it is none.

    The row of position 0 tells cos from sin. `n` is `R` when the values are doubled (half after half, or pairwise), else `R / 2`.
    """
    if first.shape != second.shape or first.dim() != 2 or first.is_complex():
        return None
    if bool((first[0] == 0).all()):
        first, second = second, first
    if not bool((second[0] == 0).all()):
        return None
    width = first.shape[-1]
    half = width // 2
    if width % 2 == 0:
        if all(torch.equal(t[:, :half], t[:, half:]) for t in (first, second)):
            return first[:, :half], second[:, :half]
        if all(torch.equal(t[:, 0::2], t[:, 1::2]) for t in (first, second)):
            return first[:, 0::2], second[:, 0::2]
    if head_dim is not None and 2 * width > head_dim:
        return None
    return first, second


def text_parameter(model: nn.Module) -> Tensor:
    """The parameter that says which dtype and device text is computed in: the embedding's weight, else the first one."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    weight = getattr(embedding, "weight", None)
    return weight if isinstance(weight, nn.Parameter) else next(model.parameters())


def _rotary_values(model: nn.Module, rope: RopePlan, rows: int) -> tuple[Tensor, Tensor]:
    """What the rotary module gives for positions 0..rows-1, `[rows, n]` each.

    Multimodal modules may insist on three positions a token, `[3, 1, rows]`; those of text are all alike.
    """
    module, first = model.get_submodule(rope.source), text_parameter(model)
    x = torch.zeros(1, 1, rope.rotary_dim, dtype=first.dtype, device=first.device)
    ids = torch.arange(rows, device=first.device)
    extra = () if rope.layer_type is None else (rope.layer_type,)
    problem = "tables of another shape"
    for shape in ((1, rows), (3, 1, rows)):
        try:
            out = module(x, ids.expand(shape), *extra)
            values = [t.reshape(-1, rows, t.shape[-1]) for t in out]
        except FORWARD_ERRORS as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if len(values) == 2 and all(torch.equal(t, t[:1].expand_as(t)) for t in values):
            return values[0][0], values[1][0]
    raise ValueError(f"rope: {rope.source!r} gives no table for {rows} positions ({problem})")


@torch.no_grad()
def rope_table(model: nn.Module, rope: RopePlan, positions: int) -> tuple[Tensor, Tensor]:
    """The (cos, sin) that the model's forward multiplies with, for positions 0 to `positions` - 1.

    Returns
    -------
    fp32 `[positions, rotary_dim / 2]` each, on the CPU, rounded to the model's dtype where the model does so; attention scaling
    and the sign of sin are included.

    Raises
    ------
    ValueError
        If `positions` is not in 1..`rope.max_positions` or the model has no such table.
    """
    if positions < 1 or (rope.max_positions is not None and positions > rope.max_positions):
        limit = "" if rope.max_positions is None else f" and at most {rope.max_positions}"
        raise ValueError(f"positions: got {positions}, must be at least 1{limit}")
    rows = max(positions, 2)
    if rope.source_kind == "sincos_buffer":
        owner, _, name = rope.source.rpartition(".")
        buffer = getattr(model.get_submodule(owner), name)
        if positions > buffer.shape[0]:
            raise ValueError(f"positions: got {positions}, the table {rope.source!r} has {buffer.shape[0]}")
        sin, cos = buffer[:rows].chunk(2, -1)
        halves = split_table(cos, sin)
    else:
        halves = split_table(*_rotary_values(model, rope, rows))
    if halves is None or halves[0].shape[-1] * 2 != rope.rotary_dim:
        raise ValueError(f"rope: {rope.source!r} gives no table of {rope.rotary_dim} rotary dimensions")
    cos, sin = (t[:positions].float().cpu().contiguous() for t in halves)
    return cos, -sin if rope.negate_sin else sin


def renamed(value: Any, old: str, new: str, module: str | None = None) -> Any:
    """A plan in which every name that begins with `old` begins with `new`; `module` sets the outermost plan's own."""
    if isinstance(value, str):
        return new + value[len(old) :] if value.startswith(old) else value
    if isinstance(value, tuple):
        return tuple(renamed(item, old, new) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: renamed(getattr(value, f.name), old, new) for f in dataclasses.fields(value)}
        if module is not None:
            changed["module"] = module
        return dataclasses.replace(value, **changed)
    return value

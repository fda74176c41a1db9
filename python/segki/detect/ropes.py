"""Rotary embeddings: the tables that a model hands to its attention, and how they may be applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from segki.detect.context import Context
from segki.detect.resolve import split_table
from segki.detect.trace import Call, is_pair, same
from segki.plan import RopeKind, RopePlan

KINDS: tuple[tuple[RopeKind, bool], ...] = (("neox", False), ("interleaved", False), ("neox", True), ("interleaved", True))


@dataclass
class RopeChoice:
    """A candidate rope and the pair of tables that it uses."""

    plan: RopePlan | None
    pair: int = 0
    fixed: tuple[Tensor, Tensor] | None = None  # whole tables that the block owns

    def tables(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) `[T, R / 2]` for the tokens of a run, with the sign that the plan asks for."""
        if self.plan is None:
            return None
        first, second = pairs[self.pair] if self.fixed is None else self.fixed
        halves = split_table(first.reshape(-1, first.shape[-1]), second.reshape(-1, second.shape[-1]))
        if halves is None:
            return None
        cos, sin = halves
        return cos, -sin if self.plan.negate_sin else sin


def rope_choices(ctx: Context, call: Call, pairs: list[tuple[Tensor, Tensor]], dim: int) -> Iterator[RopeChoice]:
    """Ropes to try for heads of `dim` elements, then none."""
    real = real_pairs(ctx, call)
    for index, (first, second) in enumerate(pairs):
        if index >= len(real):
            break
        halves = split_table(first.reshape(-1, first.shape[-1]), second.reshape(-1, second.shape[-1]), dim)
        source = rope_source(ctx, real[index])
        if halves is None or source is None or 2 * halves[0].shape[-1] > dim:
            continue
        name, layer_type = source
        width = 2 * halves[0].shape[-1]
        limit = table_limit(ctx, ctx.model.get_submodule(name), layer_type)
        for kind, negated in KINDS:
            yield RopeChoice(RopePlan(kind, width, name, "module", layer_type, True, limit, negated), index)
    for name, table in own_tables(ctx, call, dim):
        cos_sin = (table[: ctx.trace_tokens, table.shape[1] // 2 :], table[: ctx.trace_tokens, : table.shape[1] // 2])
        for kind, negated in KINDS:
            plan = RopePlan(kind, table.shape[1], name, "sincos_buffer", None, True, table.shape[0], negated)
            yield RopeChoice(plan, fixed=(cos_sin[0].float(), cos_sin[1].float()))
    yield RopeChoice(None)


def own_tables(ctx: Context, call: Call, dim: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the tables `[P, R]`, sin then cos, that a block holds as a buffer or a plain attribute."""
    module = call.module
    held = {**{n: v for n, v in vars(module).items() if isinstance(v, Tensor)}, **dict(module.named_buffers(recurse=False))}
    for name, table in held.items():
        if table.dim() != 2 or not table.is_floating_point() or table.shape[0] < ctx.trace_tokens or table.shape[1] > dim:
            continue
        half = table.shape[1] // 2
        if table.shape[1] == 2 * half > 0 and bool((table[0, :half] == 0).all()) and not bool((table[0, half:] == 0).any()):
            yield f"{call.name}.{name}", table


def real_pairs(ctx: Context, call: Call) -> list[tuple[Tensor, Tensor]]:
    """The pairs of tables that the block was given, or made inside, in the model's own pass."""
    pairs = list(call.tensor_pairs())
    if pairs:
        return pairs
    return [(c.output[0], c.output[1]) for c in ctx.trace.under(call.name) if is_pair(c.output) and not has_parameters(c.module)]


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has any parameter."""
    return next(module.parameters(), None) is not None


def rope_source(ctx: Context, pair: tuple[Tensor, Tensor]) -> tuple[str, str | None] | None:
    """(name, layer type) of the rotary module whose output a pair of tables is."""
    for call in ctx.trace.calls:
        if (
            is_pair(call.output)
            and same(call.output[0], pair[0])
            and same(call.output[1], pair[1])
            and not has_parameters(call.module)
        ):
            kinds = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, str)]
            return call.name, kinds[0] if kinds else None
    return None


def _rope_type(module: nn.Module, layer_type: str | None) -> Any:
    kind = getattr(module, "rope_type", None)
    return kind.get(layer_type) if isinstance(kind, dict) else kind


def table_limit(ctx: Context, module: nn.Module, layer_type: str | None) -> int | None:
    """Positions up to which a rotary module's table stays the same: dynamic and long rope change it past the original length."""
    kind = _rope_type(module, layer_type)
    if not isinstance(kind, str) or not ("dynamic" in kind or "longrope" in kind):
        return None
    numbers = ctx.numbers(module)
    for wanted in ("original_max_position_embeddings", "original_max_seq_len", "max_position_embeddings"):
        values = [int(v) for n, v in numbers if n == wanted]
        if values:
            return min(values)
    return 1

"""Where query, key, value and gate heads may lie in the outputs of an attention block's projections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from segki.plan import HeadView

HINTS = {"q": 0, "k": 1, "v": 2, "g": 3}  # first letters of projection names: an order of trying, never a decision


@dataclass(frozen=True)
class Layout:
    """One candidate; `HeadView.source` counts the projections as they were given."""

    q: HeadView
    k: HeadView
    v: HeadView
    gate: HeadView | None
    q_heads: int
    kv_heads: int


def layouts(names: Sequence[str], widths: Sequence[int], mixed: int, dim: int) -> Iterator[Layout]:
    """Every layout that the shapes allow, the likely ones first.

    Parameters
    ----------
    names, widths
        Child names and output widths of the projections.
    mixed
        Width of the output projection's input, `Hq * D`.
    dim
        Head size `D`.
    """
    if mixed % dim:
        return
    q_heads = mixed // dim
    if len(widths) == 1:
        yield from _one(widths[0], q_heads, dim)
    elif len(widths) == 2:
        yield from _two(widths, q_heads, dim)
    elif len(widths) in (3, 4):
        yield from _separate(names, widths, q_heads, dim)


def _one(width: int, q_heads: int, dim: int) -> Iterator[Layout]:
    total = width // dim
    if width % dim or (total - q_heads) % 2 or total <= q_heads:
        return
    kv_heads = (total - q_heads) // 2
    if q_heads % kv_heads:
        return
    group = q_heads // kv_heads
    keys, values = q_heads * dim, (q_heads + kv_heads) * dim
    yield Layout(
        HeadView(0, 0, group * dim, dim), HeadView(0, keys, dim, dim), HeadView(0, values, dim, dim), None, q_heads, kv_heads
    )
    if kv_heads > 1:
        stride = (group + 2) * dim
        yield Layout(
            HeadView(0, 0, stride, dim),
            HeadView(0, group * dim, stride, dim),
            HeadView(0, (group + 1) * dim, stride, dim),
            None,
            q_heads,
            kv_heads,
        )


def _two(widths: Sequence[int], q_heads: int, dim: int) -> Iterator[Layout]:
    for qi, kvi in ((0, 1), (1, 0)):
        if widths[qi] != q_heads * dim or widths[kvi] % (2 * dim):
            continue
        kv_heads = widths[kvi] // (2 * dim)
        if q_heads % kv_heads:
            continue
        q = HeadView(qi, 0, q_heads // kv_heads * dim, dim)
        yield Layout(q, HeadView(kvi, 0, dim, dim), HeadView(kvi, kv_heads * dim, dim, dim), None, q_heads, kv_heads)
        if kv_heads > 1:
            yield Layout(q, HeadView(kvi, 0, 2 * dim, dim), HeadView(kvi, dim, 2 * dim, dim), None, q_heads, kv_heads)


def _separate(names: Sequence[str], widths: Sequence[int], q_heads: int, dim: int) -> Iterator[Layout]:
    hints = [HINTS.get(name[:1], 4) for name in names]
    orders = sorted(itertools.permutations(range(len(names))), key=lambda order: [hints[i] for i in order])
    for order in orders:
        qi, ki, vi = order[:3]
        kv_heads = widths[ki] // dim
        if widths[ki] != widths[vi] or widths[ki] % dim or kv_heads == 0 or q_heads % kv_heads:
            continue
        group = q_heads // kv_heads
        k, v = HeadView(ki, 0, dim, dim), HeadView(vi, 0, dim, dim)
        plain = HeadView(qi, 0, group * dim, dim)
        if len(order) == 4:
            if widths[qi] == q_heads * dim == widths[order[3]]:
                yield Layout(plain, k, v, HeadView(order[3], 0, group * dim, dim), q_heads, kv_heads)
        elif widths[qi] == q_heads * dim:
            yield Layout(plain, k, v, None, q_heads, kv_heads)
        elif widths[qi] == 2 * q_heads * dim:
            pair = 2 * dim
            yield Layout(HeadView(qi, 0, group * pair, pair), k, v, HeadView(qi, dim, group * pair, pair), q_heads, kv_heads)
            yield Layout(plain, k, v, HeadView(qi, q_heads * dim, group * dim, dim), q_heads, kv_heads)

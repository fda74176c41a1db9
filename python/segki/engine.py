"""The native step of one model: cache, programs and the check that they still read the model's live weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from segki import _segki
from segki.detect import resolve, rope_table
from segki.detect.run import preserved
from segki.native import DTYPES, MAX_ROWS, TorchMemory, plain_tensors, view
from segki.plan import ModelPlan, ParamRef, RopePlan
from segki.program import Step, StepBuilder, StepState, cache_layers

KEPT_STEPS = 4  # batch sizes whose program and buffers are kept; one more takes the place of the least recently used
HUGE_PAGE = 2 << 20  # bytes, about; weights nearer to each other than this are taken together
GRANULE = 256  # cache lengths are multiples of this, so that a slightly longer request does not reallocate


@dataclass(frozen=True)
class BoundWeight:
    """Where a parameter lay when the programs were built."""

    holder: dict[str, torch.Tensor | None]  # the owning module's parameters or buffers
    name: str
    address: int
    size: int  # bytes


@dataclass(frozen=True)
class StopSpec:
    """Stop rule of one request; ids are vocabulary ids, counts are new tokens a row."""

    max_new_tokens: int
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    pad: int = 0
    check_every: int = 16


class Engine:
    """Owns everything native that belongs to one model. Not thread-safe: one generation at a time."""

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        self.model = model
        self.plan = plan
        self.backend = _segki.backend("cpu")
        self.memory = TorchMemory()
        self.cache: _segki.HybridCache | None = None
        self._steps: dict[int, Step] = {}
        self._weights: list[BoundWeight] = []
        self.dtype = resolve(model, plan.embedding.weight).dtype
        self.bind()

    @property
    def max_positions(self) -> int | None:
        """Longest row (prompt and new tokens) that the step can run; None is unlimited."""
        limits = [self.plan.max_positions]
        for layer in self.plan.layers:
            limits += [n.attention.rope.max_positions for n in layer.nodes if n.attention and n.attention.rope]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    def bind(self) -> None:
        """Note where every weight lies; programs are built again at their next use."""
        self._steps.clear()
        self._weights = []
        for ref in parameter_refs(self.plan):
            owner, _, name = ref.name.rpartition(".")
            module = self.model.get_submodule(owner)
            holder: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            tensor = holder.get(name)
            if tensor is not None:
                self._weights.append(BoundWeight(holder, name, tensor.data_ptr(), tensor.nbytes))

    @property
    def followed_buffers(self) -> set[tuple[int, str]]:
        """(id of the module's dictionary, name) of everything that is read where it is at each step."""
        return {(id(bound.holder), bound.name) for bound in self._weights}

    def follow_weights(self) -> None:
        """Build the programs again if a weight lies elsewhere than when they were built; in-place updates need nothing."""
        for bound in self._weights:
            tensor = bound.holder.get(bound.name)
            if tensor is None or tensor.data_ptr() != bound.address:
                return self.bind()

    def use_huge_pages(self) -> int:
        """Have the kernel keep the weights in huge pages, where they are; returns the bytes that lie in them then.

        Nothing happens to weights of a model smaller than a huge page, to memory-mapped files, and with `SEGKI_HUGE_PAGES=0` in the
        environment.
        """
        if os.environ.get("SEGKI_HUGE_PAGES") == "0":
            return 0
        regions: list[list[int]] = []
        for begin, size in sorted({(bound.address, bound.size) for bound in self._weights}):
            if regions and begin - regions[-1][1] < HUGE_PAGE:
                regions[-1][1] = max(regions[-1][1], begin + size)
            else:
                regions.append([begin, begin + size])
        return sum(_segki.use_huge_pages(begin, end - begin) for begin, end in regions if end - begin >= HUGE_PAGE)

    def step(self, rows: int, tokens: int) -> Step:
        """A step of `rows` rows with room for `tokens` tokens a row (prompt and new); cache and programs are kept between calls.

        Raises
        ------
        ValueError
            If `rows` is not in 1..64 or `tokens` is over `max_positions`.
        MemoryError
            If the cache does not fit into memory.
        """
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"rows: given {rows}, accepted 1 to {MAX_ROWS}")
        limit = self.max_positions
        if limit is not None and tokens > limit:
            raise ValueError(f"tokens: given {tokens} a row, accepted up to {limit} (positions of this model)")
        with plain_tensors():  # what is made here serves later calls, too
            if self.cache is None or self.cache.rows < rows or self.cache.max_len < tokens:
                self._grow(rows, tokens)
            step = self._steps.pop(rows, None) or self._build(rows)
        while len(self._steps) >= KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[rows] = step  # the last one is the most recently used
        return step

    def _grow(self, rows: int, tokens: int) -> None:
        if self.cache is not None:
            both = max(rows, self.cache.rows), max(tokens, self.cache.max_len)
            if both[0] * both[1] <= 2 * max(rows * tokens, self.cache.rows * self.cache.max_len):
                rows, tokens = both  # else one long row and many short ones in turn would take the product of both
        self.release()
        length = (tokens + GRANULE - 1) // GRANULE * GRANULE
        if self.max_positions is not None:
            length = min(length, self.max_positions)
        layers = cache_layers(self.plan, DTYPES[self.dtype])
        self.cache = _segki.HybridCache(rows, length, layers, self.memory.allocate, self.memory.release)

    def _build(self, rows: int) -> Step:
        assert self.cache is not None
        state = StepState.allocate(rows, self.cache.max_len, self.plan.vocab_size)
        builder = StepBuilder(
            self.plan,
            lambda ref: resolve(self.model, ref),
            self._rope_table,
            self.cache,
            state,
            self.dtype,
            self.backend,
        )
        return builder.build()

    def _rope_table(self, rope: RopePlan, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        with preserved(self.model):
            return rope_table(self.model, rope, positions)

    def release(self) -> None:
        """Give cache, programs and buffers back to torch's allocator; the next use makes them anew."""
        self._steps.clear()
        if self.cache is not None:
            self.cache.release()
            self.cache = None


class Decode:
    """One decode on a step: start from the prompt's last logits, then run until every row has stopped.

    Parameters
    ----------
    step
        From `Engine.step`; its cache slots hold the prompts.
    lengths
        i32 `[rows]`: tokens of each row that are in the cache (without padding).
    forced
        i64 `[rows, T]` or None: take these tokens instead of choosing (teacher forcing).
    positions
        `[rows]`: rotary position of each row's first new token; None: `lengths`.
    advance_finished
        Stopped rows go on with pad tokens, as in transformers; else their state stands still.
    """

    def __init__(
        self,
        engine: Engine,
        step: Step,
        lengths: torch.Tensor,
        rule: StopSpec,
        with_log_prob: bool = False,
        forced: torch.Tensor | None = None,
        advance_finished: bool = False,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.state = step.state
        state = step.state
        state.lengths.copy_(lengths)
        state.positions.copy_(lengths if positions is None else positions)
        state.lengths.sub_(1)  # choosing the first token advances them: the last prompt token counts as the step's input
        state.positions.sub_(1)
        for tensor in (state.generated, state.finished, state.frozen, state.history):
            tensor.zero_()
        self._eos = torch.tensor(rule.eos, dtype=torch.int64)
        self._forced = forced
        args = _segki.SelectTokenArgs()
        for name in ("logits", "next", "lengths", "positions", "generated", "finished", "frozen", "history"):
            setattr(args, name, view(getattr(state, name)))
        if with_log_prob:
            args.log_prob = view(state.log_prob)
        if len(rule.eos) > 0:
            args.eos = view(self._eos)
        if forced is not None:
            args.forced = view(forced)
        args.pad, args.min_new_tokens, args.max_new_tokens = rule.pad, rule.min_new_tokens, rule.max_new_tokens
        args.advance_finished = int(advance_finished)
        chooser = _segki.StepProgramBuilder(engine.backend)
        chooser.add(args)
        self._choose = chooser.finish()
        native_rule = _segki.StopRule()
        native_rule.eos = list(rule.eos)
        native_rule.min_new_tokens = rule.min_new_tokens
        native_rule.max_new_tokens = rule.max_new_tokens
        native_rule.pad = rule.pad
        native_rule.check_every = rule.check_every
        self._loop = _segki.DecodeLoop(step.program, self._choose, state.native(with_log_prob), native_rule)

    def first(self, logits: torch.Tensor) -> None:
        """Choose the first token from the prompt's last logits, f32 `[rows, V]`."""
        self.state.logits.copy_(logits)
        self._choose.run()

    def run(self, on_tokens: object = None) -> _segki.DecodeResult:
        """Run to the end. `on_tokens(begin, count)` is told of new columns of `state.history`; it returns False to end the loop."""
        return self._loop.run(1, on_tokens)


def parameter_refs(plan: object) -> list[ParamRef]:
    """Every `ParamRef` in a plan, once, in order of appearance."""
    found: dict[ParamRef, None] = {}

    def walk(value: object) -> None:
        if isinstance(value, ParamRef):
            found[value] = None
        elif isinstance(value, tuple):
            for item in value:
                walk(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                walk(getattr(value, name))

    walk(plan)
    return list(found)

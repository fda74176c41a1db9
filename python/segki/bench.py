"""Compare segki with other systems in one run: `segki bench` and `tests/py/bench`.

Prefill and decode are told apart by two generations of different length: their difference is decode
steps and nothing else. Systems take turns within a round, and the median over the rounds counts.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from segki.bandwidth import ReadBandwidth, measure_read_bandwidth, step_weight_bytes
from segki.machine import machine_facts
from segki.models import Loaded, ModelError
from segki.peers import SYSTEMS, Job, Runner, UnavailableError

__all__ = ["Result", "Row", "Settings", "bench", "dtype_name", "plot", "prompt_ids"]

SHORT = 8
TEXT = (
    "The harbour was quiet before sunrise. A few boats moved against their ropes, gulls walked along "
    "the wall, and the keeper of the light came down the stairs with a kettle in one hand and "
    "yesterday's newspaper in the other. He had written the same four lines in the book each morning "
    "for thirty years: the wind, the height of the water, the ships that had passed, and his name. "
)
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    batches : tuple of int
        Numbers of rows.
    against : tuple of str
        Systems beside segki: keys of `segki.peers.SYSTEMS`.
    tokens : int
        Decode steps that the long generation has more than the short one.
    prompt_tokens : int
        Length of every prompt.
    rounds : int
        How often every system takes its turn.
    """

    batches: tuple[int, ...] = (1, 8)
    against: tuple[str, ...] = ("hf", "compile", "llama")
    tokens: int = 64
    prompt_tokens: int = 32
    rounds: int = 5


@dataclass
class Row:
    """One system at one batch size and dtype; times in ms, None where it could not take part.

    Attributes
    ----------
    prefill_ms : float or None
        Everything that is not a decode step: prompt, first token, and what the call itself costs.
    decode_ms : float or None
        A decode step for all rows.
    tokens_per_second : float or None
        Decoded tokens of all rows together.
    share : float or None
        Share of the measured read bandwidth; above 1 is a measurement error, see `share_is_error`.
    samples : list of (float, float)
        Seconds of the short and of the long generation in each round.
    tokens_equal : bool or None
        Whether all tokens of all rows are those of transformers' own generate (where it took part).
    first_difference : int or None
        The first position at which they are not.
    """

    system: str
    dtype: str
    batch: int
    note: str | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_second: float | None = None
    share: float | None = None
    share_is_error: bool = False
    samples: list[tuple[float, float]] = field(default_factory=list)
    tokens_equal: bool | None = None
    first_difference: int | None = None


@dataclass
class Result:
    """All that one run found; `to_json` gives plain data."""

    model: str
    machine: dict[str, Any]
    settings: Settings
    bandwidth: ReadBandwidth
    step_bytes: dict[str, int]
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json.dump`."""
        return asdict(self)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a supported dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
    return DTYPE_NAMES[dtype]


def bench(
    models: Iterable[Callable[[], Loaded]],
    settings: Settings,
    progress: Callable[[str], None] = lambda _message: None,
) -> Result:
    """Measure segki and the chosen systems.

    Parameters
    ----------
    models : iterable of callables
        Each loads the model in one dtype; it is called when its turn comes and dropped after it.
    settings : Settings
        What to measure.
    progress : callable
        Called with a short sentence before each part.
    """
    machine = machine_facts()
    progress("measuring the read bandwidth")
    rates = [measure_read_bandwidth(seconds=2.0)]
    rows: list[Row] = []
    step_bytes: dict[str, int] = {}
    name = ""
    with tempfile.TemporaryDirectory(prefix="segki-bench-") as scratch:
        for load in models:
            loaded = load()
            name = loaded.name
            dtype = dtype_name(loaded.model.dtype)
            step_bytes[dtype] = step_weight_bytes(loaded.model)
            for batch in settings.batches:
                ids = prompt_ids(loaded, batch, settings.prompt_tokens)
                job = Job(loaded, ids, SHORT + settings.tokens, Path(scratch))
                rows += _measure(job, settings, progress)
                rates.append(measure_read_bandwidth(seconds=0.5))
            del loaded, job
            gc.collect()
    best = max(rates, key=lambda rate: rate.bytes_per_second)
    for row in rows:
        _rate(row, settings, step_bytes[row.dtype], best)
    return Result(name, machine, settings, best, step_bytes, rows)


def prompt_ids(loaded: Loaded, batch: int, length: int) -> torch.Tensor:
    """Return prompts `[batch, length]`: windows of a text, or random ids where there is no tokenizer."""
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    if loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, vocabulary, (batch, length), generator=generator)
    ids = loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    stride = 7
    needed = length + stride * batch
    ids = ids * -(-needed // len(ids))
    return torch.tensor([ids[stride * row : stride * row + length] for row in range(batch)])


def _measure(job: Job, settings: Settings, progress: Callable[[str], None]) -> list[Row]:
    """Run all systems in turns; return a row for each, not yet rated."""
    dtype, batch = dtype_name(job.dtype), job.ids.shape[0]
    rows = {name: Row(name, dtype, batch) for name in (*settings.against, "segki")}
    tokens: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, row in rows.items():
            progress(f"{dtype}, batch {batch}: preparing {name}")
            try:
                runners[name] = stack.enter_context(SYSTEMS[name](job))
            except UnavailableError as reason:
                row.note = str(reason)
                continue
            tokens[name] = runners[name](job.max_new_tokens)
        for number in range(settings.rounds):
            progress(f"{dtype}, batch {batch}: round {number + 1} of {settings.rounds}")
            for name, run in runners.items():
                rows[name].samples.append((_seconds(run, SHORT), _seconds(run, job.max_new_tokens)))
    for name, note in job.notes.items():
        rows[name].note = note
    for name, found in tokens.items():
        if "hf" in tokens and name != "hf":
            _compare(rows[name], found, tokens["hf"])
    return list(rows.values())


def _seconds(run: Runner, new_tokens: int) -> float:
    start = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - start


def _compare(row: Row, found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
    differing = [
        position
        for ours, theirs in zip(found, wanted, strict=True)
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
    row.tokens_equal = not differing
    row.first_difference = min(differing, default=None)


def _rate(row: Row, settings: Settings, step_bytes: int, bandwidth: ReadBandwidth) -> None:
    """Fill in a row's figures from its samples."""
    if not row.samples:
        return
    step = statistics.median((long - short) / settings.tokens for short, long in row.samples)
    if step <= 0:
        row.note = "the longer generation was not slower: too few tokens, or the machine is busy"
        return
    short = statistics.median(short for short, _ in row.samples)
    share = bandwidth.share(step_bytes, step)
    row.decode_ms = step * 1e3
    row.prefill_ms = (short - (SHORT - 1) * step) * 1e3
    row.tokens_per_second = row.batch / step
    row.share, row.share_is_error = share.value, share.measurement_error


def plot(result: Result, file: Path) -> None:
    """Write a PNG of the decode times beside the floor that the read bandwidth sets.

    Raises
    ------
    ModelError
        When matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModelError("--plot needs matplotlib; install it with: pip install matplotlib") from error

    groups = list(dict.fromkeys((row.dtype, row.batch) for row in result.rows))
    systems = list(dict.fromkeys(row.system for row in result.rows))
    times = {(row.system, row.dtype, row.batch): row.decode_ms for row in result.rows}
    width = 0.8 / len(systems)
    figure = Figure(figsize=(2.5 + 2 * len(groups), 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, system in enumerate(systems):
        places = [group + (index - (len(systems) - 1) / 2) * width for group in range(len(groups))]
        heights = [times.get((system, *group)) or 0.0 for group in groups]
        bars = axes.bar(places, heights, width, label=system)
        axes.bar_label(bars, [f"{height:.1f}" if height else "" for height in heights], fontsize=8)
    for number, (dtype, _) in enumerate(groups):
        floor = result.bandwidth.seconds(result.step_bytes[dtype]) * 1e3
        label = "floor: weight bytes / read bandwidth" if number == 0 else "_repeated"
        axes.hlines(floor, number - 0.45, number + 0.45, colors="black", linestyles="--", label=label)
    axes.set_xticks(range(len(groups)), [f"{dtype}, batch {batch}" for dtype, batch in groups])
    axes.set_ylabel("decode step, ms")
    rate = result.bandwidth.bytes_per_second / 1e9
    axes.set_title(f"{result.model}, {result.machine['cores']} cores, {rate:.1f} GB/s read", fontsize=10)
    axes.legend(fontsize=8)
    try:
        figure.savefig(file, dpi=150, format="png")
    except OSError as error:
        raise ModelError(f"--plot: cannot write {str(file)!r} ({error.strerror})") from error

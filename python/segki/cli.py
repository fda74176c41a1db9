"""The command line: `segki demo`, `explain`, `generate` and `bench`.

Bad input ends a command with exit code 2 and one line on standard error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from segki.bandwidth import ReadBandwidth
    from segki.bench import Result, Row
    from segki.demo import Comparison
    from segki.models import Loaded

__all__ = ["app", "main"]

P = ParamSpec("P")

app = typer.Typer(
    help="Decode Hugging Face models in place, at the speed of the memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ModelDir = Annotated[
    str,
    typer.Argument(help="A model directory, or a bundled model: smollm2, gemma3-270m."),
]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as saved when left out.")]


class UsageError(ValueError):
    """An argument that cannot be used."""


def main() -> None:
    """Run the command line."""
    app()


def show_version(wanted: bool) -> None:
    """Print the version and end, where `--version` was given."""
    if wanted:
        try:
            number = importlib.metadata.version("segki")
        except importlib.metadata.PackageNotFoundError:  # run from its sources
            number = "from source"
        out.print(f"segki {number}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Decode Hugging Face models in place, at the speed of the memory."""


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn an error that says what is wrong with the input into one line and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        from segki.models import ModelError

        try:
            command(*args, **kwargs)
        except (ModelError, UsageError) as error:
            err.print(f"segki: error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error

    return wrapped


@app.command()
@one_line_errors
def demo(
    dtype: Annotated[str, typer.Option(help="Dtypes to show, separated by commas.")] = "fp32,bf16",
    tokens: Annotated[int, typer.Option(help="The most new tokens a row gets.")] = 96,
    rows: Annotated[int, typer.Option(help="Prompts decoded together, 1 to 4.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each side is timed.")] = 3,
) -> None:
    """Run SmolLM2-135M: the model's own generate against segki, side by side."""
    _at_least("--tokens", tokens, 2)
    _at_least("--rounds", rounds, 1)
    _quiet_libraries()
    from segki.bandwidth import measure_read_bandwidth
    from segki.demo import PROMPTS, compare
    from segki.models import load_smollm2, parse_dtype

    if not 1 <= rows <= len(PROMPTS):
        raise UsageError(f"--rows: {rows} is out of range; accepted are 1 to {len(PROMPTS)}")
    dtypes = [parse_dtype(name) for name in _names("--dtype", dtype)]
    with _progress(lines=True) as say:
        say("measuring the read bandwidth")
        rates = [measure_read_bandwidth()]
        found = []
        for wanted in dtypes:
            loaded = load_smollm2(wanted, say)
            found.append(compare(loaded, PROMPTS[:rows], tokens, rounds, say))
            say("measuring the read bandwidth")
            rates.append(measure_read_bandwidth())
        best = max(rates, key=lambda rate: rate.bytes_per_second)
    for prompt, text in zip(PROMPTS, found[0].texts, strict=False):
        out.print(f"[bold]{loaded.name}, {prompt}[/bold]")
        out.print(text, markup=False)
        out.print()
    for comparison in found:
        out.print(_demo_table(comparison, best))
        if comparison.difference is not None:
            out.print(f"first difference: {comparison.difference}", markup=False)
    out.print(_bandwidth_line(best))
    out.print()
    print(found[-1].report)


@app.command()
@one_line_errors
def explain(
    model_dir: ModelDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: Dtype = None,
) -> None:
    """Say what segki runs of a model, where, and why not."""
    _quiet_libraries()
    with _progress() as say:
        loaded = _load(model_dir, dtype, say)
        say("injecting")
        import segki

        with _declined(model_dir):
            segki.inject(loaded.model)
        report = segki.explain(loaded.model)
    print(report.to_json() if as_json else report)


@app.command()
@one_line_errors
def generate(
    model_dir: ModelDir,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="The most new tokens.")] = 128,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template.")] = False,
    dtype: Dtype = None,
) -> None:
    """Generate text greedily with segki."""
    _at_least("--max-new-tokens", max_new_tokens, 1)
    _quiet_libraries()
    with _progress() as say:
        loaded = _load(model_dir, dtype, say)
        inputs = _prompt_inputs(loaded, prompt, chat)
        say("injecting")
        import segki

        with _declined(model_dir):
            segki.inject(loaded.model)
        if not stream:
            say("generating")
            output = _generate(loaded, inputs, max_new_tokens, None)
    if stream:
        from transformers import TextStreamer

        streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        _generate(loaded, inputs, max_new_tokens, streamer)
    else:
        print(loaded.tokenizer.decode(output, skip_special_tokens=True))


@app.command()
@one_line_errors
def bench(
    model_dir: ModelDir,
    batch: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = "1,8",
    against: Annotated[str, typer.Option(help="Of hf, compile, llama.")] = "hf,compile,llama",
    dtype: Annotated[str, typer.Option(help="Dtypes, separated by commas.")] = "fp32,bf16",
    tokens: Annotated[int, typer.Option(help="Decode steps to time.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
) -> None:
    """Compare decode and prefill times with other systems, in one run."""
    batches = _batches(batch)
    for name, value in (("--tokens", tokens), ("--prompt-tokens", prompt_tokens), ("--rounds", rounds)):
        _at_least(name, value, 1)
    for file, name in ((json_file, "--json"), (plot_file, "--plot")):
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{name}: folder {str(file.parent)!r} does not exist")
    others = tuple(_names("--against", against)) if against else ()
    for name in others:
        if name not in ("hf", "compile", "llama"):
            raise UsageError(f"--against: unknown {name!r}; accepted are hf, compile and llama")
    _quiet_libraries()
    from segki import bench as benchmark
    from segki.models import check_exists, load, parse_dtype

    dtypes = [parse_dtype(name) for name in _names("--dtype", dtype)]
    check_exists(model_dir)
    with _progress(lines=True) as say:
        loaders = [functools.partial(load, model_dir, wanted, say) for wanted in dtypes]
        settings = benchmark.Settings(batches, others, tokens, prompt_tokens, rounds)
        result = benchmark.bench(loaders, settings, say)
    out.print(_bench_table(result))
    for row in result.rows:
        if row.note is not None:
            out.print(f"{row.system}, {row.dtype}, batch {row.batch}: {row.note}", markup=False)
    out.print("bandwidth: share of the measured one; as hf: whether all tokens are those of hf")
    out.print(_bandwidth_line(result.bandwidth))
    if json_file is not None:
        _write(json_file, json.dumps(result.to_json(), indent=2) + "\n")
    if plot_file is not None:
        benchmark.plot(result, plot_file)


def _quiet_libraries() -> None:
    """Keep transformers' advice out of the output; segki's own warnings stay."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextlib.contextmanager
def _progress(lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on standard error: a spinner in a terminal, else `lines` or nothing."""
    if err.is_terminal:
        with err.status("starting") as status:
            yield status.update
    elif lines:
        yield lambda message: err.print(message, markup=False, soft_wrap=True)
    else:
        yield lambda _message: None


@contextlib.contextmanager
def _declined(model_dir: str) -> Iterator[None]:
    """Report a model that segki refuses to inject as one line."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{model_dir}: {' '.join(str(error).split())}") from error


def _load(model_dir: str, dtype: str | None, say: Callable[[str], None]) -> Loaded:
    say("importing PyTorch and transformers")
    from segki.models import load

    return load(model_dir, dtype, say)


def _prompt_inputs(loaded: Loaded, prompt: str, chat: bool) -> Any:
    if loaded.tokenizer is None:
        raise UsageError(f"model directory: {loaded.name} has no tokenizer.json, so no --prompt can be read")
    if chat:
        if not loaded.tokenizer.chat_template:
            raise UsageError(f"--chat: the tokenizer of {loaded.name} has no chat template; leave it out")
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
    inputs = loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    if inputs["input_ids"].shape[1] == 0:
        raise UsageError("--prompt: gives no tokens; accepted is a text of at least one token")
    return inputs


def _generate(loaded: Loaded, inputs: Any, max_new_tokens: int, streamer: Any) -> list[int]:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with _declined(loaded.name):
        output = loaded.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=streamer,
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"{option}: {text!r} has an empty entry; accepted is a list such as a,b")
    return list(dict.fromkeys(names))


def _batches(text: str) -> tuple[int, ...]:
    accepted = "accepted is a list of whole numbers from 1 on, such as 1,8"
    try:
        batches = tuple(int(name) for name in _names("--batch", text))
    except ValueError as error:
        raise UsageError(f"--batch: {text!r} is not such a list; {accepted}") from error
    if min(batches) < 1:
        raise UsageError(f"--batch: {min(batches)} is too small; {accepted}")
    return batches


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{option}: {value} is too small; accepted is {least} or more")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: cannot write {str(file)!r} ({error.strerror})") from error


def _bandwidth_line(rate: ReadBandwidth) -> str:
    return f"measured read bandwidth: {rate.bytes_per_second / 1e9:.1f} GB/s ({rate.threads} threads)"


def _demo_table(found: Comparison, bandwidth: ReadBandwidth) -> Table:
    title = f"{found.dtype}, {found.step_bytes / 1e6:.0f} MB of weights a step"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("own generate", "segki", "ratio"):
        table.add_column(name, justify="right")
    own, fast = found.own, found.segki

    def add(label: str, a: float, b: float, ratio: float) -> None:
        table.add_row(label, f"{a:.1f}", f"{b:.1f}", f"{ratio:.2f}x")

    add("decode, ms a step", own.decode_ms, fast.decode_ms, own.decode_ms / fast.decode_ms)
    speeds = own.tokens_per_second, fast.tokens_per_second
    add("decode, valid tokens/s", *speeds, speeds[1] / speeds[0])
    shares = (str(found.share(side, bandwidth)) for side in (own, fast))
    table.add_row("share of read bandwidth", *shares, "")
    add("prefill, ms", own.prefill_ms, fast.prefill_ms, own.prefill_ms / fast.prefill_ms)
    table.add_row("valid tokens", str(own.valid_tokens), str(fast.valid_tokens), "")
    table.add_row("decode steps", str(own.steps), str(fast.steps), "")
    table.add_row("injecting, s", "", f"{found.inject_s:.2f}", "")
    table.add_row("all tokens equal", "", "no" if own.tokens != fast.tokens else "yes", "")
    return table


def _bench_table(result: Result) -> Table:
    table = Table(title=f"{result.model}, median of {result.settings.rounds}", title_justify="left")
    for name in ("dtype", "batch", "system"):
        table.add_column(name)
    for name in ("prefill ms", "decode ms", "tokens/s", "bandwidth", "as hf"):
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(row.dtype, str(row.batch), row.system, *_figures(row))
    return table


def _figures(row: Row) -> list[str]:
    if row.decode_ms is None or row.prefill_ms is None or row.share is None:
        return ["-"] * 5
    from segki.bandwidth import Share

    equal = {None: "", True: "yes", False: f"not from {row.first_difference}"}[row.tokens_equal]
    speed = f"{row.tokens_per_second:.1f}"
    return [f"{row.prefill_ms:.1f}", f"{row.decode_ms:.2f}", speed, str(Share(row.share)), equal]

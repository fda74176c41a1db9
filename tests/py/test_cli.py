"""The command line: what it prints, and that bad input ends in one line and exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from segki.cli import app

PROMPT = "the boats"
CHAT_TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    return made


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny llama with its tokenizer, saved once for all tests."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved model that a test may break."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def run(*arguments: str | Path) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line(result: Result) -> str:
    """Assert that a command ended with exit code 2 and one line, and return it."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("segki: error: ")
    return lines[0]


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """Return what transformers itself generates."""
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
    )
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_generate_prints_what_transformers_generates(saved: Path) -> None:
    result = run("generate", saved, "--prompt", PROMPT, "--max-new-tokens", "20", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert result.stdout == greedy(saved, PROMPT, 20) + "\n"


def test_stream_prints_the_same_text(saved: Path) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", "20", "--dtype", "fp32")
    plain = run("generate", saved, *options)
    streamed = run("generate", saved, *options, "--stream")
    assert streamed.exit_code == 0, streamed.output
    assert streamed.stdout == plain.stdout


def test_chat_wraps_the_prompt(saved: Path) -> None:
    options = ("--max-new-tokens", "12", "--dtype", "fp32")
    chat = run("generate", saved, "--prompt", PROMPT, "--chat", *options)
    assert chat.exit_code == 0, chat.output
    assert chat.stdout == greedy(saved, f"[{PROMPT}]", 12) + "\n"


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0 and re.fullmatch(r"segki (\d+\.\d+\.\d+\S*|from source)\n", result.stdout)


def test_explain_prints_the_report(saved: Path) -> None:
    result = run("explain", saved)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_explain_json_is_json(saved: Path) -> None:
    result = run("explain", saved, "--json")
    assert result.exit_code == 0, result.output
    assert "rung" in json.loads(result.stdout)


def test_bench_writes_figures_and_a_plot(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = run(
        *("bench", saved, "--batch", "1,3", "--against", "hf,llama", "--dtype", "fp32"),
        *("--tokens", "12", "--prompt-tokens", "5", "--rounds", "3"),
        *("--json", figures, "--plot", picture),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [(row["system"], row["batch"]) for row in found["rows"]] == [
        (system, batch) for batch in (1, 3) for system in ("hf", "llama", "segki")
    ]
    for row in found["rows"]:
        if row["system"] == "llama":
            assert row["note"] and row["samples"] == []
        else:
            assert len(row["samples"]) == 3
        if row["system"] == "segki":
            assert row["tokens_equal"] is True
    assert found["machine"]["versions"]["torch"] == torch.__version__
    embedding = 258 * 32
    parameters = sum(tensor.numel() for tensor in load_file(saved / "model.safetensors").values())
    assert found["step_bytes"] == {"fp32": 4 * (parameters - embedding)}
    assert picture.read_bytes().startswith(b"\x89PNG")


COMMANDS: dict[str, tuple[str, ...]] = {
    "explain": (),
    "generate": ("--prompt", PROMPT),
    "bench": ("--batch", "1", "--against", "hf", "--dtype", "fp32"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_directory(command: str, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    line = one_line(run(command, missing, *COMMANDS[command]))
    assert str(missing) in line and "does not exist" in line and "config.json" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_file_instead_of_a_directory(command: str, saved: Path) -> None:
    line = one_line(run(command, saved / "config.json", *COMMANDS[command]))
    assert "is not a folder" in line


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ', encoding="utf-8")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def rename_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "no_such_family"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def remove_model_type(folder: Path) -> None:
    (folder / "config.json").write_text("[]", encoding="utf-8")


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garble_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reshape_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def garble_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (break_config, "config.json"),
    (remove_config, "config.json"),
    (rename_model_type, "no_such_family"),
    (remove_model_type, "model_type"),
    (truncate_weights, "model.safetensors"),
    (garble_weights, "model.safetensors"),
    (remove_weights, "no weights"),
    (drop_a_weight, "up_proj"),
    (reshape_a_weight, "model.norm.weight"),
    (garble_tokenizer, "tokenizer"),
]


@pytest.mark.parametrize(("damage", "named"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_broken_file(damage: Callable[[Path], None], named: str, copied: Path) -> None:
    damage(copied)
    line = one_line(run("generate", copied, "--prompt", PROMPT))
    assert named in line and str(copied) in line


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_dtype(command: str, saved: Path) -> None:
    line = one_line(run(command, saved, *COMMANDS[command], "--dtype", "int8"))
    assert "'int8'" in line and "bf16" in line


@pytest.mark.parametrize("batch", ["", "1,", "a", "1,two", "0", "-1", "1.5"])
def test_bad_batch_list(batch: str, saved: Path) -> None:
    line = one_line(run("bench", saved, "--batch", batch))
    assert "--batch" in line and "1,8" in line


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("bench", "--against", "vllm"),
        ("bench", "--tokens", "0"),
        ("bench", "--rounds", "0"),
        ("bench", "--prompt-tokens", "0"),
        ("bench", "--json", "/no/such/folder/bench.json"),
        ("bench", "--plot", "/no/such/folder/bench.png"),
        ("generate", "--max-new-tokens", "0"),
        ("generate", "--prompt", ""),
    ],
)
def test_bad_option(command: str, option: str, value: str, saved: Path) -> None:
    assert option in one_line(run(command, saved, *COMMANDS[command], option, value))


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "int4"), ("--tokens", "1"), ("--rows", "9"), ("--rounds", "0")]
)
def test_bad_demo_option(option: str, value: str) -> None:
    assert option.removeprefix("--") in one_line(run("demo", option, value))


def test_prompt_needs_a_tokenizer(copied: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    assert "tokenizer" in one_line(run("generate", copied, "--prompt", PROMPT))


@pytest.mark.real
def test_demo_shows_text_and_equal_tokens() -> None:
    result = run("demo", "--dtype", "fp32", "--tokens", "12", "--rounds", "1", "--rows", "2")
    assert result.exit_code == 0, result.output
    assert "The capital of France is Paris." in result.stdout
    row = next(line for line in result.stdout.splitlines() if "all tokens equal" in line)
    assert "yes" in row

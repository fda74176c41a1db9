"""No weight is copied: addresses stay, memory beyond the model is the cache and a little scratch, live weights are read."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

import families
import segki
from harness import hf_forced_logits, native_forced_logits

ALLOWED_BYTES = 20e6
"""Memory for everything but the model and its cache."""

LENGTH, STEPS, ROWS = 16, 48, 2

# Measures in a process of its own. The transformers baseline runs first in the same process, so that what torch and
# transformers themselves allocate for a call (workspaces, code) is part of the baseline, and only segki's own remains.
SCRIPT = textwrap.dedent(
    """
    import gc, json, sys, threading, time
    import torch
    torch.set_num_threads(1)
    import segki
    from segki.models import load_smollm2

    dtype, what, rows, length, steps = getattr(torch, sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])

    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    def reset_peak():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    model = load_smollm2(dtype).model
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 40000, (rows, length), generator=torch.Generator().manual_seed(0))

    def generate():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, pad_token_id=0)

    with torch.no_grad():
        model(ids, use_cache=False)  # touches every page of the weights
    generate()
    gc.collect()
    before = status("VmRSS")
    reset_peak()
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    rung = segki.inject(model).rung
    copied = [torch.empty_like(p).copy_(p) for p in model.parameters()] if what == "copy" else []
    generate()
    peak = status("VmHWM")
    moved = [name for name, p in model.named_parameters() if p.data_ptr() != addresses[name]]
    print(json.dumps({"rung": rung, "beyond": peak - before, "moved": moved}))
    """
)


def measure(dtype: str, what: str = "plain") -> dict[str, Any]:
    """Peak resident bytes beyond the loaded model during inject and generate."""
    command = [sys.executable, "-c", SCRIPT, dtype, what, str(ROWS), str(LENGTH), str(STEPS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def cache_bytes(item_size: int) -> int:
    """SmolLM2-135M: 30 layers of 3 key/value heads of 64; the native cache is rounded up, the prefill holds one too."""
    positions = LENGTH + STEPS + 64
    return 2 * 30 * 3 * 64 * 2 * positions * ROWS * item_size


@pytest.mark.real
@pytest.mark.parametrize(("dtype", "item_size"), [("float32", 4), ("bfloat16", 2)])
def test_peak_memory_beyond_the_model(dtype: str, item_size: int) -> None:
    measured = measure(dtype)
    assert measured["rung"] == 1
    assert measured["moved"] == []
    allowed = cache_bytes(item_size) + ALLOWED_BYTES
    assert measured["beyond"] <= allowed, f"{measured['beyond'] / 1e6:.1f} MB beyond the model, {allowed / 1e6:.1f} allowed"


@pytest.mark.real
def test_the_measurement_sees_a_copy() -> None:
    assert measure("bfloat16", "copy")["beyond"] > 200e6


@pytest.mark.parametrize("case", ["llama", "phi3", "gpt_neox", "falcon", "gemma3_text", "llama-odd-tied-biased", "qwen3_moe"])
def test_addresses_and_storages_stay(case: str) -> None:
    model = families.build(case)
    before = {name: (p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for name, p in model.named_parameters()}
    segki.inject(model)
    model.generate(families.prompt(2, 9), max_new_tokens=6, do_sample=False, pad_token_id=0)
    after = {name: (p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for name, p in model.named_parameters()}
    assert after == before, "a weight was moved or written"


@pytest.mark.parametrize(
    "case", ["llama", "phi3", "gpt_neox", "falcon", "persimmon", "gemma2", "cohere", "llama-odd-tied-biased"]
)
def test_each_weight_is_read_live(case: str) -> None:
    """A change of any single weight, in place, changes the next native step as it changes transformers' own."""
    original = families.build(case)
    model = copy.deepcopy(original)
    assert segki.inject(model).rung == 1
    ids, forced = families.prompt(1, 5), families.prompt(1, 3, seed=4)
    before = hf_forced_logits(original, ids, None, forced)
    for (name, changed), twin in zip(original.named_parameters(), model.parameters(), strict=True):
        generator = torch.Generator().manual_seed(6)
        noise = 0.5 * torch.randn(changed.shape, generator=generator) * changed.abs().max()
        with torch.no_grad():
            changed.add_(noise)
            twin.add_(noise)
        want, got = hf_forced_logits(original, ids, None, forced), native_forced_logits(model, ids, None, forced)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), f"{name}: a stale weight"
        with torch.no_grad():
            for parameter in (changed, twin):
                parameter.sub_(noise)
        if not torch.equal(want, before):
            continue
        assert name.endswith(("k_proj.bias", "k_norm.bias")), f"{name} has no effect on the logits: the test cannot fail"


@pytest.mark.parametrize("count", [40])
def test_repeated_calls_do_not_grow(count: int) -> None:
    """The caches of earlier calls are reused or returned."""
    model = families.build("llama")
    assert segki.inject(model).rung == 1

    def rss() -> int:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def call() -> None:
        model.generate(families.prompt(4, 200), max_new_tokens=4, do_sample=False, pad_token_id=0)

    for _ in range(10):
        call()
    before = rss()
    for _ in range(count):
        call()
    assert rss() - before < 8e6, f"{(rss() - before) / 1e6:.1f} MB more after {count} calls"

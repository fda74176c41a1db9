"""What segki costs beside the work itself: one op call, a call of generate, injecting, memory.

    python tests/py/bench/overhead.py [op generate inject memory]

Prints one JSON object. Nothing else should run on the machine.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import segki
from segki.machine import machine_facts
from segki.models import load_smollm2

ROUNDS = 30


def smallest_op() -> Callable[[], object]:
    """Return a call of the smallest op there is: RMSNorm of one row of 8 fp32 values."""
    compiled: Any = importlib.import_module("segki._segki")
    native: Any = importlib.import_module("segki.native")
    x, weight, out = torch.ones(1, 8), torch.ones(8), torch.empty(1, 8)
    spec = compiled.NormSpec()
    spec.kind, spec.eps = compiled.NormKind.rms, 1e-5
    arguments = compiled.NormArgs()
    arguments.x, arguments.weight, arguments.out = map(native.view, (x, weight, out))
    arguments.norm = spec
    backend = compiled.backend("cpu")

    norm, memory = compiled.norm, (x, weight, out)

    def call(_alive: tuple[torch.Tensor, ...] = memory) -> None:
        norm(backend, arguments)

    call()
    if not torch.allclose(out, torch.ones(1, 8), atol=1e-4):
        raise RuntimeError(f"norm of ones gave {out.tolist()}, expected ones")
    return call


def op() -> dict[str, float]:
    """Time one op call from Python, in ns; the least of several repeats, kernel included."""
    call = smallest_op()
    count = 20_000
    seconds = min(timeit.repeat(call, number=count, repeat=7)) / count
    empty = min(timeit.repeat(lambda: None, number=count, repeat=7)) / count
    return {"op_call_ns": (seconds - empty) * 1e9}


def thin_model() -> Any:
    """Return a llama with as many layers and parameters as SmolLM2 but small matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=30,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def generate() -> dict[str, float]:
    """Time what `generate` does around prefill and decode steps, in ms a call.

    A call for one token is a prefill and no decode step, so what it takes beyond a plain forward of
    the same prompt is generate's own. Both take turns; the median difference counts.
    """
    model = thin_model()
    segki.inject(model)
    ids = torch.arange(8)[None]
    mask = torch.ones_like(ids)

    def call() -> None:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)

    def prefill() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    for _ in range(3):
        call()
        prefill()
    differences = [seconds(call) - seconds(prefill) for _ in range(ROUNDS)]
    segki.eject(model)
    return {
        "generate_overhead_ms": statistics.median(differences) * 1e3,
        "own_generate_overhead_ms": statistics.median(
            seconds(call) - seconds(prefill) for _ in range(ROUNDS)
        )
        * 1e3,
    }


def inject() -> dict[str, float]:
    """Time injecting the whole of SmolLM2-135M, in s: the first time, and once everything is warm."""
    model = load_smollm2("bf16").model
    times = []
    for _ in range(3):
        times.append(seconds(lambda: segki.inject(model)))
        segki.eject(model)
    return {"inject_first_s": times[0], "inject_again_s": min(times)}


def memory() -> dict[str, float]:
    """Measure the peak of resident memory beyond the loaded model, in MB, and the KV cache in it."""
    model = load_smollm2("bf16").model
    ids = torch.arange(100, 132)[None]
    tokens = 64
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # touches every weight
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still held would hide new memory
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew from here
    before = resident("VmRSS")
    segki.inject(model)
    after = resident("VmRSS")
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    config = model.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cache = values * (ids.shape[1] + tokens) * model.dtype.itemsize
    return {
        "inject_mb": (after - before) / 1e6,
        "peak_beyond_model_mb": (resident("VmHWM") - before) / 1e6,
        "kv_cache_mb": cache / 1e6,
    }


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident(key: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this benchmark needs Linux")


PARTS = {"op": op, "generate": generate, "inject": inject, "memory": memory}


def main() -> None:
    """Run the parts named on the command line, or all of them."""
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"unknown part {unknown[0]!r}; accepted are {', '.join(PARTS)}")
    found: dict[str, Any] = {"machine": machine_facts()}
    for name in names:
        found.update(PARTS[name]())
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

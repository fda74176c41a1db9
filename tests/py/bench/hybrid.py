"""Decode of a hybrid and of a mixture-of-experts model with random bf16 weights: share of the read bandwidth, and transformers' own.

Shapes: Qwen3.5-0.8B (24 layers, hidden 1024; vocabulary 248320, tied) and a Qwen3-MoE with 64 experts, top 8 (hidden 2048, 6 layers).
Bytes of a step: all weights that it reads (of the experts the chosen ones) and the recurrent states, read and written. Bandwidth and
steps are measured in turns in one process, medians of 12 rounds. Run it with nothing else running.

    python tests/py/bench/hybrid.py [gdn] [moe]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

import segki
from segki import _segki
from segki.bandwidth import native_step_bytes
from segki.inject import injection_of

ROUNDS = 12
BUFFER = 256 << 20
TOKENS = 16


def qwen3_5() -> Any:
    """Shape of Qwen3.5-0.8B's text model."""
    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip


def qwen3_moe() -> Any:
    """64 experts, 8 of them chosen."""
    return Qwen3MoeConfig(
        vocab_size=32768, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8, eos_token_id=None,
    )  # fmt: skip


def build(config: Any) -> Any:
    """A model with random weights of the size that initialisation gives them, in bf16."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def eager_step(model: Any, ids: torch.Tensor) -> float:
    """Seconds a step of transformers' own decode: the difference of two lengths."""
    seconds = []
    for count in (2, 2 + TOKENS):
        start = time.perf_counter()
        model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / TOKENS


def run(name: str, config: Any) -> None:
    """Print one line."""
    model = build(config)
    ids = torch.randint(3, config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    eager_step(model, ids)
    eager = statistics.median(eager_step(model, ids) for _ in range(3))
    start = time.perf_counter()
    report = segki.inject(model)
    seconds = time.perf_counter() - start
    assert report.rung == 1, report.reasons
    injection = injection_of(model)
    assert injection is not None and injection.engine is not None
    model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    program = injection.engine.step(1, 128).program
    size = native_step_bytes(model, injection.engine.plan)
    shares, times = [], []
    for _ in range(ROUNDS):
        before = _segki.read_bandwidth(BUFFER, _segki.threads(), 0.1)
        begin = time.perf_counter()
        for _ in range(4):
            program.run()
        one = (time.perf_counter() - begin) / 4
        after = _segki.read_bandwidth(BUFFER, _segki.threads(), 0.1)
        shares.append(size / one / ((before + after) / 2))
        times.append(one)
    step = statistics.median(times)
    print(
        f"{name}: {size / 1e9:.3f} GB a step, {step * 1e3:.2f} ms, share of the read bandwidth {statistics.median(shares):.3f}; "
        f"transformers eager {eager * 1e3:.1f} ms, {eager / step:.1f}x; inject {seconds:.1f} s",
        flush=True,
    )
    totals = dict.fromkeys(program.op_names, 0.0)
    for op, spent in zip(program.op_names, program.profile(), strict=True):
        totals[op] += spent
    print("   " + ", ".join(f"{op} {spent * 1e3:.2f} ms" for op, spent in sorted(totals.items(), key=lambda pair: -pair[1])))


def main() -> None:
    """Run the models named on the command line, else all."""
    wanted = sys.argv[1:] or ["gdn", "moe"]
    for key, name, config in (("gdn", "Qwen3.5-0.8B shape", qwen3_5), ("moe", "Qwen3-MoE shape, 64 experts, top 8", qwen3_moe)):
        if key in wanted:
            run(name, config())


if __name__ == "__main__":
    main()

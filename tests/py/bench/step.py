"""The native step of SmolLM2-135M alone: share of the read bandwidth at batch 1, and batch 8 against batch 1.

Bandwidth and steps are measured in turns in one process, medians of 24 rounds. Run it with nothing else running.

    python tests/py/bench/step.py
"""

from __future__ import annotations

import statistics
import time

import torch

import segki
from segki import _segki
from segki.bandwidth import step_weight_bytes
from segki.inject import injection_of
from segki.models import load_smollm2

ROUNDS = 24
BUFFER = 256 << 20


def seconds(program: _segki.StepProgram, runs: int = 6) -> float:
    """Seconds of one run of a step program."""
    start = time.perf_counter()
    for _ in range(runs):
        program.run()
    return (time.perf_counter() - start) / runs


def main() -> None:
    """Print one line for each dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model = load_smollm2(dtype).model
        segki.inject(model)
        injection = injection_of(model)
        assert injection is not None and injection.engine is not None
        wide, single = (injection.engine.step(rows, 128).program for rows in (8, 1))
        size, shares, times, ratios = step_weight_bytes(model), [], [], []
        for _ in range(ROUNDS):
            before = _segki.read_bandwidth(BUFFER, _segki.threads(), 0.08)
            one = seconds(single)
            after = _segki.read_bandwidth(BUFFER, _segki.threads(), 0.08)
            shares.append(size / one / ((before + after) / 2))
            times.append(one)
            ratios.append(seconds(wide) / one)
        print(
            f"{dtype}: batch 1 {statistics.median(times) * 1e3:.2f} ms a step, share of the read bandwidth "
            f"{statistics.median(shares):.3f}, batch 8 over batch 1 {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()

"""SmolLM2-135M in fp32 and bf16 at batch 1 and 8: Hugging Face, compiled, llama.cpp and segki in one run.

Writes side_by_side.json and side_by_side.png to a folder. Nothing else should run on the machine.

    python tests/py/bench/side_by_side.py --out figures
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

from segki.bench import Settings, bench, plot
from segki.models import BUNDLED


def main() -> None:
    """Measure, write the files, and print a line for each row."""
    parser = argparse.ArgumentParser(description="Compare decode speeds in one run.")
    parser.add_argument("--out", type=Path, default=Path.cwd(), help="folder for the JSON and the PNG")
    parser.add_argument("--model", choices=sorted(BUNDLED), default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    loaders = [functools.partial(BUNDLED[arguments.model], dtype, say) for dtype in ("fp32", "bf16")]
    result = bench(loaders, Settings(tokens=arguments.tokens, rounds=arguments.rounds), say)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "side_by_side.json"
    file.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    plot(result, file.with_suffix(".png"))
    for row in result.rows:
        figures = row.note if row.decode_ms is None else f"{row.decode_ms:.2f} ms, share {row.share:.2f}"
        print(f"{row.dtype} batch {row.batch} {row.system}: {figures}")


if __name__ == "__main__":
    main()

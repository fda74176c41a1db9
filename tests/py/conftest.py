"""Settings shared by all tests: one thread, no network, quiet transformers, seeded, and the marks."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import transformers

SEED = int(os.environ.get("SEGKI_TEST_SEED", "0"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real: needs the weights of a real model from a package; slower")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def pytest_report_header() -> str:
    return f"segki: seed {SEED} (SEGKI_TEST_SEED), torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same seed, whatever ran before it."""
    random.seed(SEED)
    torch.manual_seed(SEED)

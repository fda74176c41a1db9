"""How many threads the native ops, steps and prompts use."""

from __future__ import annotations

import functools
import os

import torch

from segki import _segki

_chosen = bool(os.environ.get("SEGKI_NUM_THREADS"))  # by the user: torch's number does not count


def threads() -> int:
    """Number of threads that native code uses, the calling one among them.

    At the start it is the number of cores this process may use (CPU affinity, and no more than the CPU quota of its control group), and no
    more than the environment variable `SEGKI_NUM_THREADS` or, where that is not set, `OMP_NUM_THREADS` says. Unless it is chosen, by
    `SEGKI_NUM_THREADS` or `set_threads`, each generation takes no more threads than `torch.get_num_threads()`.

    Raises
    ------
    ValueError
        `SEGKI_NUM_THREADS` is no number from 1 to 1024.
    """
    return int(_segki.threads())


def set_threads(threads: int) -> None:
    """Use that many threads from the next native op or step on; results are bit-identical with any number.

    Costs nothing when it is the number already, else some 0.1 ms. torch's own threads are set by `torch.set_num_threads`.

    Parameters
    ----------
    threads : int
        1 to 1024, the calling thread among them.

    Raises
    ------
    ValueError
        The number is out of range.
    """
    global _chosen
    _segki.set_threads(threads)
    _chosen = True


def follow_torch() -> None:
    """Take as many threads as torch has, and no more than at the start; nothing where the user chose a number."""
    if not _chosen:
        _segki.set_threads(min(_at_start(), torch.get_num_threads()))


@functools.lru_cache(maxsize=1)
def _at_start() -> int:
    return threads()

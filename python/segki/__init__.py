"""segki: a loaded Hugging Face model decodes at the speed of the memory while it keeps training."""

from segki._segki import __version__
from segki.inject import eject, explain, generate, inject, injected
from segki.parallel import set_threads, threads
from segki.report import Report

__all__ = ["Report", "__version__", "eject", "explain", "generate", "inject", "injected", "set_threads", "threads"]

"""Detection: from the structure and the numbers of a loaded model to a plan, without code for any one family."""

from segki.detect.model import detect
from segki.detect.resolve import resolve, rope_table

__all__ = ["detect", "resolve", "rope_table"]

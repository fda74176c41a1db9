"""What `inject` did: which segments run where, which rung of the ladder `generate` stands on, and why not higher."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

RUNGS = {
    1: "step program: the whole decode step runs natively",
    2: "captured graph of the model's forward",
    3: "the model's forward, called back by the native loop",
    4: "the model's own generate",
}


@dataclass(frozen=True)
class SegmentReport:
    """One piece of the module tree.

    Attributes
    ----------
    module
        Qualified name.
    kind
        "mlp", "attention", "norm", "layer", "embedding", "head" or "model".
    runs
        "native step", "native step, prompt" (a block whose prompts run natively, too) or "torch".
    reason
        Why it is left to torch, else None.
    """

    module: str
    kind: str
    runs: str
    reason: str | None = None


@dataclass
class Report:
    """The answer of `segki.inject` and `segki.explain`.

    Attributes
    ----------
    model
        Class of the model.
    rung
        1 (step program) to 4 (the model's own generate); see `RUNGS`.
    segments
        Every piece that was looked at.
    reasons
        Why the model does not stand on a higher rung; empty on rung 1.
    fallbacks
        Reasons for which single calls of `generate` went down the ladder so far.
    """

    model: str
    rung: int
    segments: list[SegmentReport]
    reasons: list[str]
    dtype: str = ""
    backend: str = ""
    fallbacks: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.dtype}): rung {self.rung}, {RUNGS[self.rung]}"]
        if self.backend:
            lines.append(f"  backend {self.backend}")
        groups: dict[tuple[str, str, str | None], list[str]] = {}
        for segment in self.segments:
            groups.setdefault((segment.kind, segment.runs, segment.reason), []).append(segment.module)
        for (kind, runs, reason), names in groups.items():
            where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            lines.append(f"  {kind:<10} {runs:<19} {where}" + (f": {reason}" if reason else ""))
        lines += [f"  not higher: {reason}" for reason in self.reasons]
        lines += [f"  left to the model's own generate once or more: {reason}" for reason in self.fallbacks]
        return "\n".join(lines)

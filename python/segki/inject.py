"""`inject`, `eject`, `injected`, `explain`: bind a model to the native step and undo it without a trace."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from segki.cache import Decline, linear_layers_exist
from segki.detect import detect
from segki.detect.guard import module_problem
from segki.detect.run import beside, preserved
from segki.engine import Engine
from segki.gdn import rebind_gdn
from segki.generate import decoding_method, own_mode
from segki.methods import foreign_method
from segki.native import plain_tensors
from segki.plan import Detection, GdnPlan, ModelPlan, has_linear_state
from segki.probe import native_problem
from segki.rebind import Rebound, clear_copies
from segki.report import Report, SegmentReport
from segki.validate import check_inputs
from segki.watch import Watch

logger = logging.getLogger("segki")

EJECT_WAIT = 30.0  # seconds


class Injection:
    """What is bound to one model; lives in the model's rebound `generate`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.previous: Callable[..., Any] | None = vars(model).get("generate")
        self.rebound: list[Rebound] = []  # generate
        self.forwards: list[Rebound] = []  # of blocks whose prompt form is native too
        self.engine: Engine | None = None
        self.turn = threading.Lock()
        self.watch: Watch | None = None
        self._noted: set[str] = set()
        self.report = self.bind()

    def bind(self) -> Report:
        """Detect the model as it is now, build its native step and rebind the forwards that go with it."""
        self.unbind()
        passing = self.watch.passing if self.watch is not None else ()
        aside = beside(self.model)
        self._read = [(name, module) for name, module in self.model.named_modules() if name not in aside]
        self.obstacles = self._obstacles()
        foreign = foreign_method(self.model, self.previous)
        with plain_tensors():
            detection = detect(self.model)
            self.engine, reasons = (None, [foreign]) if foreign is not None else native_engine(self.model, detection)
        self.watch = Watch(self.model, None if self.engine is None else self.engine.followed_buffers, passing)
        plans: dict[str, GdnPlan] = {}
        if self.engine is not None:
            nodes = [node for layer in self.engine.plan.layers for node in layer.nodes]
            plans = {node.module: node.gdn for node in nodes if node.gdn is not None and node.module is not None}
            self.forwards = rebind_gdn(self.model, plans, self)
            for rebound in self.forwards:
                rebound.install()
        return make_report(self.model, detection, self.engine, reasons, plans.keys())

    def settle(self) -> None:
        """Only the model's own forward has run since `ready`: what differs now is its doing."""
        assert self.watch is not None
        self.watch.settle()

    def unbind(self) -> None:
        """Put the forwards back and give native memory back."""
        for rebound in reversed(self.forwards):
            rebound.remove()
        self.forwards = []
        if self.engine is not None:
            self.engine.release()

    def follow(self) -> None:
        """Bind again if the model is not what it was: changed, or freed from what stood in the way of a native step."""
        assert self.watch is not None
        reason = self.watch.change(self.model)
        if reason is None and self.engine is None and self._obstacles() != self.obstacles:
            reason = "what stood in the way of a native step has changed"
        if reason is not None:
            logger.info("segki: binding again: %s since injection", reason)
            fresh, fallbacks = self.bind(), self.report.fallbacks
            vars(self.report).update(vars(fresh) | {"fallbacks": fallbacks})

    def ready(self) -> Engine:
        """The engine, bound to the model as it is now; raises `Decline` when there is none."""
        self.follow()
        if self.engine is None:
            raise Decline("; ".join(self.report.reasons))
        if (problem := next(self._problems(), None)) is not None:
            raise Decline(problem)
        self.engine.follow_weights()
        return self.engine

    def _problems(self) -> Iterator[str]:
        """What passes and keeps a call from the native step while it lasts: patched methods, hooks, dropout in training."""
        if (foreign := foreign_method(self.model, self.previous)) is not None:
            yield foreign
        for name, module in self._read:
            if (problem := module_problem(name, module)) is not None:
                yield problem

    def _obstacles(self) -> list[str]:
        return list(self._problems())

    def fall_back(self, reason: str) -> None:
        """Note (and log once, whatever the numbers in it) why a call goes to the model's own generate."""
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._noted:
            self._noted.add(kind)
            self.report.fallbacks.append(reason)
            logger.warning("segki: generate runs the model's own loop: %s", reason)


def injection_of(model: nn.Module) -> Injection | None:
    """The injection of a model, or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: given {type(model).__name__}, accepted a transformers model")
    rebound = vars(model).get("generate")
    owner = rebound.owner if isinstance(rebound, Rebound) else None
    return owner if isinstance(owner, Injection) else None


def inject(model: nn.Module) -> Report:
    """Bind the known segments of a loaded causal language model and its `generate`.

    Nothing is copied: the native step reads the model's parameters where they are. Calls of `model.generate` keep their signature
    and results.

    Parameters
    ----------
    model
        A transformers model with a language-modelling head, any dtype, on the CPU.

    Returns
    -------
    Report
        What runs where and why not; the same that `explain` returns.

    Raises
    ------
    TypeError
        If `model` is not a module with a `generate` method.
    ValueError
        If the model is injected already.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise TypeError(f"model: given {type(model).__name__}, accepted a transformers model with a generate method")
    if injection_of(model) is not None:
        raise ValueError(f"model: this {type(model).__name__} is injected already, call segki.eject(model) first")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model: some parameters are on the meta device, accepted a model whose weights are loaded")
    clear_copies(model)
    injection = Injection(model)
    injection.rebound.append(Rebound(model, "generate", rebound_generate(model, injection), injection))
    for rebound in injection.rebound:
        rebound.install()
    return injection.report


def native_engine(model: nn.Module, detection: Detection) -> tuple[Engine | None, list[str]]:
    """The native step of a detected model, tried against the model's own forward; or the reasons why there is none."""
    if detection.plan is None:
        return None, list(detection.reasons) or ["the model's structure is not known"]
    for index, name in enumerate(cached_modules(detection.plan)):
        own = getattr(model.get_submodule(name), "layer_idx", None)
        if isinstance(own, int) and own != index:
            return None, [f"{name} keeps its past in cache layer {own}, its place is {index} (layers were removed or moved)"]
    if has_linear_state(detection.plan) and not linear_layers_exist():
        return None, ["this transformers has no cache layers for linear attention; they came with 5.0"]
    device = next(model.parameters()).device
    if device.type != "cpu":
        return None, [f"the model is on {device}; this build has a native step for cpu"]
    with preserved(model):
        engine = Engine(model, detection.plan)
        problem = native_problem(model, engine)
    engine.release()
    if problem is not None:
        return None, [problem]
    engine.use_huge_pages()
    return engine, []


def cached_modules(plan: ModelPlan) -> list[str]:
    """Names of the blocks that keep something between steps, in the order of their cache layers."""
    nodes = [node for layer in plan.layers for node in layer.nodes]
    return [node.module for node in nodes if (node.attention or node.gdn) and node.module is not None]


def make_report(
    model: nn.Module, detection: Detection, engine: Engine | None, reasons: list[str], prompts: Collection[str]
) -> Report:
    """The report of a fresh injection; `prompts` are the names of the blocks whose forward is native, too."""
    segments: list[SegmentReport] = []
    for segment in detection.segments:
        if engine is not None:
            runs = "native step, prompt" if segment.module in prompts else "native step"
            segments.append(SegmentReport(segment.module, segment.kind, runs))
        else:
            why = segment.reason or "the whole step is not native"
            segments.append(SegmentReport(segment.module, segment.kind, "torch", why))
    read = next((p.dtype for p in model.parameters()), "") if engine is None else engine.dtype
    dtype = str(read).removeprefix("torch.")
    backend = "" if engine is None else f"{engine.backend.name} ({engine.backend.instruction_set})"
    return Report(type(model).__name__, 4 if engine is None else 1, segments, reasons, dtype, backend)


def rebound_generate(model: nn.Module, injection: Injection) -> Any:
    """A `generate` with the signature of the model's own."""
    own: Callable[..., Any] = injection.previous or types.MethodType(type(model).generate, model)  # type: ignore[attr-defined]

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if injection.engine is None and injection.turn.acquire(blocking=False):
            try:
                injection.follow()
            finally:
                injection.turn.release()
        if injection.engine is None:
            injection.fall_back("; ".join(injection.report.reasons))
            return own(*args, **kwargs)
        return native_or_own(model, injection, own, *args, **kwargs)

    return generate


def native_or_own(
    model: nn.Module,
    injection: Injection,
    own: Callable[..., Any],
    inputs: Any = None,
    generation_config: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`generate` of a model that has a native step: through it, or for a reason through the model's own loop."""
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    check_inputs(model.get_input_embeddings().weight, ids, kwargs)  # type: ignore[operator]
    reason = own_mode(model, generation_config, kwargs)
    if reason is None and args:
        reason = "positional arguments past generation_config"
    if reason is not None:
        injection.fall_back(reason)
        return own(inputs, generation_config, *args, **kwargs)
    method = decoding_method(injection.ready, injection.settle, injection.fall_back, kwargs.get("streamer"), injection.turn)
    kwargs.pop("custom_generate", None)
    return own(inputs, generation_config, custom_generate=method, **kwargs)


def eject(model: nn.Module) -> None:
    """Undo `inject`: the model is exactly as before and all native memory is given back.

    Raises
    ------
    ValueError
        If the model is not injected.
    RuntimeError
        If a generation is running on it and does not end.
    """
    injection = injection_of(model)
    if injection is None:
        if clear_copies(model):  # a copy of an injected model
            return
        raise ValueError(f"model: this {type(model).__name__} is not injected")
    if not injection.turn.acquire(timeout=EJECT_WAIT):  # a generation of another thread ends first
        raise RuntimeError(f"eject: a generation still runs on this model after {EJECT_WAIT} s")
    try:
        for rebound in reversed(injection.rebound):
            rebound.remove()
        injection.unbind()
    finally:
        injection.turn.release()


@contextlib.contextmanager
def injected(model: nn.Module) -> Iterator[Report]:
    """`inject` for the length of a `with` block."""
    report = inject(model)
    try:
        yield report
    finally:
        eject(model)


def explain(model: nn.Module) -> Report:
    """The report of an injected model; for another model, what `inject` would do (the model is left untouched)."""
    injection = injection_of(model)
    if injection is not None:
        return injection.report
    with injected(model) as report:
        return report


def generate(model: nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """One `generate` call on the native step without touching `model.generate` (an injected model is used as it is).

    Same arguments and results as transformers' `model.generate`. Detection runs at every call: for more than one call, `inject`.
    """
    if injection_of(model) is not None:
        return model.generate(input_ids, **kwargs)  # type: ignore[operator]
    with injected(model):
        return model.generate(input_ids, **kwargs)  # type: ignore[operator]

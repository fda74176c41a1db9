"""Run a model's own forward once on a short random prompt and keep what happened."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segki.detect.context import Context, is_container
from segki.detect.ends import Logits
from segki.detect.guard import is_linear, module_problem
from segki.detect.moe_parts import is_moe_shaped
from segki.detect.numeric import Unknown, config_numbers
from segki.detect.trace import FORWARD_ERRORS, Call, recording

TOKENS = 9
KEPT_LOGITS = 2
LARGE_LOGIT = 100.0
SEED = 20240229


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back what a forward leaves behind in its modules: attributes and buffers that were set anew (recurrent state, flags).

    A forward that changes parameters in place (rwkv rescales its own weights once) keeps its attributes as well, since they belong
    to the new values.
    """
    modules = list(model.modules())
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    versions = [parameter._version for parameter in model.parameters()]
    try:
        yield
    finally:
        if versions == [parameter._version for parameter in model.parameters()]:
            for module, (attributes, buffers) in zip(modules, before, strict=True):
                for now, then in ((vars(module), attributes), (module._buffers, buffers)):
                    for name in [name for name in now if name not in then]:
                        del now[name]
                    for name in [name for name in then if now.get(name, then) is not then[name]]:
                        now[name] = then[name]


@contextmanager
def sealed(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """While open, those of the named modules that are hooked, patched or otherwise not their class's own raise when called.

    They may stay as they are as long as nobody calls them, and nobody's hook runs in order to find out.
    """
    handles = []
    try:
        for name in names:
            module = model.get_submodule(name)
            problem = module_problem(name, module)
            if problem is not None:
                handles.append(module.register_forward_pre_hook(_refusal(problem), prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refusal(problem: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise RuntimeError(f"{problem}, and text passes through it")

    return hook


@dataclass
class Run:
    """One traced forward; `head` and `logits` are None when the model has no output head that was called once."""

    ctx: Context
    head: Call | None
    logits: Logits | None


def run_once(model: nn.Module, first: Tensor) -> Run:
    """Trace one forward. The head's last input row is amplified so that a softcap shows.

    Raises
    ------
    Unknown
        If the forward fails.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(SEED)
    ids = _prompt(model, generator).to(first.device)
    output = model.get_output_embeddings()  # type: ignore[operator]
    accepted = inspect.signature(type(model).forward).parameters
    extra = {"logits_to_keep": KEPT_LOGITS} if "logits_to_keep" in accepted else {}
    try:
        with _amplified(output) as natural, recording(model, noisy=_blocks(model), generator=generator) as trace:
            answer = model(input_ids=ids, use_cache=False, **extra)
    except FORWARD_ERRORS as error:
        raise Unknown(f"the model's own forward failed on a prompt of {TOKENS} tokens: {type(error).__name__}: {error}") from error
    ctx = Context(model, trace, first.dtype, first.device, config, generator, ids)
    name = next((n for n, m in model.named_modules() if m is output), None)
    head = trace.only(name) if name else None
    logits = getattr(answer, "logits", None)
    if head is None or head.x is None or head.y is None or len(natural) != 1 or not isinstance(logits, Tensor):
        return Run(ctx, None, None)
    kept = min(KEPT_LOGITS, head.x.shape[1])
    return Run(ctx, head, Logits(head.y[:, -kept:], natural[0][:, -kept:], logits[:, -kept:]))


@contextmanager
def _amplified(output: object) -> Iterator[list[Tensor]]:
    """While open, the output head gets its last row scaled up to large logits; yields the inputs as they were."""
    natural: list[Tensor] = []
    if not isinstance(output, nn.Linear) or not is_linear(output):
        yield natural
        return
    weight = output.weight

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].detach().clone()
        natural.append(x.clone())
        peak = float(F.linear(x[:, -KEPT_LOGITS:], weight)[:, -1:].abs().max())
        x[:, -1:] *= max(LARGE_LOGIT / max(peak, 1e-6), 1.0)
        return (x, *args[1:])

    handle = output.register_forward_pre_hook(hook)
    try:
        yield natural
    finally:
        handle.remove()


def _prompt(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Random token ids `[1, TOKENS]`, neither special nor repeated where the vocabulary allows."""
    weight = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 64
    special = {int(v) for n, v in config_numbers(getattr(model, "config", None)) if n.endswith("token_id")}
    order = [token for token in torch.randperm(min(rows, 1000), generator=generator).tolist() if token not in special]
    order = order or list(range(rows))
    return torch.tensor([[order[i % len(order)] for i in range(TOKENS)]])


def decoder(model: nn.Module) -> tuple[str, nn.Module]:
    """(name, module) of the language model: of a composite (text and vision) the text tower, else the model itself."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    name = next((n for n, m in model.named_modules() if m is found), "")
    return (name, model.get_submodule(name)) if name else ("", model)


def beside(model: nn.Module) -> set[str]:
    """Names of the modules beside the language model, its embedding and its head: the vision tower of a composite."""
    name, language = decoder(model)
    if not name:
        return set()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    needed = {id(m) for root in (language, *ends) if isinstance(root, nn.Module) for m in root.modules()}
    return {n for n, m in model.named_modules() if id(m) not in needed and not f"{name}.".startswith(f"{n}." if n else "")}


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """(name, list) of the decoder layers: of the outermost module lists, the one with the most parameters."""
    prefix, language = decoder(model)
    lists = [(n, m) for n, m in language.named_modules(prefix=prefix) if isinstance(m, nn.ModuleList) and len(m) > 0]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    return max(outer, key=lambda pair: sum(p.numel() for p in pair[1].parameters()), default=None)


def _blocks(model: nn.Module) -> set[str]:
    """Names of the outermost blocks of the decoder layers: with parameters, neither containers of blocks nor linear layers."""
    found = layer_list(model)
    names: set[str] = set()
    if found is None:
        return names
    open_modules = [(f"{found[0]}.{i}", layer) for i, layer in enumerate(found[1])]
    while open_modules:
        name, module = open_modules.pop()
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}"
            if is_linear(child) or next(child.parameters(), None) is None:
                continue
            if is_container(child) and not is_moe_shaped(child):
                open_modules.append((full, child))
            else:
                names.add(full)
    return names


def layer_calls(ctx: Context) -> list[Call]:
    """Calls of the decoder layers.

    Raises
    ------
    Unknown
        If there are none, or they are not called once each in order, each on the previous one's output.
    """
    found = layer_list(ctx.model)
    if found is None:
        raise Unknown("the model has no list of decoder layers")
    name, layers = found
    calls = [ctx.trace.only(f"{name}.{i}") for i in range(len(layers))]
    known = [c for c in calls if c is not None]
    if len(known) != len(calls):
        raise Unknown(f"{name}: its layers are not called exactly once each")
    for one, two in itertools.pairwise(known):
        if two.order < one.order or one.y is None or two.x is None or not torch.equal(one.y, two.x):
            raise Unknown(f"{two.name}: its input is not the output of {one.name}")
    return known

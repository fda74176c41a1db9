"""What a program runs on: facts to keep beside a figure, memory that is left."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from segki import _segki

__all__ = ["available_memory", "machine_facts"]

PACKAGES = ("segki", "torch", "transformers", "llama-cpp-python", "numpy")
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def machine_facts() -> dict[str, Any]:
    """Return facts to keep beside a figure: processor, cores, memory, versions, threads, load."""
    import torch

    cpu = _key_values(Path("/proc/cpuinfo"))
    memory = _key_values(Path("/proc/meminfo")).get("MemTotal", "")
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_family_model_stepping": "/".join(
            cpu.get(name, "?") for name in ("cpu family", "model", "stepping")
        ),
        "vector_flags": [flag for flag in VECTOR_FLAGS if flag in flags],
        "cores": _segki.threads(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def available_memory() -> int | None:
    """Bytes that this process can still take without swapping, control groups considered; None where the system does not say."""
    found = []
    memory = _key_values(Path("/proc/meminfo")).get("MemAvailable", "").split()
    if memory:
        found.append(int(memory[0]) * 1024)
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        found.append(max(int(most) - int(used.read_text()), 0))
    return min(found, default=None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _key_values(file: Path) -> dict[str, str]:
    """Return the first value of each ``key : value`` line; nothing where the file does not exist."""
    if not file.is_file():
        return {}
    found: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found

"""The seam to the compiled module: dtypes, views of tensors, memory for the native side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from segki import _segki
from segki.machine import available_memory
from segki.plan import HeadView, NormPlan, ParamRef

Resolve = Callable[[ParamRef], torch.Tensor]  # the live parameter that a plan names

DTYPES = {
    torch.float32: _segki.DType.f32,
    torch.bfloat16: _segki.DType.bf16,
    torch.float16: _segki.DType.f16,
    torch.int32: _segki.DType.i32,
    torch.int64: _segki.DType.i64,
    torch.uint8: _segki.DType.u8,
}
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 64
CHECKED_BYTES = 1 << 24  # blocks from this size on are taken only if the machine has the memory left


def view(
    tensor: torch.Tensor | None,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> _segki.View:
    """A native view of a tensor's memory; None gives the absent view.

    Parameters
    ----------
    tensor
        The memory; the caller keeps it alive as long as the view is used.
    shape, stride, offset
        Another reading of the same memory, in elements; default: the tensor's own.
    """
    if tensor is None:
        return _segki.View()
    return _segki.View(
        tensor.data_ptr() + offset * tensor.element_size(),
        DTYPES[tensor.dtype],
        list(tensor.shape if shape is None else shape),
        list(tensor.stride() if stride is None else stride),
    )


def heads(projected: Sequence[torch.Tensor], where: HeadView, groups: int, width: int, group: int | None = None) -> _segki.View:
    """Heads of a projection's output: `[rows, groups, width]`, or `[rows, groups, group, width]`."""
    source = projected[where.source]
    rows, stride = source.shape[0], source.stride(0)
    if group is None:
        return view(source, (rows, groups, width), (stride, where.group_stride, 1), where.offset)
    return view(source, (rows, groups, group, width), (stride, where.group_stride, where.head_stride, 1), where.offset)


def numbers(projected: Sequence[torch.Tensor], where: HeadView, groups: int, group: int) -> _segki.View:
    """One number for each of `groups * group` heads of a projection's output: `[rows, groups, group]`."""
    source = projected[where.source]
    return view(source, (source.shape[0], groups, group), (source.stride(0), where.group_stride, where.head_stride), where.offset)


def norm_spec(plan: NormPlan | None) -> _segki.NormSpec:
    """The native form of a norm's rule; None is no norm."""
    spec = _segki.NormSpec()
    if plan is not None:
        spec.kind = _segki.NormKind.rms if plan.kind == "rms" else _segki.NormKind.layer
        spec.eps = plan.eps
        spec.weight_offset = plan.weight_offset
        spec.round_before_weight = int(plan.cast == "before_weight")
    return spec


@contextmanager
def plain_tensors() -> Iterator[None]:
    """While open, torch makes tensors as it does by default: float32 unless told otherwise, usable outside of an inference mode."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)


class TorchMemory:
    """An allocator for the native side that takes its memory from torch and gives it back to torch."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, 64-byte aligned; 0 when torch has none or the machine has not that much left."""
        if size >= CHECKED_BYTES:
            left = available_memory()
            if left is not None and self.held_bytes + size > left:
                return 0
        try:
            block = torch.empty(size + 64, dtype=torch.uint8)
        except RuntimeError:
            return 0
        address = (block.data_ptr() + 63) // 64 * 64
        self._blocks[address] = block
        return address

    def release(self, address: int, size: int) -> None:
        """Give a block back; `size` is what was asked for."""
        del self._blocks[address]

    @property
    def held_bytes(self) -> int:
        """Bytes handed out and not yet given back."""
        return sum(block.numel() for block in self._blocks.values())

    def tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A dense torch view of memory inside a block that this allocator handed out; the block lives as long as the view."""
        count = 1
        for size in shape:
            count *= size
        length = count * torch.empty((), dtype=dtype).element_size()
        for block in self._blocks.values():
            skip = address - block.data_ptr()
            if 0 <= skip and skip + length <= block.numel():
                return block[skip : skip + length].view(dtype).view(tuple(shape))
        raise ValueError(f"address: given {address:#x}, accepted an address inside of a block that was handed out")

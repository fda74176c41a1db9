"""The seam to the compiled module: dtypes, views of tensors, memory for the native side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segki import _segki

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


class TorchMemory:
    """An allocator for the native side that takes its memory from torch and gives it back to torch."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, 64-byte aligned; 0 when torch has none."""
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
        """A dense torch view of a block that this allocator handed out (or of the start of it)."""
        block = self._blocks[address]
        skip = address - block.data_ptr()
        count = 1
        for size in shape:
            count *= size
        length = count * torch.empty((), dtype=dtype).element_size()
        return block[skip : skip + length].view(dtype).view(tuple(shape))

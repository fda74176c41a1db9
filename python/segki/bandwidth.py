"""How fast this machine reads memory, and which share of that a decode step reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segki import _segki

__all__ = ["ReadBandwidth", "Share", "measure_read_bandwidth", "native_step_bytes", "step_weight_bytes"]


@dataclass(frozen=True)
class ReadBandwidth:
    """The best sustained read rate seen.

    Attributes
    ----------
    bytes_per_second : float
        Bytes read a second, all threads together.
    threads : int
        Threads that read.
    """

    bytes_per_second: float
    threads: int

    def seconds(self, size: int) -> float:
        """Return the least time in seconds in which `size` bytes can be read."""
        return size / self.bytes_per_second

    def share(self, size: int, seconds: float) -> Share:
        """Return the share of this rate at which `size` bytes were read in `seconds`."""
        return Share(self.seconds(size) / seconds)


@dataclass(frozen=True)
class Share:
    """A share of the measured read bandwidth; above 1 the bandwidth was measured too low."""

    value: float

    @property
    def measurement_error(self) -> bool:
        """Whether the value cannot be true: nothing reads faster than the memory."""
        return self.value > 1.0

    def __str__(self) -> str:
        """Return two decimals, and the reason why they cannot be true where they cannot."""
        if self.measurement_error:
            return f"{self.value:.2f} (measurement error: above 1)"
        return f"{self.value:.2f}"


def measure_read_bandwidth(
    size: int = 512 << 20, seconds: float = 1.0, threads: int | None = None
) -> ReadBandwidth:
    """Measure the read bandwidth of the memory.

    Parameters
    ----------
    size : int
        Bytes to read again and again; several times the last-level cache, or the cache is measured.
    seconds : float
        How long to go on. The best pass counts: anything slower was disturbed.
    threads : int, optional
        Threads that read, each its own part; those of native code (`segki.threads`) when None.
    """
    threads = _segki.threads() if threads is None else threads
    return ReadBandwidth(float(_segki.read_bandwidth(size, threads, seconds)), threads)


def step_weight_bytes(model: Any) -> int:
    """Return the bytes of weights that one decode step reads, whatever the number of rows.

    Every parameter counts once, also when it is tied. Embedding tables do not count, as a step looks
    up one row a token, unless the LM head multiplies with the same table.
    """
    from torch import nn

    head = model.get_output_embeddings()
    head_weight = None if head is None else getattr(head, "weight", None)
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head_weight
    }
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if id(parameter) not in looked_up
    )


def native_step_bytes(model: Any, plan: Any) -> int:
    """Return the bytes that one decode step of one row moves, from the plan of the step.

    Weights are read once, of the routed experts the chosen ones only; recurrent states are read and
    written. Tables that are looked up by row and the keys and values of the context do not count.

    Parameters
    ----------
    model : torch.nn.Module
        The model that the plan belongs to.
    plan : segki.plan.ModelPlan
        Its native step.
    """
    from segki.detect import resolve
    from segki.engine import parameter_refs
    from segki.plan import ExpertWeights

    sizes: dict[int, float] = {}  # by address: a tied weight counts once

    def count(part: Any, share: float = 1.0) -> None:
        for ref in parameter_refs(part):
            weight = resolve(model, ref)
            sizes[weight.data_ptr()] = weight.numel() * weight.element_size() * share

    moving = 0
    for layer in plan.layers:
        for node in layer.nodes:
            moe, gdn = node.moe, node.gdn
            for name in node.__dataclass_fields__:
                if name != "moe":
                    count(getattr(node, name))
            if moe is not None:
                for name in moe.__dataclass_fields__:
                    part = getattr(moe, name)
                    count(part, moe.router.top_k / moe.experts if isinstance(part, ExpertWeights) else 1.0)
            if gdn is not None:
                channels = 2 * gdn.key_heads * gdn.key_dim + gdn.value_heads * gdn.value_dim
                moving += 2 * 4 * gdn.value_heads * gdn.key_dim * gdn.value_dim
                moving += 2 * channels * gdn.conv_width * resolve(model, gdn.out.weight).element_size()
    count(plan.final_norm)
    count(plan.head)
    return round(sum(sizes.values())) + moving

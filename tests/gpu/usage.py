"""How many bytes of the card are in use at most, counted for CuPy and for torch."""

from __future__ import annotations

import gc
from typing import Any

import cupy


def padded(num_bytes: int) -> int:
    """What an allocation takes of CuPy's and of torch's pool: both cut memory by 512 bytes."""
    return -(-num_bytes // 512) * 512


class Usage(cupy.cuda.MemoryHook):
    """Counts what CuPy allocates in this thread inside a ``with`` block.

    Attributes
    ----------
    peak
        Most bytes in use at a time, beyond those at the start.
    now
        Bytes in use.
    """

    name = "streamkl usage"

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def malloc_postprocess(self, **event: Any) -> None:
        if event["mem_ptr"]:
            self._live[event["mem_ptr"]] = event["mem_size"]
            self.now += event["mem_size"]
            self.peak = max(self.peak, self.now)

    def free_postprocess(self, **event: Any) -> None:
        # What had been allocated before the block does not count.
        self.now -= self._live.pop(event["mem_ptr"], 0)


class TorchUsage:
    """Counts what torch allocates on the current device inside a ``with`` block."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self.peak = 0

    def __enter__(self) -> TorchUsage:
        gc.collect()
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        self._start = self._cuda.memory_allocated()
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak = self._cuda.max_memory_allocated() - self._start

    @property
    def now(self) -> int:
        """Bytes in use, beyond those at the start."""
        return self._cuda.memory_allocated() - self._start

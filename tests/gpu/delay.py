"""A kernel that keeps a stream busy, so that what waits for it is seen to wait."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

SOURCE = """
extern "C" __global__ void spin(long long clocks) {
    const long long start = clock64();
    while (clock64() - start < clocks) {}
}
"""
# About a tenth of a second.
CLOCKS = 200_000_000


@functools.cache
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(SOURCE, "spin")


def delay() -> None:
    """Keep CuPy's current stream busy for a while."""
    _spin()((1,), (1,), (np.int64(CLOCKS),))

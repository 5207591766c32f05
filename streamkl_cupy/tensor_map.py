"""TMA descriptors: what the copy engine of Hopper needs to know of a tensor.

The only place that calls the driver by itself. A descriptor is 128 bytes that the driver fills in.
It depends on an address and on nothing that lies there, so one that has been encoded stays right
whoever owns the memory by now.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from streamkl_cupy.problem import Strides

MAP_BYTES = 128
PANEL_COLUMNS = 64  # of 2 bytes: the 128 bytes that the swizzle permutes

# Enumerations of cuda.h.
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_OUT_OF_BOUNDS_ZERO = 0
_NO_CONTEXT = 201


class TensorMapError(RuntimeError):
    """The driver refused a descriptor."""


class Tensor:
    """All that a descriptor holds but the address, for boxes of ``box_rows`` rows by 64 columns.

    Boxes of several heads hold the heads of a row next to each other: their coordinates are
    (column, head, row, batch), those of others (column, row, head, batch).

    Parameters
    ----------
    shape
        Batch, heads, rows, columns.
    strides
        Of the first three axes, in elements, each a multiple of 8; one of 0 makes the axis a single
        step, at whose only coordinate 0 every index finds its data.
    dtype
        ``"bfloat16"`` or ``"float16"``.
    box_rows, box_heads
        Each at most 256.
    """

    __slots__ = ("arguments", "text")

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        strides: Strides,
        dtype: str,
        box_rows: int,
        box_heads: int = 1,
    ) -> None:
        batch, heads, rows, columns = shape
        axes = [
            (rows, strides.row, box_rows),
            (heads if strides.head else 1, strides.head, box_heads),
        ]
        if box_heads > 1:
            axes.reverse()
        axes.append((batch if strides.batch else 1, strides.batch, 1))
        sizes = (columns, *(size for size, _, _ in axes))
        # An axis of one step is never stepped along, but the driver wants a stride for it.
        steps = [2 * (stride or columns) for _, stride, _ in axes]
        self.text = f"shape {shape}, {strides}, box {box_rows} x {box_heads}"
        # Before and after the address; made once, for that takes longer than the call.
        self.arguments = (
            (_DATA_TYPES[dtype], 4),
            (
                (ctypes.c_uint64 * 4)(*sizes),
                (ctypes.c_uint64 * 3)(*(-(-step // 16) * 16 for step in steps)),
                (ctypes.c_uint32 * 4)(PANEL_COLUMNS, *(box for _, _, box in axes)),
                (ctypes.c_uint32 * 4)(1, 1, 1, 1),
                _INTERLEAVE_NONE,
                _SWIZZLE_128B,
                _L2_PROMOTION_256B,
                _OUT_OF_BOUNDS_ZERO,
            ),
        )


@functools.lru_cache(maxsize=4096)
def encode(tensor: Tensor, pointer: int) -> bytes:
    """Encode the descriptor of a tensor at an address. The latest ones are kept.

    Parameters
    ----------
    tensor
        What the descriptor says of the tensor; told apart by identity.
    pointer
        Address of the first element, a multiple of 16.

    Returns
    -------
    bytes
        128 of them, opaque.

    Raises
    ------
    TensorMapError
        The driver refused it.
    """
    buffer = (ctypes.c_char * (MAP_BYTES + 64))()
    address = -(-ctypes.addressof(buffer) // 64) * 64
    before, after = tensor.arguments
    arguments = (ctypes.c_void_p(address), *before, ctypes.c_void_p(pointer), *after)
    code = _driver()(*arguments)
    if code == _NO_CONTEXT:
        # The first use of CUDA in this thread: the runtime makes the context current, the driver
        # only asks for it.
        import cupy

        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        code = _driver()(*arguments)
    if code != 0:
        raise TensorMapError(f"cuTensorMapEncodeTiled: error {code} for {tensor.text}")
    return ctypes.string_at(address, MAP_BYTES)


@functools.cache
def _driver() -> Any:
    name = "nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1"
    return ctypes.CDLL(name).cuTensorMapEncodeTiled

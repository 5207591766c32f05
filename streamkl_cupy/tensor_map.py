"""TMA descriptors: what the copy engine of Hopper needs to know of a tensor.

The only place that calls the driver by itself. A descriptor is 128 bytes that the driver fills in:
it takes a few microseconds to encode one, and half of one to move it to another address.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from streamkl_cupy.problem import Strides

MAP_BYTES = 128
MAP_ALIGNMENT = 64
PANEL_COLUMNS = 64  # of 2 bytes: the 128 bytes that the swizzle permutes

# Enumerations of cuda.h.
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_OUT_OF_BOUNDS_ZERO = 0


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


def encode(place: int, tensor: Tensor, pointer: int) -> None:
    """Write the descriptor of a tensor. A CUDA device must be current in this thread.

    Parameters
    ----------
    place
        Where to write 128 bytes on the host: an address that is a multiple of 64.
    tensor
        What the descriptor says of the tensor.
    pointer
        Address of the first element, a multiple of 16.

    Raises
    ------
    TensorMapError
        The driver refused it.
    """
    before, after = tensor.arguments
    encode_tiled, _ = _driver()
    code = encode_tiled(ctypes.c_void_p(place), *before, ctypes.c_void_p(pointer), *after)
    if code != 0:
        raise TensorMapError(f"cuTensorMapEncodeTiled: error {code} for {tensor.text}")


def move(place: int, pointer: int) -> None:
    """Make a descriptor that `encode` has written say another address, and nothing else.

    Parameters
    ----------
    place
        Where it is.
    pointer
        Address of the first element from now on, a multiple of 16.

    Raises
    ------
    TensorMapError
        The driver refused it.
    """
    _, replace_address = _driver()
    code = replace_address(place, pointer)
    if code != 0:
        raise TensorMapError(f"cuTensorMapReplaceAddress: error {code} for address {pointer:#x}")


@functools.cache
def _driver() -> tuple[Any, Any]:
    library = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    replace_address = library.cuTensorMapReplaceAddress
    replace_address.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library.cuTensorMapEncodeTiled, replace_address

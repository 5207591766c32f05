"""A driver that is only pretended: it keeps what is launched instead of launching it.

It reads each argument from the address that it is given, as the driver does, after other threads
have had their turn.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from streamkl_cupy import jit, launch, tensor_map, tiling

NUM_MAPS = 4
# What `encode` writes: the address, the sizes, the strides in bytes, and rows of a box.
_MAP = struct.Struct("=Q4Q3QI")


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel, the device that it was loaded on, and what the driver was told."""

    kernel: str
    device_index: int
    grid: int
    block: int
    shared_memory: int
    stream: int
    arguments: tuple[bytes, ...]

    @property
    def params(self) -> bytes:
        return self.arguments[-1]

    @property
    def maps(self) -> list[dict[str, Any]]:
        """What the tensor maps say."""
        maps = []
        for start in range(0, len(self.arguments[0]), tensor_map.MAP_BYTES):
            values = _MAP.unpack_from(self.arguments[0], start)
            pointer, sizes, strides = values[0], values[1:5], values[5:8]
            maps.append({"pointer": pointer, "sizes": sizes, "strides": strides, "box": values[8]})
        return maps


@dataclass(frozen=True)
class Cleared:
    """One memset."""

    pointer: int
    size: int
    stream: int


class Driver:
    """Put in the place of CuPy, of the compiler and of what encodes tensor maps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Launched | Cleared] = []
        self.loaded: list[tuple[str, int]] = []
        self.encoded: list[int] = []
        self.moved: list[int] = []
        self.codes: Iterator[int] = itertools.repeat(0)  # what moves return
        self.sizes: dict[str, tuple[int, ...]] = {}  # of the arguments of kernels of a test
        cuda = SimpleNamespace(
            driver=SimpleNamespace(launchKernel=lambda *arguments: self.launch_kernel(*arguments)),
            runtime=SimpleNamespace(memsetAsync=self.memset),
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(jit, "function", self.function)
        monkeypatch.setattr(tensor_map, "_driver", lambda: (self.encode, self.move))

    def function(
        self, kernel: str, template: Any, arch: str, device_index: int, *, shared_memory: int
    ) -> Any:
        self.loaded.append((kernel, device_index))
        return SimpleNamespace(ptr=len(self.loaded))

    def launch_kernel(self, function: int, *extent: int) -> None:
        grid, grid_y, grid_z, block, block_y, block_z, *rest = extent
        shared_memory, stream, arguments, extra = rest
        assert (grid_y, grid_z, block_y, block_z, extra) == (1, 1, 1, 1, 0)
        kernel, device_index = self.loaded[function - 1]
        time.sleep(0)
        values = []
        for position, size in enumerate(self.sizes.get(kernel) or argument_sizes(kernel)):
            place = ctypes.c_uint64.from_address(arguments + 8 * position).value
            assert place % 8 == 0
            values.append(ctypes.string_at(place, size))
        self.seen.append(
            Launched(kernel, device_index, grid, block, shared_memory, stream, tuple(values))
        )

    def memset(self, pointer: int, value: int, size: int, stream: int) -> None:
        assert value == 0
        self.seen.append(Cleared(pointer, size, stream))

    def encode(self, buffer: Any, dtype: int, rank: int, pointer: Any, *rest: Any) -> int:
        sizes, strides, box, *_ = rest
        assert rank == len(sizes) == len(box)
        packed = _MAP.pack(pointer.value, *sizes, *strides, box[1])
        assert buffer.value % tensor_map.MAP_ALIGNMENT == 0
        ctypes.memmove(buffer, packed.ljust(tensor_map.MAP_BYTES, b"\0"), tensor_map.MAP_BYTES)
        self.encoded.append(pointer.value)
        return 0

    def move(self, place: int, pointer: int) -> int:
        ctypes.c_uint64.from_address(place).value = pointer
        self.moved.append(pointer)
        return next(self.codes)


def argument_sizes(kernel: str) -> tuple[int, ...]:
    """Bytes of each argument of a kernel."""
    if kernel.startswith(("forward", "reduce")):
        params = launch.FORWARD_PARAMS
    else:
        special = {"backward_prepare": launch.PREPARE_PARAMS}
        special["backward_finish"] = launch.FINISH_PARAMS
        special["merge_states"] = launch.MERGE_PARAMS
        special["replace_lse"] = launch.REPLACE_PARAMS
        special |= dict.fromkeys(tiling.BOTH_KERNELS, launch.BOTH_PARAMS)
        params = special.get(kernel, launch.BACKWARD_PARAMS)
    maps = (NUM_MAPS * tensor_map.MAP_BYTES,) if kernel.endswith("sm90") else ()
    return (*maps, params.size)

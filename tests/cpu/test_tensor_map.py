"""TMA descriptors: what the driver is asked for. The driver itself is not needed here."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from streamkl_cupy import tensor_map
from streamkl_cupy.problem import Strides
from streamkl_cupy.tensor_map import Tensor

PLACE = 1 << 20


class Driver:
    """Stands for the two functions of the driver: keeps what they are asked."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.code = 0

    def encode(self, *arguments: Any) -> int:
        names = "place dtype rank pointer sizes strides box steps interleave swizzle l2 outside"
        call = dict(zip(names.split(), arguments, strict=True))
        for name in ("sizes", "strides", "box", "steps"):
            call[name] = list(call[name])
        self.calls.append(call)
        return self.code

    def move(self, place: int, pointer: int) -> int:
        self.calls.append({"place": place, "pointer": pointer})
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: (driver.encode, driver.move))
    return driver


def test_strides_are_those_of_the_caller_in_bytes(driver: Driver) -> None:
    strides = Strides(batch=65536, head=64, row=512)
    tensor_map.encode(PLACE, Tensor((2, 8, 100, 64), strides, "bfloat16", 128), 4096)
    (call,) = driver.calls
    assert (call["place"].value, call["pointer"].value) == (PLACE, 4096)
    assert call["sizes"] == [64, 100, 8, 2]
    assert call["strides"] == [1024, 128, 131072]
    assert call["box"] == [64, 128, 1, 1]


def test_an_expanded_axis_has_one_step(driver: Driver) -> None:
    tensor_map.encode(PLACE, Tensor((3, 8, 100, 64), Strides(0, 0, 64), "float16", 192), 4096)
    (call,) = driver.calls
    assert call["sizes"] == [64, 100, 1, 1]
    assert all(stride > 0 and stride % 16 == 0 for stride in call["strides"])


def test_addresses_are_whole(driver: Driver) -> None:
    # A plain integer would lose its upper half on the way to a C function.
    tensor = Tensor((1, 1, 10, 64), Strides(0, 0, 64), "bfloat16", 128)
    tensor_map.encode(PLACE << 20, tensor, 1 << 45)
    (call,) = driver.calls
    assert isinstance(call["place"], ctypes.c_void_p)
    assert isinstance(call["pointer"], ctypes.c_void_p)
    tensor_map.move(PLACE << 20, 1 << 45)
    assert driver.calls[-1] == {"place": PLACE << 20, "pointer": 1 << 45}


def test_a_refusal_is_an_error_that_says_what_was_asked(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(tensor_map.TensorMapError, match=r"error 1 for shape \(1, 1, 10, 64\)"):
        tensor_map.encode(PLACE, Tensor((1, 1, 10, 64), Strides(0, 0, 64), "bfloat16", 128), 4096)
    with pytest.raises(tensor_map.TensorMapError, match=r"error 1 for address 0x1008"):
        tensor_map.move(PLACE, 4104)

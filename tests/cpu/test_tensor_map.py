"""TMA descriptors: what the driver is asked for. The driver itself is not needed here."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from streamkl_cupy import tensor_map
from streamkl_cupy.problem import Strides
from streamkl_cupy.tensor_map import Tensor, encode


class Driver:
    """Stands for cuTensorMapEncodeTiled: keeps what it is asked and fills the descriptor."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.code = 0

    def __call__(self, *arguments: Any) -> int:
        names = "buffer dtype rank pointer sizes strides box steps interleave swizzle l2 outside"
        call = dict(zip(names.split(), arguments, strict=True))
        for name in ("sizes", "strides", "box", "steps"):
            call[name] = list(call[name])
        self.calls.append(call)
        ctypes.memset(call["buffer"], 7, tensor_map.MAP_BYTES)
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
    return driver


def test_strides_are_those_of_the_caller_in_bytes(driver: Driver) -> None:
    strides = Strides(batch=65536, head=64, row=512)
    encoded = encode(Tensor((2, 8, 100, 64), strides, "bfloat16", 128), 4096)
    assert encoded == bytes([7]) * 128
    (call,) = driver.calls
    assert call["buffer"].value % 64 == 0
    assert call["pointer"].value == 4096
    assert call["sizes"] == [64, 100, 8, 2]
    assert call["strides"] == [1024, 128, 131072]
    assert call["box"] == [64, 128, 1, 1]


def test_an_expanded_axis_has_one_step(driver: Driver) -> None:
    encode(Tensor((3, 8, 100, 64), Strides(0, 0, 64), "float16", 192), 4096)
    (call,) = driver.calls
    assert call["sizes"] == [64, 100, 1, 1]
    assert all(stride > 0 and stride % 16 == 0 for stride in call["strides"])


def test_a_tensor_is_encoded_once_an_address(driver: Driver) -> None:
    tensor = Tensor((1, 1, 10, 64), Strides(0, 0, 64), "bfloat16", 128)
    for pointer in (4096, 4096, 8192, 4096):
        encode(tensor, pointer)
    assert [call["pointer"].value for call in driver.calls] == [4096, 8192]


def test_tensors_at_one_address_are_told_apart(driver: Driver) -> None:
    for strides in (Strides(0, 0, 64), Strides(0, 0, 128)):
        encode(Tensor((1, 1, 10, 64), strides, "bfloat16", 128), 4096)
    assert [call["strides"][0] for call in driver.calls] == [128, 256]


def test_what_is_kept_is_bounded(driver: Driver) -> None:
    tensor = Tensor((1, 1, 10, 64), Strides(0, 0, 64), "bfloat16", 128)
    limit = encode.cache_info().maxsize
    assert limit is not None
    for step in range(limit + 1):
        encode(tensor, 4096 + 16 * step)
    assert encode.cache_info().currsize == limit
    encode(tensor, 4096)  # the oldest, which had to go
    assert len(driver.calls) == limit + 2


def test_a_refusal_is_an_error_that_says_what_was_asked(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(tensor_map.TensorMapError, match=r"error 1 for shape \(1, 1, 10, 64\)"):
        encode(Tensor((1, 1, 10, 64), Strides(0, 0, 64), "bfloat16", 128), 4096)

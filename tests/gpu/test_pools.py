"""Memory of CuPy: the caller's allocator, how often it is asked, and nothing that grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    STATE,
    Cupy,
    Expected,
    backward_plan,
    forward_plan,
    random_inputs,
    run,
    upload_all,
)

SHAPE = {"heads": 4, "key_heads1": 2, "num_queries": 90, "num_keys": 130}
SPLIT = {"heads": 2, "num_queries": 3, "num_keys": 6000}


class Allocations(cupy.cuda.MemoryHook):
    """Counts what CuPy's pools are asked for in this thread inside a ``with`` block."""

    name = "streamkl allocations"

    def __init__(self) -> None:
        self.count = 0

    def malloc_postprocess(self, **event: Any) -> None:
        self.count += bool(event["mem_ptr"])


def test_how_often_memory_is_asked_for(rng: np.random.Generator, cupy_library: Cupy) -> None:
    for shape, num_workspaces in ((SHAPE, 0), (SPLIT, 1)):
        arrays = upload_all(cupy_library, random_inputs(rng, **shape))
        qk = [arrays[name] for name in INPUTS]
        assert (forward_plan(arrays, {}).workspace_bytes > 0) == num_workspaces
        with Allocations() as asked:
            state = skl.attention_kl(*qk, return_state=True)
        assert asked.count == len(STATE) + num_workspaces
        with Allocations() as asked:
            kl = skl.attention_kl(*qk)
        assert asked.count == 1 + num_workspaces

        # Into arrays of the caller's there is the workspace alone.
        with Allocations() as asked:
            skl.attention_kl(*qk, out=kl)
            skl.attention_kl(*qk, return_state=True, out=state)
        assert asked.count == 2 * num_workspaces
        assert backward_plan(arrays, {}, INPUTS).workspace_bytes > 0
        with Allocations() as asked:
            gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS)
        assert asked.count == len(INPUTS) + 1
        with Allocations() as asked:
            skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS, out=gradients)
        assert asked.count == 1


def _pool() -> tuple[Callable[[int], Any], Callable[[], int]]:
    pool = cupy.cuda.MemoryPool()
    return pool.malloc, pool.used_bytes


def _async_pool() -> tuple[Callable[[int], Any], Callable[[], int]]:
    pool = cupy.cuda.MemoryAsyncPool()
    return pool.malloc, pool.used_bytes


def _managed() -> tuple[Callable[[int], Any], Callable[[], int]]:
    pool = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    return pool.malloc, pool.used_bytes


def _no_pool() -> tuple[Callable[[int], Any], Callable[[], int]]:
    live = 0

    def allocate(size: int) -> Any:
        nonlocal live
        live += size
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)

    return allocate, lambda: live


ALLOCATORS = {"pool": _pool, "async": _async_pool, "managed": _managed, "none": _no_pool}


@pytest.fixture(params=ALLOCATORS)
def used_bytes(request: pytest.FixtureRequest) -> Iterator[Callable[[], int]]:
    """Bytes in use of an allocator of the caller's, which is in force."""
    allocate, used = ALLOCATORS[request.param]()
    with cupy.cuda.using_allocator(allocate):
        yield used


@pytest.mark.parametrize("shape", [SHAPE, SPLIT], ids=["plain", "splits"])
def test_the_allocator_of_the_caller_is_the_one_used(
    shape: dict[str, int],
    used_bytes: Callable[[], int],
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    inputs = random_inputs(rng, **shape)
    arrays = upload_all(cupy_library, inputs)
    default = cupy.get_default_memory_pool()
    before, total = used_bytes(), default.total_bytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results = run(cupy_library, arrays, {})
    stream.synchronize()
    Expected(inputs, {}).check(results)
    kl = skl.attention_kl(*(arrays[name] for name in INPUTS))
    assert used_bytes() - before >= kl.nbytes
    assert default.total_bytes() == total


def test_an_allocator_that_has_nothing_left(rng: np.random.Generator, cupy_library: Cupy) -> None:
    arrays = upload_all(cupy_library, random_inputs(rng, **SHAPE))
    qk = [arrays[name] for name in INPUTS]
    skl.attention_kl(*qk)
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=512)
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        skl.attention_kl(*qk, return_state=True)
    # And the next call is as if nothing had been.
    assert np.isfinite(cupy_library.get(skl.attention_kl(*qk))).all()


def resident_bytes() -> int:
    """Of this process, on the host."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_calls_without_growth(rng: np.random.Generator, cupy_library: Cupy) -> None:
    arrays = upload_all(cupy_library, random_inputs(rng, num_queries=8, num_keys=16))
    qk = [arrays[name] for name in INPUTS]

    def call() -> None:
        state = skl.attention_kl(*qk, return_state=True)
        skl.attention_kl_backward(arrays["dkl"], *qk, state)

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(500):
            call()
        cupy.cuda.Device().synchronize()
        gc.collect()
        before, host = pool.total_bytes(), resident_bytes()
        for _ in range(10_000):
            call()
        cupy.cuda.Device().synchronize()
        gc.collect()
        assert pool.total_bytes() == before
        assert pool.used_bytes() == 0
        # A leak of one small object a call would be a megabyte.
        assert resident_bytes() - host < 1 << 20

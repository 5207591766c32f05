"""Extra device memory, byte for byte: results and workspaces as the design counts them.

With R query rows: forward 20 R (kl, lse1, lse2 and the low parts) or 4 R for kl alone, 20 W R more
with W splits; backward 16 R, or 32 R where one pass serves both sides, for float16 256 more, and
for the fused kernel a float32 dQ of one side, rows padded to 16 and head dims to their bucket. The
table of a ragged batch: 8 bytes a query of a batch entry, in the backward also a key. An allocation
is padded to 512 bytes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import launch, plan
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    STATE,
    Cupy,
    Output,
    Torch,
    backward_plan,
    forward_plan,
    random_inputs,
    upload_all,
)
from tests.gpu.usage import TorchUsage, Usage, padded

SHAPES = {
    "few": {"heads": 2, "num_queries": 3, "num_keys": 70},
    "odd": {"batch": 2, "heads": 3, "num_queries": 101, "num_keys": 50},
    "grouped": {"heads": 8, "key_heads1": 2, "key_heads2": 1, "num_queries": 160, "num_keys": 90},
}
SUBSETS = [("q2",), ("k1",), ("q2", "k2"), ("q1", "k1"), INPUTS]


def inputs_of(arrays: dict[str, Any]) -> list[Any]:
    return [arrays[name] for name in INPUTS]


def num_rows(shape: dict[str, int]) -> int:
    return shape.get("batch", 1) * shape["heads"] * shape["num_queries"]


@pytest.fixture
def fresh_pool() -> Any:
    """A pool that nothing has been allocated from, in place of CuPy's own."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        yield pool


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_forward(
    name: str, dtype: str, rng: np.random.Generator, cupy_library: Cupy, fresh_pool: Any
) -> None:
    arrays = upload_all(cupy_library, random_inputs(rng, dtype, **SHAPES[name]))
    rows = num_rows(SHAPES[name])
    qk = inputs_of(arrays)
    assert forward_plan(arrays, {}).num_splits == 1

    before = fresh_pool.used_bytes()
    with Usage() as usage:
        kl = skl.attention_kl(*qk)
    assert usage.peak == usage.now == padded(4 * rows)
    assert fresh_pool.used_bytes() - before == usage.now

    with Usage() as usage:
        state = skl.attention_kl(*qk, return_state=True)
    assert usage.peak == usage.now == 5 * padded(4 * rows)

    del kl, state
    assert fresh_pool.used_bytes() == before


def test_forward_with_splits(rng: np.random.Generator, cupy_library: Cupy, fresh_pool: Any) -> None:
    shape = {"heads": 8, "num_queries": 16, "num_keys": 8192}
    arrays = upload_all(cupy_library, random_inputs(rng, head_dim1=128, **shape))
    rows = num_rows(shape)
    for choice in ({}, {"num_splits": 2}, {"num_splits": 7}):
        with plan.override(**choice):
            num_splits = forward_plan(arrays, {}).num_splits
            assert num_splits == choice.get("num_splits", num_splits) > 1
            with Usage() as usage:
                kl = skl.attention_kl(*inputs_of(arrays))
        assert usage.now == padded(4 * rows)
        assert usage.peak == padded(4 * rows) + padded(20 * num_splits * rows)
        del kl


def backward_bytes(
    shape: dict[str, int], dtype: str, wrt: tuple[str, ...], dims: dict[str, int], fused: bool
) -> int:
    """The workspace of a backward."""
    heads = shape.get("batch", 1) * shape["heads"]
    rows = heads * shape["num_queries"]
    # Each part of the one workspace starts at a multiple of 256 bytes.
    is_hopper = launch.device_facts(0).arch == "sm_90a"
    statistics = 32 if is_hopper and not fused and set(wrt) == set(INPUTS) else 16
    total = -(-statistics * rows // 256) * 256
    if dtype == "float16":
        total += 256
    # On so few keys dQ alone is not the fused kernel's.
    sides = [side for side in "12" if fused and {f"q{side}", f"k{side}"} <= set(wrt)]
    padded_rows = heads * -(-shape["num_queries"] // 16) * 16
    return total + max((4 * padded_rows * dims[side] for side in sides), default=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize(("name", "wrt"), list(itertools.product(SHAPES, SUBSETS)))
def test_backward(
    name: str,
    wrt: tuple[str, ...],
    strategy: str,
    dtype: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
    fresh_pool: Any,
) -> None:
    shape = SHAPES[name]
    arrays = upload_all(cupy_library, random_inputs(rng, dtype, **shape))
    qk = inputs_of(arrays)
    state = skl.attention_kl(*qk, return_state=True)
    workspace = backward_bytes(shape, dtype, wrt, {"1": 64, "2": 64}, strategy == "fused")
    assert backward_plan(arrays, {}, wrt, strategy=strategy).workspace_bytes == workspace

    # Results of the caller's, so that there is the workspace alone.
    outputs = [Output.make(cupy_library, arrays[n].shape, dtype) for n in wrt]
    before = fresh_pool.used_bytes()
    with Usage() as usage:
        skl.attention_kl_backward(
            arrays["dkl"],
            *qk,
            state,
            wrt=wrt,
            strategy=strategy,
            out=tuple(output.array for output in outputs),
        )
    assert usage.peak == padded(workspace)
    assert usage.now == 0
    assert fresh_pool.used_bytes() == before

    results = sum(padded(arrays[n].nbytes) for n in wrt)
    with Usage() as usage:
        gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=wrt, strategy=strategy)
    assert usage.peak == padded(workspace) + results
    assert usage.now == results
    del gradients


def test_tables_of_ragged_batches(
    rng: np.random.Generator, cupy_library: Cupy, fresh_pool: Any
) -> None:
    shape = SHAPES["odd"]
    arrays = upload_all(cupy_library, random_inputs(rng, **shape))
    lens = cupy_library.put(np.array([40, 3], np.int32))
    rows, qk = num_rows(shape), inputs_of(arrays)
    # 8 bytes a query of the forward, a query or a key of the backward, whatever the heads.
    with Usage() as usage:
        state = skl.attention_kl(*qk, kv_lens=lens, return_state=True)
    assert usage.peak == 5 * padded(4 * rows) + padded(8 * 2 * 101)
    options = {"strategy": "separate", "wrt": ("q2",)}
    with Usage() as usage:
        (dq2,) = skl.attention_kl_backward(arrays["dkl"], *qk, state, kv_lens=lens, **options)
    statistics = -(-16 * rows // 256) * 256
    assert usage.peak == padded(dq2.nbytes) + padded(statistics + 8 * 2 * 151)


def test_the_scratch_has_the_bucket_of_the_head_dim(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # Head dims of 40 and 128 live in buckets of 64 and 128.
    shape = SHAPES["odd"]
    inputs = random_inputs(rng, head_dim1=40, head_dim2=128, **shape)
    arrays = upload_all(cupy_library, inputs)
    for wrt in (("q1", "k1"), ("q2", "k2"), INPUTS):
        chosen = backward_plan(arrays, {}, wrt, strategy="fused")
        dims = {"1": 64, "2": 128}
        assert chosen.workspace_bytes == backward_bytes(shape, "bfloat16", wrt, dims, True)


@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_torch(strategy: str, rng: np.random.Generator, torch: Any, torch_library: Torch) -> None:
    shape = SHAPES["odd"]
    arrays = upload_all(torch_library, random_inputs(rng, **shape))
    rows = num_rows(shape)
    qk = inputs_of(arrays)
    with TorchUsage(torch) as usage:
        state = skl.attention_kl(*qk, return_state=True)
    assert usage.peak == usage.now == 5 * padded(4 * rows)

    workspace = backward_bytes(shape, "bfloat16", INPUTS, {"1": 64, "2": 64}, strategy == "fused")
    results = sum(padded(arrays[n].numel() * 2) for n in INPUTS)
    with TorchUsage(torch) as usage:
        gradients = skl.attention_kl_backward(
            arrays["dkl"], *qk, state, wrt=INPUTS, strategy=strategy
        )
    assert usage.now == results
    assert usage.peak == padded(workspace) + results
    assert [getattr(state, name).numel() for name in STATE] == [rows] * 5
    assert len(gradients) == 4

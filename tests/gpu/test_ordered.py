"""Hopper's fused backward in a fixed order of sums: what ``deterministic=True`` takes by default.

Blocks wait for those before them, so here are more of them than a card has multiprocessors, several
launches at once, and few and many heads that alternate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    Expected,
    backward_plan,
    random_inputs,
    run,
    same_bits,
    upload_all,
)

pytestmark = pytest.mark.usefixtures("needs_hopper", "poisoned_memory")

NUM_RUNS = 5
LENGTHS = {"num_queries": 500, "num_keys": 600}
SHAPES: dict[str, dict[str, Any]] = {
    "square": {"heads": 4, "num_queries": 640, "num_keys": 640},
    "uneven": {"heads": 3, **LENGTHS},
    "more-queries": {"heads": 2, "num_queries": 700, "num_keys": 130},
    "few-queries": {"heads": 2, "num_queries": 3, "num_keys": 900},
    "groups": {"heads": 12, "key_heads1": 3, "key_heads2": 4, "num_queries": 300, "num_keys": 260},
    "one-key-head": {"heads": 6, "key_heads1": 6, "key_heads2": 1, **LENGTHS},
    "batches": {"batch": 3, "heads": 7, "num_queries": 200, "num_keys": 400},
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (90, 40)},
    "chunk": {"window": (200, 0), "q_offset": 70},
    "softcaps": {"softcap1": 3.0, "softcap2": 2.0, "causal": True},
}


@pytest.fixture
def needs_hopper(is_hopper: bool) -> None:
    if not is_hopper:
        pytest.skip("the kernel is one of sm_90a")


def check(
    library: Cupy,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    wrt: tuple[str, ...] = INPUTS,
    num_runs: int = 1,
) -> None:
    """Hold the kernel, which has to be the plan's, to the reference and to its own first bits."""
    arrays = upload_all(library, inputs)
    with plan.override(strategy="fused", both=False):
        chosen = backward_plan(arrays, options, wrt, deterministic=True)
        assert {side.strategy for side in chosen.sides} == {"ordered"}
        first, *others = (
            run(library, arrays, options, wrt=wrt, deterministic=True, into=True)
            for _ in range(num_runs)
        )
    Expected(inputs, options, wrt).check(first)
    for again in others:
        for name in first:
            assert same_bits(again[name], first[name]), name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_bits(
    shape: str, mask: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, **{"head_dim1": 128, "head_dim2": 128} | SHAPES[shape])
    check(cupy_library, inputs, MASKS[mask], num_runs=NUM_RUNS)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(8, 32), (64, 64), (96, 80), (128, 32), (72, 128)], ids=str)
def test_head_dims(
    dims: tuple[int, int], dtype: str, causal: bool, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, dtype, heads=3, head_dim1=dims[0], head_dim2=dims[1], **LENGTHS)
    check(cupy_library, inputs, {"causal": causal}, num_runs=2)


@pytest.mark.parametrize("wrt", [("q1", "k1"), ("q2", "k2")], ids=["side 1", "side 2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_more_blocks_than_multiprocessors(
    causal: bool, wrt: tuple[str, ...], rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # 300 blocks of a head, of which the last ones wait for the first ones' multiprocessors.
    inputs = random_inputs(
        rng, heads=1, head_dim1=64, head_dim2=64, num_queries=260, num_keys=38_400
    )
    check(cupy_library, inputs, {"causal": causal}, wrt, NUM_RUNS)


@pytest.mark.parametrize("key_heads", [1, 13, 64])
def test_heads_that_alternate(key_heads: int, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(
        rng, heads=key_heads, head_dim1=64, head_dim2=64, num_queries=260, num_keys=700
    )
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("name", INPUTS)
def test_a_broken_row_in_the_middle(
    name: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, heads=2, head_dim1=128, head_dim2=128, **LENGTHS)
    inputs[name][0, 1, 290, 7] = np.nan
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("num_streams", [1, 5])
def test_50_in_flight_at_once(
    num_streams: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # Each launch fills the card, so blocks of several wait for multiprocessors at once.
    import cupy

    inputs = random_inputs(
        rng, heads=8, head_dim1=128, head_dim2=128, num_queries=1500, num_keys=4000
    )
    arrays, options, wrt = upload_all(cupy_library, inputs), {"causal": True}, ("q2", "k2")
    assert backward_plan(arrays, options, wrt, deterministic=True).sides[0].strategy == "ordered"
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, **options, return_state=True)

    def gradients() -> tuple[Any, ...]:
        return skl.attention_kl_backward(
            arrays["dkl"], *qk, state, wrt=wrt, deterministic=True, **options
        )

    first = [cupy_library.get(array) for array in gradients()]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(num_streams)]
    flying = []
    for position in range(50):
        with streams[position % num_streams]:
            flying.append(gradients())
    cupy.cuda.Device().synchronize()
    for landed in flying:
        for array, expected in zip(landed, first, strict=True):
            assert same_bits(cupy_library.get(array), expected)


def test_strategy_separate_keeps_the_pair(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(
        rng, heads=8, head_dim1=64, head_dim2=64, num_queries=1100, num_keys=2000
    )
    arrays, wrt = upload_all(cupy_library, inputs), ("q2", "k2")
    expected = Expected(inputs, {}, wrt)
    for strategy, found in (("auto", "ordered"), ("separate", "separate")):
        chosen = backward_plan(arrays, {}, wrt, deterministic=True, strategy=strategy)
        assert chosen.sides[0].strategy == found
        expected.check(
            run(cupy_library, arrays, {}, wrt=wrt, deterministic=True, strategy=strategy, into=True)
        )

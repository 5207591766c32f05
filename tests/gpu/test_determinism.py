"""The same bits every time, one after the other and many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    STATE,
    Cupy,
    Expected,
    forward_plan,
    random_inputs,
    run,
    same_bits,
    upload_all,
)

NUM_RUNS = 20
NUM_IN_FLIGHT = 50


def draw(rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
    return random_inputs(
        rng, dtype, heads=8, key_heads1=2, key_heads2=4, num_queries=500, num_keys=600
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_20_runs(causal: bool, dtype: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, dtype)
    options = {"causal": causal}
    arrays = upload_all(cupy_library, inputs)
    first = run(cupy_library, arrays, options, deterministic=True)
    Expected(inputs, options).check(first)
    for _ in range(NUM_RUNS - 1):
        again = run(cupy_library, arrays, options, deterministic=True)
        for name in first:
            assert same_bits(again[name], first[name]), name


@pytest.mark.parametrize("num_streams", [1, 5])
def test_50_in_flight_at_once(
    num_streams: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    import cupy

    arrays = upload_all(cupy_library, draw(rng, "bfloat16"))
    first = run(cupy_library, arrays, {}, deterministic=True)
    cupy.cuda.Device().synchronize()
    qk = [arrays[name] for name in INPUTS]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(num_streams)]
    flying: list[tuple[skl.KLState, tuple[Any, ...]]] = []
    for position in range(NUM_IN_FLIGHT):
        with streams[position % num_streams]:
            state = skl.attention_kl(*qk, return_state=True)
            gradients = skl.attention_kl_backward(
                arrays["dkl"], *qk, state, wrt=INPUTS, deterministic=True
            )
            flying.append((state, gradients))
    cupy.cuda.Device().synchronize()
    for state, gradients in flying:
        landed = {name: getattr(state, name) for name in ("kl", "lse1", "lse2")}
        landed |= zip(("d" + name for name in INPUTS), gradients, strict=True)
        for name, array in landed.items():
            assert same_bits(cupy_library.get(array), first[name]), name


def test_a_forward_with_splits(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, heads=4, num_queries=5, num_keys=30000)
    arrays = upload_all(cupy_library, inputs)
    assert forward_plan(arrays, {}).num_splits > 1
    qk = [arrays[name] for name in INPUTS]
    states = [skl.attention_kl(*qk, return_state=True) for _ in range(NUM_RUNS)]
    for name in STATE:
        bits = {cupy_library.get(getattr(state, name)).tobytes() for state in states}
        assert len(bits) == 1, name


def test_equal_queries_give_equal_rows(rng: np.random.Generator, cupy_library: Cupy) -> None:
    # Wherever a row lies in its tile, and whoever computes it.
    inputs = random_inputs(rng, heads=2, num_queries=1000, num_keys=333)
    for name in ("q1", "q2"):
        inputs[name][...] = inputs[name][:, :1, :1]
    for name in ("k1", "k2"):
        inputs[name][...] = inputs[name][:, :1]
    inputs["dkl"][...] = 0.5
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, {}, wrt=("q1", "q2"), deterministic=True)
    for name, array in results.items():
        rows = array.reshape(2000, -1)
        assert (rows == rows[0]).all(), name

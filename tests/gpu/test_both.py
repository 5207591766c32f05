"""Gradients of both sides in one pass, by Hopper's deterministic kernels."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

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

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = ("bfloat16", "float16")
Launched = list[tuple[str, dict[str, Any]]]
SUBSETS = [names for count in (2, 3, 4) for names in itertools.combinations(INPUTS, count)]


def check(
    library: Cupy,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    wrt: tuple[str, ...] = INPUTS,
    **allowed: bool,
) -> None:
    arrays = upload_all(library, inputs)
    if "sm90" in backward_plan(arrays, options, wrt).name:
        assert backward_plan(arrays, options, wrt, deterministic=True).both is not None
    results = run(library, arrays, options, wrt=wrt, deterministic=True, into=True)
    Expected(inputs, options, wrt, **allowed).check(results)


SHAPES = {
    "one-row": {"heads": 3, "num_queries": 1, "num_keys": 1},
    "one-tile": {"heads": 2, "num_queries": 64, "num_keys": 64},
    "odd": {"batch": 2, "heads": 3, "num_queries": 333, "num_keys": 259},
    "many-keys": {"heads": 2, "num_queries": 130, "num_keys": 1003},
    "empty-rows": {"heads": 3, "num_queries": 500, "num_keys": 190},
    "hidden-keys": {"heads": 3, "num_queries": 70, "num_keys": 700},
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_lengths(
    name: str, dtype: str, causal: bool, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, dtype, head_dim1=128, head_dim2=128, **SHAPES[name])
    check(cupy_library, inputs, {"causal": causal})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (96, 96), (128, 32), (40, 120), (192, 64), (64, 192), (8, 8)]
)
def test_head_dims(
    dims: tuple[int, int], dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shape = {"heads": 3, "num_queries": 190, "num_keys": 260}
    inputs = random_inputs(rng, dtype, head_dim1=dims[0], head_dim2=dims[1], **shape)
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize(("key_heads1", "key_heads2"), [(2, 2), (1, 1), (2, 4), (8, 1)])
def test_shared_keys(
    key_heads1: int, key_heads2: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # With unequal groups there is no one walk over the queries of a key, so dK takes two passes.
    heads = {"batch": 2, "heads": 8, "key_heads1": key_heads1, "key_heads2": key_heads2}
    inputs = random_inputs(rng, num_queries=200, num_keys=300, **heads)
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("wrt", SUBSETS, ids="_".join)
def test_subsets(
    wrt: tuple[str, ...],
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: Launched,
    is_hopper: bool,
) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=200, num_keys=300, head_dim1=128)
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, {}, wrt=wrt, deterministic=True, into=True)
    assert set(results) == {"kl", "lse1", "lse2", *("d" + name for name in wrt)}
    Expected(inputs, {}, wrt).check(results)
    ran = Counter(kernel for kernel, _ in launched if kernel.startswith("backward_d"))
    expected: Counter[str] = Counter()
    for rows in "qk":
        of_both = is_hopper and {f"{rows}1", f"{rows}2"} <= set(wrt)
        name = f"backward_d{rows}_{'both_sm90' if of_both else 'sm90' if is_hopper else 'sm80'}"
        expected[name] += 1 if of_both else sum(one[0] == rows for one in wrt)
    assert ran == +expected


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "at"),
    [("q1", 5), ("q2", 5), ("q1", 150), ("q2", 150), ("k1", 290), ("k2", 290), ("k1", 100)],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_broken_row_stays_where_it_is_seen(
    dim: int, name: str, at: int, what: float, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # Only the last queries see key 290, query 5 sees only the first keys, in a tile of a border.
    shape = {"heads": 4, "key_heads1": 2, "key_heads2": 2, "num_queries": 200, "num_keys": 300}
    inputs = random_inputs(rng, head_dim1=dim, head_dim2=dim, **shape)
    inputs[name][0, 1, at, 7] = what
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("scale1", [-0.2, 0.0, 3.0])
def test_scales(scale1: float, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=190, num_keys=300)
    check(cupy_library, inputs, {"scale1": scale1, "scale2": 0.3}, is_saturated=True)


def test_float16_with_tiny_upstream_gradients(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, "float16", heads=2, num_queries=190, num_keys=300, head_dim1=128)
    inputs["dkl"] *= np.float32(1e-8)
    check(cupy_library, inputs, {"causal": True})


def test_float16_gradients_past_its_range(rng: np.random.Generator, cupy_library: Cupy) -> None:
    # Of side 1: a warp lowers its factor on the way, and the sum of side 2 must not follow.
    inputs = random_inputs(rng, "float16", heads=2, num_queries=192, num_keys=1000)
    inputs["k1"][:, :, ::300] *= np.float16(4)
    check(cupy_library, inputs, {"scale1": 0.3, "scale2": 2.0}, has_offset=True)


def test_near_converged_sides(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=192, num_keys=256)
    moved = {name: inputs[name].astype(np.float32) for name in ("q1", "k1")}
    for side1, side2 in (("q1", "q2"), ("k1", "k2")):
        noise = rng.standard_normal(moved[side1].shape) * 2e-3
        inputs[side2] = (moved[side1] + noise).astype(inputs[side1].dtype)
    check(cupy_library, inputs, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_20_runs_are_the_same(
    causal: bool, dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shape = {"heads": 8, "key_heads1": 4, "key_heads2": 4, "num_queries": 500, "num_keys": 600}
    arrays = upload_all(cupy_library, random_inputs(rng, dtype, head_dim1=128, **shape))
    first = run(cupy_library, arrays, {"causal": causal}, deterministic=True)
    for _ in range(19):
        again = run(cupy_library, arrays, {"causal": causal}, deterministic=True, into=True)
        for name in first:
            assert same_bits(again[name], first[name]), name


def test_two_passes_agree(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=300, num_keys=500, head_dim1=128)
    arrays, options = upload_all(cupy_library, inputs), {"causal": True}
    for both in (True, False):
        with plan.override(both=both):
            results = run(cupy_library, arrays, options, strategy="separate", into=True)
        Expected(inputs, options).check(results)

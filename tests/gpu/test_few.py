"""The backward of few queries: a kernel of its own on Hopper, the fused ones elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, random_inputs, run, upload_all

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KERNEL = "backward_few_sm90"
DTYPES = ("bfloat16", "float16")
Launched = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def short_keys_take_it(monkeypatch: pytest.MonkeyPatch, is_hopper: bool) -> None:
    """Where the card has the kernel, it runs however short the keys are."""
    if is_hopper:
        monkeypatch.setenv("STREAMKL_FORCE", KERNEL)


def check(
    library: Cupy,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    wrt: tuple[str, ...] = INPUTS,
    **allowed: bool,
) -> None:
    arrays = upload_all(library, inputs)
    results = run(library, arrays, options, wrt=wrt, into=True)
    Expected(inputs, options, wrt, **allowed).check(results)


SHAPES = {
    "one-query": {"heads": 3, "num_queries": 1, "num_keys": 1000},
    "one-tile": {"heads": 2, "num_queries": 7, "num_keys": 64},
    "whole-tiles": {"batch": 2, "heads": 3, "num_queries": 16, "num_keys": 4096},
    "wide": {"heads": 3, "num_queries": 33, "num_keys": 1003},
    "widest": {"heads": 2, "num_queries": 64, "num_keys": 777},
    "more-heads-than-blocks": {"heads": 150, "num_queries": 5, "num_keys": 130},
    "empty-rows": {"heads": 3, "num_queries": 20, "num_keys": 10},
    "long": {"heads": 1, "num_queries": 3, "num_keys": 40_000},
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_lengths(
    name: str, dtype: str, causal: bool, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    check(cupy_library, random_inputs(rng, dtype, **SHAPES[name]), {"causal": causal})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims", [(32, 32), (128, 128), (256, 256), (192, 64), (40, 200), (96, 8), (256, 128)]
)
def test_head_dims(
    dims: tuple[int, int], dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shape = {"heads": 3, "num_queries": 9, "num_keys": 500}
    inputs = random_inputs(rng, dtype, head_dim1=dims[0], head_dim2=dims[1], **shape)
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "num_queries"), [(8, 2, 3), (10, 2, 3), (12, 1, 5), (6, 3, 30)]
)
def test_heads_that_share_their_keys_are_rows_of_one_tile(
    heads: int,
    key_heads: int,
    num_queries: int,
    dtype: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    shape = {"batch": 2, "heads": heads, "key_heads1": key_heads, "key_heads2": key_heads}
    inputs = random_inputs(rng, dtype, num_queries=num_queries, num_keys=300, **shape)
    check(cupy_library, inputs, {"causal": True})


def test_keys_of_the_other_side_may_be_shared_by_more_heads(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shape = {"heads": 8, "key_heads1": 4, "key_heads2": 2}
    inputs = random_inputs(rng, num_queries=7, num_keys=300, **shape)
    check(cupy_library, inputs, {}, ("q1", "k1"))


@pytest.mark.parametrize("wrt", [("q2",), ("k2",), ("q1",), ("k1",), ("q1", "k2")], ids="_".join)
def test_one_gradient_of_a_side(
    wrt: tuple[str, ...],
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: Launched,
    is_hopper: bool,
) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=9, num_keys=5000, head_dim1=128)
    check(cupy_library, inputs, {"causal": True}, wrt)
    few = [template for kernel, template in launched if kernel == KERNEL]
    if is_hopper:
        has = {(t["kSide"], t["kHasDq"], t["kHasDk"]) for t in few}
        assert has == {(int(name[1]), name[0] == "q", name[0] == "k") for name in wrt}
    del launched[:]
    arrays = upload_all(cupy_library, inputs)
    run(cupy_library, arrays, {}, wrt=wrt, deterministic=True)
    assert launched
    assert all(kernel != KERNEL for kernel, _ in launched)


@pytest.mark.parametrize("what", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "at"),
    [("q1", 5), ("q2", 5), ("k1", 497), ("k2", 497), ("k1", 100), ("k2", 100)],
)
def test_a_broken_row_stays_where_it_is_seen(
    name: str, at: int, what: float, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # Only some of the queries see key 497, and query 5 does not see it.
    shape = {"heads": 4, "key_heads1": 2, "key_heads2": 2, "num_queries": 12, "num_keys": 500}
    inputs = random_inputs(rng, head_dim1=128, **shape)
    inputs[name][0, 1, at, 7] = what
    check(cupy_library, inputs, {"causal": True})


@pytest.mark.parametrize("scale1", [-0.2, 0.0, 3.0])
def test_scales(scale1: float, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, heads=2, num_queries=9, num_keys=500)
    check(cupy_library, inputs, {"scale1": scale1, "scale2": 0.3}, is_saturated=True)


def test_float16_with_tiny_upstream_gradients(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, "float16", heads=2, num_queries=9, num_keys=500, head_dim1=128)
    inputs["dkl"] *= np.float32(1e-8)
    check(cupy_library, inputs, {})


def test_float16_gradients_past_its_range(rng: np.random.Generator, cupy_library: Cupy) -> None:
    # Of side 1: some tiles lower their factor, others do not, and dQ follows back and forth.
    inputs = random_inputs(rng, "float16", heads=2, num_queries=12, num_keys=3000)
    inputs["k1"][:, :, ::1000] *= np.float16(4)
    options = {"scale1": 0.3, "scale2": 2.0}
    check(cupy_library, inputs, options, ("q1", "k1"), has_offset=True)

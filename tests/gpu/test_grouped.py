"""Query heads that share key heads, in different groups on the two sides; nothing is repeated."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy import plan, tiling
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    Expected,
    forward_plan,
    random_inputs,
    run,
    same_bits,
    upload_all,
)
from tests.gpu.usage import Usage, padded

GROUPS = [(64, 1, 1), (64, 1, 8), (64, 8, 1), (12, 3, 4), (12, 12, 1), (12, 1, 12)]


def draw(
    rng: np.random.Generator, heads: int, key_heads1: int, key_heads2: int, num_queries: int = 64
) -> dict[str, np.ndarray]:
    return random_inputs(
        rng,
        batch=2 if heads < 64 else 1,
        heads=heads,
        key_heads1=key_heads1,
        key_heads2=key_heads2,
        num_queries=num_queries,
        num_keys=90,
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize(("heads", "key_heads1", "key_heads2"), GROUPS)
def test_every_output(
    heads: int,
    key_heads1: int,
    key_heads2: int,
    strategy: str,
    layout: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    inputs = draw(rng, heads, key_heads1, key_heads2)
    if layout == "bnhd":
        inputs = {n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in inputs.items()}
    options = {"causal": True, "layout": layout}
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, options, strategy=strategy, into=True)
    Expected(inputs, options).check(results)


@pytest.mark.parametrize(("heads", "key_heads1", "key_heads2"), GROUPS)
def test_repeated_keys_give_the_same_bits(
    heads: int, key_heads1: int, key_heads2: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # So many queries that no heads are packed into a tile, whose sums have another order.
    inputs = draw(rng, heads, key_heads1, key_heads2, num_queries=80)
    repeated = dict(inputs)
    for name in ("k1", "k2"):
        repeated[name] = np.repeat(inputs[name], heads // inputs[name].shape[1], axis=1)
    # The gradients of queries: those of keys are sums over a group.
    wrt = ("q1", "q2")
    ours, theirs = (
        run(cupy_library, upload_all(cupy_library, x), {}, wrt=wrt, deterministic=True)
        for x in (inputs, repeated)
    )
    for name in ours:
        assert same_bits(ours[name], theirs[name]), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("forward_kernel", plan.FORWARD_KERNELS)
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize(
    ("heads", "key_heads1", "key_heads2", "num_queries"),
    [(16, 2, 2, 1), (24, 2, 4, 3), (10, 2, 2, 7), (28, 4, 4, 33), (16, 2, 1, 64), (96, 1, 1, 2)],
)
def test_heads_packed_into_a_tile(
    heads: int,
    key_heads1: int,
    key_heads2: int,
    num_queries: int,
    head_dim: int,
    forward_kernel: str,
    causal: bool,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    inputs = random_inputs(
        rng,
        batch=2,
        heads=heads,
        key_heads1=key_heads1,
        key_heads2=key_heads2,
        num_queries=num_queries,
        num_keys=700,
        head_dim1=head_dim,
    )
    options = {"causal": causal}
    arrays = upload_all(cupy_library, inputs)
    with plan.override(forward_kernel=forward_kernel):
        try:
            chosen = forward_plan(arrays, options)
        except tiling.PlanError as error:
            pytest.skip(str(error))  # of another card
        fits = forward_kernel == "forward_sm90" or 2 * num_queries <= tiling.FEW_QUERIES
        assert (chosen.heads_per_tile > 1) == fits
        results = run(cupy_library, arrays, options, wrt=(), into=True)
    Expected(inputs, options, wrt=()).check(results)


def test_64_heads_on_one_need_no_memory_for_keys(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, heads=64, key_heads1=1, key_heads2=1, num_queries=64, num_keys=250)
    arrays = upload_all(cupy_library, inputs)
    run(cupy_library, arrays, {}, deterministic=True)  # what is allocated once is not counted
    rows = 64 * 64
    with Usage() as usage:
        run(cupy_library, arrays, {}, wrt=())
    assert usage.peak <= 5 * padded(4 * rows)
    with Usage() as usage:
        run(cupy_library, arrays, {}, deterministic=True)
    gradients = sum(padded(inputs[name].nbytes) for name in INPUTS)
    assert usage.peak <= 5 * padded(4 * rows) + padded(32 * rows) + gradients

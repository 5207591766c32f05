"""Query heads that share key heads, in different groups on the two sides; nothing is repeated."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, random_inputs, run, same_bits, upload_all
from tests.gpu.usage import Usage, padded

GROUPS = [(64, 1, 1), (64, 1, 8), (64, 8, 1), (12, 3, 4), (12, 12, 1), (12, 1, 12)]


def draw(
    rng: np.random.Generator, heads: int, key_heads1: int, key_heads2: int
) -> dict[str, np.ndarray]:
    return random_inputs(
        rng,
        batch=2 if heads < 64 else 1,
        heads=heads,
        key_heads1=key_heads1,
        key_heads2=key_heads2,
        num_queries=64,
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
    inputs = draw(rng, heads, key_heads1, key_heads2)
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
    assert usage.peak <= 5 * padded(4 * rows) + padded(16 * rows) + gradients

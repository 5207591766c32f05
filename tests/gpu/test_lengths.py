"""Lengths around the borders of tiles, random ones, and 4097."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.card import Cupy, Expected, random_inputs, run, upload_all
from tests.gpu.sampling import Samples

pytestmark = pytest.mark.usefixtures("poisoned_memory")

AROUND_TILES = sorted({n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1)})


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_queries", AROUND_TILES)
def test_the_borders_of_tiles(
    num_queries: int, causal: bool, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    for num_keys in rng.choice(AROUND_TILES, size=4, replace=False).tolist():
        inputs = random_inputs(rng, num_queries=num_queries, num_keys=num_keys)
        options = {"causal": causal}
        arrays = upload_all(cupy_library, inputs)
        expected = Expected(inputs, options)
        for strategy in ("fused", "separate"):
            expected.check(run(cupy_library, arrays, options, strategy=strategy, into=True))


@pytest.mark.parametrize("draw", range(16))
def test_random_lengths(draw: int, rng: np.random.Generator, cupy_library: Cupy) -> None:
    num_queries, num_keys = (int(n) for n in rng.integers(20, 700, size=2))
    heads = int(rng.choice([2, 3, 4]))
    head_dim = int(rng.choice([64, 128]))
    options = {"causal": bool(rng.integers(2)), "scale2": float(rng.normal())}
    print(f"{num_queries} x {num_keys}, {heads} heads of {head_dim}, {options}")
    inputs = random_inputs(
        rng, heads=heads, num_queries=num_queries, num_keys=num_keys, head_dim1=head_dim
    )
    arrays = upload_all(cupy_library, inputs)
    strategy = ("fused", "separate")[draw % 2]
    Expected(inputs, options).check(
        run(cupy_library, arrays, options, strategy=strategy, into=True)
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(4097, 4097), (4097, 129), (129, 4097), (17, 4097), (4097, 17)]
)
def test_4097(
    num_queries: int,
    num_keys: int,
    causal: bool,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    options = {"causal": causal}
    inputs = random_inputs(rng, heads=1, num_queries=num_queries, num_keys=num_keys)
    inputs = {name: array[0] for name, array in inputs.items()}
    arrays = upload_all(cupy_library, inputs)
    fused, separate = (
        run(cupy_library, arrays, options, strategy=strategy, into=True)
        for strategy in ("fused", "separate")
    )
    samples = Samples(inputs, fused, rng, causal=causal)
    samples.check(fused)
    samples.check(separate)

"""Pairs of head dims that differ, drawn anew with every seed."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, forward_plan, random_inputs, run, upload

# Each pair is a set of kernels of its own to compile.
NUM_PAIRS = 12


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("draw", range(NUM_PAIRS))
def test_a_random_pair(draw: int, rng: np.random.Generator, cupy_library: Cupy) -> None:
    head_dim1, head_dim2 = (int(8 * n) for n in rng.choice(np.arange(1, 33), 2, replace=False))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    # One side by the fused kernel, the other by the separate ones.
    fused, separate = rng.permutation(["1", "2"]).tolist()
    options = {"causal": bool(rng.integers(2)), "scale2": float(rng.normal() * 0.2)}
    # Every third draw off alignment, on the guarded path.
    offset = 0 if draw % 3 else 2 * int(rng.integers(1, 8))
    print(
        f"head dims {head_dim1} and {head_dim2}, {dtype}, side {fused} fused, {options}, "
        f"{offset} bytes off alignment"
    )
    inputs = random_inputs(
        rng,
        dtype,
        heads=4,
        key_heads1=2,
        num_queries=int(rng.integers(65, 150)),
        num_keys=int(rng.integers(20, 150)),
        head_dim1=head_dim1,
        head_dim2=head_dim2,
    )
    arrays = {n: upload(cupy_library, x, offset * (n in INPUTS)) for n, x in inputs.items()}
    assert ("_guarded" in forward_plan(arrays, options).name) == (offset > 0)
    expected = Expected(inputs, options)
    for side, strategy in ((fused, "fused"), (separate, "separate")):
        wrt = (f"q{side}", f"k{side}")
        expected.check(run(cupy_library, arrays, options, wrt=wrt, strategy=strategy, into=True))

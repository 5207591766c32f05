"""KL(P, Q) is not KL(Q, P), and the gradients are those of the value that is returned."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.cases import DTYPES
from tests.gpu.card import Cupy, Expected, random_inputs, run, upload_all

SHAPE = {"heads": 4, "key_heads1": 2, "key_heads2": 1, "num_queries": 90, "num_keys": 110}
OPTIONS = {"causal": True}


def test_the_sides_are_not_symmetric(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, num_queries=90, num_keys=110)
    inputs["q1"] = (inputs["q1"] * 3).astype(inputs["q1"].dtype)
    swapped = {n: inputs[n[0] + "21"[int(n[1]) - 1]] for n in INPUTS} | {"dkl": inputs["dkl"]}
    there, back = (
        run(cupy_library, upload_all(cupy_library, arrays), {}) for arrays in (inputs, swapped)
    )
    Expected(inputs, {}).check(there)
    Expected(swapped, {}).check(back)
    # Of a sharp P1 from a flat P2 it is the larger one, by far more than rounding.
    assert np.abs(there["kl"] - back["kl"]).mean() > 0.1
    assert np.abs(there["dq1"].astype(float) - back["dq2"].astype(float)).max() > 1e-3


def on_a_grid(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], float]:
    """Inputs in bfloat16 that a step takes to other bfloat16 numbers, and the step."""
    inputs = random_inputs(rng, **SHAPE)
    for name in INPUTS:
        # Multiples of 1/4 below 2, where bfloat16 has steps of 1/128 and less.
        quarters = np.clip(np.rint(4 * inputs[name].astype(np.float32)), -7, 7)
        inputs[name] = (quarters / 4).astype(DTYPES["bfloat16"])
    return inputs, 1 / 64


@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("name", INPUTS)
def test_finite_differences_of_the_returned_kl(
    name: str, strategy: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs, step = on_a_grid(rng)
    gradient = run(
        cupy_library, upload_all(cupy_library, inputs), OPTIONS, wrt=(name,), strategy=strategy
    )[f"d{name}"].astype(np.float64)
    # Along the signs of the gradient, so that the difference is large.
    direction = np.where(gradient < 0, -1.0, 1.0)
    sums = []
    for sign in (1, -1):
        exact = inputs[name].astype(np.float64) + sign * step * direction
        moved = inputs | {name: exact.astype(DTYPES["bfloat16"])}
        assert (moved[name].astype(np.float64) == exact).all()
        kl = run(cupy_library, upload_all(cupy_library, moved), OPTIONS, wrt=())["kl"]
        sums.append((inputs["dkl"].astype(np.float64) * kl).sum())
    difference = (sums[0] - sums[1]) / (2 * step)
    assert difference == pytest.approx((gradient * direction).sum(), rel=1e-2)


@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("name", INPUTS)
def test_finite_differences_of_the_reference(
    name: str, strategy: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    gradient = run(
        cupy_library, upload_all(cupy_library, inputs), OPTIONS, wrt=(name,), strategy=strategy
    )[f"d{name}"].astype(np.float64)
    exact = {n: array.astype(np.float64) for n, array in inputs.items()}
    step = 1e-5
    for _ in range(3):
        # A random direction that is not orthogonal to the gradient.
        direction = rng.standard_normal(gradient.shape) + np.sign(gradient)
        sums = []
        for sign in (1, -1):
            moved = exact | {name: exact[name] + sign * step * direction}
            kl = reference.attention_kl(*(moved[n] for n in INPUTS), **OPTIONS)
            sums.append((exact["dkl"] * kl).sum())
        difference = (sums[0] - sums[1]) / (2 * step)
        assert difference == pytest.approx((gradient * direction).sum(), rel=1e-2)

"""The state between forward and backward: a caller's own, and what large logits need of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.cases import DTYPES
from tests.compare import error
from tests.gpu.card import Cupy, Expected, Library, random_inputs, run, upload, upload_all

SHAPE = {"heads": 4, "key_heads1": 2, "num_queries": 90, "num_keys": 110}


def backward(
    library: Library,
    arrays: dict[str, Any],
    state: skl.KLState,
    options: dict[str, Any],
    wrt: tuple[str, ...] = INPUTS,
) -> dict[str, np.ndarray]:
    qk = [arrays[name] for name in INPUTS]
    gradients = skl.attention_kl_backward(
        arrays["dkl"], *qk, state, wrt=wrt, deterministic=True, **options
    )
    return {"d" + n: library.get(x) for n, x in zip(wrt, gradients, strict=True)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_state_of_the_callers_own(dtype: str, library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, dtype, **SHAPE)
    # More queries than keys, so that some see none.
    options = {"causal": True, "scale2": 0.3}
    inputs |= {n: inputs[n][:, :, :80] for n in ("k1", "k2")}
    arrays = upload_all(library, inputs)
    expected = Expected(inputs, options)
    parts = (upload(library, x.astype(np.float32)) for x in expected.state)
    state = skl.KLState.from_lse(*parts)
    expected.check(backward(library, arrays, state, options))


def test_gradients_of_the_student_need_no_kl(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(cupy_library, inputs)
    expected = Expected(inputs, {}, ("q2", "k2"))
    nothing = upload(cupy_library, np.full(inputs["dkl"].shape, np.nan, np.float32))
    lse = (upload(cupy_library, x.astype(np.float32)) for x in expected.state[1:])
    state = skl.KLState.from_lse(nothing, *lse)
    expected.check(backward(cupy_library, arrays, state, {}, ("q2", "k2")))


@pytest.mark.parametrize("size", [1e5, 1e6])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_huge_logits(
    causal: bool, size: float, cupy_library: Cupy, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, num_queries=90, num_keys=130)
    for name in ("q1", "q2"):
        inputs[name] = (inputs[name].astype(np.float32) * size).astype(inputs[name].dtype)
    options = {"causal": causal}
    arrays = upload_all(cupy_library, inputs)
    expected = Expected(inputs, options, is_saturated=True)
    for strategy in ("fused", "separate"):
        expected.check(run(cupy_library, arrays, options, strategy=strategy, into=True))


def near_ties_at(size: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Logits of about 1 on top of ``+-size``, every one of them exact in float32.

    The last component carries the size, positive on one side and negative on the other; the others
    are quarters, so that with a scale of 1 a logit is a multiple of 1/16.
    """
    inputs = random_inputs(rng, "float16", num_queries=90, num_keys=110)
    for name in INPUTS:
        quarters = np.rint(1.4 * inputs[name].astype(np.float32))
        inputs[name] = (quarters / 4).astype(DTYPES["float16"])
        sign = -1 if name == "k2" else 1
        inputs[name][..., -1] = 256 if name[0] == "q" else sign * size / 256
    return inputs


def test_gradients_of_large_logits_need_the_low_parts(
    cupy_library: Cupy, rng: np.random.Generator
) -> None:
    # A float32 step at 102400 is 1/128, so lse alone is off by up to 1/256, and so is every P.
    inputs = near_ties_at(102_400, rng)
    options = {"scale1": 1.0, "scale2": 1.0}
    arrays = upload_all(cupy_library, inputs)
    state = skl.attention_kl(*(arrays[name] for name in INPUTS), **options, return_state=True)
    expected = Expected(inputs, options)
    for name in ("lse1", "lse2"):
        high, low = (cupy_library.get(getattr(state, part)) for part in (name, f"{name}_low"))
        assert np.abs(high - getattr(expected.state, name)).max() > 1e-4
        assert np.abs(low).max() > 1e-4

    def errors(of: skl.KLState) -> dict[str, float]:
        gradients = backward(cupy_library, arrays, of, options)
        # Without the component of the size, whose gradient cancels to nothing but rounding.
        return {n: error(x[..., :-1], expected.values[n][..., :-1]) for n, x in gradients.items()}

    whole, halved = errors(state), errors(skl.KLState(state.kl, state.lse1, state.lse2))
    for name in whole:
        textbook = error(expected.baselines[name][..., :-1], expected.values[name][..., :-1])
        assert whole[name] <= 2 * textbook + 1e-5, name
        # The test is only worth something where they matter.
        assert halved[name] > 2 * whole[name], name

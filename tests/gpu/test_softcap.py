"""Soft bounds of the logits, in every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan, reference
from streamkl_cupy.problem import INPUTS
from tests.compare import error
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

# The kernels of each generation, as STREAMKL_FORCE names them; the plan's own where there are none.
GENERATIONS = {"own": (), "portable": ("forward_sm80", "backward_fused_sm80")}
# Logits of about 1 lie near zero under 5, on both sides of the border under 1, and mostly at the
# bound under 0.2.
BOUNDS = [
    {"softcap1": 1.0, "softcap2": 1.0},
    {"softcap1": 5.0},
    {"softcap2": 0.2},
    {"softcap1": 0.2, "softcap2": 5.0},
]
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "fused"},
    {"strategy": "separate"},
    {"deterministic": True},
)


def run_all(
    library: Cupy,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    force: tuple[str, ...] = (),
    **of: Any,
) -> dict[str, np.ndarray]:
    """Hold every strategy against the reference; return the results of the last."""
    arrays, expected = upload_all(library, inputs), Expected(inputs, options, **of)
    kernels = dict(zip(("forward_kernel", "backward_kernel"), force, strict=False))
    for choices in STRATEGIES:
        with plan.override(**kernels):
            results = run(library, arrays, options, into=True, **choices)
        expected.check(results)
    return results


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (70, 20), "q_offset": 40}], ids=str
)
def test_bounds(
    mask: dict[str, Any],
    bounds: dict[str, float],
    dtype: str,
    generation: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    # More queries than keys, so that under a causal mask some see none.
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=2, key_heads2=1, num_queries=280, num_keys=250,
        head_dim1=64,
    )  # fmt: skip
    run_all(cupy_library, inputs, mask | bounds, GENERATIONS[generation])


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(32, 64), (96, 96), (128, 128), (192, 64), (256, 256)], ids=str)
def test_head_dims(
    dims: tuple[int, int],
    dtype: str,
    generation: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    inputs = random_inputs(
        rng, dtype, num_queries=300, num_keys=330, head_dim1=dims[0], head_dim2=dims[1]
    )
    options = {"softcap1": 1.0, "softcap2": 2.0, "scale2": -0.2}
    run_all(cupy_library, inputs, options, GENERATIONS[generation])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_queries", [1, 9, 40])
def test_few_queries_and_split_keys(
    num_queries: int, dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=4 if num_queries == 40 else 1, key_heads2=1,
        num_queries=num_queries, num_keys=3000, head_dim1=128,
    )  # fmt: skip
    options = {"softcap1": 2.0, "softcap2": 1.0, "causal": True}
    with plan.override(num_splits=5):
        run_all(cupy_library, inputs, options)
    arrays = upload_all(cupy_library, inputs)
    if num_queries < 40:
        chosen = backward_plan(arrays, options, INPUTS)
        assert {side.fused.kernel for side in chosen.sides if side.fused} == {"backward_few_sm90"}


def test_guarded_loads(rng: np.random.Generator, cupy_library: Cupy) -> None:
    options = {"softcap1": 1.0, "softcap2": 0.5, "causal": True}
    inputs = random_inputs(rng, num_queries=150, num_keys=200)
    arrays = upload_all(cupy_library, inputs)
    for name in INPUTS:
        memory = cupy_library.put(np.zeros(inputs[name].nbytes + 2, np.uint8))
        moved = cupy_library.view(
            memory, 2, "bfloat16", inputs[name].shape, np.array(inputs[name].strides) // 2
        )
        moved[...] = arrays[name]
        arrays[name] = moved
    expected = Expected(inputs, options)
    for choices in STRATEGIES:
        expected.check(run(cupy_library, arrays, options, into=True, **choices))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sides_that_are_nearly_equal(
    dtype: str, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    """A KL of about 1e-6 is made of what tanh keeps of small and of large logits."""
    inputs = random_inputs(rng, "float32", num_queries=300, num_keys=400)
    for name in ("q2", "k2"):
        noise = rng.standard_normal(inputs[name].shape, np.float32)
        inputs[name] = inputs["q1" if name == "q2" else "k1"] + np.float32(1e-3) * noise
    kind = random_inputs(rng, dtype)["q1"].dtype
    inputs = {n: x.astype(kind) if n in INPUTS else x for n, x in inputs.items()}
    for cap in (0.8, 40.0):
        options = {"softcap1": cap, "softcap2": cap}
        results = run_all(cupy_library, inputs, options, GENERATIONS[generation])
        assert 1e-8 < np.median(results["kl"]) < 1e-5
    for t in ("q", "k"):
        inputs[t + "2"] = inputs[t + "1"]
    results = run_all(cupy_library, inputs, options, GENERATIONS[generation])
    assert (results["kl"] == 0).all()


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_ten_thousand(
    dtype: str, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    """All at the bound, where the gradient of the bounded side is exactly zero."""
    inputs = random_inputs(rng, dtype, num_queries=200, num_keys=300)
    for name in ("q1", "q2"):
        # No product is near zero: all of a query's components are of one sign and size.
        inputs[name][...] = np.where(inputs[name] < 0, -100, 100)[..., :1].astype(
            inputs[name].dtype
        )
    for name in ("k1", "k2"):
        inputs[name] = (np.sign(inputs[name][..., :1]) * 12 + 0 * inputs[name]).astype(
            inputs[name].dtype
        )
    for options in ({"softcap1": 20.0, "softcap2": 10.0}, {"softcap1": 4.0, "softcap2": 4.0}):
        exact = reference.attention_kl(
            *(inputs[n] for n in INPUTS), softcap1=1e30, return_state=True
        )
        assert np.abs(exact.lse1).max() > 9000
        results = run_all(cupy_library, inputs, options, GENERATIONS[generation])
        for name in INPUTS:
            assert (results["d" + name] == 0).all(), name


@pytest.mark.parametrize("generation", GENERATIONS)
def test_far_out(generation: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    """Nine bounds out a gradient is 1e-7 of what it was, and keeps its digits."""
    inputs = random_inputs(rng, num_queries=200, num_keys=300)
    for name, size in (("q2", 3), ("k2", 1)):
        values = np.abs(inputs[name].astype(np.float32)) * 0.05 + size
        if name == "k2":  # or what is summed for a query nearly cancels
            values *= np.sign(rng.standard_normal((*values.shape[:3], 1), np.float32))
        inputs[name] = values.astype(inputs[name].dtype)
    options = {"softcap1": 50.0, "softcap2": 3.0}
    arrays = upload_all(cupy_library, inputs)
    qk = [inputs[name] for name in INPUTS]
    exact = reference.attention_kl(*qk, **options, return_state=True)
    gradients = reference.attention_kl_backward(inputs["dkl"], *qk, exact, wrt=INPUTS, **options)
    kernels = dict(
        zip(("forward_kernel", "backward_kernel"), GENERATIONS[generation], strict=False)
    )
    with plan.override(**kernels):
        for choices in STRATEGIES:
            results = run(cupy_library, arrays, options, into=True, **choices)
            for name, ref in zip(INPUTS[2:], gradients[2:], strict=True):
                assert 0 < np.abs(ref).max() < 1e-5
                # 1 - tanh^2 of a float32 tanh is off by a tenth here.
                assert error(results["d" + name].astype(np.float64), ref) < 0.005, name


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_side_without_a_bound_is_exact(
    generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    """Side 2 has the bits that it has in a call without any bound."""
    inputs = random_inputs(rng, num_queries=300, num_keys=400)
    for name in ("q2", "k2"):
        inputs[name] = (inputs[name].astype(np.float32) * 20).astype(inputs[name].dtype)
    arrays = upload_all(cupy_library, inputs)
    kernels = dict(
        zip(("forward_kernel", "backward_kernel"), GENERATIONS[generation], strict=False)
    )
    with plan.override(**kernels):
        for causal in (False, True):
            plain = run(cupy_library, arrays, {"causal": causal}, wrt=())
            capped = run(cupy_library, arrays, {"causal": causal, "softcap1": 3.0}, wrt=())
            assert same_bits(plain["lse2"], capped["lse2"])
            assert not same_bits(plain["lse1"], capped["lse1"])
            none = run(
                cupy_library, arrays, {"causal": causal, "softcap1": 0.0}, deterministic=True
            )
            again = run(cupy_library, arrays, {"causal": causal}, deterministic=True)
            assert all(same_bits(none[name], again[name]) for name in again)


def test_what_is_not_finite_stays_in_its_row(rng: np.random.Generator, cupy_library: Cupy) -> None:
    for causal in (False, True):
        for value in (np.nan, np.inf):
            inputs = random_inputs(rng, num_queries=130, num_keys=120)
            inputs["q1"][0, 0, 40, 1] = value
            inputs["k2"][0, 1, 100, 1] = value
            for generation in GENERATIONS.values():
                options = {"causal": causal, "softcap1": 1.0, "softcap2": 4.0}
                run_all(cupy_library, inputs, options, generation)


def test_states_and_entropies(rng: np.random.Generator, cupy_library: Cupy) -> None:
    """Entropies, given log-sum-exps and merged states are those of the bounded logits."""
    inputs = random_inputs(rng, num_queries=200, num_keys=300)
    arrays = upload_all(cupy_library, inputs)
    qk, host = [arrays[n] for n in INPUTS], [inputs[n] for n in INPUTS]
    options = {"softcap1": 1.5, "softcap2": 0.7}
    exact = reference.attention_kl(*host, **options, return_entropy=True)
    ours = skl.attention_kl(*qk, **options, return_entropy=True)
    for name in ("kl", "entropy", "cross_entropy"):
        got = cupy_library.get(getattr(ours, name))
        np.testing.assert_allclose(got, getattr(exact, name), rtol=1e-5, atol=2e-6)
    lse2 = exact.lse2.astype(np.float32)
    given = skl.attention_kl(*qk, **options, lse2=cupy_library.put(lse2), return_state=True)
    expected = reference.attention_kl(*host, **options, lse2=lse2, return_state=True)
    np.testing.assert_allclose(cupy_library.get(given.kl), expected.kl, rtol=1e-5, atol=2e-6)
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, given, wrt=INPUTS, **options)
    wanted = reference.attention_kl_backward(inputs["dkl"], *host, expected, wrt=INPUTS, **options)
    for name, got, ref in zip(INPUTS, gradients, wanted, strict=True):
        assert error(cupy_library.get(got).astype(np.float64), ref) < 0.006, name
    parts = []
    for first in (0, 128):
        some = slice(first, first + 128 if first == 0 else 300)
        q1, k1, q2, k2 = qk
        of_part = (q1, k1[:, :, some], q2, k2[:, :, some])
        parts.append(skl.attention_kl(*of_part, **options, return_state=True))
    merged = skl.merge_states(*parts)
    np.testing.assert_allclose(cupy_library.get(merged.kl), exact.kl, rtol=1e-5, atol=2e-6)

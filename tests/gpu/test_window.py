"""Sliding windows and offsets of the queries, in every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS
from tests.cases import Case, select
from tests.gpu.card import (
    Cupy,
    Expected,
    backward_plan,
    forward_plan,
    random_inputs,
    run,
    same_bits,
    upload_all,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = [*select("windows"), *(case for case in select("nonfinite") if "window" in case.options)]
# The kernels of each generation, as STREAMKL_FORCE names them; the plan's own where there are none.
GENERATIONS = {"own": (), "portable": ("forward_sm80", "backward_fused_sm80")}


def run_forced(
    library: Cupy, arrays: Any, options: Any, force: tuple[str, ...], **choices: Any
) -> dict[str, np.ndarray]:
    kernels = dict(zip(("forward_kernel", "backward_kernel"), force, strict=False))
    with plan.override(**kernels):
        return run(library, arrays, options, into=True, **choices)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(
    case: Case, dtype: str, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = case.inputs(rng, dtype)
    arrays, expected = upload_all(cupy_library, inputs), Expected(inputs, case.options)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        results = run_forced(cupy_library, arrays, case.options, force, strategy=strategy)
        expected.check(results)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_head_dims(
    head_dim: int, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shape = {"num_queries": 700, "num_keys": 900, "head_dim1": head_dim}
    inputs, options = random_inputs(rng, heads=2, **shape), {"window": (257, 31)}
    arrays, expected = upload_all(cupy_library, inputs), Expected(inputs, options)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        expected.check(run_forced(cupy_library, arrays, options, force, strategy=strategy))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 31, 40])
@pytest.mark.parametrize("num_queries", [3, 50, 200])
@pytest.mark.parametrize("heads", [{"heads": 2}, {"heads": 8, "key_heads1": 1, "key_heads2": 1}])
def test_any_number_of_splits(
    num_queries: int,
    num_splits: int,
    heads: dict[str, int],
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    options = {"window": (700, 20), "q_offset": 800}
    inputs = random_inputs(rng, **heads, num_queries=num_queries, num_keys=1500)
    arrays = upload_all(cupy_library, inputs)
    with plan.override(num_splits=num_splits):
        results = run(cupy_library, arrays, options, wrt=(), into=True)
    Expected(inputs, options, wrt=()).check(results)


def test_what_the_plan_splits(rng: np.random.Generator, cupy_library: Cupy) -> None:
    options = {"window": (9000, 0)}
    inputs = random_inputs(rng, heads=2, num_queries=30, num_keys=20000, head_dim1=128)
    arrays = upload_all(cupy_library, inputs)
    assert 1 < forward_plan(arrays, options).num_splits <= 36
    Expected(inputs, options, wrt=()).check(run(cupy_library, arrays, options, wrt=(), into=True))


@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("offset", [2, 8])
def test_guarded_loads(
    offset: int, strategy: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    options = {"window": (60, 10), "q_offset": 100}
    inputs = random_inputs(rng, num_queries=150, num_keys=300)
    arrays = upload_all(cupy_library, inputs)
    for name in INPUTS:
        memory = cupy_library.put(np.zeros(inputs[name].nbytes + offset, np.uint8))
        moved = cupy_library.view(
            memory, offset, "bfloat16", inputs[name].shape, np.array(inputs[name].strides) // 2
        )
        moved[...] = arrays[name]
        arrays[name] = moved
    assert "_guarded" in backward_plan(arrays, options, INPUTS).name
    Expected(inputs, options).check(
        run(cupy_library, arrays, options, strategy=strategy, into=True)
    )


def test_a_window_without_limits_is_none(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, num_queries=300, num_keys=400)
    arrays = upload_all(cupy_library, inputs)
    for causal, window in ((False, (-1, None)), (True, (5000, 3)), (False, (400, 300))):
        plain = run(cupy_library, arrays, {"causal": causal}, deterministic=True)
        wide = run(cupy_library, arrays, {"causal": causal, "window": window}, deterministic=True)
        assert all(same_bits(plain[name], wide[name]) for name in plain)


def test_chunks_of_queries_are_the_whole(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, num_queries=600, num_keys=800)
    expected = Expected(inputs, {"causal": True, "window": (150, None)})
    whole: dict[str, np.ndarray] = {}
    for first in range(0, 600, 200):
        part = {
            name: np.ascontiguousarray(x[:, :, first : first + 200]) if name[0] in "qd" else x
            for name, x in inputs.items()
        }
        options = {"causal": True, "window": (150, None), "q_offset": 200 + first}
        results = run(cupy_library, upload_all(cupy_library, part), options)
        for name, values in results.items():
            if name.startswith("dk"):
                # Rounded three times instead of once, so it is not held to the rule.
                values = values.astype(np.float64) + whole.get(name, 0.0)
                whole[name] = values
            else:
                before = [whole[name]] if name in whole else []
                whole[name] = np.concatenate([*before, values], axis=2)
    for name in ("dk1", "dk2"):
        exact = expected.values[name]
        error = np.linalg.norm(whole.pop(name) - exact) / np.linalg.norm(exact)
        assert error < 0.01, name
    expected.check(whole)

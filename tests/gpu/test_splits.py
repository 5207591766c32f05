"""The keys of a row split among blocks, and the parts merged."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy import plan
from tests.cases import Case, select
from tests.gpu.card import Cupy, Expected, forward_plan, random_inputs, run, upload_all

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EXTREMES = ("no_mass", "offset", "student_underflow", "big_logits", "nonfinite", "no_keys")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 20000), (16, 6000), (40, 20000), (300, 9000)]
)
def test_what_the_plan_splits(
    num_queries: int, num_keys: int, causal: bool, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    options = {"causal": causal}
    inputs = random_inputs(
        rng, heads=2, num_queries=num_queries, num_keys=num_keys, head_dim1=128, key_heads2=1
    )
    arrays = upload_all(cupy_library, inputs)
    assert forward_plan(arrays, options).num_splits > 1
    Expected(inputs, options, wrt=()).check(run(cupy_library, arrays, options, wrt=(), into=True))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("num_queries", [3, 50, 200])
def test_any_number_of_splits(
    num_queries: int, num_splits: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # As many keys as queries, so that causal rows leave most of the splits empty.
    options = {"causal": True}
    num_keys = max(num_queries, 7 * num_splits)
    inputs = random_inputs(rng, batch=2, num_queries=num_queries, num_keys=num_keys)
    arrays = upload_all(cupy_library, inputs)
    with plan.override(num_splits=num_splits):
        results = run(cupy_library, arrays, options, wrt=(), into=True)
    Expected(inputs, options, wrt=()).check(results)


@pytest.mark.parametrize("case", select(*EXTREMES), ids=str)
def test_extremes_in_one_of_the_splits(
    case: Case, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = case.inputs(rng, "bfloat16")
    arrays = upload_all(cupy_library, inputs)
    with plan.override(num_splits=3):
        results = run(cupy_library, arrays, case.options, wrt=(), into=True)
    has_offset = case.group == "offset"
    Expected(inputs, case.options, wrt=(), has_offset=has_offset).check(results)

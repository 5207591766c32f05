"""Every named case of tests/cases.py: all outputs, both strategies, both dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.cases import CASES, Case, enough_draws, plain, scaled, select
from tests.gpu.card import Cupy, Expected, Torch, random_inputs, run, same_bits, upload_all

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = ("bfloat16", "float16")


def _parameters() -> Iterator[Any]:
    for case in CASES:
        for dtype in DTYPES:
            # A pair of head dims is a set of kernels more, so float16 does without unequal pairs.
            dims = case.name.split("_")[2:] if case.group == "head_dims" else ["0"]
            if dtype == "bfloat16" or len(set(dims)) == 1:
                yield pytest.param(case, dtype, id=f"{case}-{dtype}")


@pytest.mark.parametrize(("case", "dtype"), list(_parameters()))
def test_every_output(case: Case, dtype: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = enough_draws(case, rng, dtype)
    expected = Expected(inputs, case.options, has_offset=case.group in ("offset", "big_logits"))
    arrays = upload_all(cupy_library, inputs)
    expected.check(run(cupy_library, arrays, case.options, strategy="fused", into=True))
    expected.check(run(cupy_library, arrays, case.options, strategy="separate"))


@pytest.mark.parametrize("into", [True, False], ids=["out", "allocated"])
@pytest.mark.parametrize("case", select("layout", "upstream", "no_keys", "zero_sizes"), ids=str)
def test_every_output_through_torch(
    case: Case, into: bool, rng: np.random.Generator, torch_library: Torch
) -> None:
    inputs = case.inputs(rng, "bfloat16")
    arrays = upload_all(torch_library, inputs)
    Expected(inputs, case.options).check(run(torch_library, arrays, case.options, into=into))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100], ids=["small", "large"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 5000), (50, 300), (200, 200)])
def test_equal_sides_have_a_kl_of_exactly_zero(
    dtype: str,
    size: float,
    causal: bool,
    num_queries: int,
    num_keys: int,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    build = scaled({"q1": size}, num_queries=num_queries, num_keys=num_keys)
    inputs = Case("equal", "equal", build).inputs(rng, dtype)
    inputs["q2"], inputs["k2"] = inputs["q1"], inputs["k1"]
    results = run(cupy_library, upload_all(cupy_library, inputs), {"causal": causal})
    assert (results["kl"] == 0).all()
    assert same_bits(results["lse1"], results["lse2"])


@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("case", select("no_keys"), ids=str)
def test_rows_without_keys_are_exact(
    case: Case, strategy: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = case.inputs(rng, "bfloat16")
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, case.options, strategy=strategy)
    empty = inputs["q1"].shape[2] - inputs["k1"].shape[2]
    assert empty > 0
    assert (results["kl"][..., :empty] == 0).all()
    for name in ("lse1", "lse2"):
        assert (results[name][..., :empty] == -np.inf).all()
        assert np.isfinite(results[name][..., empty:]).all()
    for name in ("dq1", "dq2"):
        assert (results[name][..., :empty, :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_an_upstream_gradient_of_zero_gives_exact_zeros(
    dtype: str, strategy: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, dtype, num_queries=130, num_keys=90)
    inputs["dkl"][...] = 0
    results = run(cupy_library, upload_all(cupy_library, inputs), {}, strategy=strategy)
    for name in INPUTS:
        assert results["d" + name].dtype == inputs[name].dtype
        assert results["d" + name].shape == inputs[name].shape
        assert (results["d" + name] == 0).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sides", ["1", "2", "12"])
def test_an_offset_of_the_logits_does_not_move_kl(
    sides: str, dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, dtype, num_queries=130, num_keys=140)
    results = []
    # 80 * 100 times the default scale of 1/8 is 1000, for every key.
    for last in (0, 100):
        for side in sides:
            inputs["q" + side][..., -1] = 80
            inputs["k" + side][..., -1] = last
        results.append(run(cupy_library, upload_all(cupy_library, inputs), {}, wrt=()))
    still, moved = results
    for side in sides:
        assert (moved["lse" + side] - still["lse" + side] > 999).all()
    # A float32 step at 1000 is 2**-14, and a logit of that size is off by about one.
    assert np.abs(moved["kl"] - still["kl"]).max() < 4 * 2.0**-14


def test_the_inputs_are_not_written_to(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = Case("any", "any", plain(num_queries=150, num_keys=170)).inputs(rng, "float16")
    arrays = upload_all(cupy_library, inputs)
    for strategy in ("fused", "separate"):
        run(cupy_library, arrays, {"causal": True}, strategy=strategy)
    for name, array in arrays.items():
        assert same_bits(cupy_library.get(array), inputs[name]), name


def test_kl_alone_has_the_bits_of_kl_with_its_state(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    for num_queries, num_keys in ((1, 5000), (130, 170)):
        inputs = random_inputs(rng, num_queries=num_queries, num_keys=num_keys)
        arrays = upload_all(cupy_library, inputs)
        kl = skl.attention_kl(*(arrays[name] for name in INPUTS))
        cupy_library.check(kl, "float32", inputs["q1"].shape[:-1])
        with_state = run(cupy_library, arrays, {}, wrt=())["kl"]
        assert same_bits(cupy_library.get(kl), with_state)

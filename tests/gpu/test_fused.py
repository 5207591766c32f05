"""The fused backward over many tiles and blocks, which the named cases are too small for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, random_inputs, run, upload_all

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = ("bfloat16", "float16")
LENGTHS = {"num_queries": 500, "num_keys": 600}


def fused_kernels(launched: list[tuple[str, dict[str, Any]]]) -> set[str]:
    return {kernel for kernel, _ in launched if kernel.startswith("backward_fused")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_a_broken_row_in_the_middle(
    name: str, dtype: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # Of the rows and keys around it, in the same tile and in others, only some see it.
    inputs = random_inputs(rng, dtype, heads=2, head_dim1=128, head_dim2=128, **LENGTHS)
    inputs[name][0, 1, 290, 7] = np.nan
    options = {"causal": True}
    arrays = upload_all(cupy_library, inputs)
    Expected(inputs, options).check(run(cupy_library, arrays, options, strategy="fused", into=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads1", "key_heads2"), [(3, 4), (4, 3), (1, 12), (12, 1)])
def test_keys_are_exchanged_between_tiles(
    key_heads1: int,
    key_heads2: int,
    dtype: str,
    causal: bool,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    heads = {"heads": 12, "key_heads1": key_heads1, "key_heads2": key_heads2}
    inputs = random_inputs(rng, dtype, **heads, num_queries=300, num_keys=260)
    options = {"causal": causal}
    arrays = upload_all(cupy_library, inputs)
    Expected(inputs, options).check(run(cupy_library, arrays, options, strategy="fused"))


def test_float16_gradients_past_its_range(rng: np.random.Generator, cupy_library: Cupy) -> None:
    # Of side 1: logits of the student far apart where the teacher has mass. Some warps lower their
    # factors, others do not.
    inputs = random_inputs(rng, "float16", heads=2, head_dim1=64, head_dim2=64, **LENGTHS)
    inputs["k1"][:, :, ::100] *= np.float16(4)
    options = {"scale1": 0.3, "scale2": 2.0}
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, options, wrt=("q1", "k1"), strategy="fused", into=True)
    Expected(inputs, options, ("q1", "k1"), has_offset=True).check(results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_portable_kernel_in_its_place(
    dtype: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = random_inputs(rng, dtype, heads=3, head_dim1=96, head_dim2=64, **LENGTHS)
    expected = Expected(inputs, {})
    arrays = upload_all(cupy_library, inputs)
    expected.check(run(cupy_library, arrays, {}, strategy="fused", into=True))
    chosen = fused_kernels(launched)
    assert len(chosen) == 1
    del launched[:]
    monkeypatch.setenv("STREAMKL_FORCE", "backward_fused_sm80")
    expected.check(run(cupy_library, arrays, {}, strategy="fused", into=True))
    assert fused_kernels(launched) == {"backward_fused_sm80"}


@pytest.mark.parametrize("num_queries", [65, 100])
def test_dq_alone(
    num_queries: int,
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: list[tuple[str, dict[str, Any]]],
) -> None:
    inputs = random_inputs(rng, heads=4, num_queries=num_queries, num_keys=20000)
    arrays = upload_all(cupy_library, inputs)
    results = run(cupy_library, arrays, {}, wrt=("q2",), into=True)
    Expected(inputs, {}, ("q2",)).check(results)
    assert len(fused_kernels(launched)) == 1

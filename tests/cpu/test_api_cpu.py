"""The public functions on arrays of the CPU, through the float64 reference."""

from __future__ import annotations

import doctest
import importlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS

DTYPES = ("float16", "bfloat16", "float32", "float64")
SUBSETS = [names for count in (1, 2, 3, 4) for names in itertools.combinations(INPUTS, count)]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


class Numpy:
    kl_dtype = "float64"
    dtypes = DTYPES

    def put(self, values: np.ndarray) -> Any:
        return values

    def get(self, array: Any) -> np.ndarray:
        assert isinstance(array, np.ndarray)
        return array

    def dtype(self, array: Any) -> str:
        return str(array.dtype)


class Torch:
    kl_dtype = "float64"
    dtypes = DTYPES

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")

    def put(self, values: np.ndarray) -> Any:
        if values.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(values.view(np.int16).copy()).view(self.torch.bfloat16)
        return self.torch.from_numpy(values.copy())

    def get(self, array: Any) -> np.ndarray:
        assert isinstance(array, self.torch.Tensor)
        assert array.device.type == "cpu"
        assert not array.requires_grad
        # Exact: float64 holds every value of the others.
        return array.to(self.torch.float64).numpy()

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")


class Jax:
    # float64 exists in JAX only where it is asked for.
    kl_dtype = "float32"
    dtypes = DTYPES[:3]

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")

    def put(self, values: np.ndarray) -> Any:
        return self.jax.device_put(values, self.jax.devices("cpu")[0])

    def get(self, array: Any) -> np.ndarray:
        assert isinstance(array, self.jax.Array)
        assert array.devices() == {self.jax.devices("cpu")[0]}
        return np.asarray(array)

    def dtype(self, array: Any) -> str:
        return str(array.dtype)


LIBRARY_DTYPES = [(make, dtype) for make in (Numpy, Torch, Jax) for dtype in make.dtypes]


@pytest.fixture(params=[Numpy, Torch, Jax], ids=["numpy", "torch", "jax"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def shapes(
    layout: str = "bhnd",
    rank: int = 4,
    batch: int = 2,
    heads: int = 4,
    key_heads: tuple[int, int] = (2, 1),
    lengths: tuple[int, int] = (5, 7),
    head_dims: tuple[int, int] = (6, 8),
) -> dict[str, tuple[int, ...]]:
    result = {}
    for name in INPUTS:
        side = int(name[1]) - 1
        num_heads = heads if name[0] == "q" else key_heads[side]
        length = lengths[0] if name[0] == "q" else lengths[1]
        axes = (num_heads, length) if layout == "bhnd" or rank < 4 else (length, num_heads)
        result[name] = (batch, *axes, head_dims[side])[4 - rank :]
    return result


def random_inputs(
    rng: np.random.Generator, dtype: str = "float64", **kwargs: Any
) -> dict[str, np.ndarray]:
    return {
        name: rng.standard_normal(shape).astype(numpy_dtype(dtype))
        for name, shape in shapes(**kwargs).items()
    }


def put_all(library: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: library.put(array) for name, array in arrays.items()}


def assert_same(library: Any, got: Any, expected: np.ndarray, dtype: str) -> None:
    assert library.dtype(got) == dtype
    assert tuple(got.shape) == expected.shape
    rounded = expected.astype(numpy_dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(library.get(got).astype(np.float64), rounded)


@pytest.mark.parametrize(("make", "dtype"), LIBRARY_DTYPES)
@pytest.mark.parametrize(("layout", "rank"), [("bhnd", 4), ("bnhd", 4), ("bhnd", 3), ("bnhd", 3)])
def test_forward(make: Any, dtype: str, layout: str, rank: int, rng: np.random.Generator) -> None:
    library = make()
    inputs = random_inputs(rng, dtype, layout=layout, rank=rank)
    options = {"causal": True, "scale1": 0.7, "scale2": -1.3, "layout": layout}
    expected = reference.attention_kl(**inputs, **options, return_state=True)
    arrays = put_all(library, inputs)
    assert_same(library, skl.attention_kl(**arrays, **options), expected.kl, library.kl_dtype)
    state = skl.attention_kl(**arrays, **options, return_state=True)
    for name in ("kl", "lse1", "lse2"):
        assert_same(library, getattr(state, name), getattr(expected, name), library.kl_dtype)


@pytest.mark.parametrize(("make", "dtype"), LIBRARY_DTYPES)
@pytest.mark.parametrize(("layout", "rank"), [("bhnd", 4), ("bnhd", 4), ("bhnd", 3)])
def test_backward(make: Any, dtype: str, layout: str, rank: int, rng: np.random.Generator) -> None:
    library = make()
    inputs = random_inputs(rng, dtype, layout=layout, rank=rank)
    dkl = rng.standard_normal(inputs["q1"].shape[:-1]).astype(np.float32)
    options = {"causal": True, "scale1": 0.7, "scale2": -1.3, "layout": layout}
    wrt = ("k2", "q1", "q2", "k1")
    state = reference.attention_kl(**inputs, **options, return_state=True)
    expected = reference.attention_kl_backward(dkl, **inputs, state=state, wrt=wrt, **options)
    arrays = put_all(library, inputs)
    state = skl.attention_kl(**arrays, **options, return_state=True)
    gradients = skl.attention_kl_backward(
        library.put(dkl), **arrays, state=state, wrt=wrt, **options
    )
    assert type(gradients) is tuple
    for name, got, gradient in zip(wrt, gradients, expected, strict=True):
        if library.kl_dtype == "float64":
            assert_same(library, got, gradient, dtype)
            continue
        # The kl in the state is rounded, which gradients of side 1 may notice in their last place.
        assert library.dtype(got) == dtype
        assert got.shape == arrays[name].shape
        tolerance = 4 * float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) * np.abs(gradient).max()
        values = library.get(got).astype(np.float64)
        np.testing.assert_allclose(values, gradient, rtol=0, atol=tolerance)


@pytest.mark.parametrize("wrt", SUBSETS, ids="-".join)
def test_every_subset_of_gradients_in_every_order(
    wrt: tuple[str, ...], rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, "float32")
    dkl = rng.standard_normal(inputs["q1"].shape[:-1])
    state = skl.attention_kl(**inputs, return_state=True)
    every = skl.attention_kl_backward(dkl, **inputs, state=state, wrt=INPUTS)
    expected = dict(zip(INPUTS, every, strict=True))
    for order in itertools.permutations(wrt):
        gradients = skl.attention_kl_backward(dkl, **inputs, state=state, wrt=order)
        assert len(gradients) == len(order)
        for name, gradient in zip(order, gradients, strict=True):
            np.testing.assert_array_equal(gradient, expected[name])


def test_the_default_gradients_are_those_of_the_student(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    dkl = np.ones(inputs["q1"].shape[:-1])
    state = skl.attention_kl(**inputs, return_state=True)
    dq2, dk2 = skl.attention_kl_backward(dkl, **inputs, state=state)
    assert dq2.shape == inputs["q2"].shape
    assert dk2.shape == inputs["k2"].shape


def test_gradients_are_those_of_the_returned_value(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, batch=1, heads=2, key_heads=(1, 2))
    dkl = rng.standard_normal(inputs["q1"].shape[:-1])
    state = skl.attention_kl(**inputs, causal=True, return_state=True)
    gradients = skl.attention_kl_backward(dkl, **inputs, state=state, wrt=INPUTS, causal=True)
    for name, gradient in zip(INPUTS, gradients, strict=True):
        step = 1e-6 * rng.standard_normal(inputs[name].shape)
        up = skl.attention_kl(**inputs | {name: inputs[name] + step}, causal=True)
        down = skl.attention_kl(**inputs | {name: inputs[name] - step}, causal=True)
        change = np.sum(dkl * (up - down)) / 2
        np.testing.assert_allclose(np.sum(gradient * step), change, rtol=1e-6)


def test_rank_2_and_default_scales(library: Any, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float32", rank=2)
    kl = skl.attention_kl(**put_all(library, inputs))
    expected = reference.attention_kl(**inputs, scale1=6**-0.5, scale2=8**-0.5)
    assert_same(library, kl, expected, library.kl_dtype)


@pytest.mark.parametrize("make", [Numpy, Torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_views_go_in_as_they_are(make: Any, dtype: str, rng: np.random.Generator) -> None:
    library = make()
    inputs = random_inputs(rng, dtype, heads=4, key_heads=(4, 4))
    wide = rng.standard_normal((2, 5, 4, 6 + 11)).astype(numpy_dtype(dtype))
    inputs["q1"] = wide.swapaxes(1, 2)[..., 3:9]
    inputs["k1"] = inputs["k1"][:, :1].repeat(4, axis=1)
    arrays = put_all(library, inputs)
    arrays["q1"] = library.put(wide).swapaxes(1, 2)[..., 3:9]
    if make is Torch:
        arrays["k1"] = arrays["k1"][:, :1].expand(-1, 4, -1, -1)
    else:
        arrays["k1"] = np.broadcast_to(arrays["k1"][:, :1], inputs["k1"].shape)
    state = skl.attention_kl(**arrays, return_state=True)
    expected = reference.attention_kl(**inputs, return_state=True)
    assert_same(library, state.kl, expected.kl, "float64")
    dkl = library.put(rng.standard_normal((2, 4, 5)))
    gradients = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=INPUTS)
    exact = reference.attention_kl_backward(library.get(dkl), **inputs, state=expected, wrt=INPUTS)
    for got, gradient in zip(gradients, exact, strict=True):
        assert_same(library, got, gradient, dtype)
        contiguous = got.is_contiguous() if make is Torch else got.flags.c_contiguous
        assert contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_upstream_gradient_of_any_float_and_strides(dtype: str, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float32")
    state = skl.attention_kl(**inputs, return_state=True)
    values = rng.standard_normal((5, 4, 2)).astype(numpy_dtype(dtype)).transpose(2, 1, 0)
    expanded = np.broadcast_to(values[:, :1, :1], values.shape)
    for dkl in (values, expanded):
        got = skl.attention_kl_backward(dkl, **inputs, state=state)
        contiguous = np.ascontiguousarray(dkl).astype(np.float64)
        expected = skl.attention_kl_backward(contiguous, **inputs, state=state)
        for gradient, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(gradient, other)


def test_a_sum_of_torch_hands_on_a_gradient_with_strides_0(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    inputs = random_inputs(rng, "float32")
    arrays = put_all(Torch(), inputs)
    state = skl.attention_kl(**arrays, return_state=True)
    dkl = torch.ones(()).expand(state.kl.shape)
    assert dkl.stride() == (0, 0, 0)
    got = skl.attention_kl_backward(dkl, **arrays, state=state)
    expected = skl.attention_kl_backward(torch.ones(state.kl.shape), **arrays, state=state)
    for gradient, other in zip(got, expected, strict=True):
        assert torch.equal(gradient, other)


def test_zero_upstream_gives_zeros_of_the_right_dtype(
    library: Any, rng: np.random.Generator
) -> None:
    arrays = put_all(library, random_inputs(rng, "bfloat16"))
    state = skl.attention_kl(**arrays, return_state=True)
    dkl = library.put(np.zeros((2, 4, 5), np.float32))
    for name, got in zip(
        INPUTS, skl.attention_kl_backward(dkl, **arrays, state=state, wrt=INPUTS), strict=True
    ):
        assert_same(library, got, np.zeros(arrays[name].shape), "bfloat16")


@pytest.mark.parametrize(
    "sizes",
    [
        {"lengths": (0, 7)},
        {"lengths": (5, 0)},
        {"lengths": (0, 0)},
        {"batch": 0},
        {"heads": 0, "key_heads": (0, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_empty_sizes(
    library: Any, sizes: dict[str, Any], dtype: str, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, dtype, **sizes)
    rows = inputs["q1"].shape[:-1]
    arrays = put_all(library, inputs)
    state = skl.attention_kl(**arrays, return_state=True)
    assert_same(library, state.kl, np.zeros(rows), library.kl_dtype)
    assert_same(library, state.lse1, np.full(rows, -np.inf), library.kl_dtype)
    dkl = library.put(np.ones(rows, np.float32))
    gradients = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=INPUTS)
    for name, gradient in zip(INPUTS, gradients, strict=True):
        assert_same(library, gradient, np.zeros(inputs[name].shape), dtype)


def test_rows_without_keys(library: Any, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float32", lengths=(7, 3))
    state = skl.attention_kl(**put_all(library, inputs), causal=True, return_state=True)
    assert (library.get(state.kl)[..., :4] == 0).all()
    assert (library.get(state.lse2)[..., :4] == -np.inf).all()
    assert np.isfinite(library.get(state.lse2)[..., 4:]).all()
    if state.lse1_low is not None:
        assert (library.get(state.lse1_low)[..., :4] == 0).all()


@pytest.mark.parametrize("make", [Numpy, Torch], ids=["numpy", "torch"])
def test_out_of_the_forward(make: Any, rng: np.random.Generator) -> None:
    library = make()
    inputs = random_inputs(rng, "bfloat16")
    arrays = put_all(library, inputs)
    expected = reference.attention_kl(**inputs, return_state=True)
    kl = library.put(np.full((2, 4, 5), np.nan))
    assert skl.attention_kl(**arrays, out=kl) is kl
    assert_same(library, kl, expected.kl, "float64")
    parts = [library.put(np.full((2, 4, 5), np.nan)) for _ in range(5)]
    for state in (skl.KLState(*parts[:3]), skl.KLState(*parts)):
        assert skl.attention_kl(**arrays, return_state=True, out=state) is state
        for name in ("kl", "lse1", "lse2"):
            assert_same(library, getattr(state, name), getattr(expected, name), "float64")
    assert_same(library, parts[4], np.zeros((2, 4, 5)), "float64")


@pytest.mark.parametrize("make", [Numpy, Torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_the_backward(make: Any, dtype: str, rng: np.random.Generator) -> None:
    library = make()
    arrays = put_all(library, random_inputs(rng, dtype))
    state = skl.attention_kl(**arrays, return_state=True)
    dkl = library.put(rng.standard_normal((2, 4, 5)))
    expected = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=("k1", "q2"))
    out = [library.put(np.ones(arrays[n].shape, numpy_dtype(dtype))) for n in ("k1", "q2")]
    got = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=("k1", "q2"), out=out)
    assert type(got) is tuple
    for result, given, gradient in zip(got, out, expected, strict=True):
        assert result is given
        np.testing.assert_array_equal(library.get(given), library.get(gradient))


def test_a_state_of_the_callers_own(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    dkl = rng.standard_normal((2, 4, 5))
    exact = skl.attention_kl(**inputs, return_state=True)
    expected = skl.attention_kl_backward(dkl, **inputs, state=exact, wrt=INPUTS)
    same = skl.KLState.from_lse(exact.kl, exact.lse1, exact.lse2)
    for got, gradient in zip(
        skl.attention_kl_backward(dkl, **inputs, state=same, wrt=INPUTS), expected, strict=True
    ):
        np.testing.assert_array_equal(got, gradient)


def test_low_parts_count(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    inputs["q1"] *= 1e4
    inputs["q2"] *= 1e4
    dkl = rng.standard_normal((2, 4, 5))
    exact = skl.attention_kl(**inputs, return_state=True)
    high = [lse.astype(np.float32) for lse in (exact.lse1, exact.lse2)]
    low = [
        (lse - part).astype(np.float32)
        for lse, part in zip((exact.lse1, exact.lse2), high, strict=True)
    ]
    expected = skl.attention_kl_backward(dkl, **inputs, state=exact)
    split = skl.KLState(exact.kl, *high, *low)
    got = skl.attention_kl_backward(dkl, **inputs, state=split)
    rounded = skl.KLState(exact.kl, *high)
    worse = skl.attention_kl_backward(dkl, **inputs, state=rounded)
    for gradient, other, poor in zip(expected, got, worse, strict=True):
        size = np.linalg.norm(gradient)
        assert np.linalg.norm(other - gradient) < 1e-9 * size
        assert np.linalg.norm(poor - gradient) > 1e-6 * size


def test_jax_keeps_in_low_parts_what_float32_loses(rng: np.random.Generator) -> None:
    library = Jax()
    inputs = random_inputs(rng, "float32")
    inputs["q1"] *= 1000
    state = skl.attention_kl(**put_all(library, inputs), return_state=True)
    expected = reference.attention_kl(**inputs, return_state=True)
    for name in ("lse1", "lse2"):
        high = library.get(getattr(state, name)).astype(np.float64)
        low = library.get(getattr(state, f"{name}_low")).astype(np.float64)
        np.testing.assert_allclose(high + low, getattr(expected, name), rtol=1e-13)


def test_jax_with_float64(rng: np.random.Generator) -> None:
    library = Jax()
    inputs = random_inputs(rng, "float64")
    with library.jax.enable_x64(True):
        arrays = put_all(library, inputs)
        state = skl.attention_kl(**arrays, return_state=True)
        (dq2,) = skl.attention_kl_backward(
            library.put(np.ones((2, 4, 5))), **arrays, state=state, wrt=("q2",)
        )
        assert state.lse1_low is None
        assert_same(library, state.kl, reference.attention_kl(**inputs), "float64")
        assert library.dtype(dq2) == "float64"


class Shared:
    """An array of a library of the array API standard: DLPack and a namespace, no more."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __array_namespace__(self, **_: Any) -> Any:
        return SimpleNamespace(
            __name__="shared", from_dlpack=lambda array: Shared(np.from_dlpack(array))
        )


def test_any_library_of_the_array_api_standard(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float32")
    arrays = {name: Shared(values) for name, values in inputs.items()}
    state = skl.attention_kl(**arrays, return_state=True)
    assert isinstance(state.kl, Shared)
    np.testing.assert_array_equal(state.kl.values, reference.attention_kl(**inputs))
    (dk1,) = skl.attention_kl_backward(
        Shared(np.ones((2, 4, 5))), **arrays, state=state, wrt=("k1",)
    )
    assert isinstance(dk1, Shared)
    assert dk1.dtype == np.float32
    out = Shared(np.zeros((2, 4, 5)))
    assert skl.attention_kl(**arrays, out=out) is out
    np.testing.assert_array_equal(out.values, state.kl.values)


def test_torch_parameters_without_grad_mode(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    inputs = random_inputs(rng, "float32")
    arrays = put_all(Torch(), inputs)
    arrays["q2"] = torch.nn.Parameter(arrays["q2"])
    with torch.no_grad():
        kl = skl.attention_kl(**arrays)
    assert_same(Torch(), kl, reference.attention_kl(**inputs), "float64")
    with torch.inference_mode():
        kl = skl.attention_kl(**put_all(Torch(), inputs))
        assert kl.is_inference() or not kl.requires_grad


def test_inputs_are_only_read(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float32")
    for array in inputs.values():
        array.flags.writeable = False
    before = {name: array.copy() for name, array in inputs.items()}
    dkl = np.ones((2, 4, 5))
    dkl.flags.writeable = False
    state = skl.attention_kl(**inputs, return_state=True)
    skl.attention_kl_backward(dkl, **inputs, state=state, wrt=INPUTS)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


def test_calls_of_different_shapes_at_once(rng: np.random.Generator) -> None:
    problems = [
        random_inputs(rng, "float32", lengths=(1 + i, 3 + i), head_dims=(2 + i, 9))
        for i in range(8)
    ]

    def call(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        state = skl.attention_kl(**inputs, causal=True, return_state=True)
        dkl = np.ones(inputs["q1"].shape[:-1])
        gradients = skl.attention_kl_backward(dkl, **inputs, state=state, causal=True)
        return [state.kl, state.lse1, *gradients]

    expected = [call(inputs) for inputs in problems]
    with ThreadPoolExecutor(8) as pool:
        for got, values in zip(pool.map(call, problems * 4), expected * 4, strict=True):
            for array, value in zip(got, values, strict=True):
                np.testing.assert_array_equal(array, value)


def test_strategies_agree_on_the_cpu(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    dkl = np.ones((2, 4, 5))
    state = skl.attention_kl(**inputs, return_state=True)
    first = skl.attention_kl_backward(dkl, **inputs, state=state)
    for options in ({"strategy": "fused"}, {"strategy": "separate", "deterministic": True}):
        again = skl.attention_kl_backward(dkl, **inputs, state=state, **options)
        for gradient, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(gradient, other)


@pytest.mark.parametrize("name", ["api", "interop", "state"])
def test_the_examples_of_the_docstrings(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"streamkl_cupy.{name}"))
    assert failed == 0
    assert attempted > 0

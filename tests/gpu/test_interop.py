"""Arrays of each library come back as arrays of that library, on its device."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, Torch, random_inputs, run, upload_all

SHAPE = {"batch": 2, "heads": 4, "key_heads1": 2, "num_queries": 90, "num_keys": 70}
OPTIONS = {"causal": True, "scale1": 0.2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cupy(dtype: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, dtype, **SHAPE)
    arrays = upload_all(cupy_library, inputs)
    # `run` looks at the type, dtype, shape, strides and device of what comes back.
    Expected(inputs, OPTIONS).check(run(cupy_library, arrays, OPTIONS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch(dtype: str, rng: np.random.Generator, torch_library: Torch) -> None:
    inputs = random_inputs(rng, dtype, **SHAPE)
    arrays = upload_all(torch_library, inputs)
    Expected(inputs, OPTIONS).check(run(torch_library, arrays, OPTIONS))
    with torch_library.torch.inference_mode():
        Expected(inputs, OPTIONS).check(run(torch_library, arrays, OPTIONS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jax(dtype: str, rng: np.random.Generator, jax: Any) -> None:
    inputs = random_inputs(rng, dtype, **SHAPE)
    device = jax.devices("gpu")[0]
    arrays = {name: jax.device_put(array, device) for name, array in inputs.items()}
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, **OPTIONS, return_state=True)
    # Their memory may be handed out at once: the call has waited for its kernels.
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS, **OPTIONS)
    del arrays, qk
    results = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    results |= {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    for name, array in results.items():
        assert isinstance(array, jax.Array), name
        assert array.devices() == {device}, name
        is_gradient = name.startswith("d")
        assert array.dtype.name == (dtype if is_gradient else "float32"), name
        like = inputs[name[1:]].shape if is_gradient else inputs["q1"].shape[:-1]
        assert array.shape == like, name
    Expected(inputs, OPTIONS).check({n: np.asarray(x) for n, x in results.items()})


def test_jax_results_go_on_in_jax(rng: np.random.Generator, jax: Any) -> None:
    inputs = random_inputs(rng, **SHAPE)
    qk = [jax.numpy.asarray(inputs[name]) for name in INPUTS]
    kl = skl.attention_kl(*qk)
    doubled = jax.jit(lambda x: 2 * x)(kl)
    assert np.array_equal(np.asarray(doubled), 2 * np.asarray(kl))


class Foreign:
    """An array of a library that is known by the array API standard alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return FOREIGN


def _from_dlpack(value: Any) -> Foreign:
    import cupy

    return Foreign(cupy.from_dlpack(value))


FOREIGN = types.SimpleNamespace(__name__="foreign", from_dlpack=_from_dlpack)


def test_a_library_of_the_array_api(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, "float16", **SHAPE)
    arrays = {n: Foreign(array) for n, array in upload_all(cupy_library, inputs).items()}
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, **OPTIONS, return_state=True)
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS, **OPTIONS)
    results = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    results |= {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    assert all(type(array) is Foreign for array in results.values())
    Expected(inputs, OPTIONS).check({n: cupy_library.get(x.array) for n, x in results.items()})


def test_libraries_do_not_mix(
    rng: np.random.Generator, cupy_library: Cupy, torch_library: Torch
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    ours, theirs = upload_all(cupy_library, inputs), upload_all(torch_library, inputs)
    for name in INPUTS[1:]:
        mixed = {n: (theirs if n == name else ours)[n] for n in INPUTS}
        with pytest.raises(TypeError, match=f"{name}: expected an array of cupy like q1"):
            skl.attention_kl(**mixed)
    with pytest.raises(TypeError, match="k1: expected an array of torch like q1"):
        skl.attention_kl(**{n: (theirs if n == "q1" else ours)[n] for n in INPUTS})
    with pytest.raises(TypeError, match="k2: expected an array of cupy like q1"):
        skl.attention_kl(**{n: inputs[n] if n == "k2" else ours[n] for n in INPUTS})
    qk = [ours[name] for name in INPUTS]
    state = skl.attention_kl(*qk, return_state=True)
    with pytest.raises(TypeError, match="dkl: expected an array of cupy like q1"):
        skl.attention_kl_backward(theirs["dkl"], *qk, state)
    with pytest.raises(TypeError, match=r"out\[0\]: expected an array of cupy like q1"):
        skl.attention_kl_backward(ours["dkl"], *qk, state, wrt=("q2",), out=(theirs["q2"],))


def test_the_current_device_stays_the_same(
    rng: np.random.Generator, cupy_library: Cupy, torch_library: Torch
) -> None:
    import cupy

    before = cupy.cuda.runtime.getDevice(), torch_library.torch.cuda.current_device()
    inputs = random_inputs(rng, **SHAPE)
    run(cupy_library, upload_all(cupy_library, inputs), OPTIONS)
    run(torch_library, upload_all(torch_library, inputs), OPTIONS)
    after = cupy.cuda.runtime.getDevice(), torch_library.torch.cuda.current_device()
    assert after == before

"""Arrays of each library come back as arrays of that library, on its device."""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    Expected,
    Library,
    Torch,
    random_inputs,
    run,
    same_bits,
    upload,
    upload_all,
)

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


# Kinds of arrays that one library or another cannot share, or shares in its own way.


@pytest.fixture(params=["cupy", "torch", "jax", "foreign"])
def make(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Put a NumPy array on the card, as an array of each library."""
    if request.param == "jax":
        jax = request.getfixturevalue("jax")
        device = jax.devices("gpu")[0]
        return lambda host: jax.device_put(host, device)
    if request.param == "torch":
        library: Library = request.getfixturevalue("torch_library")
        return lambda host: upload(library, host)
    library = request.getfixturevalue("cupy_library")
    if request.param == "cupy":
        return lambda host: upload(library, host)
    return lambda host: Foreign(upload(library, host))


def back(array: Any) -> np.ndarray:
    """Copy an array of any of these libraries back."""
    if isinstance(array, Foreign):
        array = array.array
    if type(array).__module__.startswith("torch"):
        return array.float().cpu().numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float32)


@pytest.mark.parametrize(
    "empty",
    [{"batch": 0}, {"heads": 0}, {"num_queries": 0}, {"num_keys": 0}],
    ids=lambda empty: next(iter(empty)),
)
def test_arrays_without_elements(
    empty: dict[str, int], make: Callable[[np.ndarray], Any], rng: np.random.Generator
) -> None:
    shape = {"batch": 2, "heads": 4, "num_queries": 20, "num_keys": 30} | empty
    inputs = random_inputs(rng, "float16", **shape)
    arrays = {name: make(x) for name, x in inputs.items()}
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, return_state=True)
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS)
    assert type(state.kl) is type(qk[0])
    rows = inputs["q1"].shape[:-1]
    # Rows without keys: no divergence, and -inf for a log-sum-exp.
    assert np.array_equal(back(state.kl), np.zeros(rows, np.float32))
    assert np.array_equal(back(state.lse1), np.full(rows, -np.inf, np.float32))
    for name, gradient in zip(INPUTS, gradients, strict=True):
        assert np.array_equal(back(gradient), np.zeros(inputs[name].shape, np.float32))


def test_read_only_inputs(jax: Any, rng: np.random.Generator) -> None:
    # Every array of JAX is read-only, and its memory may be that of a constant.
    inputs = random_inputs(rng, **SHAPE)
    device = jax.devices("gpu")[0]
    arrays = {name: jax.device_put(x, device) for name, x in inputs.items()}
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, return_state=True)
    before = {name: np.asarray(x) for name, x in arrays.items()}
    kl = np.asarray(state.kl)
    skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS)
    for name, array in arrays.items():
        assert same_bits(np.asarray(array), before[name]), name
        assert same_bits(np.asarray(array), inputs[name]), name
    assert same_bits(np.asarray(state.kl), kl)
    with pytest.raises(ValueError, match="out: expected an array to write to, got a read-only one"):
        skl.attention_kl(*qk, out=state.kl)


def test_an_expanded_upstream_gradient(torch: Any, rng: np.random.Generator) -> None:
    # What the backward of a sum hands on: one number, of strides 0.
    library = Torch(torch)
    inputs = random_inputs(rng, **SHAPE)
    inputs["dkl"] = np.ones_like(inputs["dkl"])
    arrays = upload_all(library, inputs)
    arrays["dkl"] = torch.ones((), device="cuda").expand(inputs["dkl"].shape)
    assert set(arrays["dkl"].stride()) == {0}
    Expected(inputs, OPTIONS).check(run(library, arrays, OPTIONS))


def test_lazy_negation_is_refused(torch: Any) -> None:
    values = torch.randn(3, 50, 64, device="cuda", dtype=torch.complex32)
    lazy = values.conj().imag
    assert lazy.is_neg()
    others = [torch.randn(3, 50, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    with pytest.raises(TypeError, match="q1: expected a torch tensor whose memory holds its value"):
        skl.attention_kl(lazy, *others)
    assert skl.attention_kl(lazy.resolve_neg(), *others).isfinite().all()


@pytest.mark.parametrize("offset", [2, 6, 8, 14])
def test_slices_off_alignment(
    offset: int, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(torch_library, inputs)
    for name in ("q1", "k2"):
        flat = torch.empty(inputs[name].size + 8, device="cuda", dtype=torch.bfloat16)
        slice_ = flat[offset // 2 : offset // 2 + inputs[name].size].view(inputs[name].shape)
        slice_.copy_(arrays[name])
        assert slice_.data_ptr() % 16 == offset
        arrays[name] = slice_
    Expected(inputs, OPTIONS).check(run(torch_library, arrays, OPTIONS))


class Traced(Foreign):
    """A foreign array that can be watched being dropped."""


def test_a_capsule_lives_as_long_as_its_use(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float16", **SHAPE)
    expected = Expected(inputs, OPTIONS, ())
    arrays = [Traced(upload(cupy_library, inputs[name])) for name in INPUTS]
    watched = [weakref.ref(array) for array in arrays]
    memory = [weakref.ref(array.array) for array in arrays]
    kl = skl.attention_kl(*arrays, **OPTIONS)
    # Nothing of the package keeps the inputs, nor their memory.
    del arrays
    gc.collect()
    assert [reference() for reference in (*watched, *memory)] == [None] * 8
    # And the result owns its memory, whatever happens to the array it was handed out as.
    shared = kl.array
    del kl
    gc.collect()
    overwritten = [cupy_library.put(np.full(x.nbytes, 0xFF, np.uint8)) for x in inputs.values()]
    expected.check({"kl": cupy_library.get(shared)})
    assert len(overwritten) == len(inputs)


@pytest.mark.slow
def test_10000_calls_do_not_grow(
    make: Callable[[np.ndarray], Any], rng: np.random.Generator
) -> None:
    import cupy

    inputs = random_inputs(rng, "float16", heads=2, num_queries=40, num_keys=40)
    arrays = {name: make(x) for name, x in inputs.items()}
    qk = [arrays[name] for name in INPUTS]

    def usage(calls: int) -> tuple[int, int]:
        for _ in range(calls):
            skl.attention_kl(*qk)
        state = skl.attention_kl(*qk, return_state=True)
        for _ in range(calls // 10):
            skl.attention_kl_backward(arrays["dkl"], *qk, state)
        cupy.cuda.Device().synchronize()
        del state
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return cupy.get_default_memory_pool().total_bytes(), 4096 * pages

    # What leaks grows all the time; allocators take a megabyte now and then.
    usage(1000)
    devices, hosts = zip(*(usage(count) for count in (1000, *(3000,) * 6)), strict=True)
    assert len(set(devices)) == 1
    # 100 bytes a call would show.
    assert min(after - before for before, after in itertools.pairwise(hosts)) < 300_000

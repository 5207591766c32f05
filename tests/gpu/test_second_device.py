"""A card that is not device 0, while device 0 is the current one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, Library, Torch, random_inputs, run, upload_all

SECOND = 1
SHAPE = {"heads": 4, "key_heads1": 2, "num_queries": 90, "num_keys": 170}
OPTIONS = {"causal": True}


@pytest.fixture(autouse=True)
def two_devices() -> None:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")


@pytest.fixture(params=["cupy", "torch"])
def on_device(request: pytest.FixtureRequest) -> Callable[[int], Library]:
    """The library of the arrays of a device."""
    if request.param == "cupy":
        return Cupy
    torch = request.getfixturevalue("torch")
    return lambda device: Torch(torch, device)


def current_device() -> int:
    import cupy

    index: int = cupy.cuda.runtime.getDevice()
    return index


@pytest.mark.parametrize("into", [True, False], ids=["out", "allocated"])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_every_output(
    strategy: str, into: bool, rng: np.random.Generator, on_device: Callable[[int], Library]
) -> None:
    second = on_device(SECOND)
    assert current_device() == 0
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(second, inputs)
    results = run(second, arrays, OPTIONS, strategy=strategy, into=into)
    Expected(inputs, OPTIONS).check(results)
    assert current_device() == 0


def test_splits(rng: np.random.Generator, on_device: Callable[[int], Library]) -> None:
    second = on_device(SECOND)
    inputs = random_inputs(rng, num_queries=3, num_keys=9000)
    arrays = upload_all(second, inputs)
    Expected(inputs, {}).check(run(second, arrays, {}))


def test_two_devices_in_one_call(
    rng: np.random.Generator, on_device: Callable[[int], Library]
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    first, second = (upload_all(on_device(index), inputs) for index in (0, SECOND))
    with pytest.raises(ValueError, match="k2: expected an array on cuda:0 like q1"):
        skl.attention_kl(**{n: (second if n == "k2" else first)[n] for n in INPUTS})
    qk = [second[name] for name in INPUTS]
    state = skl.attention_kl(*qk, return_state=True)
    with pytest.raises(ValueError, match="dkl: expected an array on cuda:1 like q1"):
        skl.attention_kl_backward(first["dkl"], *qk, state)


def test_a_thread_for_each_device(
    rng: np.random.Generator, on_device: Callable[[int], Library]
) -> None:
    problems = [random_inputs(rng, **SHAPE) for _ in range(4)]
    libraries = [on_device(index % 2) for index in range(4)]

    def work(position: int) -> dict[str, np.ndarray]:
        arrays = upload_all(libraries[position], problems[position])
        for _ in range(5):
            results = run(libraries[position], arrays, OPTIONS)
        return results

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    for inputs, ours in zip(problems, results, strict=True):
        Expected(inputs, OPTIONS).check(ours)


def test_a_graph_on_the_second_device(rng: np.random.Generator, torch: Any) -> None:
    library = Torch(torch, SECOND)
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(library, inputs)
    qk = [arrays[name] for name in INPUTS]
    skl.warmup(64, 64, wrt=INPUTS, device=SECOND)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(SECOND):
        with torch.cuda.graph(graph):
            state = skl.attention_kl(*qk, **OPTIONS, return_state=True)
            gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS, **OPTIONS)
        graph.replay()
        torch.cuda.synchronize()
    results = {"kl": state.kl} | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    Expected(inputs, OPTIONS).check({name: library.get(x) for name, x in results.items()})


def test_autograd(rng: np.random.Generator, torch: Any) -> None:
    from streamkl_cupy.torch import attention_kl

    library = Torch(torch, SECOND)
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(library, inputs)
    leaves = [arrays[name].requires_grad_() for name in INPUTS]
    kl = attention_kl(*leaves, **OPTIONS)
    kl.backward(arrays["dkl"])
    assert current_device() == 0
    results = {"kl": kl.detach()} | {
        "d" + n: leaf.grad for n, leaf in zip(INPUTS, leaves, strict=True)
    }
    assert all(x.get_device() == SECOND for x in results.values())
    Expected(inputs, OPTIONS).check({name: library.get(x) for name, x in results.items()})


def test_jax(rng: np.random.Generator, jax: Any) -> None:
    device = jax.devices("gpu")[SECOND]
    inputs = random_inputs(rng, **SHAPE)
    arrays = {name: jax.device_put(array, device) for name, array in inputs.items()}
    dkl = arrays.pop("dkl")
    state = skl.attention_kl(**arrays, **OPTIONS, return_state=True)
    gradients = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=INPUTS, **OPTIONS)
    results = {"kl": state.kl} | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    assert all(array.devices() == {device} for array in results.values())
    Expected(inputs, OPTIONS).check({name: np.asarray(x) for name, x in results.items()})

"""What is kept from call to call must not show: the same shapes come again, all else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, Library, Torch, random_inputs, run, upload_all

# Large enough for the maps of Hopper's kernels.
SHAPE = {"heads": 4, "key_heads1": 2, "num_queries": 130, "num_keys": 150}


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_library")


def test_other_addresses(library: Library, rng: np.random.Generator) -> None:
    problems = [random_inputs(rng, **SHAPE) for _ in range(3)]
    expected = [Expected(inputs, {}) for inputs in problems]
    arrays = [upload_all(library, inputs) for inputs in problems]
    for turn in (0, 1, 2, 1, 0):
        expected[turn].check(run(library, arrays[turn], {}))
    # One that has changed among others that have not.
    mixed = problems[0] | {"k2": problems[1]["k2"]}
    Expected(mixed, {}).check(run(library, arrays[0] | {"k2": arrays[1]["k2"]}, {}))


def test_other_strides(library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, **SHAPE)
    expected = Expected(inputs, {})
    plain = upload_all(library, inputs)
    swapped = {
        n: np.ascontiguousarray(x.swapaxes(-3, -2)) for n, x in inputs.items() if n in INPUTS
    }
    views = {n: x.swapaxes(-3, -2) for n, x in upload_all(library, swapped).items()}
    for _ in range(2):
        expected.check(run(library, plain, {}))
        expected.check(run(library, plain | views, {}))


def test_the_same_memory_as_another_dtype(torch_library: Torch, rng: np.random.Generator) -> None:
    torch = torch_library.torch
    inputs = random_inputs(rng, "float16", **SHAPE)
    arrays = upload_all(torch_library, inputs)
    others = {name: arrays[name].view(torch.bfloat16) for name in INPUTS}
    for _ in range(2):
        Expected(inputs, {}).check(run(torch_library, arrays, {}))
        skl.attention_kl(**others)


def test_memory_that_was_freed_and_came_back(
    torch_library: Torch, rng: np.random.Generator
) -> None:
    addresses = set()
    for _ in range(4):
        inputs = random_inputs(rng, **SHAPE)
        arrays = upload_all(torch_library, inputs)
        addresses.add(arrays["q1"].data_ptr())
        Expected(inputs, {}).check(run(torch_library, arrays, {}))
        del arrays
    assert len(addresses) < 4, "torch did not hand out the same memory again"


def test_a_tensor_whose_memory_was_exchanged(
    torch_library: Torch, rng: np.random.Generator
) -> None:
    first, second = (random_inputs(rng, **SHAPE) for _ in range(2))
    arrays, others = (upload_all(torch_library, inputs) for inputs in (first, second))
    Expected(first, {}).check(run(torch_library, arrays, {}))
    arrays["k1"].data = others["k1"]
    Expected(first | {"k1": second["k1"]}, {}).check(run(torch_library, arrays, {}))


def test_checks_are_not_forgotten(torch_library: Torch, rng: np.random.Generator) -> None:
    torch = torch_library.torch
    arrays = upload_all(torch_library, random_inputs(rng, **SHAPE))
    qk = {name: arrays[name] for name in INPUTS}
    for _ in range(2):
        state = skl.attention_kl(**qk, return_state=True)
        skl.attention_kl_backward(arrays["dkl"], **qk, state=state)
    tracked = qk["k2"].clone().requires_grad_()
    with pytest.raises(TypeError, match=r"k2: .*streamkl_cupy\.torch"):
        skl.attention_kl(**qk | {"k2": tracked})
    with torch.no_grad():
        skl.attention_kl(**qk | {"k2": tracked})
    with pytest.raises(TypeError, match=r"k2: .*streamkl_cupy\.torch"):
        skl.attention_kl(**qk | {"k2": tracked})
    with pytest.raises(TypeError, match=r"q2: .*negated lazily"):
        skl.attention_kl(**qk | {"q2": torch._neg_view(qk["q2"])})
    negated = skl.KLState(state.kl, torch._neg_view(state.lse1), state.lse2)
    with pytest.raises(TypeError, match=r"state\.lse1: .*negated lazily"):
        skl.attention_kl_backward(arrays["dkl"], **qk, state=negated)
    with pytest.raises(ValueError, match="k1: expected an array on cuda"):
        skl.attention_kl(**qk | {"k1": qk["k1"].cpu()})
    emptied = qk["k1"].clone()
    emptied.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k1: expected an array with data, got a null address"):
        skl.attention_kl(**qk | {"k1": emptied})


def test_threads_on_the_same_shapes(library: Library, rng: np.random.Generator) -> None:
    problems = [random_inputs(rng, **SHAPE) for _ in range(4)]
    expected = [Expected(inputs, {}) for inputs in problems]
    arrays = [upload_all(library, inputs) for inputs in problems]
    run(library, arrays[0], {})

    def call(turn: int) -> list[dict[str, np.ndarray]]:
        return [run(library, arrays[turn], {}) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for results, exact in zip(pool.map(call, range(4)), expected, strict=True):
            for result in results:
                exact.check(result)


def test_a_new_thread_needs_no_cuda_before(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, **SHAPE)
    arrays = upload_all(cupy_library, inputs)
    qk = [arrays[name] for name in INPUTS]
    out = cupy_library.cupy.empty(inputs["q1"].shape[:-1], "float32")
    cupy_library.cupy.cuda.Device().synchronize()
    # The first of CUDA that this thread sees is a launch.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(skl.attention_kl, *qk, out=out).result()
    Expected(inputs, {}, ()).check({"kl": cupy_library.get(out)})

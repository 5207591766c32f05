"""Order with the caller's stream, whatever the others do, and CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import POISON, Expected, Library, Torch, random_inputs, upload_all
from tests.gpu.delay import delay

SHAPE = {"heads": 4, "key_heads2": 2, "num_queries": 200, "num_keys": 300}


class CupyStream:
    """A side stream of CuPy that the default stream does not wait for."""

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._stream:
            yield

    def delay(self) -> None:
        delay()

    def copy(self, to: Any, source: Any) -> None:
        to.data.copy_from_device_async(source.data, source.nbytes)

    def poison(self, like: Any) -> Any:
        array = like.__class__(like.shape, like.dtype)
        array.data.memset_async(POISON, array.nbytes)
        return array

    def synchronize(self) -> None:
        self._stream.synchronize()


class TorchStream:
    """A side stream of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.stream(self._stream):
            yield

    def delay(self) -> None:
        import cupy

        with cupy.cuda.ExternalStream(self._stream.cuda_stream):
            delay()

    def copy(self, to: Any, source: Any) -> None:
        to.copy_(source)

    def poison(self, like: Any) -> Any:
        return self._torch.full_like(like, float("nan"))

    def synchronize(self) -> None:
        self._stream.synchronize()


@pytest.fixture
def new_stream(library: Library, request: pytest.FixtureRequest) -> Callable[[], Any]:
    if library.name == "cupy":
        return CupyStream
    return functools.partial(TorchStream, request.getfixturevalue("torch"))


@pytest.fixture
def stream(new_stream: Callable[[], Any]) -> Any:
    return new_stream()


def synchronize() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def compute(arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward, nothing copied back."""
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, **options, return_state=True)
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS, **options)
    results = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    return results | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}


def fetch(library: Library, results: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: library.get(array) for name, array in results.items()}


def test_a_producer_still_running_on_a_side_stream(
    library: Library, stream: Any, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    ready = upload_all(library, inputs)
    late = {name: stream.poison(array) for name, array in ready.items()}
    compute(ready, {})  # compiled and loaded
    synchronize()
    with stream.current():
        stream.delay()
        for name, array in ready.items():
            stream.copy(late[name], array)
        results = compute(late, {})
    stream.synchronize()
    Expected(inputs, {}).check(fetch(library, results))


def test_inputs_may_be_dropped_after_the_call(
    library: Library, stream: Any, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    compute(upload_all(library, inputs), {})
    with stream.current():
        arrays = upload_all(library, inputs)
        sizes = [array.nbytes for array in inputs.values()]
        stream.delay()
        results = compute(arrays, {})
        # Their memory is handed out again and overwritten, but behind the kernels.
        del arrays
        overwritten = [library.put(np.full(size, POISON, np.uint8)) for size in sizes]
    stream.synchronize()
    Expected(inputs, {}).check(fetch(library, results))
    assert len(overwritten) == len(sizes)


def test_two_streams_do_not_meet(
    library: Library, new_stream: Callable[[], Any], rng: np.random.Generator
) -> None:
    problems = [random_inputs(rng, **SHAPE) for _ in range(2)]
    uploaded = [upload_all(library, inputs) for inputs in problems]
    compute(uploaded[0], {})
    synchronize()
    streams = [new_stream(), new_stream()]
    results: list[list[dict[str, Any]]] = [[], []]
    for _ in range(5):
        for position in (0, 1):
            with streams[position].current():
                results[position].append(compute(uploaded[position], {}))
    for side_stream in streams:
        side_stream.synchronize()
    for inputs, all_results in zip(problems, results, strict=True):
        expected = Expected(inputs, {})
        for each in all_results:
            expected.check(fetch(library, each))


@pytest.mark.parametrize("strategy", ["auto", "fused", "separate"])
@pytest.mark.parametrize("num_queries", [3, 200], ids=["splits", "plain"])
def test_a_graph_replayed_with_new_inputs(
    num_queries: int, strategy: str, rng: np.random.Generator, torch: Any, torch_library: Torch
) -> None:
    # Few queries on many keys: two kernels and a workspace in the forward, too.
    shape = SHAPE | {"num_queries": num_queries, "num_keys": 6000 if num_queries == 3 else 300}
    options = {"causal": True, "scale2": 0.2}
    static = upload_all(torch_library, random_inputs(rng, **shape))
    qk = [static[name] for name in INPUTS]
    # Ahead of a capture this is enough: no call needs to have been made.
    skl.warmup(64, 64, wrt=INPUTS)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        state = skl.attention_kl(*qk, **options, return_state=True)
        gradients = skl.attention_kl_backward(
            static["dkl"], *qk, state, wrt=INPUTS, strategy=strategy, **options
        )
    results = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    results |= {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    for _ in range(3):
        inputs = random_inputs(rng, **shape)
        for name, array in upload_all(torch_library, inputs).items():
            static[name].copy_(array)
        for array in results.values():
            array.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        Expected(inputs, options).check(fetch(torch_library, results))


COLD = """
import torch
import streamkl_cupy as skl

q, k = (torch.randn(2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (200, 300))
dkl = torch.ones(2, 200, device="cuda")
state = skl.KLState.from_lse(*(torch.zeros(2, 200, device="cuda") for _ in range(3)))

def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results

def refused(call):
    try:
        captured(call)
    except RuntimeError as error:
        return str(error)
    raise SystemExit("a cold capture was not refused")

forward = lambda: skl.attention_kl(q, k, q, k, return_state=True)
backward = lambda: skl.attention_kl_backward(dkl, q, k, q, k, state)
for call, kernel in ((forward, "forward_sm"), (backward, "backward_prepare")):
    message = refused(call)
    assert "warmup" in message and kernel in message, message
skl.warmup(64, 64)
forward_graph, state = captured(forward)
forward_graph.replay()
torch.cuda.synchronize()
assert (state.kl == 0).all() and state.lse1.isfinite().all()
backward_graph, gradients = captured(backward)
backward_graph.replay()
torch.cuda.synchronize()
assert all((gradient == 0).all() for gradient in gradients)
print("refused cold, captured warm")
"""


def test_a_cold_capture_is_refused_and_names_warmup(
    torch: Any, run_python: Callable[..., Any]
) -> None:
    assert run_python("-c", COLD).stdout.endswith("refused cold, captured warm\n")

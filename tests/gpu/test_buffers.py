"""Buffers that do not fit are refused before any launch; inputs off alignment are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.cases import DTYPES
from tests.gpu.card import (
    STATE,
    Cupy,
    Expected,
    Library,
    Torch,
    backward_plan,
    forward_plan,
    random_inputs,
    run,
    upload,
    upload_all,
)

SHAPE = {"heads": 2, "num_queries": 70, "num_keys": 90}


class Call:
    """Arrays of a forward and a backward that are right; a test spoils some of them."""

    def __init__(self, library: Library, rng: np.random.Generator) -> None:
        self.library = library
        self.hosts = random_inputs(rng, **SHAPE)
        self.arrays = upload_all(library, self.hosts)
        self.rows = self.hosts["q1"].shape[:-1]
        self.options: dict[str, Any] = {}

    def filled(self, shape: tuple[int, ...], dtype: str, offset: int = 0) -> Any:
        return upload(self.library, np.zeros(shape, DTYPES[dtype]), offset)

    def state(self, **changed: Any) -> skl.KLState:
        parts = {name: self.filled(self.rows, "float32") for name in STATE}
        return skl.KLState(**(parts | changed))

    def forward(self, **options: Any) -> None:
        skl.attention_kl(*(self.arrays[name] for name in INPUTS), **options)

    def backward(self, state: Any = None, **options: Any) -> None:
        qk = [self.arrays[name] for name in INPUTS]
        state = self.state() if state is None else state
        skl.attention_kl_backward(self.arrays["dkl"], *qk, state, **options)


@pytest.fixture
def call(library: Library, rng: np.random.Generator) -> Call:
    return Call(library, rng)


def wrong_input(name: str, dtype: str) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call.arrays[name] = upload(call.library, call.hosts[name].astype(DTYPES[dtype]))
        call.forward()

    return spoil


def wrong_shape(name: str) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call.arrays[name] = upload(call.library, call.hosts[name][..., :-1, :])
        call.forward()

    return spoil


def last_stride_of_two(call: Call) -> None:
    wide = np.repeat(call.hosts["q2"], 2, axis=-1)
    call.arrays["q2"] = upload(call.library, wide[..., ::2])
    call.forward()


def wrong_upstream(dtype: str, shape: Callable[[Any], Any] = lambda x: x) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        host = np.ascontiguousarray(shape(call.hosts["dkl"])).astype(DTYPES[dtype])
        call.arrays["dkl"] = upload(call.library, host)
        call.backward()

    return spoil


def wrong_state(name: str, dtype: str, **options: Any) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        rows = options.get("rows", call.rows)
        call.backward(call.state(**{name: call.filled(rows, dtype)}))

    return spoil


def strided_state(call: Call) -> None:
    strided = upload(call.library, np.zeros((*call.rows, 2), np.float32)[..., 0])
    call.backward(call.state(lse2=strided))


def wrong_out(**changed: Any) -> Callable[[Call], None]:
    """`out=` of the gradient of q2, of the right kind but for what is named."""

    def spoil(call: Call) -> None:
        right = {"shape": call.hosts["q2"].shape, "dtype": "bfloat16"}
        call.backward(wrt=("q2",), out=(call.filled(**(right | changed)),))

    return spoil


def strided_out(call: Call) -> None:
    wide = np.repeat(call.hosts["q2"], 2, axis=-2)
    call.backward(wrt=("q2",), out=(upload(call.library, wide[..., ::2, :]),))


def out_is_an_input(call: Call) -> None:
    call.backward(wrt=("q2",), out=(call.arrays["q2"],))


def one_out_twice(call: Call) -> None:
    out = call.filled(call.hosts["q2"].shape, "bfloat16")
    call.backward(wrt=("q1", "q2"), out=(out, out))


def kl_out(dtype: str, rows: tuple[int, ...] | None = None) -> Callable[[Call], None]:
    return lambda call: call.forward(out=call.filled(rows or call.rows, dtype))


WRONG: dict[str, tuple[Callable[[Call], None], type[Exception], str]] = {
    "q1_float64": (wrong_input("q1", "float64"), TypeError, r"q1: expected bfloat16, float16 or"),
    "k2_float16": (wrong_input("k2", "float16"), TypeError, r"k2: expected the dtype of q1"),
    "k1_shorter": (wrong_shape("k1"), ValueError, r"k2: expected the length of k1"),
    "q2_shorter": (wrong_shape("q2"), ValueError, r"q2: expected the length of q1"),
    "last_stride": (last_stride_of_two, ValueError, r"q2: expected a last stride of 1"),
    "dkl_float64": (wrong_upstream("float64"), TypeError, r"dkl: expected float32"),
    "dkl_bfloat16": (wrong_upstream("bfloat16"), TypeError, r"dkl: expected float32"),
    "dkl_shape": (
        wrong_upstream("float32", lambda x: x[..., :-1]),
        ValueError,
        r"dkl: expected the shape of q1 without its last axis",
    ),
    "state_dtype": (wrong_state("lse1", "float64"), TypeError, r"state\.lse1: expected float32"),
    "state_shape": (
        wrong_state("lse2_low", "float32", rows=(1, 2, 71)),
        ValueError,
        r"state\.lse2_low: expected the shape",
    ),
    "state_strides": (strided_state, ValueError, r"state\.lse2: expected a C-contiguous array"),
    "out_dtype": (wrong_out(dtype="float16"), TypeError, r"out\[0\]: expected bfloat16"),
    "out_shape": (wrong_out(shape=(1, 2, 70, 72)), ValueError, r"out\[0\]: expected the shape"),
    "out_misaligned": (wrong_out(offset=2), ValueError, r"out\[0\]: .* a multiple of 16 bytes"),
    "out_strides": (strided_out, ValueError, r"out\[0\]: expected a C-contiguous array"),
    "out_is_an_input": (out_is_an_input, ValueError, r"out\[0\]: .* overlaps with that of q2"),
    "one_out_twice": (one_out_twice, ValueError, r"out\[1\]: .* overlaps with that of out\[0\]"),
    "kl_out_dtype": (kl_out("bfloat16"), TypeError, r"out: expected float32"),
    "kl_out_shape": (kl_out("float32", (1, 2, 71)), ValueError, r"out: expected the shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_before_any_launch(
    name: str, call: Call, launched: list[tuple[str, dict[str, Any]]]
) -> None:
    spoil, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        spoil(call)
    assert launched == []
    # And what is right is not.
    fresh = Call(call.library, np.random.default_rng(0))
    fresh.forward()
    fresh.backward()
    assert launched


def test_a_tensor_on_the_cpu_among_others(
    torch: Any,
    torch_library: Torch,
    rng: np.random.Generator,
    launched: list[tuple[str, dict[str, Any]]],
) -> None:
    for name in ("k1", "q2"):
        call = Call(torch_library, rng)
        call.arrays[name] = call.arrays[name].cpu()
        with pytest.raises(ValueError, match=f"{name}: expected an array on cuda:"):
            call.forward()
    call = Call(torch_library, rng)
    with pytest.raises(ValueError, match=r"state\.kl: expected an array on cuda:"):
        call.backward(call.state(kl=torch.zeros(call.rows)))
    call.arrays["dkl"] = call.arrays["dkl"].cpu()
    with pytest.raises(ValueError, match="dkl: expected an array on cuda:"):
        call.backward()
    with pytest.raises(ValueError, match="out: expected an array on cuda:"):
        call.forward(out=torch.zeros(call.rows))
    assert launched == []


def test_a_tensor_that_requires_grad(torch_library: Torch, rng: np.random.Generator) -> None:
    call = Call(torch_library, rng)
    call.arrays["k2"].requires_grad_()
    with pytest.raises(TypeError, match=r"k2: .*streamkl_cupy\.torch"):
        call.forward()
    with torch_library.torch.no_grad():
        call.forward()


def test_a_row_output_off_alignment(
    cupy_library: Cupy, rng: np.random.Generator, launched: list[tuple[str, dict[str, Any]]]
) -> None:
    # torch cannot even make one.
    call = Call(cupy_library, rng)
    memory = cupy_library.put(np.zeros(4 * 140 + 4, np.uint8))
    kl = cupy_library.view(memory, 2, "float32", call.rows, (140, 70, 1))
    with pytest.raises(ValueError, match=r"out: .* a multiple of 4 bytes"):
        call.forward(out=kl)
    assert launched == []


def test_a_read_only_output(jax: Any, rng: np.random.Generator) -> None:
    hosts = random_inputs(rng, **SHAPE)
    arrays = {name: jax.numpy.asarray(host) for name, host in hosts.items()}
    out = jax.numpy.zeros(hosts["q1"].shape[:-1], "float32")
    with pytest.raises(ValueError, match="out: expected an array to write to"):
        skl.attention_kl(*(arrays[name] for name in INPUTS), out=out)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("names", [*((name,) for name in INPUTS), INPUTS], ids="_".join)
def test_inputs_off_alignment_take_the_guarded_path(
    names: tuple[str, ...], strategy: str, library: Library, rng: np.random.Generator
) -> None:
    hosts = random_inputs(rng, **SHAPE)
    arrays = upload_all(library, hosts)
    assert "_guarded" not in forward_plan(arrays, {}).name
    for name in names:
        offset = 2 * int(rng.integers(1, 8))
        arrays[name] = upload(library, hosts[name], offset)
    assert "_guarded" in forward_plan(arrays, {}).name
    assert "_guarded" in backward_plan(arrays, {}, INPUTS, strategy=strategy).name
    results = run(library, arrays, {}, strategy=strategy, into=True)
    Expected(hosts, {}).check(results)


def test_an_upstream_gradient_off_alignment(library: Library, rng: np.random.Generator) -> None:
    hosts = random_inputs(rng, **SHAPE)
    arrays = upload_all(library, hosts)
    arrays["dkl"] = upload(library, hosts["dkl"], 4)
    assert "_guarded" not in backward_plan(arrays, {}, INPUTS).name
    Expected(hosts, {}).check(run(library, arrays, {}, into=True))

"""The public functions on a card that is only pretended.

Memory of the host stands for that of the card, and the launch is replaced by one that computes
with the reference, through addresses and strides alone, as the kernels do. What is tested is all
between the caller's array and the launch: addresses, strides, outputs, workspaces, devices,
streams, plans and their reuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import api, catalogue, interop, jit, launch, plan, reference, tiling
from streamkl_cupy.problem import (
    INPUTS,
    Device,
    Operand,
    Problem,
    Strides,
    describe,
    gradient_strides,
)

DEVICE = 3
STREAM = 0xBEEF
FACTS = plan.device_facts("sm_80")


class CardArray:
    """An array "on the card"."""

    def __init__(self, host: np.ndarray, index: int = DEVICE) -> None:
        self.host = host
        self.index = index


class CardLibrary(interop._Forgetful):
    """A library whose arrays are all "on the card"."""

    name = "card"

    def __init__(self) -> None:
        self.allocated: list[tuple[tuple[int, ...], str, int]] = []
        self.settled: list[int] = []
        self.handed_back = 0

    def take(self, argument: str, value: CardArray) -> interop.Array:
        host = value.host
        strides = tuple(stride // host.itemsize for stride in host.strides)
        address = host.__array_interface__["data"][0] if host.size else 0
        return interop.Array(
            value, self, host.shape, strides, host.dtype.name, value.index, address
        )

    def current_stream(self, index: int) -> int:
        return STREAM + index

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> tuple[Any, int]:
        self.allocated.append((shape, dtype, index))
        # What is not written shows, and every address is a multiple of 16 bytes.
        size = int(np.prod(shape)) * interop.numpy_dtype(dtype).itemsize
        memory = np.full(size + 16, 0xFF, np.uint8)
        start = -memory.__array_interface__["data"][0] % 16
        host = memory[start : start + size].view(interop.numpy_dtype(dtype)).reshape(shape)
        return CardArray(host, index), host.__array_interface__["data"][0]

    def settle(self, stream: int) -> None:
        self.settled.append(stream)

    def hand_back(self, buffer: CardArray) -> CardArray:
        self.handed_back += 1
        return buffer


class PretendedChain:
    """Stands for the chain of launches of a plan."""

    def __init__(self, launch: Any) -> None:
        self.launch = launch


class Card:
    """Records what reaches the launch, and computes it."""

    def __init__(self) -> None:
        self.library = CardLibrary()
        self.current: list[int] = []
        self.launched: list[tuple[Any, ...]] = []
        self.planned = 0
        self.loaded = True
        self.capturing = False

    @contextlib.contextmanager
    def under_device(self, index: int) -> Iterator[None]:
        self.current.append(index)
        try:
            yield
        finally:
            self.current.pop()

    def forward(
        self,
        chosen: plan.ForwardPlan,
        problem: Problem,
        device_index: int,
        given: launch.GivenStrides,
    ) -> PretendedChain:
        run = functools.partial(self.launch_forward, chosen, problem, device_index, given)
        return PretendedChain(run)

    def backward(
        self, chosen: plan.BackwardPlan, problem: Problem, dkl: Strides, device_index: int
    ) -> PretendedChain:
        return PretendedChain(
            functools.partial(self.launch_backward, chosen, problem, dkl, device_index)
        )

    def merge(self, chosen: plan.MergePlan, num_rows: int, device_index: int) -> PretendedChain:
        return PretendedChain(functools.partial(self.launch_merge, chosen, num_rows, device_index))

    def launch_merge(
        self,
        chosen: plan.MergePlan,
        num_rows: int,
        device_index: int,
        pointers: dict[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        assert self.current == [device_index]
        assert workspace == 0
        self.launched.append((chosen, num_rows, pointers, stream))
        strides = Strides(num_rows, num_rows, 1)

        def rows(name: str) -> np.ndarray:
            if not pointers[name]:
                return np.zeros(num_rows)
            return read(pointers[name], (1, 1, num_rows, 1), strides, np.float32).ravel()

        states = [
            reference.ReferenceState(
                rows(f"{i}.kl"),
                rows(f"{i}.lse1") + rows(f"{i}.lse1_low"),
                rows(f"{i}.lse2") + rows(f"{i}.lse2_low"),
            )
            for i in range(chosen.takes[-1][1])
        ]
        merged = reference.merge_states(*states)._asdict()
        merged |= {name: np.full(num_rows, 0.25) for name in ("lse1_low", "lse2_low")}
        for name, values in merged.items():
            if pointers[name]:
                read(pointers[name], (1, 1, num_rows, 1), strides, np.float32)[0, 0, :, 0] = values

    def launch_forward(
        self,
        chosen: plan.ForwardPlan,
        problem: Problem,
        device_index: int,
        given: launch.GivenStrides,
        pointers: dict[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        assert self.current == [device_index]
        assert (workspace != 0) == (chosen.workspace_bytes > 0)
        if workspace:
            ctypes.memset(workspace, 0, chosen.workspace_bytes)
        self.launched.append((chosen, problem, pointers, stream))
        sizes = (problem.batch, problem.num_heads, problem.num_queries, 1)
        outside = {
            f"lse{side}": read(pointers[f"given{side}"], sizes, strides, np.float32)[..., 0]
            for side, strides in enumerate(given, 1)
            if strides is not None
        }
        if problem.mask == "packed":
            outside = {name: x[0] for name, x in outside.items()}
        assert tuple(outside) == chosen.given
        inputs = self.inputs(problem, pointers)
        state: Any = reference.attention_kl(**inputs, **outside, return_state=True)
        has_entropy = chosen.has_entropy
        for kernel in chosen.kernels:
            assert dict(kernel.template).get("kHasEntropy", has_entropy) == has_entropy
        if has_entropy:
            state = reference.attention_kl(**inputs, return_entropy=True)
        for name, values in state._asdict().items():
            if name != "given":
                self.write_rows(problem, pointers[name], values.reshape(sizes[:3]))
        for name in ("lse1_low", "lse2_low"):
            self.write_rows(problem, pointers[name], np.full(sizes[:3], 0.25))

    def launch_backward(
        self,
        chosen: plan.BackwardPlan,
        problem: Problem,
        dkl: Strides,
        device_index: int,
        pointers: dict[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        assert self.current == [device_index]
        if workspace:
            ctypes.memset(workspace, 0, chosen.workspace_bytes)
        self.launched.append((chosen, problem, pointers, stream))
        sizes = (problem.batch, problem.num_heads, problem.num_queries)
        rows = {
            name: read(pointers[name], (*sizes, 1), problem.row, np.float32)[..., 0]
            for name in ("kl", "lse1", "lse2")
        }
        state: Any = reference.ReferenceState(**rows)
        if chosen.given:
            mass1 = read(pointers["mass1"], (*sizes, 1), problem.row, np.float32)[..., 0]
            state = reference.GivenState(*state, mass1, chosen.given)
        for name in ("lse1", "lse2"):
            if pointers[f"{name}_low"]:
                low = read(pointers[f"{name}_low"], (*sizes, 1), problem.row, np.float32)[..., 0]
                assert (low == 0.25).all()
        upstream = read(pointers["dkl"], (*sizes, 1), dkl, np.float32)[..., 0]
        if problem.mask == "packed":
            upstream, state = upstream[0], reference.ReferenceState(*(x[0] for x in state))
        gradients = reference.attention_kl_backward(
            upstream,
            **self.inputs(problem, pointers),
            state=state,
            wrt=INPUTS,
        )
        for name, values in zip(INPUTS, gradients, strict=True):
            if problem.mask == "packed":
                values = values.swapaxes(0, 1)[None]
            if pointers[f"d{name}"]:
                dtype = interop.numpy_dtype(problem.dtype)
                view = read(
                    pointers[f"d{name}"], values.shape, gradient_strides(problem, name), dtype
                )
                view[...] = values

    def inputs(self, problem: Problem, pointers: dict[str, int]) -> dict[str, Any]:
        arrays = {}
        for name in INPUTS:
            side = name[1]
            heads = (
                problem.num_heads if name[0] == "q" else getattr(problem, f"num_key_heads{side}")
            )
            length = problem.num_queries if name[0] == "q" else problem.num_keys
            shape = (problem.batch, heads, length, getattr(problem, f"head_dim{side}"))
            dtype = interop.numpy_dtype(problem.dtype)
            arrays[name] = read(pointers[name], shape, getattr(problem, name), dtype)
        names = ("causal", "window", "q_offset", "scale1", "scale2", "softcap1", "softcap2")
        options = {name: getattr(problem, name) for name in names}
        if problem.ragged is not None:
            is_packed = problem.ragged.is_packed
            count = problem.ragged.num_sequences + 1 if is_packed else problem.batch
            for name in problem.ragged.names:
                memory = (ctypes.c_int32 * count).from_address(pointers[name])
                options[name] = np.frombuffer(memory, np.int32)
            if is_packed:
                arrays = {name: x[0].swapaxes(0, 1) for name, x in arrays.items()}
        return arrays | options

    def write_rows(self, problem: Problem, address: int, values: np.ndarray) -> None:
        if address:
            view = read(address, (*values.shape, 1), problem.row, np.float32)
            view[..., 0] = values


def read(address: int, shape: tuple[int, ...], strides: Strides, dtype: Any) -> np.ndarray:
    """View of memory, by an address and strides in elements."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.zeros(shape, dtype)
    steps = (strides.batch, strides.head, strides.row, 1)
    size = 1 + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in steps])


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    pretended = Card()
    monkeypatch.setitem(interop._libraries, CardArray, pretended.library)
    monkeypatch.setattr(interop, "under_device", pretended.under_device)
    monkeypatch.setattr(interop, "is_capturing", lambda stream: pretended.capturing)
    monkeypatch.setattr(launch, "device_facts", lambda index: FACTS)
    monkeypatch.setattr(launch, "forward", pretended.forward)
    monkeypatch.setattr(launch, "backward", pretended.backward)
    monkeypatch.setattr(launch, "merge", pretended.merge)
    monkeypatch.setattr(jit, "is_loaded", lambda *slot: pretended.loaded)

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            pretended.planned += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(plan, "forward", counted(plan.forward))
    monkeypatch.setattr(plan, "backward", counted(plan.backward))
    api.prepare_forward.cache_clear()
    api.prepare_backward.cache_clear()
    api.prepare_merge.cache_clear()
    yield pretended
    # The plans of this test hold its pretended launches.
    api.prepare_forward.cache_clear()
    api.prepare_backward.cache_clear()
    api.prepare_merge.cache_clear()


def random_inputs(
    rng: np.random.Generator,
    dtype: Any = ml_dtypes.bfloat16,
    layout: str = "bhnd",
    lengths: tuple[int, int] = (5, 7),
) -> dict[str, np.ndarray]:
    arrays = {}
    for name, heads, head_dim in (("q1", 4, 8), ("k1", 2, 8), ("q2", 4, 16), ("k2", 1, 16)):
        length = lengths[0] if name[0] == "q" else lengths[1]
        axes = (heads, length) if layout == "bhnd" else (length, heads)
        arrays[name] = rng.standard_normal((2, *axes, head_dim)).astype(dtype)
    return arrays


def on_card(arrays: dict[str, np.ndarray]) -> dict[str, CardArray]:
    return {name: CardArray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("bounds", [{}, {"softcap1": 1.5}, {"softcap1": 2, "softcap2": 0.5}])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_forward_and_backward(
    card: Card, dtype: Any, layout: str, bounds: dict[str, float], rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, dtype, layout)
    options = {"causal": True, "scale1": 0.5, "scale2": -0.3, "layout": layout, **bounds}
    rows = inputs["q1"].shape[:-1]
    expected = reference.attention_kl(**inputs, **options, return_state=True)
    arrays = on_card(inputs)

    kl = skl.attention_kl(**arrays, **options)
    assert kl.host.dtype == np.float32
    np.testing.assert_array_equal(kl.host, expected.kl.astype(np.float32))
    assert card.library.allocated == [(rows, "float32", DEVICE)]
    assert all(card.launched[-1][2][name] == 0 for name in ("lse1", "lse2", "lse1_low", "lse2_low"))

    state = skl.attention_kl(**arrays, **options, return_state=True)
    for name in ("kl", "lse1", "lse2"):
        values = getattr(expected, name).astype(np.float32)
        np.testing.assert_array_equal(getattr(state, name).host, values)
    assert (state.lse1_low.host == 0.25).all()

    dkl = np.ascontiguousarray(rng.standard_normal(rows[::-1]).astype(np.float32)).T
    wrt = ("k2", "q1", "q2", "k1")
    gradients = skl.attention_kl_backward(CardArray(dkl), **arrays, state=state, wrt=wrt, **options)
    rounded = reference.ReferenceState(*(getattr(state, n).host for n in ("kl", "lse1", "lse2")))
    exact = reference.attention_kl_backward(dkl, **inputs, state=rounded, wrt=wrt, **options)
    for name, got, gradient in zip(wrt, gradients, exact, strict=True):
        assert got.host.shape == inputs[name].shape
        assert got.host.flags.c_contiguous
        np.testing.assert_array_equal(got.host, gradient.astype(dtype))
    assert card.library.settled == [STREAM + DEVICE] * 3
    assert [entry[3] for entry in card.launched] == [STREAM + DEVICE] * 3
    assert card.library.handed_back == 1 + 5 + 4


def test_views_reach_the_launch_as_they_are(card: Card, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    wide = rng.standard_normal((2, 5, 4, 8 + 8)).astype(ml_dtypes.bfloat16)
    inputs["q1"] = wide.swapaxes(1, 2)[..., 8:]
    inputs["k1"] = np.broadcast_to(inputs["k1"][:, :1], inputs["k1"].shape)
    kl = skl.attention_kl(**on_card(inputs))
    np.testing.assert_array_equal(kl.host, reference.attention_kl(**inputs).astype(np.float32))
    _, problem, pointers, _ = card.launched[-1]
    assert problem.q1 == Strides(5 * 4 * 16, 16, 4 * 16)
    assert problem.k1.head == 0
    assert pointers["q1"] == wide.__array_interface__["data"][0] + 16
    assert problem.aligned


LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "right": {"kv_lens": (4, 0)},
    "all": {"kv_starts": (0, 3), "kv_lens": (7, 2), "q_lens": (5, 2)},
    "packed": {"cu_seqlens_q": (0, 2, 2, 4), "cu_seqlens_k": (1, 4, 6, 7)},
}


@pytest.mark.parametrize("given", [(), ("lse1",)], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", LENGTHS)
def test_ragged_batches(
    card: Card, name: str, layout: str, given: tuple[str, ...], rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, layout=layout)
    options: dict[str, Any] = {"causal": True, "layout": layout}
    if name == "packed":
        inputs = {n: np.ascontiguousarray(x[0]) for n, x in inputs.items()}
        if layout == "bhnd":
            inputs = {n: np.ascontiguousarray(x.swapaxes(0, 1)) for n, x in inputs.items()}
    lengths = {n: np.array(values, np.int32) for n, values in LENGTHS[name].items()}
    rows = inputs["q1"].shape[:-1]
    rows = rows[::-1] if name == "packed" else rows
    outside = {n: rng.standard_normal(rows, np.float32) for n in given}
    arrays = on_card(inputs) | on_card(lengths)
    state = skl.attention_kl(**arrays, **options, **on_card(outside), return_state=True)
    (chosen, problem, _, _), *_ = card.launched
    assert problem.ragged is not None
    assert problem.ragged.names == tuple(lengths)
    assert chosen.name.endswith("_packed" if name == "packed" else "_padded") or given
    exact = reference.attention_kl(**inputs, **options, **lengths, **outside, return_state=True)
    assert state.kl.host.shape == rows
    np.testing.assert_array_equal(state.kl.host, exact.kl.astype(np.float32))
    if given:
        return
    dkl = rng.standard_normal(rows, np.float32)
    (dk2,) = skl.attention_kl_backward(
        CardArray(dkl), **arrays, state=state, wrt=("k2",), **options
    )
    low = reference.ReferenceState(*(x.astype(np.float32) for x in exact))
    (expected,) = reference.attention_kl_backward(
        dkl, **inputs, state=low, wrt=("k2",), **options, **lengths
    )
    np.testing.assert_array_equal(dk2.host, expected.astype(ml_dtypes.bfloat16))


def test_the_longest_sequence_is_part_of_the_plan(card: Card, rng: np.random.Generator) -> None:
    inputs = {n: np.ascontiguousarray(x[0]) for n, x in random_inputs(rng, layout="bnhd").items()}
    lengths = {n: np.array(x, np.int32) for n, x in LENGTHS["packed"].items()}
    arrays = on_card(inputs) | on_card(lengths)
    skl.attention_kl(**arrays)
    skl.attention_kl(**arrays, max_seqlen_q=3, max_seqlen_k=4)
    whole, known = (problem.ragged for _, problem, _, _ in card.launched)
    assert whole is not None
    assert known is not None
    num_queries, num_keys = len(inputs["q1"]), len(inputs["k1"])
    assert (whole.num_sequences, whole.max_queries, whole.max_keys) == (3, num_queries, num_keys)
    assert (known.num_sequences, known.max_queries, known.max_keys) == (3, 3, 4)


def test_unaligned_views_take_another_plan(card: Card, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    wide = rng.standard_normal((2, 4, 5, 9)).astype(ml_dtypes.bfloat16)
    inputs["q1"] = wide[..., 1:]
    kl = skl.attention_kl(**on_card(inputs))
    np.testing.assert_array_equal(kl.host, reference.attention_kl(**inputs).astype(np.float32))
    assert not card.launched[-1][1].aligned
    assert "guarded" in card.launched[-1][0].name


@pytest.mark.parametrize("given", [("lse1",), ("lse2",), ("lse1", "lse2")], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_given_log_sum_exps(
    card: Card,
    mask: dict[str, Any],
    layout: str,
    given: tuple[str, ...],
    rng: np.random.Generator,
) -> None:
    inputs = random_inputs(rng, layout=layout)
    options: dict[str, Any] = {**mask, "layout": layout}
    rows = inputs["q1"].shape[:-1]
    # Of any strides, 0 among them.
    lse = {
        "lse1": np.ascontiguousarray(rng.random(rows[::-1]).astype(np.float32)).T,
        "lse2": np.broadcast_to(np.float32(2.5), rows),
    }
    outside = {name: lse[name] for name in given}
    arrays = on_card(inputs) | on_card(outside)
    expected = reference.attention_kl(**inputs, **outside, **options, return_state=True)
    assert isinstance(expected, reference.GivenState)

    kl = skl.attention_kl(**arrays, **options)
    np.testing.assert_array_equal(kl.host, expected.kl.astype(np.float32))
    assert card.library.allocated[0] == (rows, "float32", DEVICE)
    chosen = card.launched[-1][0]
    assert card.library.allocated[1:] == [((chosen.workspace_bytes,), "uint8", DEVICE)]
    state = skl.attention_kl(**arrays, **options, return_state=True)
    assert state.given == given
    for name in ("kl", "lse1", "lse2", "mass1"):
        exact = getattr(expected, name).astype(np.float32)
        np.testing.assert_array_equal(getattr(state, name).host, exact)

    dkl = rng.standard_normal(rows).astype(np.float32)
    arrays = on_card(inputs)
    gradients = skl.attention_kl_backward(
        CardArray(dkl), **arrays, state=state, wrt=INPUTS, **options
    )
    rounded = reference.GivenState(
        *(getattr(state, name).host for name in ("kl", "lse1", "lse2", "mass1")), given
    )
    exact = reference.attention_kl_backward(dkl, **inputs, state=rounded, wrt=INPUTS, **options)
    for got, gradient in zip(gradients, exact, strict=True):
        np.testing.assert_array_equal(got.host, gradient.astype(ml_dtypes.bfloat16))
    assert "_given_" in card.launched[-1][0].name
    assert ("_window_" in card.launched[-1][0].name) == ("window" in mask)

    out = skl.KLState(
        *(CardArray(np.full(rows, np.nan, np.float32)) for _ in range(3)),
        mass1=CardArray(np.full(rows, np.nan, np.float32)),
        given=given,
    )
    again = skl.attention_kl(**arrays, **on_card(outside), **options, return_state=True, out=out)
    assert again is out
    np.testing.assert_array_equal(out.mass1.host, state.mass1.host)
    with pytest.raises(ValueError, match=r"^out: expected a KLState with given="):
        skl.attention_kl(**arrays, **options, return_state=True, out=out)


@pytest.mark.parametrize("lengths", [(5, 7), (2, 4000)], ids=["plain", "splits"])
@pytest.mark.parametrize("mask", [{}, {"window": (3000, 0), "q_offset": 3}], ids=str)
def test_entropies(
    card: Card, mask: dict[str, Any], lengths: tuple[int, int], rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, lengths=lengths)
    arrays = on_card(inputs)
    rows = inputs["q1"].shape[:-1]
    if mask and lengths[1] == 4000:
        mask = mask | {"q_offset": 3500}
    expected = reference.attention_kl(**inputs, **mask, return_entropy=True)
    state = skl.attention_kl(**arrays, **mask, return_entropy=True)
    names = ("kl", "lse1", "lse2", "entropy", "cross_entropy")
    for name in names:
        exact = getattr(expected, name).astype(np.float32)
        np.testing.assert_array_equal(getattr(state, name).host, exact)
    chosen = card.launched[-1][0]
    of_mask = "kWindow" if mask else "kPlain"
    assert all(dict(k.template).get("kMask", of_mask) == of_mask for k in chosen.kernels)
    assert (chosen.num_splits > 1) == (lengths[1] == 4000)
    if chosen.num_splits > 1:
        assert chosen.workspace_bytes == 24 * chosen.num_splits * 2 * 4 * 2
    assert card.library.allocated[:7] == [(rows, "float32", DEVICE)] * 7
    # The backward does without them.
    dkl = CardArray(np.ones(rows, np.float32))
    skl.attention_kl_backward(dkl, **arrays, state=state, **mask)
    assert card.launched[-1][2]["entropy"] == 0

    poison = [CardArray(np.full(rows, np.nan, np.float32)) for _ in names]
    out = skl.KLState(**dict(zip(names, poison, strict=True)))
    assert skl.attention_kl(**arrays, **mask, return_entropy=True, out=out) is out
    np.testing.assert_array_equal(out.entropy.host, state.entropy.host)


@pytest.mark.parametrize("num_states", [1, 2, 11])
def test_merged_states(card: Card, num_states: int, rng: np.random.Generator) -> None:
    parts = [
        reference.ReferenceState(*rng.standard_normal((3, 2, 4, 5)).astype(np.float32))
        for _ in range(num_states)
    ]
    low = np.full((2, 4, 5), 0.5, np.float32)
    states = [skl.KLState(*map(CardArray, part), None, CardArray(low)) for part in parts]
    exact = reference.merge_states(*(part._replace(lse2=part.lse2 + 0.5) for part in parts))
    merged = skl.merge_states(*states)
    for name in ("kl", "lse1", "lse2"):
        expected = getattr(exact, name).astype(np.float32)
        np.testing.assert_array_equal(getattr(merged, name).host, expected)
    assert (merged.lse1_low.host == 0.25).all()
    assert card.library.allocated == [((2, 4, 5), "float32", DEVICE)] * 5
    assert card.library.settled == [STREAM + DEVICE]

    out = skl.KLState(*(CardArray(np.full((2, 4, 5), np.nan, np.float32)) for _ in range(3)))
    assert skl.merge_states(*states, out=out) is out
    np.testing.assert_array_equal(out.kl.host, merged.kl.host)
    assert card.launched[-1][2]["lse1_low"] == 0
    assert len(card.library.allocated) == 5


def test_merged_states_of_other_dtypes_or_devices_are_refused(card: Card) -> None:
    rows = np.zeros(5, np.float32)
    state = skl.KLState(*(CardArray(rows) for _ in range(3)))
    elsewhere = skl.KLState(*(CardArray(rows, DEVICE + 1) for _ in range(3)))
    with pytest.raises(ValueError, match=r"^states\[1\]\.kl: expected an array on cuda:3 like "):
        skl.merge_states(state, elsewhere)
    wide = skl.KLState(*(CardArray(rows.astype(np.float64)) for _ in range(3)))
    with pytest.raises(TypeError, match=r"^states\[0\]\.kl: expected float32, got float64"):
        skl.merge_states(wide)
    assert card.launched == []


@pytest.mark.parametrize("wrt", [("q1",), ("k2",), ("k1", "q2")])
def test_only_what_is_asked_for_is_allocated(
    card: Card, wrt: tuple[str, ...], rng: np.random.Generator
) -> None:
    arrays = on_card(random_inputs(rng))
    state = skl.attention_kl(**arrays, return_state=True)
    card.library.allocated.clear()
    dkl = CardArray(np.ones((2, 4, 5), np.float32))
    skl.attention_kl_backward(dkl, **arrays, state=state, wrt=wrt)
    chosen, _, pointers, _ = card.launched[-1]
    assert {name for name in INPUTS if pointers[f"d{name}"]} == set(wrt)
    gradients = [(arrays[name].host.shape, "bfloat16", DEVICE) for name in wrt]
    workspace = [((chosen.workspace_bytes,), "uint8", DEVICE)]
    assert card.library.allocated == gradients + workspace


def test_the_same_shapes_are_planned_once(card: Card, rng: np.random.Generator) -> None:
    for _ in range(3):
        arrays = on_card(random_inputs(rng))
        state = skl.attention_kl(**arrays, return_state=True)
        skl.attention_kl(**arrays)
        dkl = CardArray(np.ones((2, 4, 5), np.float32))
        skl.attention_kl_backward(dkl, **arrays, state=state)
    assert card.planned == 2
    skl.attention_kl(**arrays, causal=True)
    skl.attention_kl_backward(dkl, **arrays, state=state, deterministic=True)
    skl.attention_kl(**on_card(random_inputs(rng, np.float16)))
    assert card.planned == 5


def test_overrides_of_the_plan_are_heeded(card: Card, rng: np.random.Generator) -> None:
    arrays = on_card(random_inputs(rng, lengths=(1, 5000)))
    skl.attention_kl(**arrays)
    assert card.launched[-1][0].num_splits > 1
    with plan.override(num_splits=1):
        skl.attention_kl(**arrays)
        assert card.launched[-1][0].num_splits == 1
    skl.attention_kl(**arrays)
    assert card.launched[-1][0].num_splits > 1


def test_split_keys_get_a_workspace(card: Card, rng: np.random.Generator) -> None:
    skl.attention_kl(**on_card(random_inputs(rng, lengths=(1, 5000))))
    chosen = card.launched[-1][0]
    assert card.library.allocated[-1] == ((chosen.workspace_bytes,), "uint8", DEVICE)


def test_force_is_handed_to_the_plan(
    card: Card, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = on_card(random_inputs(rng))
    skl.attention_kl(**arrays)
    monkeypatch.setenv("STREAMKL_FORCE", "forward_sm70")
    with pytest.raises(ValueError, match="forward_sm70"):
        skl.attention_kl(**arrays)


def test_out(card: Card, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    arrays = on_card(inputs)
    expected = reference.attention_kl(**inputs, return_state=True)
    rows = [CardArray(np.full((2, 4, 5), np.nan, np.float32)) for _ in range(5)]
    assert skl.attention_kl(**arrays, out=rows[0]) is rows[0]
    np.testing.assert_array_equal(rows[0].host, expected.kl.astype(np.float32))
    short, long = skl.KLState(*rows[:3]), skl.KLState(*rows)
    assert skl.attention_kl(**arrays, return_state=True, out=short) is short
    assert np.isnan(rows[3].host).all()
    assert skl.attention_kl(**arrays, return_state=True, out=long) is long
    np.testing.assert_array_equal(rows[2].host, expected.lse2.astype(np.float32))
    assert (rows[4].host == 0.25).all()
    assert card.library.allocated == []

    dkl = CardArray(np.ones((2, 4, 5), np.float32))
    (gradient,) = skl.attention_kl_backward(dkl, **arrays, state=long, wrt=("k2",))
    buffer, _ = card.library.empty(inputs["k2"].shape, "bfloat16", DEVICE)
    got = skl.attention_kl_backward(dkl, **arrays, state=long, wrt=("k2",), out=[buffer])
    assert got == (buffer,)
    np.testing.assert_array_equal(buffer.host, gradient.host)


def test_states_without_low_parts(card: Card, rng: np.random.Generator) -> None:
    arrays = on_card(random_inputs(rng))
    full = skl.attention_kl(**arrays, return_state=True)
    state = skl.KLState.from_lse(full.kl, full.lse1, full.lse2)
    dkl = CardArray(np.ones((2, 4, 5), np.float32))
    skl.attention_kl_backward(dkl, **arrays, state=state)
    pointers = card.launched[-1][2]
    assert pointers["lse1_low"] == pointers["lse2_low"] == 0
    assert pointers["lse1"] != 0


@pytest.mark.parametrize("lengths", [(0, 7), (5, 0), (0, 0)])
def test_empty_problems(card: Card, lengths: tuple[int, int], rng: np.random.Generator) -> None:
    arrays = on_card(random_inputs(rng, lengths=lengths))
    state = skl.attention_kl(**arrays, return_state=True)
    assert (state.kl.host == 0).all()
    dkl = CardArray(np.ones((2, 4, lengths[0]), np.float32))
    gradients = skl.attention_kl_backward(dkl, **arrays, state=state, wrt=INPUTS)
    for name, gradient in zip(INPUTS, gradients, strict=True):
        assert gradient.host.shape == arrays[name].host.shape
        assert (gradient.host == 0).all()


def test_what_is_wrong_is_refused_before_any_launch(card: Card, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    arrays = on_card(inputs)
    state = skl.attention_kl(**arrays, return_state=True)
    dkl = CardArray(np.ones((2, 4, 5), np.float32))
    launched = len(card.launched)
    double = {name: CardArray(array.astype(np.float64)) for name, array in inputs.items()}
    with pytest.raises(TypeError, match="q1: expected bfloat16, float16 or float32 on a GPU"):
        skl.attention_kl(**double)
    elsewhere = CardArray(inputs["k1"], index=0)
    with pytest.raises(ValueError, match="k1: expected an array on cuda:3 like q1, got one on"):
        skl.attention_kl(**arrays | {"k1": elsewhere})
    small = {name: CardArray(array[..., :4].copy()) for name, array in inputs.items()}
    with pytest.raises(ValueError, match="q1 and k1: expected a head dimension"):
        skl.attention_kl(**small)
    with pytest.raises(TypeError, match="dkl: expected float32, got float64"):
        skl.attention_kl_backward(CardArray(np.ones((2, 4, 5))), **arrays, state=state)
    with pytest.raises(ValueError, match="dkl: expected an array on cuda:3"):
        skl.attention_kl_backward(CardArray(dkl.host, 0), **arrays, state=state)
    strided = CardArray(np.ones((2, 4, 10), np.float32)[..., ::2])
    with pytest.raises(ValueError, match=r"state.lse2: expected a C-contiguous array"):
        skl.attention_kl_backward(dkl, **arrays, state=skl.KLState(state.kl, state.lse1, strided))
    out = CardArray(np.zeros(2 * 4 * 5 * 16 + 1, ml_dtypes.bfloat16)[1:].reshape(2, 4, 5, 16))
    with pytest.raises(ValueError, match=r"out\[0\]: expected an address that is a multiple of 16"):
        skl.attention_kl_backward(dkl, **arrays, state=state, wrt=("q2",), out=(out,))
    with pytest.raises(ValueError, match=r"out\[0\]: expected memory of its own, .* of q2"):
        skl.attention_kl_backward(dkl, **arrays, state=state, wrt=("q2",), out=(arrays["q2"],))
    with pytest.raises(ValueError, match=r"out: expected an array on cuda:3 like q1"):
        skl.attention_kl(**arrays, out=CardArray(dkl.host, 0))
    assert len(card.launched) == launched


def test_cold_kernels_in_a_capture(card: Card, rng: np.random.Generator) -> None:
    arrays = on_card(random_inputs(rng))
    card.loaded, card.capturing = False, True
    with pytest.raises(RuntimeError) as caught:
        skl.attention_kl(**arrays)
    name = plan.forward(
        describe(*(interop.take(n, a).operand(n) for n, a in arrays.items())), FACTS
    ).name
    assert str(caught.value) == (
        f"{name}: expected its kernels to be loaded before a graph is captured, got forward_sm80 "
        "not loaded; before the capture call streamkl_cupy.warmup(head_dim1=8, head_dim2=16, "
        "dtype='bfloat16', backward=False, device=3), or make this call once."
    )
    assert card.launched == []
    card.loaded = True
    skl.attention_kl(**arrays)
    # Once launched, nothing is asked again.
    card.loaded = False
    skl.attention_kl(**arrays)
    card.capturing = False
    state = skl.attention_kl(**arrays, return_state=True)
    card.capturing = True
    with pytest.raises(RuntimeError, match="warmup"):
        skl.attention_kl_backward(CardArray(np.ones((2, 4, 5), np.float32)), **arrays, state=state)


def test_debug_tells_each_new_plan_once(
    card: Card,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STREAMKL_DEBUG", "1")
    arrays = on_card(random_inputs(rng, lengths=(1, 5000)))
    for _ in range(2):
        skl.attention_kl(**arrays)
    lines = capsys.readouterr().err.splitlines()
    chosen = card.launched[-1][0]
    assert lines == [
        f"streamkl_cupy: {chosen.name} on cuda:3: forward_sm80 reduce_splits, workspace "
        f"{chosen.workspace_bytes} bytes"
    ]


def test_many_threads(
    card: Card, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [random_inputs(rng, lengths=(1 + i % 4, 3 + i)) for i in range(8)]
    # The list of current devices belongs to one thread each on a real card.
    monkeypatch.setattr(interop, "under_device", lambda index: contextlib.nullcontext())
    card.current = [DEVICE]

    def call(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return skl.attention_kl(**on_card(inputs)).host

    with ThreadPoolExecutor(8) as pool:
        for got, inputs in zip(pool.map(call, problems * 8), problems * 8, strict=True):
            np.testing.assert_array_equal(got, reference.attention_kl(**inputs).astype(np.float32))


# Options of calls, and what warmup is told of them.
COLD: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "causal": ({"causal": True}, ""),
    "window": ({"window": (2, 1)}, "windowed=True, "),
    "offset": ({"causal": True, "q_offset": 1}, "windowed=True, "),
    "padded": ({"kv_lens": np.int32([3, 7])}, "ragged=True, "),
    "packed window": (
        {"cu_seqlens_q": np.int32([0, 5]), "cu_seqlens_k": np.int32([0, 7]), "window": (2, 1)},
        "ragged=True, ",
    ),
    "softcap": ({"softcap2": 3.0, "window": (2, 1)}, "windowed=True, softcap=True, "),
    "entropy": ({"return_entropy": True}, ""),
    "entropy, padded": ({"return_entropy": True, "q_lens": np.int32([1, 5])}, "ragged=True, "),
    "given": ({}, ""),
    "float32": ({}, ""),
    "float32 as tf32": ({"precision": "tf32"}, "precision='tf32', "),
    "unaligned": ({}, "unaligned=True, "),
}


class TestWarmup:
    @pytest.fixture(autouse=True)
    def _recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[tuple[str, Any, str]] = []
        self.loaded: list[tuple[str, Any, str, int, int]] = []

        def build(kernel: str, template: Any, arch: str) -> None:
            self.built.append((kernel, template, arch))

        def function(
            kernel: str, template: Any, arch: str, index: int, *, shared_memory: int
        ) -> None:
            self.loaded.append((kernel, template, arch, index, shared_memory))

        monkeypatch.setattr(jit, "build", build)
        monkeypatch.setattr(jit, "function", function)

    @pytest.mark.parametrize("wrt", [("q2", "k2"), ("q2",), ("k1",), ("k2", "q1"), INPUTS], ids=str)
    def test_every_plan_with_these_head_dims_finds_its_kernels(self, wrt: tuple[str, ...]) -> None:
        added = dict.fromkeys(("unaligned", "windowed", "entropy", "softcap"), True)
        skl.warmup(64, 128, wrt=wrt, **added, arch="sm_80")
        built = {(kernel, template) for kernel, template, _ in self.built}
        assert len(built) == len(self.built)
        facts = plan.device_facts("sm_80")
        for num_queries in (1, 3, 17, 64, 65, 1000, 40_000):
            for num_keys in (1, 100, 5000, 200_000):
                for pointer, window, softcap in itertools.product(
                    (256, 258), (None, (10, 0), (5000, 7)), (None, 5.0)
                ):
                    problem = self.problem(num_queries, num_keys, pointer, window, softcap)
                    plans: list[Any] = [plan.forward(problem, facts)]
                    plans.append(plan.forward(problem, facts, given=("lse1",)))
                    plans.append(plan.forward(problem, facts, has_entropy=True))
                    plans.append(plan.merge(problem.num_rows, 20, facts))
                    for strategy in ("auto", "fused", "separate"):
                        plans.append(plan.backward(problem, facts, wrt, strategy=strategy))
                    plans.append(plan.backward(problem, facts, wrt, deterministic=True))
                    for chosen in plans:
                        assert {(k.kernel, k.template) for k in chosen.kernels} <= built

    def test_deterministic_gradients_find_their_kernels_on_hopper(self) -> None:
        skl.warmup(64, 128, wrt=INPUTS, windowed=True, softcap=True, arch="sm_90a")
        built = {(kernel, template) for kernel, template, _ in self.built}
        facts = plan.device_facts("sm_90a")
        taken = set()
        for num_queries, window, softcap in itertools.product(
            (1, 300, 40_000), (None, (5000, 7)), (None, 5.0)
        ):
            problem = self.problem(num_queries, 40_000, 256, window, softcap)
            for wrt in (INPUTS, ("q1", "k1"), ("q2", "k2")):
                chosen = plan.backward(problem, facts, wrt, deterministic=True)
                assert {(k.kernel, k.template) for k in chosen.kernels} <= built
                taken |= {side.strategy for side in chosen.sides}
        assert taken == {"ordered", "separate"}

    def test_few_queries_of_any_groups_find_their_kernels(self) -> None:
        skl.warmup(64, 128, wrt=INPUTS, arch="sm_90a")
        built = {(kernel, template) for kernel, template, _ in self.built}
        facts = plan.device_facts("sm_90a")
        taken = set()
        for num_queries, groups in itertools.product(
            (1, 2, 5, 16, 33, 64), itertools.product((1, 2, 8, 32), repeat=2)
        ):
            shapes = (
                (32, num_queries, 64),
                (32 // groups[0], 2048, 64),
                (32, num_queries, 128),
                (32 // groups[1], 2048, 128),
            )
            problem = describe(
                *(
                    Operand(
                        n,
                        (1, *s),
                        (s[0] * s[1] * s[2], s[1] * s[2], s[2], 1),
                        "bfloat16",
                        Device("cuda", 0),
                        256,
                    )
                    for n, s in zip(INPUTS, shapes, strict=True)
                )
            )
            for wrt in (INPUTS, ("q1", "k1"), ("q2", "k2")):
                chosen = plan.backward(problem, facts, wrt)
                assert {(k.kernel, k.template) for k in chosen.kernels} <= built
                taken |= {k.kernel for k in chosen.kernels}
        assert {"backward_few_sm90", "backward_fused_sm80"} <= taken

    def problem(
        self, num_queries: int, num_keys: int, pointer: int, window: Any = None, softcap: Any = None
    ) -> Problem:
        shapes = ((num_queries, 64), (num_keys, 64), (num_queries, 128), (num_keys, 128))
        return describe(
            *(
                Operand(n, (4, *s), (s[0] * s[1], s[1], 1), "bfloat16", Device("cuda", 0), pointer)
                for n, s in zip(INPUTS, shapes, strict=True)
            ),
            window=window,
            softcap2=softcap,
        )

    @pytest.mark.parametrize(("option", "mask"), [("windowed", "kWindow"), ("ragged", "kRagged")])
    def test_masks_have_kernels_of_their_own(self, option: str, mask: str) -> None:
        skl.warmup(64, 64, arch="sm_80")
        plain = {(kernel, template) for kernel, template, _ in self.built}
        assert all(("kMask", mask) not in template for _, template in plain)
        skl.warmup(64, 64, arch="sm_80", **{option: True})
        both = {(kernel, template) for kernel, template, _ in self.built}
        begun = {one for one in both - plain if ("kMask", mask) in one[1]}
        assert {kernel for kernel, _ in begun} == {
            kernel for kernel, template in plain if ("kMask", "kPlain") in template
        }
        has_table = "key_table" in {kernel for kernel, _ in both}
        assert has_table == (option == "ragged")

    def test_softcaps_have_kernels_of_their_own(self) -> None:
        skl.warmup(64, 64, arch="sm_90a")
        plain = {(kernel, template) for kernel, template, _ in self.built}
        assert all(("kHasSoftcap", True) not in template for _, template in plain)
        names = skl.warmup(64, 64, softcap=True, arch="sm_90a")
        assert any(name.endswith("_softcap") for name in names)
        capped = {(kernel, template) for kernel, template, _ in self.built} - plain
        assert all(("kHasSoftcap", True) in template for _, template in capped)
        assert {kernel for kernel, _ in capped} == {
            kernel for kernel, template in plain if ("kHasSoftcap", False) in template
        }

    def test_entropies_of_windows_too(self) -> None:
        names = skl.warmup(64, 64, backward=False, windowed=True, entropy=True, arch="sm_80")
        assert any(name.endswith("_window_entropy") for name in names)
        of_both = {
            k for k, t, _ in self.built if {("kMask", "kWindow"), ("kHasEntropy", True)} <= {*t}
        }
        assert of_both == {"forward_sm80"}

    def test_without_a_card_it_builds_only(self) -> None:
        names = skl.warmup(32, 32, "float16", backward=False, arch="sm_80")
        assert self.loaded == []
        kernels = {"forward_sm80", "reduce_splits", "merge_states", "replace_lse"}
        assert {kernel for kernel, _, _ in self.built} == kernels
        assert not any(dict(template).get("kHasEntropy") for _, template, _ in self.built)
        assert {arch for _, _, arch in self.built} == {"sm_80"}
        assert all("guarded" not in name for name in names)
        assert len(set(names)) == len(names) >= len(catalogue.ROW_CLASSES)

    def test_on_a_card_it_loads(self, card: Card) -> None:
        skl.warmup(128, 128, device=DEVICE)
        assert self.built == []
        assert {(arch, index) for _, _, arch, index, _ in self.loaded} == {("sm_80", DEVICE)}
        chosen = plan.forward(self.problem(4096, 4096, 256), FACTS)
        assert chosen.kernels[0].shared_memory > 0
        assert max(shared for *_, shared in self.loaded) > 48 * 1024

    def test_what_was_tuned_is_loaded_too(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = self.problem(500, 3000, 256)
        tile = tiling.BackwardTile(1, 2, 16, 16, 2)
        choice = plan.Choice(backward_tiles=(("backward_dk_sm80", tile),))
        of = plan.problem_class(problem, ("k2",), deterministic=True)
        entry = plan.TunedChoice(of, plan.shape_of(problem), choice)
        facts = dataclasses.replace(FACTS, tuned=(entry,))
        monkeypatch.setattr(launch, "device_facts", lambda index: facts)
        chosen = plan.backward(problem, facts, ("k2",), deterministic=True)
        wanted = {(kernel.kernel, kernel.template) for kernel in chosen.kernels}
        for options, is_loaded in (
            ({"head_dim2": 64}, False),
            ({"dtype": "float16"}, False),
            ({"backward": False}, False),
            ({}, True),
        ):
            self.loaded.clear()
            skl.warmup(**{"head_dim1": 64, "head_dim2": 128, "device": DEVICE} | options)
            assert (wanted <= {(kernel, template) for kernel, template, *_ in self.loaded}) is (
                is_loaded
            ), options

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
    @pytest.mark.parametrize("case", COLD)
    def test_a_cold_capture_names_the_call_that_loads_its_kernels(
        self,
        case: str,
        arch: str,
        card: Card,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        options, named = COLD[case]
        facts, dtype = plan.device_facts(arch), "float32" if "float32" in case else "bfloat16"
        monkeypatch.setattr(launch, "device_facts", lambda index: facts)
        asked: set[Any] = set()

        def is_loaded(kernel: str, template: Any, *_: Any) -> bool:
            asked.add((kernel, template))
            return False

        monkeypatch.setattr(jit, "is_loaded", is_loaded)
        inputs = random_inputs(rng, interop.numpy_dtype(dtype))
        if "cu_seqlens_q" in options:
            inputs = {n: x[0].swapaxes(0, 1).copy() for n, x in inputs.items()}
        if "unaligned" in case:
            inputs["k1"] = np.zeros((*inputs["k1"].shape[:-1], 9), inputs["k1"].dtype)[..., :8]
        arrays = on_card(inputs)
        options = {n: CardArray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        if "given" in case:
            options["lse2"] = CardArray(np.zeros((2, 4, 5), np.float32))

        def check(call: Any, end: str) -> None:
            asked.clear()
            self.loaded.clear()
            card.capturing = True
            with pytest.raises(RuntimeError) as caught:
                call()
            card.capturing = False
            found = re.search(r"capture call (streamkl_cupy\.warmup\(.*\)), or", str(caught.value))
            assert found is not None
            dims = f"head_dim1=8, head_dim2=16, dtype='{dtype}', "
            assert found[1] == f"streamkl_cupy.warmup({dims}{named}{end}, device=3)"
            eval(found[1], {"streamkl_cupy": skl})
            assert asked <= {(kernel, template) for kernel, template, *_ in self.loaded}

        entropy = ", entropy=True" * options.get("return_entropy", False)
        check(lambda: skl.attention_kl(**arrays, **options), f"backward=False{entropy}")
        state = skl.attention_kl(**arrays, **options | {"return_state": True})
        for name in ("lse2", "return_entropy"):
            options.pop(name, None)
        dkl = CardArray(np.ones(state.kl.host.shape, np.float32))
        for wrt, is_fixed in itertools.product((("k2", "q2"), INPUTS), (False, True)):
            named_wrt = tuple(name for name in INPUTS if name in wrt)
            check(
                functools.partial(
                    skl.attention_kl_backward, dkl, **arrays, state=state, wrt=wrt,
                    deterministic=is_fixed, **options,
                ),
                f"wrt={named_wrt}",
            )  # fmt: skip

    def test_a_cold_capture_of_a_merge(self, card: Card) -> None:
        state = skl.KLState(*(CardArray(np.zeros(5, np.float32)) for _ in range(3)))
        card.loaded, card.capturing = False, True
        match = r"call streamkl_cupy\.warmup\(backward=False, device=3\), or make this call once\.$"
        with pytest.raises(RuntimeError, match=match):
            skl.merge_states(state)
        skl.warmup(backward=False, device=3)
        assert ("merge_states", ()) in {(kernel, template) for kernel, template, *_ in self.loaded}

    def test_progress(self) -> None:
        seen: list[tuple[int, int, str]] = []
        skl.warmup(arch="sm_90a", progress=lambda *step: seen.append(step))
        total = len(self.built)
        assert [done for done, _, _ in seen] == list(range(total + 1))
        assert {count for _, count, _ in seen} == {total}
        rendered = [jit.render(kernel, template) for kernel, template, _ in self.built]
        assert [name for _, _, name in seen] == [*rendered, ""]


def test_cupy_arrays_are_read_without_a_card() -> None:
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 12, None, 1)
    address = cupy.cuda.MemoryPointer(memory, 64)
    array = cupy.ndarray((2, 3, 8), ml_dtypes.bfloat16, address, strides=(96, 32, 2))
    taken = interop.take("q1", array)
    assert taken.operand("q1") == Operand(
        "q1", (2, 3, 8), (48, 16, 1), "bfloat16", Device("cuda", 1), (1 << 20) + 64
    )
    assert taken.library.name == "cupy"

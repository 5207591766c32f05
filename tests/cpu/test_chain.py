"""Chains of launches: what is used again from one launch to the next must not show in it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamkl_cupy import launch, plan, tiling
from streamkl_cupy.chain import Address, Chain, Clear, Kernel, Params
from streamkl_cupy.plan import KernelPlan
from streamkl_cupy.problem import INPUTS, Device, Operand, Problem, describe
from tests.pretended_driver import Cleared, Driver, Launched

CARD = plan.device_facts("sm_90a")
OUTPUTS = (*launch.STATE, "dkl", *launch.GRADIENTS)
WORKSPACE, STREAM = 1 << 45, 0xBEEF


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def problem_of(num_queries: int = 4096, row_stride: int = 64) -> Problem:
    shape = (16, num_queries, 64)
    strides = (num_queries * row_stride, row_stride, 1)
    device = Device("cuda", 0)
    return describe(*(Operand(name, shape, strides, "bfloat16", device, 256) for name in INPUTS))


def forward(problem: Problem, device_index: int = 0, num_splits: int = 1) -> Chain:
    with plan.override(num_splits=num_splits):
        return launch.forward(plan.forward(problem, CARD), problem, device_index)


def pointers_from(first: int) -> dict[str, int]:
    return {name: first + 4096 * step for step, name in enumerate((*INPUTS, *OUTPUTS))}


def inputs_of(launched: Any) -> list[int]:
    """The addresses in the parameters of a forward."""
    fields = launch.FORWARD_PARAMS.unpack(launched.params)
    return [fields[0], fields[4], fields[8], fields[12]]


def check(launched: Any, pointers: Mapping[str, int], row_stride: int = 64) -> None:
    """All that a launch of forward_sm90 says of addresses and strides."""
    expected = [pointers[name] for name in INPUTS]
    assert launched.kernel == "forward_sm90"
    assert [tensor["pointer"] for tensor in launched.maps] == expected
    assert {tensor["strides"][0] for tensor in launched.maps} == {2 * row_stride}
    assert inputs_of(launched) == expected
    fields = launch.FORWARD_PARAMS.unpack(launched.params)
    assert list(fields[19:24]) == [pointers[name] for name in launch.STATE]


def test_each_launch_says_its_own_addresses(driver: Driver) -> None:
    chain = forward(problem_of())
    for first in (1 << 30, 1 << 40, 1 << 30, 1 << 30):
        pointers = pointers_from(first)
        chain.launch(pointers, 0, STREAM)
        check(driver.seen[-1], pointers)
    # One address that has changed among others that have not, and an output that there is not.
    pointers |= {"k2": 1 << 41, "lse1": 0}
    chain.launch(pointers, 0, STREAM)
    check(driver.seen[-1], pointers)
    # A map is encoded once, moved when its address has changed, and left alone otherwise.
    assert len(driver.encoded) == 4
    assert len(driver.moved) == 4 + 4 + 1


def test_what_is_launched_is_what_was_planned(driver: Driver) -> None:
    problem = problem_of()
    chosen = plan.forward(problem, CARD)
    (kernel,) = chosen.kernels
    launch.forward(chosen, problem, 5).launch(pointers_from(1 << 30), 0, STREAM)
    (seen,) = driver.seen
    assert isinstance(seen, Launched)
    assert seen.device_index == 5
    assert (seen.grid, seen.block) == (kernel.grid, kernel.block)
    assert (seen.shared_memory, seen.stream) == (kernel.shared_memory, STREAM)
    assert isinstance(chosen.tile, tiling.WarpgroupTile)
    assert {tensor["box"] for tensor in seen.maps} == {
        chosen.tile.box_rows(chosen.heads_per_tile),
        chosen.tile.block_k,
    }


def test_the_same_shape_with_other_strides_has_other_maps(driver: Driver) -> None:
    pointers = pointers_from(1 << 30)
    narrow, wide = forward(problem_of(row_stride=64)), forward(problem_of(row_stride=128))
    for _ in range(2):
        narrow.launch(pointers, 0, STREAM)
        check(driver.seen[-1], pointers, row_stride=64)
        wide.launch(pointers, 0, STREAM)
        check(driver.seen[-1], pointers, row_stride=128)


def test_each_device_loads_its_own_kernels(driver: Driver) -> None:
    problem = problem_of()
    chains = [forward(problem, index) for index in (0, 1)]
    for chain in chains * 2:
        chain.launch(pointers_from(1 << 30), 0, STREAM)
    assert [seen.device_index for seen in driver.seen if isinstance(seen, Launched)] == [0, 1, 0, 1]
    assert driver.loaded == [("forward_sm90", 0), ("forward_sm90", 1)]


def test_kernels_may_share_parameters(driver: Driver) -> None:
    chain = forward(problem_of(), num_splits=3)
    chain.launch(pointers_from(1 << 30), WORKSPACE, STREAM)
    main, merge = driver.seen
    assert isinstance(main, Launched)
    assert isinstance(merge, Launched)
    assert (main.kernel, merge.kernel) == ("forward_sm90", "reduce_splits")
    assert merge.arguments == (main.params,)
    assert launch.FORWARD_PARAMS.unpack(main.params)[24] == WORKSPACE


def test_threads_do_not_share_a_block(driver: Driver) -> None:
    chain = forward(problem_of())
    chain.load()
    barrier = threading.Barrier(8)

    def call(thread: int) -> None:
        barrier.wait()
        for turn in range(50):
            chain.launch(pointers_from((1 + thread) << 32 | turn << 20), 0, thread)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert len(driver.seen) == 8 * 50
    turns = dict.fromkeys(range(8), 0)
    for seen in driver.seen:
        check(seen, pointers_from((1 + seen.stream) << 32 | turns[seen.stream] << 20))
        turns[seen.stream] += 1
    assert len(driver.encoded) <= 8 * 4


def test_a_call_within_a_call_does_not_share_a_block(driver: Driver) -> None:
    # A signal handler or a finaliser may run between any two steps.
    chain = forward(problem_of(), num_splits=2)
    outer, inner = pointers_from(1 << 30), pointers_from(1 << 40)
    original = driver.launch_kernel
    chain.load()

    def interrupted(*arguments: int) -> None:
        original(*arguments)
        if len(driver.seen) == 1:
            chain.launch(inner, 2 * WORKSPACE, STREAM)

    driver.launch_kernel = interrupted  # type: ignore[method-assign]
    chain.launch(outer, WORKSPACE, STREAM)
    found = [(seen.kernel, inputs_of(seen)[0]) for seen in driver.seen]
    assert found == [
        ("forward_sm90", outer["q1"]),
        ("forward_sm90", inner["q1"]),
        ("reduce_splits", inner["q1"]),
        ("reduce_splits", outer["q1"]),
    ]


def test_after_an_error_the_next_launch_is_right(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = forward(problem_of())
    chain.launch(pointers_from(1 << 30), 0, STREAM)
    with monkeypatch.context() as broken:
        broken.setattr(driver, "codes", iter([0, 1]))
        with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress: error 1"):
            chain.launch(pointers_from(1 << 40), 0, STREAM)
    with pytest.raises(KeyError, match="k2"):
        chain.launch({"q1": 1, "k1": 2, "q2": 3}, 0, STREAM)
    assert len(driver.seen) == 1
    pointers = pointers_from(1 << 40)
    chain.launch(pointers, 0, STREAM)
    check(driver.seen[-1], pointers)


def test_places_of_any_chain(driver: Driver) -> None:
    odd = struct.Struct("=Qi")  # not a whole number of words
    plans = [KernelPlan(name, (), 1, 32, 0) for name in ("odd", "even")]
    driver.sizes |= {"odd": (12,), "even": (16,)}
    steps = (
        Clear(Address("workspace", 64), 8),
        Kernel(plans[0], Params(odd, (Address("kl"), -5))),
        Clear(Address("dq2"), 24),
        Kernel(plans[1], Params(struct.Struct("=iiQ"), (1, 2, Address("workspace", 8)))),
    )
    Chain("sm_80", 0, steps).launch({"kl": 48, "dq2": 80}, WORKSPACE, STREAM)
    first, second, third, fourth = driver.seen
    assert first == Cleared(WORKSPACE + 64, 8, STREAM)
    assert third == Cleared(80, 24, STREAM)
    assert isinstance(second, Launched)
    assert isinstance(fourth, Launched)
    assert odd.unpack(second.params) == (48, -5)
    assert struct.unpack("=iiQ", fourth.params) == (1, 2, WORKSPACE + 8)


def test_a_chain_without_steps_does_nothing(driver: Driver) -> None:
    Chain("sm_80", 0, ()).launch({}, 0, STREAM)
    assert driver.seen == []


# Bound to an order of addresses.

BOUND = (*INPUTS, "kl")
PLACES = {name: (position, 0) for position, name in enumerate(BOUND)}


def test_a_bound_chain_says_the_addresses_of_each_launch(driver: Driver) -> None:
    bound = forward(problem_of()).bind(PLACES)
    assert driver.loaded == [("forward_sm90", 0)]
    absent = dict.fromkeys(launch.STATE, 0)
    first, second = pointers_from(1 << 30), pointers_from(1 << 40)
    # All new, all others, one other, none other, and back again.
    for given in (first, second, second | {"k2": first["k2"]}, second, second, first):
        bound.launch([given[name] for name in BOUND], STREAM)
        check(driver.seen[-1], given | absent | {"kl": given["kl"]})
        assert driver.seen[-1].stream == STREAM
    # A map is touched when its address has changed, and then alone.
    assert len(driver.encoded) == 4
    assert len(driver.moved) == 4 + 1 + 1 + 4


def test_arrays_of_a_bound_chain_may_lie_in_one(driver: Driver) -> None:
    places = PLACES | {"lse1": (5, 0), "lse2": (5, 64), "lse2_low": (5, 256), "workspace": (6, 0)}
    bound = forward(problem_of(), num_splits=2).bind(places)
    inputs = [pointers_from(1 << 30)[name] for name in BOUND]
    for saved, workspace in ((1 << 41, WORKSPACE), (1 << 42, WORKSPACE), (1 << 42, 2 * WORKSPACE)):
        bound.launch([*inputs, saved, workspace], STREAM)
        main, merge = driver.seen[-2:]
        assert isinstance(main, Launched)
        assert isinstance(merge, Launched)
        fields = launch.FORWARD_PARAMS.unpack(main.params)
        assert fields[19:25] == (inputs[4], saved, saved + 64, 0, saved + 256, workspace)
        assert merge.params == main.params


def test_calls_of_a_bound_chain_do_not_share_a_block(driver: Driver) -> None:
    bound = forward(problem_of()).bind(PLACES)
    barrier = threading.Barrier(8)

    def call(thread: int) -> None:
        barrier.wait()
        for turn in range(50):
            pointers = pointers_from((1 + thread) << 32 | turn << 20)
            bound.launch([pointers[name] for name in BOUND], thread)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    turns = dict.fromkeys(range(8), 0)
    for seen in driver.seen:
        pointers = pointers_from((1 + seen.stream) << 32 | turns[seen.stream] << 20)
        check(seen, pointers | dict.fromkeys(launch.STATE, 0) | {"kl": pointers["kl"]})
        turns[seen.stream] += 1
    assert sum(turns.values()) == 8 * 50


def test_after_an_error_the_next_launch_of_a_bound_chain_is_right(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = forward(problem_of()).bind(PLACES)
    old, new = ([pointers_from(1 << n)[name] for name in BOUND] for n in (30, 40))
    bound.launch(old, STREAM)
    with monkeypatch.context() as broken:
        broken.setattr(driver, "codes", iter([0, 1]))
        with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress: error 1"):
            bound.launch(new, STREAM)
    assert len(driver.seen) == 1
    for addresses in (new, old):
        bound.launch(addresses, STREAM)
        assert inputs_of(driver.seen[-1]) == addresses[:4]
        assert [tensor["pointer"] for tensor in driver.seen[-1].maps] == addresses[:4]

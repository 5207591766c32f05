"""Plans hold together whatever the problem and the card; which tiles they choose is not tested."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkl_cupy import catalogue, jit, plan, tiling
from streamkl_cupy.plan import BackwardPlan, DeviceFacts, KernelPlan
from streamkl_cupy.problem import Problem, Ragged, Strides
from streamkl_cupy.tiling import BackwardTile, PlanError
from tests import host_compiler

CARDS = [plan.device_facts(arch) for arch in plan.TYPICAL_CARDS]
H200 = plan.device_facts("sm_90a")
INPUTS = ("q1", "k1", "q2", "k2")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(INPUTS, size)]
KEY_STATIONARY = ("backward_dk_sm80", "backward_fused_sm80")


def make(**changes: Any) -> Problem:
    """A problem; strides play no part in plans."""
    none = Strides(0, 0, 0)
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "batch": 2,
        "num_heads": 8,
        "num_key_heads1": 8,
        "num_key_heads2": 8,
        "num_queries": 1000,
        "num_keys": 1000,
        "head_dim1": 128,
        "head_dim2": 128,
        "causal": False,
        "scale1": 1.0,
        "scale2": 1.0,
        "layout": "bhnd",
        **dict.fromkeys((*INPUTS, "row"), none),
        "aligned": True,
    }
    return Problem(**fields | changes)


LENGTHS = st.one_of(
    st.sampled_from((0, 1, 2, 16, 17, 64, 65, 128, 1000, 4097, 65_536, 524_288)),
    st.integers(0, 10_000),
)
SIDES = st.one_of(st.none(), st.none(), st.sampled_from((0, 1, 127, 4096)))
HEAD_DIMS = st.integers(1, 32).map(lambda eighth: 8 * eighth)


HALF = ("bfloat16", "float16")
ANY_DTYPE = (*HALF, "float32")
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32"}


@st.composite
def problems(draw: st.DrawFn, dtypes: Sequence[str] = HALF, **fixed: Any) -> Problem:
    key_heads = st.sampled_from((1, 2, 3))
    dtype = draw(st.sampled_from(dtypes))
    precision = draw(st.sampled_from(("float32", "tf32"))) if dtype == "float32" else None
    num_key_heads1, num_key_heads2 = draw(key_heads), draw(key_heads)
    return make(
        **{
            "dtype": dtype,
            "precision": precision,
            "batch": draw(st.sampled_from((1, 2, 100))),
            "num_heads": 6 * draw(st.sampled_from((1, 4, 11))),
            "num_key_heads1": num_key_heads1,
            "num_key_heads2": num_key_heads2,
            "num_queries": draw(LENGTHS),
            "num_keys": draw(LENGTHS),
            "head_dim1": draw(HEAD_DIMS),
            "head_dim2": draw(HEAD_DIMS),
            "causal": draw(st.booleans()),
            "window": (draw(SIDES), draw(SIDES)),
            "q_offset": draw(st.sampled_from((None, None, -5, 100, 5000))),
            "aligned": draw(st.booleans()),
        }
        | fixed
    )


CARD = st.sampled_from(CARDS)
WRT = st.sampled_from(SUBSETS)
STRATEGY = st.sampled_from(("auto", "fused", "separate"))


def arguments(kernel: KernelPlan) -> dict[str, Any]:
    return dict(kernel.template)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def stationary_rows(kernel: KernelPlan) -> int:
    chosen = arguments(kernel)
    if "kNumConsumers" in chosen:
        return int(64 * chosen["kNumConsumers"])
    return int(16 * chosen["kRowTiles"] * chosen.get("kNumWarps", chosen.get("kNumWarpsQ")))


# Listed here and now, or the first example of a test would be late.
SPECIALISATIONS = {arch: frozenset(catalogue.specialisations(arch)) for arch in plan.TYPICAL_CARDS}


def assert_launchable(kernels: Sequence[KernelPlan], card: DeviceFacts) -> None:
    for kernel in kernels:
        assert (kernel.kernel, kernel.template) in SPECIALISATIONS[card.arch]
        assert 0 < kernel.grid < 2**31
        assert 0 < kernel.block <= 1024
        assert kernel.block % 32 == 0
        static = tiling.STATIC_BYTES if kernel.kernel in KEY_STATIONARY else 0
        assert kernel.shared_memory + static <= card.shared_memory_per_block


# ----------------------------------------------------------------------------------------- forward


@given(problem=problems(ANY_DTYPE), card=CARD)
@settings(deadline=None)  # the first example of an architecture lists all that there is for it
def test_forward(problem: Problem, card: DeviceFacts) -> None:
    chosen = plan.forward(problem, card)
    assert plan.forward(problem, card) == chosen
    assert hash(chosen) == hash(plan.forward(problem, card))
    assert chosen.arch == card.arch
    assert_launchable(chosen.kernels, card)
    if problem.num_queries == 0:
        assert chosen.kernels == ()
        assert chosen.workspace_bytes == 0
        return
    # Without keys there is still something to write: KL 0 and log-sum-exp -inf.
    main, *rest = chosen.kernels
    cut, splits = arguments(main), chosen.num_splits
    assert main.kernel == "forward_sm80"
    assert cut["Element"] == ELEMENTS[problem.arithmetic]
    assert cut["kIsAligned"] == problem.aligned
    assert cut["kHeadDim1"] == tiling.bucket(problem.head_dim1)
    assert cut["kHeadDim2"] == tiling.bucket(problem.head_dim2)
    assert main.block == 32 * cut["kNumWarpsQ"] * cut["kNumWarpsK"]
    heads = chosen.heads_per_tile
    assert cut["kIsPacked"] == (heads > 1)
    assert problem.group1 % heads == problem.group2 % heads == 0
    assert chosen.queries_per_tile == stationary_rows(main) // heads > 0
    assert chosen.num_query_tiles == ceil_div(problem.num_queries, chosen.queries_per_tile)
    packs = problem.batch * problem.num_heads // heads
    assert main.grid == packs * chosen.num_query_tiles * splits
    # Every split has keys.
    assert 1 <= splits <= max(1, ceil_div(problem.num_keys, cut["kBlockK"]))
    if splits == 1:
        assert rest == []
        assert chosen.workspace_bytes == 0
    else:
        (reduce,) = rest
        lanes = arguments(reduce)["kLanesPerRow"]
        assert min(splits, 32) <= lanes <= 32
        assert lanes < 2 * splits
        assert (reduce.kernel, reduce.block) == ("reduce_splits", 128)
        assert reduce.grid == ceil_div(problem.num_rows * lanes, 128)
        assert chosen.workspace_bytes == 5 * 4 * splits * problem.num_rows
    # What the kernel takes for granted of its tile.
    assert cut["kNumStages"] >= 2
    assert cut["kChunkK"] % 16 == 0
    assert cut["kBlockK"] % (cut["kNumWarpsK"] * cut["kChunkK"]) == 0


@given(problem=problems(ANY_DTYPE), card=CARD)
def test_forward_name(problem: Problem, card: DeviceFacts) -> None:
    chosen = plan.forward(problem, card)
    name = re.fullmatch(
        r"forward_sm80_(bf16|fp16|fp32|tf32)_d(\d+)x(\d+)_q(\d+)_k(\d+)_s(\d)(_guarded)?"
        r"(?:_pack(\d+))?(?:_split(\d+))?(?:_(causal|window))?",
        chosen.name,
    )
    assert name is not None, chosen.name
    assert name[7] == (None if problem.aligned else "_guarded")
    assert int(name[8] or 1) == chosen.heads_per_tile
    assert int(name[9] or 1) == chosen.num_splits
    assert (name[10] or "full") == problem.mask
    if chosen.kernels:
        main = chosen.kernels[0]
        cut = arguments(main)
        assert name[1] == cut["Element"]
        assert [int(name[idx]) for idx in range(2, 7)] == [
            cut["kHeadDim1"],
            cut["kHeadDim2"],
            stationary_rows(main),
            cut["kBlockK"],
            cut["kNumStages"],
        ]


@given(
    blocks=st.integers(0, 10_000), max_splits=st.integers(1, 4096), resident=st.integers(1, 1000)
)
def test_number_of_splits(blocks: int, max_splits: int, resident: int) -> None:
    splits = plan.choose_splits(blocks, max_splits, resident)
    assert 1 <= splits <= max_splits
    if blocks == 0 or blocks >= 4 * resident:
        assert splits == 1
    # No more blocks than would run in a few waves.
    assert blocks * splits <= 4 * resident + blocks


def test_one_row_of_queries_spreads_over_the_card() -> None:
    problem = make(batch=1, num_heads=1, num_key_heads1=1, num_key_heads2=1, num_keys=131_072)
    for num_queries in (1, 64, 128):
        chosen = plan.forward(dataclasses.replace(problem, num_queries=num_queries), H200)
        assert chosen.kernels[0].grid > H200.num_sms // 2
    # And the card is full without splits already here.
    assert plan.forward(make(batch=100, num_keys=131_072), H200).num_splits == 1


@pytest.mark.parametrize("num_keys", [1, 100, 255])
def test_few_keys_are_not_split(num_keys: int) -> None:
    problem = make(batch=1, num_heads=1, num_key_heads1=1, num_key_heads2=1, num_keys=num_keys)
    assert plan.forward(problem, H200).num_splits == 1


@given(
    problem=problems(ANY_DTYPE),
    card=CARD,
    given=st.sampled_from([("lse1",), ("lse2",), ("lse1", "lse2")]),
)
@settings(deadline=None)
def test_given_log_sum_exps_add_a_kernel_and_memory(
    problem: Problem, card: DeviceFacts, given: tuple[str, ...]
) -> None:
    plain, chosen = plan.forward(problem, card), plan.forward(problem, card, given=given)
    assert_launchable(chosen.kernels, card)
    assert chosen.given == given
    assert chosen.name == "_".join((plain.name, "given", *given))
    rows = problem.num_rows
    assert chosen.kernels[: len(plain.kernels)] == plain.kernels
    assert len(chosen.kernels) == len(plain.kernels) + (rows > 0)
    if rows:
        replacing = chosen.kernels[-1]
        assert replacing.kernel == "replace_lse"
        assert replacing.grid * replacing.block >= rows > (replacing.grid - 1) * replacing.block
    assert plain.workspace_bytes <= chosen.own_offset < plain.workspace_bytes + 256
    assert chosen.workspace_bytes == chosen.own_offset + 16 * rows
    if rows:
        behind = plan.backward(problem, card, ("q2", "k1"), given=given)
        before = plan.backward(problem, card, ("q2", "k1"))
        assert behind.kernels == before.kernels
        assert before.workspace_bytes <= behind.weighted_dkl_offset < before.workspace_bytes + 256
        assert behind.workspace_bytes == behind.weighted_dkl_offset + 4 * rows


@given(problem=problems(ANY_DTYPE), card=CARD)
@settings(deadline=None)
def test_entropy_takes_kernels_of_its_own(problem: Problem, card: DeviceFacts) -> None:
    chosen = plan.forward(problem, card, has_entropy=True)
    assert_launchable(chosen.kernels, card)
    assert all(arguments(kernel)["kHasEntropy"] for kernel in chosen.kernels)
    assert not any(arguments(k)["kHasEntropy"] for k in plan.forward(problem, card).kernels)
    assert all(arguments(k)["kMask"] == problem.kernel_mask for k in chosen.kernels[:1])
    if chosen.num_splits > 1:
        assert chosen.workspace_bytes == 6 * 4 * chosen.num_splits * problem.num_rows


@pytest.mark.parametrize("dim1", tiling.BUCKETS)
@pytest.mark.parametrize("dim2", tiling.BUCKETS)
def test_every_pair_of_head_dims_has_a_tile_beside_the_entropy(dim1: int, dim2: int) -> None:
    problem = hopper_problem(head_dim1=dim1, head_dim2=dim2)
    chosen = plan.forward(problem, HOPPER, has_entropy=True, force="forward_sm90")
    assert_launchable(chosen.kernels, HOPPER)


def test_a_tuned_tile_does_not_serve_the_entropy() -> None:
    problem = hopper_problem()
    choice = plan.Choice(forward_kernel="forward_sm80", num_splits=3)
    entry = plan.TunedChoice(plan.problem_class(problem), plan.shape_of(problem), choice)
    tuned = dataclasses.replace(HOPPER, tuned=(entry,))
    assert plan.forward(problem, tuned).num_splits == 3
    plain = plan.forward(problem, HOPPER, has_entropy=True)
    assert plan.forward(problem, tuned, has_entropy=True) == plain


@given(problem=problems(), card=CARD, has_entropy=st.booleans())
@settings(deadline=None)
def test_softcaps_take_kernels_of_their_own(
    problem: Problem, card: DeviceFacts, has_entropy: bool
) -> None:
    capped = dataclasses.replace(problem, softcap1=3.0)
    chosen = plan.forward(capped, card, has_entropy=has_entropy)
    plain = plan.forward(problem, card, has_entropy=has_entropy)
    assert_launchable(chosen.kernels, card)
    assert chosen.name == f"{plain.name}_softcap"
    assert chosen.workspace_bytes == plain.workspace_bytes
    both = [(chosen.kernels, plain.kernels)]
    for strategy in ("fused", "separate"):
        with plan.override(both=False):  # of one pass for both sides there is none with softcaps
            backward = plan.backward(capped, card, ("q2", "k1", "k2"), strategy=strategy)
            before = plan.backward(problem, card, ("q2", "k1", "k2"), strategy=strategy)
        assert_launchable(backward.kernels, card)
        assert backward.name == f"{before.name}_softcap"
        both.append((backward.kernels, before.kernels))
    for ours, theirs in both:
        assert [kernel.kernel for kernel in ours] == [kernel.kernel for kernel in theirs]
        assert all(arguments(kernel).get("kHasSoftcap", True) for kernel in ours)
        assert not any(arguments(kernel).get("kHasSoftcap", False) for kernel in theirs)


def test_a_tuned_tile_does_not_serve_softcaps() -> None:
    problem = hopper_problem()
    choice = plan.Choice(forward_kernel="forward_sm80", num_splits=3)
    entry = plan.TunedChoice(plan.problem_class(problem), plan.shape_of(problem), choice)
    tuned = dataclasses.replace(HOPPER, tuned=(entry,))
    capped = dataclasses.replace(problem, softcap2=3.0)
    assert plan.forward(capped, tuned) == plan.forward(capped, HOPPER)


@pytest.mark.parametrize("num_states", [1, 2, 8, 9, 15, 16, 100])
def test_every_state_is_merged_once(num_states: int) -> None:
    chosen = plan.merge(1000, num_states, HOPPER)
    assert_launchable(chosen.kernels, HOPPER)
    assert len(chosen.kernels) == len(chosen.takes)
    states = [state for first, stop in chosen.takes for state in range(first, stop)]
    assert states == list(range(num_states))
    # Beside the result of the launch before.
    for launch, (first, stop) in enumerate(chosen.takes):
        assert stop - first + (launch > 0) <= plan.MERGED_AT_ONCE
    assert all(kernel.grid * kernel.block >= 1000 for kernel in chosen.kernels)
    assert plan.merge(0, num_states, HOPPER).kernels == ()


# ---------------------------------------------------------------------------------------- backward


def sides_of(wrt: tuple[str, ...]) -> list[int]:
    return [side for side in (2, 1) if f"q{side}" in wrt or f"k{side}" in wrt]


def left_to_sides(chosen: BackwardPlan, wrt: tuple[str, ...]) -> set[str]:
    """The wanted gradients that no kernel of both sides gives."""
    both = chosen.both
    taken = "" if both is None else ("q" if both.dq else "") + ("k" if both.dk else "")
    return {name for name in wrt if name[0] not in taken}


@given(
    problem=problems(ANY_DTYPE), card=CARD, wrt=WRT, strategy=STRATEGY, deterministic=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_backward(
    problem: Problem, card: DeviceFacts, wrt: tuple[str, ...], strategy: str, deterministic: bool
) -> None:
    if strategy == "fused" and (deterministic or problem.dtype == "float32"):
        return  # refused by check_strategy, and by the plan
    options: dict[str, Any] = {"strategy": strategy, "deterministic": deterministic}
    chosen = plan.backward(problem, card, wrt, **options)
    assert chosen == plan.backward(problem, card, wrt[::-1], **options)
    assert_launchable(chosen.kernels, card)
    assert [side.side for side in chosen.sides] == sides_of(wrt)
    left = left_to_sides(chosen, wrt)
    for side in chosen.sides:
        wants_dq, wants_dk = f"q{side.side}" in left, f"k{side.side}" in left
        key_heads = problem.num_key_heads1 if side.side == 1 else problem.num_key_heads2
        head_dim = problem.head_dim1 if side.side == 1 else problem.head_dim2
        for kernel in side.kernels:
            cut = arguments(kernel)
            assert cut.get("kSide", side.side) == side.side
            if kernel.kernel == "backward_finish":
                assert cut["kHeadDim"] == tiling.bucket(head_dim)
            assert cut.get("kIsAligned", problem.aligned) == problem.aligned
        # Each gradient that is wanted is written by one kernel if it has elements at all.
        fused_dk = side.fused is not None and arguments(side.fused)["kHasDk"]
        has_dq, has_dk = problem.num_queries > 0, problem.num_keys > 0
        assert (side.fused is not None) + (side.dq is not None) == (wants_dq and has_dq)
        assert fused_dk + (side.dk is not None) == (wants_dk and has_dk)
        assert (side.finish is None) == (side.fused is None)
        # The kernels read the statistics of rows; without rows there is nothing to read.
        assert (side.prepare is not None) == (problem.num_rows > 0)
        if side.prepare is not None:
            assert side.prepare.block == 256
            assert side.prepare.grid == ceil_div(problem.num_rows, 256)
        if side.dq is not None:
            assert side.dq_blocks == ceil_div(problem.num_queries, stationary_rows(side.dq))
            assert side.dq.grid == problem.batch * problem.num_heads * side.dq_blocks
        for kernel in (side.fused, side.dk):
            if kernel is not None:
                assert side.key_blocks == ceil_div(problem.num_keys, stationary_rows(kernel))
                assert kernel.grid == problem.batch * key_heads * side.key_blocks
        if strategy == "separate":
            assert side.fused is None
        if side.fused is not None:
            is_ordered = bool(arguments(side.fused).get("kIsOrdered", False))
            assert is_ordered == deterministic == (side.counts_offset is not None)
            assert side.strategy == ("ordered" if is_ordered else "fused")
        if strategy == "fused" and wants_dq and wants_dk and has_dq and has_dk:
            assert side.fused is not None
        if side.fused is None:
            assert side.scratch_bytes == 0
        else:
            # Float32 sums of dQ: whole tiles of 16 rows, padded head dimension.
            heads, tiles = problem.batch * problem.num_heads, ceil_div(problem.num_queries, 16)
            sums = heads * tiles * 16 * tiling.bucket(head_dim) * 4
            if deterministic:  # and a count for each tile of queries
                assert side.counts_offset == sums
                sums += 4 * heads * ceil_div(problem.num_queries, 64)
                assert key_heads * problem.batch % side.num_interleaved == 0
            assert side.scratch_bytes == sums
            assert side.finish is not None
            assert side.finish.block == 256
            per_head = tiles * tiling.bucket(head_dim) // 8 * 32
            assert side.finish.grid == heads * ceil_div(per_head, 256)
        for kernel in (side.fused, side.dq, side.dk):
            if kernel is not None and kernel.boxes is None:
                assert_tile_fits_kernel(kernel)
    assert_regions(problem, chosen)


def assert_tile_fits_kernel(kernel: KernelPlan) -> None:
    """What the portable backward kernels take for granted of their tiles."""
    cut = arguments(kernel)
    streamed = cut.get("kBlockQ", cut.get("kBlockK"))
    chunk = cut.get("kChunkQ", cut.get("kChunkK", streamed))
    assert kernel.block == 32 * cut["kNumWarps"]
    assert cut["kNumStages"] >= 2
    assert chunk % 16 == 0
    assert streamed % chunk == 0
    # One thread brings one query's statistics.
    queries = stationary_rows(kernel) if kernel.kernel == "backward_dq_sm80" else streamed
    assert queries <= kernel.block


def assert_regions(problem: Problem, chosen: BackwardPlan) -> None:
    """Row statistics, the largest |dkl| and the scratch lie apart in the workspace."""
    statistics = 16 * problem.num_rows * (1 if chosen.both is None else 2)
    offsets = [side.statistics_offset for side in chosen.sides]
    assert offsets == ([0] * len(offsets) if chosen.both is None else [0, 16 * problem.num_rows])
    assert chosen.max_dkl_offset >= statistics
    assert chosen.max_dkl_offset % plan.WORKSPACE_ALIGNMENT == 0
    assert chosen.scratch_offset % plan.WORKSPACE_ALIGNMENT == 0
    needed = 4 if problem.dtype == "float16" else 0
    assert chosen.scratch_offset >= chosen.max_dkl_offset + needed
    largest = max(side.scratch_bytes for side in chosen.sides)
    assert chosen.workspace_bytes == chosen.scratch_offset + largest
    # And no more than that: 16 bytes a row (of a side, if one pass reads both), and the rounding.
    assert chosen.scratch_offset <= statistics + 2 * plan.WORKSPACE_ALIGNMENT


@given(problem=problems(ANY_DTYPE), card=CARD, wrt=WRT, deterministic=st.booleans())
def test_backward_name(
    problem: Problem, card: DeviceFacts, wrt: tuple[str, ...], deterministic: bool
) -> None:
    chosen = plan.backward(problem, card, wrt, deterministic=deterministic)
    left, parts = left_to_sides(chosen, wrt), []
    if (both := chosen.both) is not None:
        parts.append("both" + ("_dq" if both.dq else "") + ("_dk" if both.dk else "") + "_sm90")
    parts += [
        (("ordered" if deterministic else "fused") if side.fused else "separate")
        + str(side.side)
        + ("_dq" if f"q{side.side}" in left else "")
        + ("_dk" if f"k{side.side}" in left else "")
        + f"_{side.generation}"
        for side in chosen.sides
        if {f"q{side.side}", f"k{side.side}"} & left
    ]
    sides = "_".join(parts)
    element = ELEMENTS[problem.arithmetic]
    dims = f"d{tiling.bucket(problem.head_dim1)}x{tiling.bucket(problem.head_dim2)}"
    guarded = "" if problem.aligned else "_guarded"
    mask = "" if problem.mask == "full" else f"_{problem.mask}"
    assert chosen.name == f"backward_{sides}_{element}_{dims}{guarded}{mask}"


# ------------------------------------------------------------------------------------------- empty


@pytest.mark.parametrize("empty", ["batch", "num_heads", "num_queries"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_without_rows_only_the_keys_have_gradients(empty: str, deterministic: bool) -> None:
    changes = {empty: 0}
    if empty == "num_heads":
        changes |= {"num_key_heads1": 0, "num_key_heads2": 0}
    problem = make(**changes)
    forward = plan.forward(problem, H200)
    assert (forward.kernels, forward.workspace_bytes) == ((), 0)
    backward = plan.backward(problem, H200, INPUTS, deterministic=deterministic)
    # With queries of length 0 there are keys, whose gradient is zero and must be written.
    expected = ["backward_dk_sm80"] * 2 if empty == "num_queries" else []
    assert [kernel.kernel for kernel in backward.kernels] == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_keys_rows_are_still_written(deterministic: bool) -> None:
    problem = make(num_keys=0)
    forward = plan.forward(problem, H200)
    assert [kernel.kernel for kernel in forward.kernels] == ["forward_sm80"]
    backward = plan.backward(problem, H200, INPUTS, deterministic=deterministic)
    assert [kernel.kernel for kernel in backward.kernels if "dq" in kernel.kernel] == [
        "backward_dq_sm80"
    ] * 2
    assert not any("dk" in kernel.kernel or "fused" in kernel.kernel for kernel in backward.kernels)


# ---------------------------------------------------------------------------------------- override


def test_override_of_the_splits() -> None:
    problem = make()
    free = plan.forward(problem, H200)
    with plan.override(num_splits=5):
        chosen = plan.forward(problem, H200)
        assert chosen.num_splits == 5
        assert chosen.name.endswith("_split5")
        with plan.override(num_splits=1):
            assert plan.forward(problem, H200).num_splits == 1
        assert plan.forward(problem, H200) == chosen
        # More splits than tiles of keys would leave some without any.
        assert plan.forward(make(num_keys=1), H200).num_splits == 1
        assert plan.forward(make(num_keys=0), H200).num_splits == 1
    assert plan.forward(problem, H200) == free


def test_override_of_the_tiles() -> None:
    problem = make()
    forward_tile = tiling.ForwardTile(1, 2, 2, 64, 32, 3, False)
    backward_tile = BackwardTile(1, 2, 16, 16, 3)
    free = plan.current_override()
    portable = [kernel for kernel in plan.BACKWARD_KERNELS if kernel.endswith("sm80")]
    tiles = dict.fromkeys(portable, backward_tile)
    with plan.override(forward_tile=forward_tile), plan.override(backward_tiles=tiles):
        assert plan.current_override() != free
        forward = plan.forward(problem, H200)
        backward = plan.backward(problem, H200, INPUTS)
    assert plan.current_override() == free
    cut = arguments(forward.kernels[0])
    names = "kRowTiles kNumWarpsQ kNumWarpsK kBlockK kChunkK kNumStages kQueriesInRegisters"
    assert tuple(cut[name] for name in names.split()) == dataclasses.astuple(forward_tile)
    for kernel in backward.kernels:
        if "kRowTiles" in (cut := arguments(kernel)):
            assert (cut["kRowTiles"], cut["kNumWarps"], cut["kNumStages"]) == (1, 2, 3)
            assert cut.get("kBlockQ", cut.get("kBlockK")) == 16


def test_override_stays_in_its_thread_and_ends_with_its_block() -> None:
    free = plan.current_override()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(plan.current_override()))
    with plan.override(num_splits=3):
        thread.start()
        thread.join()
        assert plan.current_override() != free
    assert seen == [free]
    assert plan.current_override() == free
    with pytest.raises(ZeroDivisionError), plan.override(num_splits=3):
        raise ZeroDivisionError
    assert plan.current_override() == free


def test_override_of_what_does_not_exist() -> None:
    with (
        pytest.raises(PlanError, match=r"override: expected some of \[.*\]; got \['tiles'\]"),
        plan.override(tiles=3),
    ):
        pass


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("head_dims", [(8, 8), (64, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.arch)
def test_float32_takes_the_portable_kernels_that_are_reproducible(
    precision: str, head_dims: tuple[int, int], card: DeviceFacts
) -> None:
    sizes = dict(zip(("head_dim1", "head_dim2"), head_dims, strict=True))
    rows = dict.fromkeys(INPUTS, Strides(0, 0, 256))
    for num_queries in (1, 30, 1000):
        problem = make(
            dtype="float32", precision=precision, num_queries=num_queries, **sizes, **rows
        )
        forward = plan.forward(problem, card)
        assert {kernel.kernel for kernel in forward.kernels} <= {"forward_sm80", "reduce_splits"}
        backward = plan.backward(problem, card, INPUTS)
        assert backward == plan.backward(problem, card, INPUTS, deterministic=True)
        assert {kernel.kernel for kernel in backward.kernels} == {
            "backward_prepare",
            "backward_dq_sm80",
            "backward_dk_sm80",
        }
        for kernel in (*forward.kernels, *backward.kernels):
            assert arguments(kernel).get("Element", ELEMENTS[precision]) == ELEMENTS[precision]
        assert_launchable((*forward.kernels, *backward.kernels), card)
    # Twice the bytes of bfloat16: no tile leaves less than 16 rows.
    assert all(stationary_rows(k) >= 16 for k in backward.kernels if "kRowTiles" in arguments(k))


def test_float32_has_no_fused_backward() -> None:
    problem = make(dtype="float32", precision="float32")
    expected = (
        r'strategy: expected "auto" or "separate" with float32 inputs on a GPU, got \'fused\'; '
        "leave it out"
    )
    with pytest.raises(PlanError, match=expected):
        plan.backward(problem, H200, INPUTS, strategy="fused")
    with pytest.raises(PlanError, match=expected), plan.override(strategy="fused"):
        plan.backward(problem, H200, INPUTS)
    found = catalogue.backward_candidates(problem, H200, ("q2", "k2"))
    assert {choice.strategy for choice in found.values()} == {"separate"}
    assert len(found) > 1


def test_hopper_kernels_cannot_be_forced_on_float32() -> None:
    problem = make(dtype="float32", precision="float32")
    with pytest.raises(PlanError, match="forward_sm90: expected bfloat16 or float16 inputs"):
        plan.forward(problem, H200, force="forward_sm90")
    with pytest.raises(PlanError, match="expected bfloat16 or float16 inputs; got float32"):
        plan.backward(problem, H200, INPUTS, force="backward_dq_sm90")


def test_override_of_the_strategy_yields_to_the_caller() -> None:
    problem = make(num_queries=4096, num_keys=4096)
    with plan.override(strategy="separate"):
        auto = plan.backward(problem, H200, ("q2", "k2"))
        asked = plan.backward(problem, H200, ("q2", "k2"), strategy="fused")
    assert auto.sides[0].fused is None
    assert asked.sides[0].fused is not None


# ------------------------------------------------------------------------------ candidates, tuning


CANDIDATE_LENGTHS = ((1, 131_072), (50, 3000), (1000, 1000), (16_384, 16_384), (3, 0), (0, 3))


@pytest.mark.parametrize("lengths", CANDIDATE_LENGTHS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 64)])
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.arch)
def test_candidates_of_the_forward(
    lengths: tuple[int, int], dims: tuple[int, int], card: DeviceFacts
) -> None:
    problem = hopper_problem(
        num_queries=lengths[0], num_keys=lengths[1], head_dim1=dims[0], head_dim2=dims[1]
    )
    found = catalogue.forward_candidates(problem, card)
    assert next(iter(found)) == plan.forward(problem, card)
    kernels = {kernel.kernel for chosen in found for kernel in chosen.kernels[:1]}
    if 0 not in lengths:
        assert ("forward_sm90" in kernels) == (card.arch == "sm_90a")
        assert "forward_sm80" in kernels
    for chosen, choice in found.items():
        assert isinstance(choice.num_splits, int)
        with plan.override(**{f.name: getattr(choice, f.name) for f in dataclasses.fields(choice)}):
            assert plan.forward(problem, card) == chosen
        for kernel in chosen.kernels:
            assert kernel.shared_memory <= card.shared_memory_per_block
        assert chosen.num_splits == 1 or chosen.num_splits * 256 <= lengths[1]


@pytest.mark.parametrize("lengths", CANDIDATE_LENGTHS)
@pytest.mark.parametrize("wrt", [("q2", "k2"), ("q1",), ("k1",)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_candidates_of_the_backward(
    lengths: tuple[int, int], wrt: tuple[str, ...], deterministic: bool
) -> None:
    problem = make(num_queries=lengths[0], num_keys=lengths[1])
    found = catalogue.backward_candidates(problem, H200, wrt, deterministic=deterministic)
    assert next(iter(found)) == plan.backward(problem, H200, wrt, deterministic=deterministic)
    fused = [chosen for chosen in found if any(side.fused for side in chosen.sides)]
    possible = not deterministic and 0 not in lengths and len(wrt) == 2
    assert not deterministic or not fused  # by the portable kernels
    assert bool(fused) or not possible
    for chosen, choice in found.items():
        assert len(choice.backward_tiles) <= 1
        fields = {f.name: getattr(choice, f.name) for f in dataclasses.fields(choice)}
        other = plan.Choice(backward_tiles=(("backward_dq_sm80", BackwardTile(1, 2, 16, 16, 2)),))
        card = tuned(H200, problem, other, wrt=wrt, deterministic=deterministic)
        with plan.override(**fields):
            assert plan.backward(problem, card, wrt, deterministic=deterministic) == chosen
        for kernel in chosen.kernels:
            assert kernel.shared_memory <= H200.shared_memory_per_block


def test_candidates_on_hopper_are_of_both_generations() -> None:
    problem = hopper_problem(num_queries=4096, num_keys=4096)
    found = catalogue.backward_candidates(problem, H200, ("q2", "k2"))
    kernels = {kernel.kernel for chosen in found for kernel in chosen.kernels}
    of_others = {"backward_few_sm90", *tiling.BOTH_KERNELS}
    assert set(plan.BACKWARD_KERNELS) - of_others <= kernels
    entry = next(c for c in found.values() if c.strategy == "fused" and c.backward_kernel)
    assert plan.backward(problem, tuned(H200, problem, entry, wrt=("q2", "k2")), ("q2", "k2")) in [
        chosen for chosen, choice in found.items() if choice == entry
    ]


def tuned(card: DeviceFacts, problem: Problem, choice: plan.Choice, **of: Any) -> DeviceFacts:
    entry = plan.TunedChoice(plan.problem_class(problem, **of), plan.shape_of(problem), choice)
    return dataclasses.replace(card, tuned=(*card.tuned, entry))


def test_a_tuned_forward_serves_its_class() -> None:
    problem = hopper_problem(num_queries=1000)
    choices = catalogue.forward_candidates(problem, H200)
    split = [chosen for chosen in choices if chosen.num_splits > 1]
    chosen = next(one for one in split if one.kernels[0].kernel == "forward_sm80")
    choice = choices[chosen]
    card = tuned(H200, problem, choice)
    assert plan.forward(problem, card) == chosen
    # Another length of the class takes the tile, but not the number of splits.
    alike = hopper_problem(num_queries=900)
    assert plan.forward(alike, card).tile == chosen.tile
    free = dataclasses.replace(choice, num_splits=None)
    assert plan.forward(alike, card) == plan.forward(alike, tuned(H200, alike, free))
    for other in (
        hopper_problem(num_queries=1025),
        hopper_problem(num_queries=1000, causal=True),
        hopper_problem(num_queries=1000, head_dim1=64),
        hopper_problem(num_queries=1000, dtype="float16"),
        hopper_problem(num_queries=1000, num_key_heads1=4),
        hopper_problem(num_queries=1000, batch=64),
        hopper_problem(num_queries=1000, aligned=False),
    ):
        assert plan.forward(other, card) == plan.forward(other, H200)


def test_what_is_asked_for_comes_before_what_was_tuned() -> None:
    problem = hopper_problem(num_queries=1000)
    choices = catalogue.forward_candidates(problem, H200)
    narrow = next(p for p in choices if p.kernels[0].kernel == "forward_sm80")
    card = tuned(H200, problem, choices[narrow])
    assert plan.forward(problem, card).kernels[0].kernel == "forward_sm80"
    forced = plan.forward(problem, card, force="forward_sm90")
    assert forced == plan.forward(problem, H200, force="forward_sm90")
    with plan.override(forward_kernel="forward_sm90"):
        assert plan.forward(problem, card).kernels[0].kernel == "forward_sm90"
    with plan.override(num_splits=2):
        assert plan.forward(problem, card).tile == narrow.tile
        assert plan.forward(problem, card).num_splits == 2


def test_a_tuned_hopper_kernel_is_left_where_it_cannot_run() -> None:
    problem = hopper_problem(num_queries=1000)
    choices = catalogue.forward_candidates(problem, H200)
    wide = [p for p in choices if p.kernels[0].kernel == "forward_sm90"][-1]
    card = tuned(H200, problem, choices[wide])
    assert plan.forward(problem, card).tile == wide.tile
    at_one_address = hopper_problem(num_queries=1000, k1=Strides(0, 0, 0))
    assert plan.forward(at_one_address, card) == plan.forward(at_one_address, H200)


def test_a_tuned_backward_serves_its_side_and_its_gradients() -> None:
    problem = make(num_queries=1000)
    of = {"wrt": ("k2", "q2"), "deterministic": False}
    tile = BackwardTile(1, 2, 16, 16, 2)
    choice = plan.Choice(strategy="separate", backward_tiles=(("backward_dk_sm80", tile),))
    card = tuned(H200, problem, choice, **of)
    side2, side1 = plan.backward(problem, card, INPUTS).sides
    assert side2.fused is None
    assert side2.dk is not None
    assert side2.dk.block == tile.threads
    assert side1 == plan.backward(problem, H200, INPUTS).sides[1]
    for options in ({"deterministic": True}, {"strategy": "fused"}):
        ours = plan.backward(problem, card, ("q2", "k2"), **options)
        assert ours == plan.backward(problem, H200, ("q2", "k2"), **options)
    assert plan.backward(problem, card, ("k2",)) == plan.backward(problem, H200, ("k2",))


# -------------------------------------------------------------------------------------- the errors


def test_unknown_kernels_and_cards_are_refused() -> None:
    with pytest.raises(PlanError, match=r"STREAMKL_FORCE: expected .*forward_sm80.*'forward'"):
        plan.forward(make(), H200, force="forward")
    assert plan.forward(make(), H200, force="forward_sm80") == plan.forward(make(), H200)
    with pytest.raises(PlanError, match=r"arch: expected one of sm_80, .*; got 'sm_70'"):
        plan.device_facts("sm_70")


def test_a_card_with_too_little_shared_memory_is_refused() -> None:
    small = dataclasses.replace(H200, shared_memory_per_block=8000)
    for num_queries in (1, 50, 1000):
        with pytest.raises(PlanError, match=r"forward_sm80: no tile .* fits 8000 bytes"):
            plan.forward(make(num_queries=num_queries), small)
    with pytest.raises(PlanError, match=r"backward_d[qk]_sm80: no tile .* fits 8000 bytes"):
        plan.backward(make(), small, INPUTS)


# --------------------------------------------------------------------------------- specialisations


def test_buckets() -> None:
    assert list(tiling.BUCKETS) == sorted(set(tiling.BUCKETS))
    for head_dim in range(8, 257, 8):
        chosen = tiling.bucket(head_dim)
        assert chosen >= head_dim
        assert not any(head_dim <= smaller < chosen for smaller in tiling.BUCKETS)


@pytest.mark.parametrize("arch", sorted(plan.TYPICAL_CARDS))
def test_specialisations(arch: str) -> None:
    everything, declared = catalogue.specialisations(arch), catalogue.declared(arch)
    assert len(set(everything)) == len(everything)
    assert len(set(declared)) == len(declared) > 0
    assert set(declared) <= set(everything)
    assert catalogue.declared(arch) == declared
    for kernel, template in everything:
        rendered = jit.render(kernel, template)
        assert rendered.startswith(kernel)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_declared_covers_what_it_promises(arch: str) -> None:
    declared = catalogue.declared(arch)
    kernels = {kernel for kernel, _ in catalogue.specialisations(arch)}
    assert {kernel for kernel, _ in declared} == kernels
    cuts = [(kernel, dict(template)) for kernel, template in declared]
    for dim, element in itertools.product(tiling.BUCKETS, ("bf16", "fp16")):
        of_rows = {"reduce_splits", "merge_states", "replace_lse", "key_table"}
        of_rows |= {"backward_prepare", "backward_finish"}
        for kernel in kernels - of_rows:
            sides = {
                cut.get("kSide")
                for name, cut in cuts
                if name == kernel
                and (cut["kHeadDim1"], cut["kHeadDim2"], cut["Element"]) == (dim, dim, element)
            }
            is_of_both = kernel.startswith("forward") or kernel in tiling.BOTH_KERNELS
            expected: set[int | None] = {None} if is_of_both else {1, 2}
            if kernel == "backward_fused_sm90" and not has_fused_tile(dim, dim, 2):
                expected = set()
            if kernel in tiling.BOTH_KERNELS and dim > 128:
                expected = set()
            assert sides == expected, (kernel, dim)
        assert ("backward_finish", {"Element": element, "kHeadDim": dim}) in cuts


# -------------------------------------------------- shared memory, as the kernels themselves cut it


def braces(text: str, start: str) -> str:
    """The declaration that begins with `start`, with its template head, to its closing brace."""
    found = re.search(
        rf"(?:^template <[^{{}}]*?>\n)?^{start}.*?^}};", text, re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"no declaration {start!r}"
    return found[0]


def value_of(text: str, name: str) -> str:
    found = re.search(rf"\b{name} =\s*([^;]+);", text)
    assert found is not None, f"no constant {name}"
    return found[1]


def layout_source(kernels: Sequence[KernelPlan]) -> str:
    """C++ with the tables of the kernels' shared memory, taken from their own sources.

    A line each: bytes in all, then where its tiles and rows begin.
    """
    read = {
        path.name: re.sub(r"//.*", "", path.read_text())
        for path in (*jit.source_directory().glob("*.cu"), *jit.source_directory().glob("*.cuh"))
    }
    tile, parts = read["backward_tile.cuh"], []
    parts.append('#include "kl_state.cuh"\n#include "schedule.cuh"\n#include "smem.cuh"')
    parts.append("template <int, int> struct StationaryRegisters;")
    parts.append("template <int, int> struct StationaryShared;")
    parts.append(braces(read["row_statistics.cuh"], r"struct alignas\(16\) RowStatistics"))
    parts.append(braces(read["forward_sm80.cu"], "struct ForwardTraits"))
    parts.append(braces(tile, "struct BackwardTile"))
    parts.append(braces(tile, r"struct (?:alignas\(\d+\) )?RowsOfTile"))
    stage = value_of(braces(tile, "struct KeyBlock"), "kStageBytes")
    parts.append(
        "template <class Tile, int kBlockQ> struct KeyBlockBytes "
        f"{{ static constexpr int kStageBytes = {stage}; }};"
    )
    for kernel in ("backward_dq_sm80", "backward_dk_sm80", "backward_fused_sm80"):
        text = read[f"{kernel}.cu"]
        head = re.search(r"template <([^<>]*)>\s*__global__", text)
        assert head is not None
        units = {f"kUnits{side}": f"kUnits<Element> * kHeadDim{side}" for side in (1, 2)}
        if kernel == "backward_dq_sm80":
            constants = {
                "kStride": "Tile::kStageBytes",
                "kRows": value_of(text, "kRowsOffset"),
                "kTotal": "kRows + sizeof(RowsOfTile<Tile::kBlockRows>)",
            }
        else:
            constants = {
                "kStride": "KeyBlockBytes<Tile, kBlockQ>::kStageBytes",
                "kRows": "Tile::kStationaryBytes + Tile::kStageBytes",
                "kTotal": "Tile::kStationaryBytes + kNumStages * kStride",
            }
        if kernel == "backward_fused_sm80":
            offset = value_of(text, "kGradientOffset").replace("Block::kStageBytes", "kStride")
            pitch = f"TileLayout<{value_of(text, 'kGradientPitch')}>::kPitchBytes"
            constants["kGradient"] = offset
            constants["kTotal"] = f"{offset} + Tile::kBlockRows * {pitch}"
        begin, lines = (
            "\n".join(f"    static constexpr int {name} = {text};" for name, text in some.items())
            for some in (units, constants)
        )
        parts.append(
            f"template <{head[1]}>\nstruct {kernel} {{\n{begin}\n"
            f"    using Tile = {value_of(text, 'using Tile')};\n{lines}\n}};"
        )
    for idx, kernel in enumerate(kernels):
        rendered = jit.render(kernel.kernel, kernel.template)
        stages = range(arguments(kernel)["kNumStages"])
        if kernel.kernel == "forward_sm80":
            # What is packed has no part in the layout, nor have masks and bounds.
            rendered = rendered.replace("forward_sm80", "ForwardTraits").rsplit(",", 3)[0] + ">"
            values = ["T::kSmemBytes", "T::kQ1Bytes"]
            for stage_idx in stages:
                base = f"T::kRingOffset + {stage_idx} * T::kStageBytes"
                values += [base, f"{base} + T::kK1Bytes"]
        else:
            values = ["T::kTotal", "T::Tile::kStationary1Bytes", "T::kRows"]
            for stage_idx in stages:
                base = f"T::Tile::kStationaryBytes + {stage_idx} * T::kStride"
                values += [base, f"{base} + T::Tile::kStreamed1Bytes"]
            if kernel.kernel == "backward_fused_sm80":
                values.append("T::kGradient")
        parts.append(
            f"namespace n{idx} {{\nusing T = {rendered};\n"
            f"static constexpr int values[] = {{{', '.join(values)}}};\n}}"
        )
    tables = ", ".join(f"n{idx}::values" for idx in range(len(kernels)))
    sizes = ", ".join(f"sizeof(n{idx}::values) / sizeof(int)" for idx in range(len(kernels)))
    parts.append(f'extern "C" const int* const layouts[] = {{{tables}}};')
    parts.append(f'extern "C" const int sizes[] = {{{sizes}}};')
    # The block of keys, and one more word in the fused kernel.
    parts.append('extern "C" const int static_bytes = sizeof(QueryWalk<1, 64, 32>) + 4;')
    return "\n".join(parts) + "\n"


def kernels_with_tiles() -> list[KernelPlan]:
    """A plan of each kernel for each tile and pair of head dimensions that any card has."""
    found: dict[Any, KernelPlan] = {}
    for card, dim1, dim2, num_queries, dtype in itertools.product(
        CARDS, tiling.BUCKETS, tiling.BUCKETS, (1, 50, 5000), ("bfloat16", "float32")
    ):
        sizes = {"head_dim1": dim1, "head_dim2": dim2, "num_queries": num_queries}
        problem = make(**sizes, dtype=dtype)
        plans = [plan.forward(problem, card)]
        strategies = ("fused", "separate") if dtype == "bfloat16" else ("separate",)
        for strategy in strategies if num_queries == 5000 else ():
            plans.append(plan.backward(problem, card, INPUTS, strategy=strategy))
        for kernel in itertools.chain.from_iterable(chosen.kernels for chosen in plans):
            if "kNumStages" in arguments(kernel):
                found[kernel.kernel, kernel.template] = kernel
    return list(found.values())


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_shared_memory_is_what_the_kernels_use(tmp_path: Path) -> None:
    kernels = kernels_with_tiles()
    assert {kernel.kernel for kernel in kernels} == {
        "forward_sm80",
        "backward_fused_sm80",
        "backward_dq_sm80",
        "backward_dk_sm80",
    }
    source = tmp_path / "shared_memory.cpp"
    source.write_text(layout_source(kernels))
    library = host_compiler.load(source, tmp_path)
    sizes = (ctypes.c_int * len(kernels)).in_dll(library, "sizes")
    layouts = (ctypes.POINTER(ctypes.c_int) * len(kernels)).in_dll(library, "layouts")
    for kernel, size, layout in zip(kernels, sizes, layouts, strict=True):
        total, *offsets = layout[:size]
        name = jit.render(kernel.kernel, kernel.template)
        assert kernel.shared_memory == total, name
        # ldmatrix addresses permute bits of a tile's address by exclusive or (smem.cuh).
        assert all(offset % 128 == 0 for offset in offsets), (name, offsets)
        assert all(0 <= offset < total for offset in offsets), (name, offsets)
    static = ctypes.c_int.in_dll(library, "static_bytes").value
    assert static <= tiling.STATIC_BYTES


# --------------------------------------------------------------------------------- forward_sm90


HOPPER = plan.device_facts("sm_90a")


@pytest.mark.parametrize("is_packed", [False, True], ids=["heads-apart", "packed"])
@pytest.mark.parametrize("dim2", tiling.BUCKETS)
@pytest.mark.parametrize("dim1", tiling.BUCKETS)
def test_every_pair_of_head_dims_has_a_warpgroup_tile(
    dim1: int, dim2: int, is_packed: bool
) -> None:
    few = {"num_queries": 40, "num_heads": 14, "num_key_heads1": 2, "num_key_heads2": 2}
    problem = hopper_problem(head_dim1=dim1, head_dim2=dim2, **(few if is_packed else {}))
    tile, _ = plan.warpgroup_tile(problem, HOPPER)
    assert tile.shared_memory(dim1, dim2) <= HOPPER.shared_memory_per_block
    assert tile.block_k % 8 == 0, "panels of eight rows"
    assert 64 <= max(tile.stationary_rows, tile.block_k) <= 256, "a box of the copy engine"
    chosen = plan.forward(problem, HOPPER, force="forward_sm90")
    assert chosen.heads_per_tile == (7 if is_packed else 1)
    (kernel, *_) = chosen.kernels
    assert (kernel.kernel, kernel.template) in SPECIALISATIONS["sm_90a"]


def has_fused_tile(dim1: int, dim2: int, side: int) -> bool:
    return (
        tiling.backward_warpgroup_tile(dim1, dim2, side, H200.shared_memory_per_block) is not None
    )


def hopper_problem(**changes: Any) -> Problem:
    rows = dict.fromkeys(("q1", "k1", "q2", "k2"), Strides(8192, 4096, 64))
    problem = make(num_queries=1024, num_keys=1024)
    return dataclasses.replace(problem, **(rows | changes))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_queries", [100, 1000, 5000, 20_000])
@pytest.mark.parametrize("num_keys", [1000, 70_000])
def test_hopper_takes_the_tile_and_the_splits_of_the_least_time(
    num_queries: int, num_keys: int, causal: bool
) -> None:
    problem = hopper_problem(num_queries=num_queries, num_keys=num_keys, causal=causal)
    chosen = plan.forward(problem, HOPPER)
    assert isinstance(chosen.tile, tiling.WarpgroupTile)
    least = plan.warpgroup_time(problem, HOPPER, chosen.tile, chosen.num_splits)
    for tile in tiling.warpgroup_tiles(128, 128, False):
        for splits in range(1, plan.max_splits(problem, tile, 1) + 1):
            blocks = plan.num_blocks(problem, tile, 1) * splits
            if blocks <= 4 * HOPPER.num_sms and tile.fits(128, 128, HOPPER.shared_memory_per_block):
                assert least <= plan.warpgroup_time(problem, HOPPER, tile, splits)


def test_time_of_the_forward_falls_with_less_work() -> None:
    tile = tiling.WarpgroupTile(3, 128, 2, False)
    full, causal = (
        hopper_problem(num_queries=8192, num_keys=8192),
        hopper_problem(num_queries=8192, num_keys=8192, causal=True),
    )
    time = plan.warpgroup_time(full, HOPPER, tile, 1)
    assert 0.45 * time < plan.warpgroup_time(causal, HOPPER, tile, 1) < 0.6 * time
    # A causal mask over few of the keys makes no difference.
    few = {"num_queries": 192, "num_keys": 70_000}
    full, causal = hopper_problem(**few), hopper_problem(**few, causal=True)
    time = plan.warpgroup_time(full, HOPPER, tile, 16)
    assert 0.99 * time < plan.warpgroup_time(causal, HOPPER, tile, 16) <= time


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 16, 33, 64, 65])
@pytest.mark.parametrize(("heads1", "heads2"), [(8, 8), (1, 1), (2, 4), (8, 1), (64, 1)])
def test_heads_that_share_their_keys_are_packed(
    heads1: int, heads2: int, num_queries: int, arch: str
) -> None:
    problem = hopper_problem(
        num_heads=64, num_key_heads1=heads1, num_key_heads2=heads2, num_queries=num_queries
    )
    chosen = plan.forward(problem, plan.device_facts(arch))
    shared = math.gcd(64 // heads1, 64 // heads2)
    if num_queries > tiling.FEW_QUERIES or shared == 1:
        assert chosen.heads_per_tile == 1
    elif arch == "sm_90a" or num_queries * shared <= tiling.FEW_QUERIES:
        assert chosen.heads_per_tile == min(shared, chosen.tile.stationary_rows)
    else:
        # What no longer fits into a tile of few rows stays apart, for the keys of a pack are read
        # once only if it is one tile.
        assert chosen.heads_per_tile * num_queries <= tiling.FEW_QUERIES
    expanded = dataclasses.replace(problem, q1=Strides(4096, 0, 64))
    assert plan.forward(expanded, plan.device_facts(arch)).heads_per_tile == 1


def test_hopper_takes_its_own_kernel_where_queries_fill_a_tile() -> None:
    assert plan.forward_kernel(hopper_problem(), HOPPER) == "forward_sm90"
    few = hopper_problem(num_queries=tiling.FEW_QUERIES)
    assert plan.forward_kernel(few, HOPPER) == "forward_sm80"
    assert plan.forward_kernel(hopper_problem(), plan.device_facts("sm_80")) == "forward_sm80"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"num_keys": 0}, "at least one key"),
        ({"k2": Strides(0, 0, 0)}, "one address"),
    ],
    ids=["unaligned", "no-keys", "expanded-rows"],
)
def test_what_hopper_cannot_take_goes_to_the_portable_kernel(
    changes: dict[str, Any], reason: str
) -> None:
    problem = hopper_problem(**changes)
    assert plan.forward_kernel(problem, HOPPER) == "forward_sm80"
    with pytest.raises(tiling.PlanError, match=reason):
        plan.forward(problem, HOPPER, force="forward_sm90")


# ------------------------------------------------------------------------------ backward_fused_sm90


HOPPER_ROWS = dict.fromkeys(INPUTS, Strides(0, 0, 64))


@given(problem=problems(**HOPPER_ROWS, aligned=True), wrt=WRT, strategy=STRATEGY)
@settings(max_examples=300, deadline=None)
def test_hopper_backward(problem: Problem, wrt: tuple[str, ...], strategy: str) -> None:
    chosen = plan.backward(problem, HOPPER, wrt, strategy=strategy)
    assert_launchable(chosen.kernels, HOPPER)
    assert_regions(problem, chosen)
    dims = tiling.bucket(problem.head_dim1), tiling.bucket(problem.head_dim2)
    for side in chosen.sides:
        wide = [kernel for kernel in side.kernels if kernel.kernel.endswith("sm90")]
        # What a kernel of Hopper reads of a row is not what a portable one does.
        assert side.generation == ("sm90" if wide else "sm80")
        is_left = {f"q{side.side}", f"k{side.side}"} & left_to_sides(chosen, wrt)
        assert f"_{side.generation}" in chosen.name or not is_left
        if side.prepare is not None:
            is_wide = bool(wide) or chosen.both is not None
            assert arguments(side.prepare)["kIsWeighted"] == is_wide
        if side.fused is None:
            continue
        few = problem.num_queries <= plan.FEW_FUSED_QUERIES
        assert bool(wide) == (has_fused_tile(*dims, side.side) and not few)
        if not wide:
            continue
        assert wide == [side.fused]
        cut = arguments(side.fused)
        key_heads = problem.num_key_heads1 if side.side == 1 else problem.num_key_heads2
        assert side.fused.block == 128 * (cut["kNumConsumers"] + 2)
        assert side.key_blocks == ceil_div(problem.num_keys, 64 * cut["kNumConsumers"])
        assert side.fused.grid == problem.batch * key_heads * side.key_blocks
        assert side.fused.boxes == (64, 64 * cut["kNumConsumers"])
        assert cut["kHasDk"] == (f"k{side.side}" in wrt)
        assert cut["kRegisterSteps"] <= sum(dims) // 16
        trained = dims[side.side - 1]
        tiles = ceil_div(problem.num_queries, 16)
        assert side.scratch_bytes == problem.batch * problem.num_heads * tiles * 64 * trained


@pytest.mark.parametrize(
    "changes",
    [{"aligned": False}, {"k2": Strides(0, 0, 0)}, {"head_dim2": 256}],
    ids=["unaligned", "expanded-rows", "no-tile"],
)
def test_what_the_fused_kernel_of_hopper_cannot_take(changes: dict[str, Any]) -> None:
    problem = hopper_problem(**changes)
    for force in (None, "backward_fused_sm80"):
        chosen = plan.backward(problem, HOPPER, ("q2", "k2"), strategy="fused", force=force)
        assert [k.kernel for k in chosen.kernels if "fused" in k.kernel] == ["backward_fused_sm80"]
    options: dict[str, Any] = {"strategy": "fused", "force": "backward_fused_sm90"}
    with pytest.raises(PlanError, match=r"^backward_fused_sm90: expected .* Unset STREAMKL_FORCE"):
        plan.backward(problem, HOPPER, ("q2", "k2"), **options)


def test_a_forced_kernel_binds_its_direction_only() -> None:
    problem = hopper_problem(num_keys=4096)
    free = plan.backward(problem, HOPPER, ("q2", "k2"))
    assert free.sides[0].generation == "sm90"
    assert plan.backward(problem, HOPPER, ("q2", "k2"), force="forward_sm80") == free
    portable = plan.backward(problem, HOPPER, ("q2", "k2"), force="backward_dq_sm80")
    assert portable.sides[0].generation == "sm80"
    with plan.override(backward_kernel="backward_fused_sm80"):
        assert plan.backward(problem, HOPPER, ("q2", "k2")) == portable
    forward = plan.forward(problem, HOPPER)
    assert plan.forward(problem, HOPPER, force="backward_fused_sm80") == forward
    with pytest.raises(PlanError, match=r"STREAMKL_FORCE: expected one of .*backward_fused_sm90"):
        plan.backward(problem, HOPPER, ("q2",), force="backward")


@pytest.mark.parametrize(
    ("num_queries", "options", "kernel"),
    [
        (1, {}, "backward_few_sm90"),
        (64, {}, "backward_few_sm90"),
        (65, {}, "backward_fused_sm90"),
        (16, {"q_offset": 3, "causal": True}, "backward_fused_sm80"),
        (17, {"window": (5, 5)}, "backward_fused_sm90"),
    ],
)
def test_few_queries_take_a_kernel_of_their_own(
    num_queries: int, options: dict[str, Any], kernel: str
) -> None:
    problem = hopper_problem(num_queries=num_queries, num_keys=2**17, **options)
    side = plan.backward(problem, HOPPER, ("q2", "k2")).sides[0]
    assert side.fused is not None
    assert side.fused.kernel == kernel
    forced = plan.backward(problem, HOPPER, ("q2", "k2"), force="backward_fused_sm90").sides[0]
    assert forced.fused is not None
    assert forced.fused.kernel == "backward_fused_sm90"


@pytest.mark.parametrize(("num_queries", "generation"), [(1, "sm80"), (16, "sm80"), (17, "sm90")])
def test_few_queries_that_no_tile_takes_go_to_the_portable_fused_kernel(
    num_queries: int, generation: str
) -> None:
    # Of the heads of a key head of side 1, two each share one of side 2.
    problem = hopper_problem(
        num_queries=num_queries, num_keys=2**17, num_key_heads1=2, num_key_heads2=4
    )
    for wrt in (("q1", "k1"), ("q1",)):
        side = plan.backward(problem, HOPPER, wrt).sides[0]
        assert side.fused is not None
        assert side.generation == generation
    forced = plan.backward(problem, HOPPER, ("q1", "k1"), force="backward_fused_sm90")
    assert forced.sides[0].generation == "sm90"


def test_override_of_the_fused_tile() -> None:
    tile = tiling.BackwardWarpgroupTile(2, 2, 1, 0)
    with plan.override(backward_tiles={"backward_fused_sm90": tile}):
        chosen = plan.backward(hopper_problem(), HOPPER, ("q2", "k2"), strategy="fused")
    assert chosen.sides[0].fused is not None
    cut = arguments(chosen.sides[0].fused)
    names = ("kNumConsumers", "kNumStages", "kNumBuffers", "kRegisterSteps")
    assert tuple(cut[name] for name in names) == dataclasses.astuple(tile)


@pytest.mark.parametrize(
    ("changes", "wrt", "is_ordered"),
    [
        ({}, ("q2", "k2"), True),
        ({"causal": True, "softcap1": 9.0}, ("q1", "k1"), True),
        ({"window": (300, 0)}, ("q2", "k2"), True),
        ({"head_dim1": 256}, ("q2", "k2"), True),
        ({"num_queries": 4096, "num_keys": 8192, "num_key_heads2": 1}, ("q2", "k2"), True),
        # One head less than would be best is too few, so many more alternate.
        ({"num_queries": 256, "num_heads": 32, "num_key_heads2": 16}, ("q2", "k2"), True),
        # One gradient, a head dimension without a tile, blocks that cannot be counted.
        ({}, ("q2",), False),
        ({"head_dim2": 256}, ("q2", "k2"), False),
        ({"ragged": Ragged(("kv_lens",))}, ("q2", "k2"), False),
        # Blocks that would not fill the card, or would only wait for each other.
        ({"num_keys": 1024, "num_key_heads2": 1}, ("q2", "k2"), False),
        ({"num_queries": 64, "num_keys": 65536}, ("q2", "k2"), False),
    ],
    ids=str,
)
def test_a_fused_kernel_in_a_fixed_order(
    changes: dict[str, Any], wrt: tuple[str, ...], is_ordered: bool
) -> None:
    heads = {"batch": 2, "num_heads": 8, "num_key_heads1": 8, "num_key_heads2": 8}
    problem = hopper_problem(**{"num_keys": 2048} | heads | changes)
    side = plan.backward(problem, HOPPER, wrt, deterministic=True).sides[0]
    assert side.strategy == ("ordered" if is_ordered else "separate")
    with plan.override(strategy="separate"):
        assert plan.backward(problem, HOPPER, wrt, deterministic=True).sides[0].fused is None
    with plan.override(strategy="fused"):
        asked = plan.backward(problem, HOPPER, wrt, deterministic=True).sides[0].strategy
    can_be = len(wrt) == 2 and problem.head_dim2 < 256 and problem.ragged is None
    assert asked == ("ordered" if can_be else "separate")
    for options in ({"force": plan.PORTABLE}, {"strategy": "separate"}):
        other = plan.backward(problem, HOPPER, wrt, deterministic=True, **options)
        assert other.sides[0].strategy == "separate"
    # A kernel that has no tile there is missed in any order, not in a fixed one.
    for kernel in ("backward_fused_sm90", "backward_dq_sm90"):
        forced = plan.backward(problem, HOPPER, wrt, deterministic=True, force=kernel)
        assert forced.sides[0].generation == "sm90"


@given(
    key_heads=st.integers(1, 300),
    num_queries=st.integers(1, 100_000),
    num_keys=st.integers(1, 300_000),
    causal=st.booleans(),
)
def test_heads_that_alternate_divide_all(
    key_heads: int, num_queries: int, num_keys: int, causal: bool
) -> None:
    problem = hopper_problem(
        batch=1,
        num_heads=key_heads,
        num_key_heads1=key_heads,
        num_key_heads2=key_heads,
        num_queries=num_queries,
        num_keys=num_keys,
        causal=causal,
    )
    found = plan.interleaved(problem, 2, ceil_div(num_keys, 128), HOPPER)
    assert key_heads % found == 0
    least = math.ceil(HOPPER.num_sms * plan.FOLLOW_TIME / ceil_div(num_queries, 64))
    assert found >= min(least, key_heads)
    # All that run at once of one head wait for each other: few, wherever there are heads enough.
    if causal and key_heads % 8 == 0 and num_queries > 600:
        assert HOPPER.num_sms // found <= 2 * plan.FEW_FOLLOWERS


def fused_layout_source(kernels: Sequence[catalogue.Specialisation]) -> str:
    """C++ with the bytes of shared memory of each, and where its buffers begin."""
    kernel = (jit.source_directory() / "backward_fused_sm90.cu").read_text()
    read = {
        name: re.sub(r"//.*", "", (jit.source_directory() / name).read_text())
        for name in ("warpgroup.cuh", "row_statistics.cuh", "pipeline.cuh")
    }
    panel = braces(read["warpgroup.cuh"], "struct PanelTile")
    ring = value_of(braces(read["pipeline.cuh"], "struct Ring"), "kBytes")
    parts = [
        '#include "schedule.cuh"',
        braces(read["row_statistics.cuh"], r"struct alignas\(16\) WeightedStatistics"),
        re.sub(r"template <int kRows>.*", "};", panel, flags=re.DOTALL),
        f"template <int kNumStages> struct Ring {{ static constexpr int kBytes = {ring}; }};",
        "template <int, int, int> struct PanelMixed;",
        "template <class, int> inline constexpr bool kNeedsRunningFactor = false;",
        braces(re.sub(r"//.*", "", kernel), "struct FusedTraits"),
    ]
    rows = []
    for name, template in kernels:
        rendered = jit.render(name, (*template[:-4], *template[-3:-1]))
        rendered = rendered.replace(name, "FusedTraits")
        rows.append(
            f"{{{rendered}::kSmemBytes, {rendered}::kRingOffset, {rendered}::kStageBytes, "
            f"{rendered}::kGradientOffset, {rendered}::kSumOffset}}"
        )
    parts.append(f'extern "C" const int layouts[][5] = {{{", ".join(rows)}}};')
    return "\n".join(parts) + "\n"


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_shared_memory_of_the_fused_kernel(tmp_path: Path) -> None:
    kernels = [
        one for one in catalogue.specialisations("sm_90a") if one[0] == "backward_fused_sm90"
    ]
    source = tmp_path / "fused.cpp"
    source.write_text(fused_layout_source(kernels))
    layouts = (ctypes.c_int * 5 * len(kernels)).in_dll(
        host_compiler.load(source, tmp_path), "layouts"
    )
    for (name, template), (total, *offsets) in zip(kernels, layouts, strict=True):
        cut = dict(template)
        values = (
            cut[f"k{key}"] for key in ("NumConsumers", "NumStages", "NumBuffers", "RegisterSteps")
        )
        tile = tiling.BackwardWarpgroupTile(*map(int, values))
        planned = tile.shared_memory(
            *(int(cut[f"k{key}"]) for key in ("HeadDim1", "HeadDim2", "Side")),
            is_ordered=bool(cut["kIsOrdered"]),
        )
        assert planned - tiling.MOST_BARRIER_BYTES < total <= planned, jit.render(name, template)
        # The swizzle permutes bits of an address below 1024.
        assert all(offset % 1024 == 0 for offset in offsets)


# ------------------------------------------------------------------------------- backward_few_sm90


FEW_STRIDES = dict.fromkeys(("q1", "q2"), Strides(0, 64, 64)) | dict.fromkeys(
    ("k1", "k2"), Strides(0, 0, 64)
)


@given(
    problem=problems(**FEW_STRIDES, aligned=True),
    num_queries=st.integers(1, 80),
    num_keys=st.integers(1, 10_000),
    group=st.sampled_from((1, 2, 6)),
    wrt=WRT,
    deterministic=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_few_queries_on_hopper(
    problem: Problem,
    num_queries: int,
    num_keys: int,
    group: int,
    wrt: tuple[str, ...],
    deterministic: bool,
) -> None:
    key_heads = {f"num_key_heads{side}": problem.num_heads // group for side in (1, 2)}
    problem = dataclasses.replace(problem, num_queries=num_queries, num_keys=num_keys, **key_heads)
    chosen = plan.backward(problem, HOPPER, wrt, deterministic=deterministic)
    assert_launchable(chosen.kernels, HOPPER)
    assert_regions(problem, chosen)
    for side in chosen.sides:
        few = [kernel for kernel in side.kernels if kernel.kernel == "backward_few_sm90"]
        assert not few or not plan.why_not_few(problem, HOPPER, side.side)
        assert not few or not deterministic
        assert side.heads_per_tile == (group if few else 1)
        for kernel in few:
            cut = arguments(kernel)
            assert cut["kHasDq"] == (f"q{side.side}" in wrt)
            assert cut["kHasDk"] == (f"k{side.side}" in wrt)
            assert group * num_queries <= cut["kRows"] < 32 + 2 * group * num_queries
            assert kernel.boxes == (cut["kRows"] // group, 64)
            assert cut["kNumStages"] % 2 == 0
            num_tiles = problem.batch * problem.num_heads // group * ceil_div(num_keys, 64)
            assert side.key_blocks == num_tiles
            assert kernel.grid == min(HOPPER.num_sms, num_tiles)
            row_tiles = (
                problem.batch * problem.num_heads // group * ceil_div(group * num_queries, 16)
            )
            trained = tiling.bucket(problem.head_dim1 if side.side == 1 else problem.head_dim2)
            assert side.scratch_bytes == row_tiles * 64 * trained * cut["kHasDq"]


@pytest.mark.parametrize("wrt", [("q2", "k2"), ("q1",), ("k1",), INPUTS], ids="_".join)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_queries", [1, 16])
def test_few_queries_on_many_keys_take_their_own_kernel(
    num_queries: int, group: int, wrt: tuple[str, ...]
) -> None:
    problem = hopper_problem(
        num_queries=num_queries,
        num_keys=2**17,
        num_key_heads1=8 // group,
        num_key_heads2=8 // group,
    )
    for side in plan.backward(problem, HOPPER, wrt).sides:
        names = [kernel.kernel for kernel in side.kernels]
        finish = ["backward_finish"] * (f"q{side.side}" in wrt)
        assert names == ["backward_prepare", "backward_few_sm90", *finish] or names == [
            "backward_prepare",
            *finish,
            "backward_few_sm90",
        ]
    for kernel in plan.backward(problem, HOPPER, wrt, deterministic=True).kernels:
        assert kernel.kernel in ("backward_prepare", *tiling.PAIR_KERNELS, *tiling.BOTH_KERNELS)


@pytest.mark.parametrize(
    ("num_heads", "num_keys", "wrt", "is_few"),
    [
        (1, 64, ("q2", "k2"), True),
        (2048, 512, ("k2",), True),
        (16, 512, ("q2",), True),
        (16, 448, ("q2",), False),
        (128, 8192, ("q2",), False),  # blocks of queries fill the card
    ],
)
def test_gradients_of_few_queries_alone_pay_on_many_keys_and_few_heads(
    num_heads: int, num_keys: int, wrt: tuple[str, ...], is_few: bool
) -> None:
    heads = dict.fromkeys(("num_heads", "num_key_heads1", "num_key_heads2"), num_heads)
    problem = hopper_problem(batch=1, num_queries=64, num_keys=num_keys, **heads)
    kernels = {kernel.kernel for kernel in plan.backward(problem, HOPPER, wrt).kernels}
    assert ("backward_few_sm90" in kernels) == is_few
    forced = plan.backward(problem, HOPPER, wrt, force="backward_few_sm90")
    assert "backward_few_sm90" in {kernel.kernel for kernel in forced.kernels}
    # Heads that share their keys have them read once.
    shared = dataclasses.replace(
        problem, num_queries=8, num_key_heads1=num_heads // 2, num_key_heads2=num_heads // 2
    )
    kernels = {kernel.kernel for kernel in plan.backward(shared, HOPPER, wrt).kernels}
    assert "backward_few_sm90" in kernels


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_queries": 65}, "expected at most 64 rows"),
        ({"num_queries": 33, "num_key_heads1": 4, "num_key_heads2": 4}, "got 66 rows"),
        ({"num_queries": 17, "head_dim2": 136}, "head dimensions whose tile fits"),
        ({"num_queries": 0}, "at least one query"),
        ({"num_key_heads2": 4}, "share one of the other side; got groups of 2 and 1"),
        (
            {"num_key_heads1": 4, "num_key_heads2": 4, "q1": Strides(0, 0, 64)},
            "do not all lie at one address",
        ),
        ({"aligned": False}, "multiples of 16 bytes"),
    ],
)
def test_what_the_kernel_of_few_queries_cannot_take(changes: dict[str, Any], reason: str) -> None:
    problem = hopper_problem(**{"num_queries": 8} | changes)
    assert reason in plan.why_not_few(problem, HOPPER, 2)
    with pytest.raises(PlanError, match=r"^backward_few_sm90: .* Unset STREAMKL_FORCE"):
        plan.backward_kernel("fused", problem, HOPPER, 2, force="backward_few_sm90")


def test_override_of_the_tile_of_few_queries() -> None:
    problem, tile = hopper_problem(num_queries=8, num_keys=2**17), tiling.FewTile(32, 2)
    with plan.override(backward_tiles={"backward_few_sm90": tile}):
        chosen = plan.backward(problem, HOPPER, ("q2", "k2")).sides[0].fused
    assert chosen is not None
    assert (arguments(chosen)["kRows"], arguments(chosen)["kNumStages"]) == (32, 2)
    # A tuned tile that is too narrow for another problem of its class makes way.
    narrow = plan.Choice(backward_tiles=(("backward_few_sm90", tiling.FewTile(16, 2)),))
    problem = dataclasses.replace(problem, num_queries=20)
    card = tuned(HOPPER, problem, narrow, wrt=("q2", "k2"))
    chosen = plan.backward(problem, card, ("q2", "k2")).sides[0].fused
    assert chosen is not None
    assert arguments(chosen)["kRows"] == 32


def few_layout_source(kernels: Sequence[catalogue.Specialisation]) -> str:
    """C++ with the bytes of shared memory of each, and where its buffers begin."""
    kernel = (jit.source_directory() / "backward_few_sm90.cu").read_text()
    read = {
        name: re.sub(r"//.*", "", (jit.source_directory() / name).read_text())
        for name in ("warpgroup.cuh", "row_statistics.cuh", "pipeline.cuh")
    }
    panel = braces(read["warpgroup.cuh"], "struct PanelTile")
    ring = value_of(braces(read["pipeline.cuh"], "struct Ring"), "kBytes")
    parts = [
        '#include "schedule.cuh"',
        braces(read["row_statistics.cuh"], r"struct alignas\(16\) WeightedStatistics"),
        re.sub(r"template <int kRows>.*", "};", panel, flags=re.DOTALL),
        f"template <int kNumStages> struct Ring {{ static constexpr int kBytes = {ring}; }};",
        braces(re.sub(r"//.*", "", kernel), "struct FewTraits"),
    ]
    rows = []
    for name, template in kernels:
        rendered = jit.render(name, template).replace(name, "FewTraits")
        rows.append(
            f"{{{rendered}::kSmemBytes, {rendered}::kRingOffset, {rendered}::kStageBytes, "
            f"{rendered}::kGradientOffset, {rendered}::kLineOffset}}"
        )
    parts.append(f'extern "C" const int layouts[][5] = {{{", ".join(rows)}}};')
    return "\n".join(parts) + "\n"


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_shared_memory_of_the_kernel_of_few_queries(tmp_path: Path) -> None:
    kernels = [one for one in catalogue.specialisations("sm_90a") if one[0] == "backward_few_sm90"]
    source = tmp_path / "few.cpp"
    source.write_text(few_layout_source(kernels))
    layouts = (ctypes.c_int * 5 * len(kernels)).in_dll(
        host_compiler.load(source, tmp_path), "layouts"
    )
    for (name, template), (total, *offsets) in zip(kernels, layouts, strict=True):
        cut = dict(template)
        tile = tiling.FewTile(int(cut["kRows"]), int(cut["kNumStages"]))
        planned = tile.shared_memory(int(cut["kHeadDim1"]), int(cut["kHeadDim2"]))
        assert planned == total, jit.render(name, template)
        # The swizzle permutes bits of an address below 1024.
        assert all(offset % 1024 == 0 for offset in offsets)


# ------------------------------------------------------------ backward_dq_sm90, backward_dk_sm90


@given(problem=problems(**HOPPER_ROWS, aligned=True), wrt=WRT)
@settings(max_examples=200)
def test_the_deterministic_pair_of_hopper(problem: Problem, wrt: tuple[str, ...]) -> None:
    with plan.override(both=False):
        chosen = plan.backward(problem, HOPPER, wrt, strategy="separate")
        same = plan.backward(problem, HOPPER, wrt, deterministic=True, strategy="separate")
    assert chosen == same
    is_taken = problem.num_queries > 0 and problem.num_keys > 0
    for side in chosen.sides:
        assert side.fused is None
        for kernel, job in ((side.dq, "dq"), (side.dk, "dk")):
            if kernel is None:
                continue
            assert kernel.kernel == f"backward_{job}_{'sm90' if is_taken else 'sm80'}"
            if not is_taken:
                continue
            cut = arguments(kernel)
            rows, cols = 64 * cut["kNumConsumers"], cut["kBlockK" if job == "dq" else "kBlockQ"]
            assert kernel.block == 128 * (cut["kNumConsumers"] + 1)
            assert kernel.boxes == ((rows, cols) if job == "dq" else (cols, rows))
            key_heads = problem.num_key_heads1 if side.side == 1 else problem.num_key_heads2
            if job == "dq":
                assert side.dq_blocks == ceil_div(problem.num_queries, rows)
                assert kernel.grid == problem.batch * problem.num_heads * side.dq_blocks
            else:
                assert side.key_blocks == ceil_div(problem.num_keys, rows)
                assert kernel.grid == problem.batch * key_heads * side.key_blocks
            dims = tiling.bucket(problem.head_dim1), tiling.bucket(problem.head_dim2)
            fixed, trained = dims[2 - side.side], dims[side.side - 1]
            assert cut["kFixedSteps"] <= fixed // 16
            assert cut["kTrainedSteps"] <= trained // 16


@pytest.mark.parametrize("side", [1, 2])
def test_the_pair_stands_in_where_the_fused_kernel_of_hopper_has_no_tile(side: int) -> None:
    problem = hopper_problem(num_keys=4096, **{f"head_dim{side}": 256})
    wrt = (f"q{side}", f"k{side}")
    kernels = [one.kernel for one in plan.backward(problem, HOPPER, wrt).kernels]
    assert kernels[1:] == ["backward_dq_sm90", "backward_dk_sm90"]


def test_override_of_the_tile_of_the_pair() -> None:
    tile = tiling.PairWarpgroupTile(3, 32, 2, 3, 1, 2)
    with plan.override(backward_tiles=dict.fromkeys(tiling.PAIR_KERNELS, tile)):
        chosen = plan.backward(hopper_problem(), HOPPER, ("q2", "k2"), strategy="separate")
    for kernel in chosen.kernels[1:]:
        assert tuple(value for _, value in kernel.template[4:-2]) == dataclasses.astuple(tile)


@pytest.mark.parametrize("job", ["dq", "dk"])
def test_override_of_the_pair_by_kernels_of_two_generations_is_refused(job: str) -> None:
    # One would read the row statistics that the other wants, and be wrong without an error.
    tiles = {f"backward_{job}_sm80": BackwardTile(1, 2, 16, 16, 2)}
    text = r"backward_tiles: expected tiles of one generation .* side 2; got backward_dq_sm\d0 and"
    for options in ({"deterministic": True, "strategy": "separate"}, {"strategy": "separate"}):
        with plan.override(backward_tiles=tiles):
            with pytest.raises(PlanError, match=text):
                plan.backward(hopper_problem(), HOPPER, ("q2", "k2"), **options)
            alone = plan.backward(hopper_problem(), HOPPER, (f"{job[1]}2",), **options)
        assert {kernel.kernel for kernel in alone.kernels} == {"backward_prepare", *tiles}
    with plan.override(backward_tiles=tiles, backward_kernel="backward_dq_sm80"):
        plan.backward(hopper_problem(), HOPPER, ("q2", "k2"), deterministic=True)
    with plan.override(backward_tiles=tiles):  # neither of them runs
        plan.backward(hopper_problem(), HOPPER, ("q2", "k2"), strategy="fused")


def pair_layout_source(kernels: Sequence[catalogue.Specialisation]) -> str:
    """C++ with the bytes of shared memory of each, and where its swizzled buffers begin."""
    read = {
        name: re.sub(r"//.*", "", (jit.source_directory() / name).read_text())
        for name in (
            "warpgroup.cuh",
            "row_statistics.cuh",
            "pipeline.cuh",
            "backward_warpgroup.cuh",
        )
    }
    panel = braces(read["warpgroup.cuh"], "struct PanelTile")
    ring = value_of(braces(read["pipeline.cuh"], "struct Ring"), "kBytes")
    parts = [
        '#include "base.cuh"',
        braces(read["row_statistics.cuh"], r"struct alignas\(16\) WeightedStatistics"),
        re.sub(r"template <int kRows>.*", "};", panel, flags=re.DOTALL),
        f"template <int kNumStages> struct Ring {{ static constexpr int kBytes = {ring}; }};",
        "template <int, int, int> struct PanelMixed;",
        braces(read["backward_warpgroup.cuh"], "struct PairTraits"),
    ]
    rows = []
    for name, template in kernels:
        values = [str(value) for _, value in template[1:-2]]
        values.append("true" if name == "backward_dk_sm90" else "false")
        traits = f"PairTraits<{', '.join(values)}>"
        rows.append(
            f"{{{traits}::kSmemBytes, {traits}::kTrainedRowsOffset, {traits}::kFixedRingOffset, "
            f"{traits}::kTrainedRingOffset, {traits}::kZerosOffset, {traits}::kFixedBytes, "
            f"{traits}::kTrainedBytes}}"
        )
    parts.append(f'extern "C" const int layouts[][7] = {{{", ".join(rows)}}};')
    return "\n".join(parts) + "\n"


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_shared_memory_of_the_pair(tmp_path: Path) -> None:
    kernels = [one for one in catalogue.specialisations("sm_90a") if one[0] in tiling.PAIR_KERNELS]
    source = tmp_path / "pair.cpp"
    source.write_text(pair_layout_source(kernels))
    layouts = (ctypes.c_int * 7 * len(kernels)).in_dll(
        host_compiler.load(source, tmp_path), "layouts"
    )
    for (name, template), (total, *offsets) in zip(kernels, layouts, strict=True):
        cut = dict(template)
        tile = tiling.PairWarpgroupTile(*(int(value) for _, value in template[4:-2]))
        dims = int(cut["kHeadDim1"]), int(cut["kHeadDim2"])
        fixed, trained = dims if cut["kSide"] == 2 else dims[::-1]
        assert tile.shared_memory(name, fixed, trained) == total
        assert all(offset % 1024 == 0 for offset in offsets)


# -------------------------------------------------- backward_dq_both_sm90, backward_dk_both_sm90


@given(problem=problems(**HOPPER_ROWS, aligned=True), wrt=WRT)
@settings(max_examples=300)
def test_one_pass_for_both_sides(problem: Problem, wrt: tuple[str, ...]) -> None:
    chosen = plan.backward(problem, HOPPER, wrt, strategy="separate")
    fits = tiling.bucket(problem.head_dim1) + tiling.bucket(problem.head_dim2) <= 256
    can = fits and problem.num_rows > 0 and problem.num_keys > 0
    can = can and problem.kernel_mask == "kPlain" and not problem.has_softcap
    has_dq = can and {"q1", "q2"} <= set(wrt)
    has_dk = can and {"k1", "k2"} <= set(wrt) and problem.group1 == problem.group2
    assert (chosen.both is not None) == (has_dq or has_dk)
    if chosen.both is None:
        return
    assert (chosen.both.dq is not None, chosen.both.dk is not None) == (has_dq, has_dk)
    assert chosen.kernels[-len(chosen.both.kernels) :] == chosen.both.kernels
    for side in chosen.sides:
        assert side.fused is None
        assert side.prepare is not None
        assert arguments(side.prepare) == {"kSide": side.side, "kIsWeighted": True}
        # A gradient comes from one kernel.
        assert (side.dq is not None) == (f"q{side.side}" in wrt and not has_dq)
        assert (side.dk is not None) == (f"k{side.side}" in wrt and not has_dk)
    for kernel, num_rows, heads, num_blocks in (
        (chosen.both.dq, problem.num_queries, problem.num_heads, chosen.both.dq_blocks),
        (chosen.both.dk, problem.num_keys, problem.num_key_heads1, chosen.both.key_blocks),
    ):
        if kernel is None:
            continue
        cut = arguments(kernel)
        rows, cols = 128, cut.get("kBlockK", cut.get("kBlockQ"))
        assert kernel.block == 384
        assert kernel.boxes == ((rows, cols) if "kBlockK" in cut else (cols, rows))
        assert num_blocks == ceil_div(num_rows, rows)
        assert kernel.grid == problem.batch * heads * num_blocks
        assert cut["kSteps1"] <= tiling.bucket(problem.head_dim1) // 16
        assert cut["kSteps2"] <= tiling.bucket(problem.head_dim2) // 16


def test_both_sides_stay_apart_where_that_is_asked_for() -> None:
    problem = hopper_problem(num_keys=4096)
    pair = ["backward_dq_sm90", "backward_dk_sm90"]
    fused = ["backward_fused_sm90", "backward_finish"]

    def kernels(**options: Any) -> list[str]:
        chosen = plan.backward(problem, HOPPER, INPUTS, **options)
        names = [kernel.kernel for kernel in chosen.kernels]
        return [name for name in names if name != "backward_prepare"]

    assert kernels(strategy="separate") == list(tiling.BOTH_KERNELS)
    assert kernels(deterministic=True, given=("lse2",)) == 2 * fused
    assert kernels(strategy="fused") == 2 * fused
    assert "backward_dq_sm80" in kernels(deterministic=True, force="backward_dq_sm80")
    with plan.override(both=False):
        assert kernels(deterministic=True) == 2 * fused
        assert kernels(deterministic=True, strategy="separate") == 2 * pair
    # What measures a tile of a kernel gets that kernel.
    tile = tiling.PairWarpgroupTile(2, 32, 2, 2, 1, 2)
    with plan.override(backward_tiles={"backward_dq_sm90": tile}):
        assert kernels(strategy="separate") == 2 * pair
    with plan.override(strategy="fused"):
        assert kernels() == 2 * fused


@pytest.mark.parametrize(
    ("changes", "wrt", "has_both"),
    [
        ({}, INPUTS, True),
        ({}, ("q1", "k1", "k2"), True),
        ({}, ("q1", "k2"), False),
        # Six blocks of queries, and keys enough to fill the card.
        ({"num_queries": 384}, INPUTS, False),
        ({"num_queries": 384}, ("k1", "k2"), True),
        # Few queries have a kernel of their own.
        ({"num_queries": 16}, INPUTS, False),
        # dK would have to be separate: ten products in the place of eight.
        ({"num_heads": 4, "num_key_heads1": 2, "num_key_heads2": 4}, INPUTS, False),
    ],
)
def test_one_pass_for_both_sides_by_default(
    changes: dict[str, Any], wrt: tuple[str, ...], has_both: bool
) -> None:
    heads = dict.fromkeys(("num_heads", "num_key_heads1", "num_key_heads2"), 2)
    problem = hopper_problem(batch=1, num_keys=16384, **{"num_queries": 16384} | heads | changes)
    assert (plan.backward(problem, HOPPER, wrt).both is not None) == has_both
    with plan.override(both=not has_both):
        other = plan.backward(problem, HOPPER, wrt)
    assert (other.both is not None) == (not has_both and wrt != ("q1", "k2"))


@pytest.mark.parametrize(
    ("kernel", "changes", "text"),
    [
        ("backward_dq_both_sm90", {"head_dim1": 256}, "head dimensions whose tile fits"),
        ("backward_dq_both_sm90", {"window": (64, 64)}, "no window"),
        ("backward_dk_both_sm90", {"num_heads": 8, "num_key_heads1": 4}, "the same groups"),
    ],
)
def test_a_kernel_of_both_sides_that_cannot_run_says_why(
    kernel: str, changes: dict[str, Any], text: str
) -> None:
    problem = hopper_problem(**changes)
    with pytest.raises(PlanError, match=rf"^{kernel}: expected .*{text}.* Unset STREAMKL_FORCE"):
        plan.backward(problem, HOPPER, INPUTS, force=kernel)
    # For fewer gradients it is not asked.
    plan.backward(problem, HOPPER, ("q2", "k2"), force=kernel)


@pytest.mark.parametrize("kernel", tiling.BOTH_KERNELS)
def test_override_of_the_tile_of_both_sides(kernel: str) -> None:
    tile = tiling.BothWarpgroupTile(32, 3, 1, 2, logits_first=False)
    assert tile not in catalogue.tile_candidates(kernel, hopper_problem(), HOPPER)
    with plan.override(backward_tiles={kernel: tile}):
        chosen = plan.backward(hopper_problem(), HOPPER, INPUTS, deterministic=True)
    cut = next(arguments(one) for one in chosen.kernels if one.kernel == kernel)
    assert tuple(cut.values())[3:] == dataclasses.astuple(tile)


def both_layout_source(kernels: Sequence[catalogue.Specialisation]) -> str:
    """C++ with the bytes of shared memory of each, and where its swizzled buffers begin."""
    read = {
        name: re.sub(r"//.*", "", (jit.source_directory() / name).read_text())
        for name in ("warpgroup.cuh", "row_statistics.cuh", "pipeline.cuh", "backward_both.cuh")
    }
    panel = braces(read["warpgroup.cuh"], "struct PanelTile")
    ring = value_of(braces(read["pipeline.cuh"], "struct Ring"), "kBytes")
    parts = [
        '#include "base.cuh"',
        braces(read["row_statistics.cuh"], r"struct alignas\(16\) WeightedStatistics"),
        re.sub(r"template <int kRows>.*", "};", panel, flags=re.DOTALL),
        f"template <int kNumStages> struct Ring {{ static constexpr int kBytes = {ring}; }};",
        "template <int, int, int> struct PanelMixed;",
        braces(read["backward_both.cuh"], "struct BothTraits"),
    ]
    rows = []
    for name, template in kernels:
        values = [str(value).lower() for _, value in template[1:]]
        values.append("true" if name == "backward_dk_both_sm90" else "false")
        traits = f"BothTraits<{', '.join(values)}>"
        rows.append(
            f"{{{traits}::kSmemBytes, {traits}::kRows2Offset, {traits}::kRingOffset, "
            f"{traits}::kZerosOffset, {traits}::kTile1Bytes, {traits}::kTile2Bytes}}"
        )
    parts.append(f'extern "C" const int layouts[][6] = {{{", ".join(rows)}}};')
    return "\n".join(parts) + "\n"


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_shared_memory_of_both_sides(tmp_path: Path) -> None:
    kernels = [one for one in catalogue.specialisations("sm_90a") if one[0] in tiling.BOTH_KERNELS]
    source = tmp_path / "both.cpp"
    source.write_text(both_layout_source(kernels))
    layouts = (ctypes.c_int * 6 * len(kernels)).in_dll(
        host_compiler.load(source, tmp_path), "layouts"
    )
    for (name, template), (total, *offsets) in zip(kernels, layouts, strict=True):
        cut = dict(template)
        sizes = (int(value) for _, value in template[3:-1])
        tile = tiling.BothWarpgroupTile(*sizes, logits_first=bool(cut["kLogitsFirst"]))
        planned = tile.shared_memory(name, int(cut["kHeadDim1"]), int(cut["kHeadDim2"]))
        assert planned == total, jit.render(name, template)
        assert all(offset % 1024 == 0 for offset in offsets)

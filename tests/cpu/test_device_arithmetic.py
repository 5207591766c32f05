"""The plain arithmetic of the kernels, compiled for the host, against float64 and brute force.

What runs here is what the kernels run, but for the special function unit and for fused multiply
and add where the source does not ask for it.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamkl_cupy import launch, reference
from streamkl_cupy.chain import Address
from streamkl_cupy.problem import MAX_LENGTH, NO_WINDOW, PADDING, Problem, Ragged, Strides, Window
from streamkl_cupy.tiling import BUCKETS
from tests import compare, host_compiler

MISSING = host_compiler.missing_compiler()
if MISSING is not None:
    pytest.skip(MISSING, allow_module_level=True)

SOURCE = Path(__file__).with_name("device_arithmetic.cpp")

# Columns of the structs.
M1, L1, M2, L2, ACC = range(5)
KL, LSE1, LSE1_LOW, LSE2, LSE2_LOW = range(5)

# Rows and columns of an update; device_arithmetic.cpp has these.
UPDATES = ((1, 4), (2, 8), (4, 16))
LN2 = np.log(np.longdouble(2))
EPSILON = 2.0**-24  # half a step of a float32 in [1, 2)


# What hangs in C++ cannot be stopped from Python, so it hangs in a process of its own first.
CANNOT_HANG = """
import ctypes, sys, numpy as np
library = ctypes.CDLL(sys.argv[1])
one = ctypes.c_float(1)
for a in (np.nan, np.inf, -np.inf, 0):
    for b in (np.nan, np.inf, -np.inf, 0):
        x1, x2 = (np.full(16, x, np.float32).ctypes for x in (a, b))
        states = np.zeros(10, np.float32)
        library.start_states(2, ctypes.c_void_p(states.ctypes.data))
        pointers = (ctypes.c_void_p(x.data) for x in (x1, x2))
        library.update_states(2, 8, 1, 1, *pointers, one, one, ctypes.c_void_p(states.ctypes.data))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = host_compiler.load(SOURCE, tmp_path_factory.mktemp("host"))
    command = [sys.executable, "-c", CANNOT_HANG, library._name]
    try:
        subprocess.run(command, check=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("an update of logits that are not finite does not end")
    return library


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)  # which keeps the array alive


def many(**options: Any) -> settings:
    return settings(deadline=None, **options)


# ------------------------------------------------------------------------------------ kl_state.cuh


@dataclass(frozen=True)
class Logits:
    """Raw dot products [rows, keys] of both sides, the keys a row may see, and the scales."""

    x1: np.ndarray
    x2: np.ndarray
    visible: np.ndarray
    scale1: float = 1.0
    scale2: float = 1.0


@dataclass(frozen=True)
class Cut:
    """How the keys of a row come to a thread: rows and columns of an update, and threads."""

    num_rows: int = 4
    num_cols: int = 16
    num_threads: int = 4


CUTS = st.builds(
    lambda update, threads: Cut(*update, threads), st.sampled_from(UPDATES), st.integers(1, 8)
)


def reduce_keys(
    library: ctypes.CDLL, logits: Logits, cut: Cut, order: np.ndarray | None = None
) -> np.ndarray:
    """The states [threads, rows, 5] of keys dealt to threads, chunk after chunk, as a block does.

    Places beyond the last key and keys that a row may not see hold what the kernels put there.
    """
    num_rows, num_keys = logits.x1.shape
    order = np.arange(num_keys) if order is None else order
    num_groups = num_rows // cut.num_rows
    num_chunks = -(-num_keys // (cut.num_threads * cut.num_cols))
    places = num_chunks * cut.num_threads * cut.num_cols
    arrays, scales = [], []
    for x, scale in ((logits.x1, logits.scale1), (logits.x2, logits.scale2)):
        log2_scale = np.float32(launch._log2_scale(scale))
        padded = np.full((num_rows, places), launch.MASKED_LOGIT / log2_scale, np.float32)
        padded[:, :num_keys] = np.where(logits.visible, x, padded[:, :num_keys])[:, order]
        shape = (num_groups, cut.num_rows, num_chunks, cut.num_threads, cut.num_cols)
        arrays.append(np.ascontiguousarray(padded.reshape(shape).transpose(3, 0, 2, 1, 4)))
        scales.append(ctypes.c_float(log2_scale))
    states = empty_states(library, cut.num_threads, num_rows)
    updated = library.update_states(
        cut.num_rows,
        cut.num_cols,
        cut.num_threads * num_groups,
        num_chunks,
        pointer(arrays[0]),
        pointer(arrays[1]),
        *scales,
        pointer(states),
    )
    assert updated
    exponents = states[..., [M1, M2]]
    exponents = exponents[np.isfinite(exponents)]
    # Integers, so that rescaling is exact.
    np.testing.assert_array_equal(exponents, np.round(exponents))
    return states


def empty_states(library: ctypes.CDLL, *shape: int) -> np.ndarray:
    states = np.empty((*shape, 5), np.float32)
    library.start_states(states.size // 5, pointer(states))
    return states


def merge(library: ctypes.CDLL, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    merged = np.empty_like(a)
    library.merge_states(
        a.size // 5,
        pointer(np.ascontiguousarray(a)),
        pointer(np.ascontiguousarray(b)),
        pointer(merged),
    )
    return merged


def merge_all(
    library: ctypes.CDLL, states: np.ndarray, rng: np.random.Generator | None = None
) -> np.ndarray:
    """States [parts, rows, 5] merged pair by pair, in a random order if there is an `rng`."""
    parts = list(states)
    while len(parts) > 1:
        if rng is not None:
            rng.shuffle(parts)
        a, b = parts.pop(), parts.pop()
        parts.insert(0, merge(library, a, b))
    return parts[0]


def finish(library: ctypes.CDLL, states: np.ndarray) -> np.ndarray:
    """Rows of kl, lse1, its low part, lse2, its low part."""
    results = np.empty_like(states)
    library.finish_states(states.size // 5, pointer(np.ascontiguousarray(states)), pointer(results))
    return results


def results_of(library: ctypes.CDLL, logits: Logits, cut: Cut | None = None) -> np.ndarray:
    return finish(library, merge_all(library, reduce_keys(library, logits, cut or Cut())))


def by_row(logits: Logits, function: Any) -> np.ndarray:
    """kl, lse1, lse2 of each row by a function of q1 k1 q2 k2: products with 1 are the logits."""
    rows = []
    one = np.ones((1, 1), np.float32)
    for x1, x2, visible in zip(logits.x1, logits.x2, logits.visible, strict=True):
        keys1, keys2 = x1[visible, None], x2[visible, None]
        with np.errstate(all="ignore"):
            values = function(one, keys1, one, keys2, scale1=logits.scale1, scale2=logits.scale2)
        rows.append([value[0] for value in values])
    return np.array(rows)


def exact(logits: Logits) -> np.ndarray:
    return by_row(
        logits, lambda *x, **scales: reference.attention_kl(*x, **scales, return_state=True)
    )


def textbook(logits: Logits) -> np.ndarray:
    return by_row(logits, compare.baseline_forward)


def assert_rule(library: ctypes.CDLL, logits: Logits, cut: Cut) -> None:
    ours, ref, baseline = results_of(library, logits, cut), exact(logits), textbook(logits)
    for i, (name, column) in enumerate((("kl", KL), ("lse1", LSE1), ("lse2", LSE2))):
        # A row on one key has no KL left, or a log-sum-exp of hardly anything: the textbook gets it
        # exactly, ours to a step of the sums, which are about 1.
        finite = ref[np.isfinite(ref[:, i]), i]
        typical = np.mean(np.abs(finite)) if finite.size else 0
        floor = 1e-6 + (2 * EPSILON / max(typical, 1e-290) if typical > 0 else 0)
        compare.assert_accurate(name, ours[:, column], ref[:, i], baseline[:, i], floor)


SHAPES = ("random", "rising", "falling", "spiked", "offset", "far apart")
NUM_ROWS = 16


def draw_logits(
    seed: int, shape: str, num_keys: int, spread: float, noise: float, masked: float = 0.0
) -> Logits:
    """Logits of side 1 of some shape; those of side 2 differ by normal noise."""
    rng = np.random.default_rng(seed)
    x1 = rng.normal(size=(NUM_ROWS, num_keys))
    if shape == "rising":
        x1 += np.linspace(0, spread, num_keys)
    elif shape == "falling":
        x1 -= np.linspace(0, spread, num_keys)
    elif shape == "spiked":
        # High enough to outweigh the rest in some rows, not to leave no KL at all in every row.
        keys = rng.integers(num_keys, size=NUM_ROWS)
        x1[np.arange(NUM_ROWS), keys] += np.linspace(0, spread, NUM_ROWS)
    elif shape == "offset":
        x1 += 1000
    x2 = x1 + noise * rng.normal(size=x1.shape)
    if shape == "far apart":
        x2 = spread * rng.normal(size=x1.shape)
    visible = rng.random(x1.shape) >= masked
    return Logits(x1.astype(np.float32), x2.astype(np.float32), visible)


SEEDS = st.integers(0, 2**32 - 1)


@many(max_examples=80)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(8, 400),
    spread=st.floats(0, 100),
    noise=st.sampled_from((0.1, 1.0, 5.0)),
    masked=st.sampled_from((0.0, 0.3, 0.95)),
    scale=st.sampled_from((1.0, 0.125, 0.0884)),
    cut=CUTS,
)
@example(seed=0, shape="rising", num_keys=343, spread=40, noise=0.1, masked=0, scale=1, cut=Cut())
def test_state_is_as_accurate_as_the_textbook(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_keys: int,
    spread: float,
    noise: float,
    masked: float,
    scale: float,
    cut: Cut,
) -> None:
    logits = draw_logits(seed, shape, num_keys, spread / scale, noise / scale, masked)
    logits = Logits(logits.x1, logits.x2, logits.visible, scale, scale)
    assert_rule(library, logits, cut)


@many(max_examples=40)
@given(seed=SEEDS, scale1=st.floats(-3, 3), scale2=st.floats(-3, 3), cut=CUTS)
@example(seed=0, scale1=0.0, scale2=1.0, cut=Cut())
@example(seed=0, scale1=1e-30, scale2=-1e-30, cut=Cut())
@example(seed=0, scale1=-1.0, scale2=1e-12, cut=Cut())
@example(seed=0, scale1=1e4, scale2=-1e4, cut=Cut())
def test_scales_of_any_sign_and_size(
    library: ctypes.CDLL, seed: int, scale1: float, scale2: float, cut: Cut
) -> None:
    logits = draw_logits(seed, "random", 100, 0, 1, masked=0.3)
    assert_rule(library, Logits(logits.x1, logits.x2, logits.visible, scale1, scale2), cut)


@many(max_examples=40)
@given(seed=SEEDS, num_keys=st.integers(1, 300), cut=CUTS)
def test_huge_logits(library: ctypes.CDLL, seed: int, num_keys: int, cut: Cut) -> None:
    logits = draw_logits(seed, "random", num_keys, 0, 0.3)
    huge = np.float32(1e5)
    assert_rule(library, Logits(logits.x1 * huge, logits.x2 * huge, logits.visible), cut)


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(1, 300),
    spread=st.floats(0, 200),
    noise=st.sampled_from((0.0, 1e-6, 1e-3, 1.0)),
)
def test_a_small_kl_is_off_by_little(
    library: ctypes.CDLL, seed: int, shape: str, num_keys: int, spread: float, noise: float
) -> None:
    """Where nearly nothing is left of the KL, what counts is the distance, not the ratio."""
    logits = draw_logits(seed, shape, num_keys, spread, noise)
    ref, ours = exact(logits)[:, 0], results_of(library, logits)[:, KL]
    # Differences of two logits are exact to a step of how far they lie above the reference
    # exponent, which is less than 64.
    np.testing.assert_allclose(ours, ref, rtol=16 * EPSILON, atol=64 * EPSILON)


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(1, 300),
    spread=st.floats(0, 200),
    masked=st.sampled_from((0.0, 0.5)),
    scale=st.sampled_from((1.0, -0.7, 1e-3, 30.0)),
    cut=CUTS,
)
def test_equal_sides_give_exactly_zero(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_keys: int,
    spread: float,
    masked: float,
    scale: float,
    cut: Cut,
) -> None:
    x, visible = (
        getattr(draw_logits(seed, shape, num_keys, spread, 0, masked), field)
        for field in ("x1", "visible")
    )
    results = results_of(library, Logits(x, x, visible, scale, scale), cut)
    assert (results[:, KL] == 0).all()
    np.testing.assert_array_equal(results[:, LSE1], results[:, LSE2])


@many(max_examples=30)
@given(seed=SEEDS, offset1=st.sampled_from((-1000, 0, 1000)), offset2=st.sampled_from((0, 1000)))
def test_an_offset_does_not_move_the_kl(
    library: ctypes.CDLL, seed: int, offset1: int, offset2: int
) -> None:
    # Sixty-fourths, so that adding the offset is exact. The scales take it to a whole number of
    # bits, because the scale in base 2, a float32 like any other, is not exact itself.
    logits = draw_logits(seed, "random", 200, 0, 1)
    x1, x2 = (np.round(x * 64) / 64 for x in (logits.x1, logits.x2))
    ln2 = 1 / launch.LOG2_E
    plain = results_of(library, Logits(x1, x2, logits.visible, ln2, ln2))
    moved = results_of(
        library,
        Logits(
            (x1 + offset1).astype(np.float32),
            (x2 + offset2).astype(np.float32),
            logits.visible,
            ln2,
            ln2,
        ),
    )
    np.testing.assert_array_equal(moved[:, KL], plain[:, KL])
    for lse, low, offset in ((LSE1, LSE1_LOW, offset1), (LSE2, LSE2_LOW, offset2)):
        before, after = (r[:, lse].astype(np.longdouble) + r[:, low] for r in (plain, moved))
        np.testing.assert_allclose((after - before).astype(float), offset * float(LN2), atol=1e-9)


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(1, 300),
    spread=st.floats(0, 200),
    num_parts=st.integers(1, 40),
    num_empty=st.integers(0, 3),
    cut=CUTS,
)
def test_any_split_in_any_order_is_the_whole(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_keys: int,
    spread: float,
    num_parts: int,
    num_empty: int,
    cut: Cut,
) -> None:
    rng = np.random.default_rng(seed)
    logits = draw_logits(seed, shape, num_keys, spread, 1, masked=0.3)
    parts = [empty_states(library, 1, NUM_ROWS)] * num_empty
    ends = np.sort(rng.integers(num_keys + 1, size=num_parts - 1))
    for keys in np.split(rng.permutation(num_keys), ends):
        if len(keys):
            x1, x2, visible = (x[:, keys] for x in (logits.x1, logits.x2, logits.visible))
            parts.append(reduce_keys(library, Logits(x1, x2, visible), cut))
    ours = finish(library, merge_all(library, np.concatenate(parts), rng))
    ref = exact(logits)
    is_empty = ~logits.visible.any(axis=1)
    assert (ours[is_empty] == [0, -np.inf, 0, -np.inf, 0]).all()
    for i, column in enumerate((KL, LSE1, LSE2)):
        np.testing.assert_allclose(
            ours[~is_empty, column], ref[~is_empty, i], rtol=16 * EPSILON, atol=64 * EPSILON
        )


def merge_finished(library: ctypes.CDLL, parts: np.ndarray) -> np.ndarray:
    """Finished rows [parts, rows, 5] as one, in this order."""
    merged = np.empty_like(parts[0])
    library.merge_finished(
        len(parts), len(parts[0]), pointer(np.ascontiguousarray(parts)), pointer(merged)
    )
    return merged


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(1, 300),
    spread=st.floats(0, 200),
    noise=st.sampled_from((0.0, 1e-3, 1.0)),
    num_parts=st.integers(1, 20),
    num_empty=st.integers(0, 3),
)
@example(
    seed=0, shape="offset", num_keys=300, spread=0, noise=1e-3, num_parts=9, num_empty=1
)  # kl of 1e-6 under logits of 1000
def test_finished_rows_merge_to_the_whole(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_keys: int,
    spread: float,
    noise: float,
    num_parts: int,
    num_empty: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = draw_logits(seed, shape, num_keys, spread, noise, masked=0.3)
    parts = [finish(library, empty_states(library, NUM_ROWS))] * num_empty
    ends = np.sort(rng.integers(num_keys + 1, size=num_parts - 1))
    for keys in np.split(rng.permutation(num_keys), ends):
        x1, x2, visible = (x[:, keys] for x in (logits.x1, logits.x2, logits.visible))
        if len(keys):
            parts.append(results_of(library, Logits(x1, x2, visible)))
    rng.shuffle(parts)
    ours, ref, whole = (
        merge_finished(library, np.stack(parts)),
        exact(logits),
        results_of(library, logits),
    )
    is_empty = ~logits.visible.any(axis=1)
    assert (ours[is_empty] == [0, -np.inf, 0, -np.inf, 0]).all()
    ours, ref, whole = ours[~is_empty], ref[~is_empty], whole[~is_empty]
    # Each part is off by as little as a small KL of the forward may be, and the merge adds nothing.
    np.testing.assert_allclose(ours[:, KL], ref[:, 0], rtol=16 * EPSILON, atol=64 * EPSILON)
    for i, lse, low in ((1, LSE1, LSE1_LOW), (2, LSE2, LSE2_LOW)):
        np.testing.assert_allclose(ours[:, lse], ref[:, i], rtol=4 * EPSILON, atol=64 * EPSILON)
        both = [x[:, lse].astype(np.float64) + x[:, low] for x in (ours, whole)]
        np.testing.assert_allclose(*both, rtol=0, atol=64 * EPSILON)
    if noise == 0 and shape != "far apart":
        # One key alone leaves what the device sets to zero when it writes the row.
        np.testing.assert_allclose(ours[:, KL], 0, atol=4 * EPSILON)


def test_finished_rows_without_keys(library: ctypes.CDLL) -> None:
    logits = draw_logits(1, "random", 100, 0, 1)
    rows, empty = results_of(library, logits), finish(library, empty_states(library, NUM_ROWS))
    for parts in ([rows, empty], [empty, rows], [rows], [empty, rows, empty]):
        np.testing.assert_array_equal(merge_finished(library, np.stack(parts)), rows)
    for value in (np.nan, np.inf):
        for column in (KL, LSE1, LSE2):
            broken = rows.copy()
            broken[3, column] = value
            merged = merge_finished(library, np.stack([rows, broken, empty]))
            assert (np.isfinite(merged[:, KL]) == (np.arange(NUM_ROWS) != 3)).all()


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_chunks=st.integers(1, 12),
    num_threads=st.integers(1, 4),
    spread=st.floats(0, 200),
    masked=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_entropy(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_chunks: int,
    num_threads: int,
    spread: float,
    masked: float,
) -> None:
    places = num_threads * num_chunks * 8
    logits = draw_logits(seed, shape, places, spread, 1, masked)
    scale = np.float32(launch.LOG2_E)
    arrays = []
    for x in (logits.x1, logits.x2):
        x = np.where(logits.visible, x, np.float32(launch.MASKED_LOGIT / scale))[:2]
        shaped = x.reshape(2, num_threads, num_chunks, 8).transpose(1, 2, 0, 3)
        arrays.append(np.ascontiguousarray(shaped))
    entropy, plain = np.empty(2, np.float32), np.empty((2, 5), np.float32)
    library.entropy_of_rows(
        num_threads,
        num_chunks,
        *map(pointer, arrays),
        ctypes.c_float(scale),
        ctypes.c_float(scale),
        pointer(entropy),
        pointer(plain),
    )
    # The other sums are what they are without it.
    chunks = [x.reshape(num_threads, num_chunks, 16) for x in arrays]
    states = empty_states(library, num_threads, 2)
    assert library.update_states(
        2, 8, num_threads, num_chunks, *map(pointer, chunks), ctypes.c_float(scale),
        ctypes.c_float(scale), pointer(states),
    )  # fmt: skip
    alone = empty_states(library, 2)
    for thread in states:
        alone = merge(library, alone, thread)
    np.testing.assert_array_equal(plain, alone)
    exact = []
    for x, visible in zip(logits.x1[:2], logits.visible[:2], strict=True):
        seen = x[visible].astype(np.float64)
        log_p = seen - np.logaddexp.reduce(seen) if len(seen) else seen
        exact.append(-(np.exp(log_p) * log_p).sum())
    # A difference of two numbers of the size of the logits above the reference exponent.
    np.testing.assert_allclose(entropy, exact, rtol=16 * EPSILON, atol=64 * EPSILON)


GIVEN = st.sampled_from((("lse1",), ("lse2",), ("lse1", "lse2")))


@many(max_examples=60)
@given(
    seed=SEEDS,
    shape=st.sampled_from(SHAPES),
    num_keys=st.integers(1, 100),
    spread=st.floats(0, 60),
    names=GIVEN,
    # Of the given log-sum-exps over the rows' own: fewer keys than here, a few more, very many.
    above=st.sampled_from((-1.0, 0.5, 20.0, 60.0)),
)
def test_given_log_sum_exps(
    library: ctypes.CDLL,
    seed: int,
    shape: str,
    num_keys: int,
    spread: float,
    names: tuple[str, ...],
    above: float,
) -> None:
    logits = draw_logits(seed, shape, num_keys, spread, 1)
    rng = np.random.default_rng(seed)
    rows, own = results_of(library, logits), exact(logits)
    lse = {
        name: (own[:, 1 + i] + above + rng.random(NUM_ROWS)).astype(np.float32)
        for i, name in enumerate(("lse1", "lse2"))
        if name in names
    }
    addresses = [pointer(lse[name]) if name in lse else None for name in ("lse1", "lse2")]
    results, mass1 = np.empty_like(rows), np.empty(NUM_ROWS, np.float32)
    error = ctypes.c_float(launch._log2_scale_error(1.0))
    library.divide_finished(
        NUM_ROWS, pointer(rows), *addresses, error, error, pointer(results), pointer(mass1)
    )
    one = np.ones((NUM_ROWS, 1, 1))
    arrays = (one, logits.x1[..., None], one, logits.x2[..., None])
    outer = {name: values[:, None] for name, values in lse.items()}
    state = reference.attention_kl(*arrays, **outer, return_state=True)
    assert isinstance(state, reference.GivenState)
    # Each log-sum-exp is off by a few steps of its sum, and with it all that is divided by it.
    off = 64 * EPSILON
    np.testing.assert_allclose(mass1, state.mass1[:, 0], rtol=off, atol=1e-38)
    size = state.mass1 * (1 + np.abs(own[:, 1:2] - state.lse1) + np.abs(own[:, 2:] - state.lse2))
    np.testing.assert_allclose(
        results[:, KL], state.kl[:, 0], rtol=off, atol=off * size.max() + 1e-38
    )
    for name, column in (("lse1", LSE1), ("lse2", LSE2)):
        if name in lse:
            np.testing.assert_array_equal(results[:, column], lse[name])
            assert (np.abs(results[:, column + 1]) <= np.spacing(np.abs(lse[name]))).all()
        else:
            np.testing.assert_array_equal(results[:, column], rows[:, column])

    for side in (1, 2):
        found = np.empty((2, NUM_ROWS, num_keys), np.float32)
        library.given_gradients(
            side,
            NUM_ROWS,
            num_keys,
            pointer(logits.x1),
            pointer(logits.x2),
            ctypes.c_float(launch.LOG2_E),
            ctypes.c_float(launch.LOG2_E),
            pointer(results),
            pointer(mass1),
            int("lse1" in names),
            int("lse2" in names),
            pointer(found[0]),
            pointer(found[1]),
        )
        # One query whose component is 1: the gradient of a key is that of its logit.
        (ref,) = reference.attention_kl_backward(
            np.ones((NUM_ROWS, 1)), *arrays, state, wrt=(f"k{side}",)
        )
        # A bracket is a difference of logits, less one of log-sum-exps and what is constant.
        bracket = 4 + np.abs(logits.x1 - logits.x2) + np.abs(state.lse1 - state.lse2)
        bound = state.mass1 * (1 if side == 2 else bracket)
        # The scale in base 2 is off by half a step, and with it the logits.
        bound = bound * (1 + np.abs(logits.x1 - state.lse1) + np.abs(logits.x2 - state.lse2))
        for form in found:
            assert (np.abs(form - ref[..., 0]) <= 16 * EPSILON * bound + 1e-36).all()


@pytest.mark.parametrize("num_keys", [1, 90])
def test_gradients_of_both_sides_at_once(library: ctypes.CDLL, num_keys: int) -> None:
    logits = draw_logits(5, "random", num_keys, 0, 1)
    rows = results_of(library, logits)
    dkl = np.linspace(-2, 3, NUM_ROWS, dtype=np.float32)
    ds1, ds2, alone1 = np.empty((3, NUM_ROWS, num_keys), np.float32)
    scale = ctypes.c_float(launch.LOG2_E)
    library.gradients_of_both(
        NUM_ROWS, num_keys, pointer(logits.x1), pointer(logits.x2), scale, scale, pointer(rows),
        pointer(dkl), pointer(ds1), pointer(ds2), pointer(alone1),
    )  # fmt: skip
    np.testing.assert_array_equal(ds1, alone1)
    x1, x2 = logits.x1.astype(np.float64), logits.x2.astype(np.float64)
    p1, p2 = (np.exp(x - np.logaddexp.reduce(x, axis=1, keepdims=True)) for x in (x1, x2))
    # The scale in base 2 is off by half a step, and with it the logits.
    bound = (p1 + p2) * np.abs(dkl[:, None]) * (1 + np.abs(x1) + np.abs(x2) + np.log(num_keys))
    assert (np.abs(ds2 - dkl[:, None] * (p2 - p1)) <= 16 * EPSILON * bound + 1e-36).all()


def test_rows_without_keys_or_numbers_keep_what_they_have(library: ctypes.CDLL) -> None:
    rows = results_of(library, draw_logits(1, "random", 20, 0, 1))
    rows[3] = finish(library, empty_states(library, 1))[0]
    rows[5, KL] = rows[5, LSE2] = np.nan
    rows[7, KL] = rows[7, LSE1] = np.nan
    given = np.full(NUM_ROWS, 9, np.float32)
    results, mass1 = np.empty_like(rows), np.empty(NUM_ROWS, np.float32)
    addresses, nothing = [pointer(given)] * 2, [ctypes.c_float(0)] * 2
    library.divide_finished(
        NUM_ROWS, pointer(rows), *addresses, *nothing, pointer(results), pointer(mass1)
    )
    np.testing.assert_array_equal(results[3], rows[3])
    assert mass1[3] == 0
    assert np.isnan(results[[5, 7], KL]).all()
    assert np.isnan(results[5, LSE2])
    assert np.isnan(results[7, LSE1])
    x = np.zeros((NUM_ROWS, 4), np.float32)
    for side in (1, 2):
        found = np.empty((2, NUM_ROWS, 4), np.float32)
        one = ctypes.c_float(1)
        library.given_gradients(
            side, NUM_ROWS, 4, pointer(x), pointer(x), one, one, pointer(results), pointer(mass1),
            1, 1, pointer(found[0]), pointer(found[1]),
        )  # fmt: skip
        broken = np.isin(np.arange(NUM_ROWS), (5, 7))
        assert (np.isnan(found).all(axis=(0, 2)) == broken).all()
        assert (found[:, 3] == 0).all()


def test_empty_states(library: ctypes.CDLL) -> None:
    empty = empty_states(library, NUM_ROWS)
    assert (finish(library, empty) == [0, -np.inf, 0, -np.inf, 0]).all()
    np.testing.assert_array_equal(merge(library, empty, empty), empty)
    logits = draw_logits(1, "random", 100, 0, 1)
    for cut in (Cut(num_threads=1), Cut(1, 4, 3)):
        states = reduce_keys(library, logits, cut)[0]
        np.testing.assert_array_equal(merge(library, states, empty), states)
        np.testing.assert_array_equal(merge(library, empty, states), states)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0, 1e-30, -1e-19, 1e6, 1e30, 2.3e38])
@pytest.mark.parametrize("cut", [Cut(1, 4, 1), Cut(2, 8, 3), Cut(4, 16, 4)], ids=str)
def test_masked_keys_leave_no_trace(library: ctypes.CDLL, scale: float, cut: Cut) -> None:
    logits = draw_logits(2, "random", 90, 0, 1)
    visible = np.zeros_like(logits.visible)
    masked = Logits(logits.x1, logits.x2, visible, scale, scale)
    states = reduce_keys(library, masked, cut)
    np.testing.assert_array_equal(states, empty_states(library, cut.num_threads, NUM_ROWS))
    # Some rows of a thread with keys and some without, in every chunk and in the first one only.
    visible[::2] = True
    visible[0, 16:] = False
    mixed = Logits(logits.x1, logits.x2, visible, scale, scale)
    with_keys = results_of(library, mixed, cut)
    assert (with_keys[1::2] == [0, -np.inf, 0, -np.inf, 0]).all()
    other = Logits(logits.x1 * np.where(visible, 1, 3), logits.x2, visible, scale, scale)
    np.testing.assert_array_equal(results_of(library, other, cut), with_keys)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("key", [0, 5, 89])
@pytest.mark.parametrize("cut", [Cut(1, 4, 1), Cut(2, 8, 3), Cut(4, 16, 4)], ids=str)
def test_what_is_not_finite_stays_in_its_row(
    library: ctypes.CDLL, value: float, side: int, key: int, cut: Cut
) -> None:
    logits = draw_logits(3, "random", 90, 0, 1)
    clean = results_of(library, logits, cut)
    x1, x2 = logits.x1.copy(), logits.x2.copy()
    (x1 if side == 1 else x2)[3, key] = value
    broken = Logits(x1, x2, logits.visible)
    ours, ref = results_of(library, broken, cut), exact(broken)
    others = np.arange(NUM_ROWS) != 3
    # The neighbours in the thread may have taken a second pass, with another exponent.
    np.testing.assert_allclose(ours[others], clean[others], rtol=1e-6, atol=1e-6)
    for i, column in enumerate((KL, LSE1, LSE2)):
        assert np.isfinite(ours[3, column]) <= np.isfinite(ref[3, i])
    assert not np.isfinite(ours[3, KL])
    # Where the key is masked, nothing of it is seen.
    broken.visible[3, key] = False
    hidden = Logits(logits.x1, logits.x2, broken.visible)
    np.testing.assert_array_equal(
        results_of(library, broken, cut), results_of(library, hidden, cut)
    )


def test_rows_that_are_not_finite_at_all(library: ctypes.CDLL) -> None:
    visible = np.ones((NUM_ROWS, 50), bool)
    for value1, value2 in itertools.product((np.nan, np.inf, -np.inf, 0), repeat=2):
        x1, x2 = (np.full(visible.shape, value, np.float32) for value in (value1, value2))
        results = results_of(library, Logits(x1, x2, visible))
        if np.isfinite([value1, value2]).all():
            assert (results[:, KL] == 0).all()
        else:
            assert not np.isfinite(results[:, KL]).any()


def capped(
    library: ctypes.CDLL, x: np.ndarray, tanh_scale: float, are_near: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Values and slopes of logits with a bound, in units of the bound."""
    x = np.ascontiguousarray(x, np.float32)
    values, slopes = np.empty_like(x), np.empty_like(x)
    library.cap_logits(
        len(x), pointer(x), ctypes.c_float(tanh_scale), int(are_near), pointer(values),
        pointer(slopes),
    )  # fmt: skip
    return values, slopes


def test_tanh_keeps_the_digits_of_any_logit(library: ctypes.CDLL) -> None:
    sizes = np.concatenate([np.logspace(-30, 1.45, 200_000), np.linspace(0.3, 10, 200_000)])
    x = np.concatenate([-sizes, sizes]).astype(np.float32)
    values, slopes = capped(library, x, 1.0)
    u = x.astype(np.longdouble)
    # Relative, small logits included; fifty digits say what tanh is (test below).
    np.testing.assert_array_less(abs(values / np.tanh(u) - 1), 3 * EPSILON)
    rate = np.exp(-2 * abs(u))
    slope = 4 * rate / (1 + rate) ** 2
    # A float32 exponent of e is off by more the larger it is.
    np.testing.assert_array_less(abs(slopes / slope - 1), (4 + 4 * abs(u)) * EPSILON)
    assert (abs(values) <= 1).all()
    near = abs(x) <= 0.6
    for ours, theirs in zip(capped(library, x[near], 1.0, True), (values, slopes), strict=True):
        np.testing.assert_array_equal(ours, theirs[near])


def test_tanh_against_fifty_digits(library: ctypes.CDLL) -> None:
    mpmath = pytest.importorskip("mpmath")
    x = np.array([1e-20, 1e-6, 0.01, 0.3, 0.599, 0.601, 1, 2.5, 7, 20], np.float32)
    values, slopes = capped(library, x, 1.0)
    with mpmath.workdps(50):
        for given, value, slope in zip(x.tolist(), values.tolist(), slopes.tolist(), strict=True):
            assert abs(value / mpmath.tanh(given) - 1) < 3 * EPSILON
            assert abs(slope * mpmath.cosh(given) ** 2 - 1) < (4 + 4 * given) * EPSILON


def test_bounds_hold_far_out(library: ctypes.CDLL) -> None:
    x = np.array([1e4, -1e4, 3e38, -3e38, np.inf, -np.inf, np.nan, 0.0], np.float32)
    values, slopes = capped(library, x, 10.0)
    np.testing.assert_array_equal(values, [1, -1, 1, -1, np.nan, np.nan, np.nan, 0])
    np.testing.assert_array_equal(slopes[:4], 0)
    assert slopes[-1] == 1
    # A scale of zero leaves no logit, whatever the product.
    smallest = 1 / launch.LARGEST_TANH_SCALE
    np.testing.assert_array_less(abs(capped(library, x[:2], smallest)[0]), 1e-30)


@pytest.mark.parametrize("side", [1, 2])
def test_gradients_of_bounded_logits(
    library: ctypes.CDLL, side: int, rng: np.random.Generator
) -> None:
    """The kernels' units of row statistics, against the float64 reference."""
    num_keys, bound, scale = 40, 1.5, 0.7
    x1, x2 = (rng.standard_normal(num_keys).astype(np.float32) * 3 for _ in range(2))
    s = [scale * x.astype(np.float64) for x in (x1, x2)]
    slope = 1 - np.tanh(s[side - 1] / bound) ** 2
    s[side - 1] = bound * np.tanh(s[side - 1] / bound)
    lse1, lse2 = (np.logaddexp.reduce(x) for x in s)
    p1, p2 = np.exp(s[0] - lse1), np.exp(s[1] - lse2)
    kl = (p1 * (s[0] - s[1])).sum() - lse1 + lse2
    exact = slope * (p1 * (s[0] - s[1] - (kl - lse2 + lse1)) if side == 1 else p2 - p1)
    log2 = np.array([lse1, lse2, kl]) * launch.LOG2_E
    exponents = np.rint(log2[:2])
    fractions = log2[:2] - exponents
    last = fractions[1] if side == 2 else log2[2] - fractions[1] + fractions[0]
    row = np.array([exponents[0], fractions[0], exponents[1], last], np.float32)
    factors = [bound if t == side else scale for t in (1, 2)]
    # Of the parameters only the scales to base 2 are read, which six fields follow.
    fields = [0] * (len(launch.BACKWARD_PARAMS.format) - 1)
    fields[-8:-6] = [launch.LOG2_E * factor for factor in factors]
    params = np.frombuffer(launch.BACKWARD_PARAMS.pack(*fields), np.uint8)
    ds, weighted = np.empty(num_keys, np.float32), np.empty(num_keys, np.float32)
    library.product_gradients(
        side, num_keys, pointer(x1), pointer(x2), ctypes.c_float(scale / bound), pointer(params),
        pointer(row), ctypes.c_float(3.0), pointer(ds), pointer(weighted),
    )  # fmt: skip
    unit = np.log(2) if side == 1 else 1
    np.testing.assert_allclose(ds * unit, exact, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(weighted, 3 * exact, rtol=1e-5, atol=3e-7)


def test_constants_are_those_of_launch(library: ctypes.CDLL) -> None:
    constants = np.empty(3, np.float32)
    library.state_constants(pointer(constants))
    unset, masked, raise_above = constants
    assert masked == np.float32(launch.MASKED_LOGIT)
    # A masked logit must not raise an exponent that is not set, whatever the rounding of the scale.
    assert masked * (1 - 1e-6) < unset < -1e15
    # The largest sum of a chunk, and what 2^31 chunks can add up to, are finite.
    assert float(raise_above) * 2**31 * 64 < np.finfo(np.float32).max
    # The smallest scale leaves the masked logit a float32.
    assert abs(launch.MASKED_LOGIT / launch.SMALLEST_SCALE) < np.finfo(np.float32).max


# ------------------------------------------------------------------------- log-sum-exp in two parts


def floats32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@many(max_examples=300)
@given(exponent=st.integers(-150_000, 150_000), log2_sum=floats32(-1, 96))
@example(exponent=144_269, log2_sum=0.5)
@example(exponent=-7, log2_sum=7.0)
def test_nats_are_exact(library: ctypes.CDLL, exponent: int, log2_sum: float) -> None:
    nats = np.empty(2, np.float32)
    library.nats_of(
        1,
        pointer(np.array([exponent], np.float32)),
        pointer(np.array([log2_sum], np.float32)),
        pointer(nats),
    )
    high, low = nats.astype(np.longdouble)
    expected = (np.longdouble(exponent) + np.longdouble(np.float32(log2_sum))) * LN2
    # Relative to the larger part: the two may cancel. Nothing is asked of denormal numbers.
    largest = max(abs(exponent), abs(log2_sum), 2.0**-80)
    assert abs(high + low - expected) <= 2.0**-44 * largest
    assert nats[0] == np.float32(high + low)


@many(max_examples=300)
@given(lse=floats32(-(2.0**17), 2.0**17), part=st.floats(-0.5, 0.5))
@example(lse=1e5, part=0.3)
@example(lse=-1e5, part=0.0)
def test_bits_are_exact(library: ctypes.CDLL, lse: float, part: float) -> None:
    low = np.float32(part * float(np.spacing(np.float32(abs(lse)))))
    sums = np.empty(2, np.float32)
    library.log2_of(1, pointer(np.array([lse, low], np.float32)), pointer(sums))
    exponent, fraction = sums.astype(np.longdouble)
    expected = (np.longdouble(np.float32(lse)) + np.longdouble(low)) / LN2
    assert exponent == np.round(exponent)
    # Rounded before the low part is added, which may be as much as half a step.
    assert abs(fraction) <= 0.5 + float(np.spacing(np.float32(abs(lse)))) * 2
    # The fraction is a float32 of little more than a half: its own rounding is lost, no more.
    assert abs(exponent + fraction - expected) <= 2.0**-25 + 2.0**-44 * abs(lse)


@many(max_examples=200)
@given(exponent=st.integers(-150_000, 150_000), log2_sum=floats32(-1, 96))
@example(exponent=144_269, log2_sum=0.5)
def test_round_trip(library: ctypes.CDLL, exponent: int, log2_sum: float) -> None:
    nats, sums = np.empty(2, np.float32), np.empty(2, np.float32)
    library.nats_of(
        1,
        pointer(np.array([exponent], np.float32)),
        pointer(np.array([log2_sum], np.float32)),
        pointer(nats),
    )
    library.log2_of(1, pointer(nats), pointer(sums))
    whole, fraction = sums.astype(np.longdouble)
    expected = np.longdouble(exponent) + np.longdouble(np.float32(log2_sum))
    assert abs(whole + fraction - expected) <= 2.0**-25 + 2.0**-43 * abs(exponent)


# ----------------------------------------------------------------------------------- key_range.cuh


@dataclass(frozen=True)
class Mask:
    """What a call says of its keys, and whether the kernels take it for a window."""

    causal: bool = False
    window: Window = NO_WINDOW
    q_offset: int | None = None
    takes_window: bool = True

    def bounds(self, num_queries: int, num_keys: int) -> tuple[Any, int]:
        """The arguments of a C function that takes a key range."""
        problem = make_problem(num_queries, num_keys, self)
        is_window = problem.kernel_mask == "kWindow" or self.takes_window
        return pointer(np.array(launch._key_bounds(problem), np.int32)), int(is_window)

    def allowed(self, num_queries: int, num_keys: int) -> np.ndarray:
        """Whether a query sees a key: [queries, keys]."""
        offset = num_keys - num_queries if self.q_offset is None else self.q_offset
        distance = np.arange(num_keys) - (np.arange(num_queries)[:, None] + offset)
        left, right = self.window
        seen = np.ones(distance.shape, bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen & (distance <= 0) if self.causal else seen


def make_problem(num_queries: int, num_keys: int, mask: Mask) -> Problem:
    none = Strides(0, 0, 0)
    return Problem(
        dtype="bfloat16",
        batch=1,
        num_heads=1,
        num_key_heads1=1,
        num_key_heads2=1,
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim1=64,
        head_dim2=64,
        causal=mask.causal,
        scale1=1.0,
        scale2=1.0,
        layout="bhnd",
        q1=none,
        k1=none,
        q2=none,
        k2=none,
        row=none,
        aligned=True,
        window=mask.window,
        q_offset=mask.q_offset,
    )


def intervals(function: Any, bounds: tuple[Any, int], *columns: Any, out: int = 1) -> Any:
    columns = tuple(np.ascontiguousarray(column, np.int32) for column in columns)
    results = tuple(np.empty((len(columns[0]), 2), np.int32) for _ in range(out))
    function(*bounds, len(columns[0]), *map(pointer, (*columns, *results)))
    return results[0] if out == 1 else results


LENGTHS = st.integers(0, 24)
SIDES = st.one_of(st.none(), st.integers(0, 30), st.integers(0, 200))
OFFSETS = st.one_of(st.none(), st.none(), st.integers(-60, 60), st.integers(-400, 400))
MASKS = st.builds(Mask, st.booleans(), st.tuples(SIDES, SIDES), OFFSETS, takes_window=st.booleans())
FULL, CAUSAL = Mask(takes_window=False), Mask(causal=True, takes_window=False)
BAND = Mask(window=(40, 3))


@many(max_examples=200)
@given(num_queries=LENGTHS, num_keys=LENGTHS, mask=MASKS)
@example(num_queries=9, num_keys=7, mask=Mask(window=(0, 0), q_offset=-4))
@example(num_queries=9, num_keys=7, mask=Mask(window=(2, 0), q_offset=7))
@example(num_queries=9, num_keys=7, mask=Mask(window=(2, 5), q_offset=-(2**40)))
@example(num_queries=9, num_keys=7, mask=Mask(window=(2**40, 5), q_offset=2**40))
def test_key_range_is_brute_force(
    library: ctypes.CDLL, num_queries: int, num_keys: int, mask: Mask
) -> None:
    bounds, seen = mask.bounds(num_queries, num_keys), mask.allowed(num_queries, num_keys)
    keys = np.arange(num_keys)
    # Tiles ask about queries beyond the last one, too.
    ends = intervals(library.key_ends, bounds, np.arange(num_queries + 40))
    assert (np.diff(ends, axis=0) >= 0).all()
    assert ((ends >= 0) & (ends <= num_keys)).all()
    for query in range(num_queries):
        inside = (ends[query, 0] <= keys) & (keys < ends[query, 1])
        np.testing.assert_array_equal(inside, seen[query])
    pairs = [(a, b) for a in range(num_queries) for b in range(a, num_queries + 8)]
    if pairs:
        first, last = np.array(pairs).T
        found = intervals(library.keys_of_queries, bounds, first, last, out=3)
        for (a, b), some, every, empty in zip(pairs, *found, strict=True):
            rows = seen[a : b + 1]
            np.testing.assert_array_equal((some[0] <= keys) & (keys < some[1]), rows.any(axis=0))
            np.testing.assert_array_equal((every[0] <= keys) & (keys < every[1]), rows.all(axis=0))
            assert empty[0] == (not rows.any(axis=1).all())
    pairs = [(a, b) for a in range(num_keys) for b in range(a, num_keys + 8)]
    if pairs:
        first, last = np.array(pairs).T
        queries = np.arange(num_queries)
        for (a, b), (begin, end) in zip(
            pairs, intervals(library.queries_of_keys, bounds, first, last), strict=True
        ):
            seeing = seen[:, a : b + 1].any(axis=1)
            np.testing.assert_array_equal((begin <= queries) & (queries < end), seeing)


@many(max_examples=200)
@given(
    lengths=st.tuples(st.integers(1, MAX_LENGTH - 1), st.integers(1, MAX_LENGTH - 1)),
    causal=st.booleans(),
    sides=st.tuples(*[st.one_of(st.none(), st.integers(0, 2**33))] * 2),
    q_offset=st.one_of(st.none(), st.integers(-(2**33), 2**33)),
    part=st.floats(0, 1),
)
@example(lengths=(MAX_LENGTH - 1, 1), causal=True, sides=(None, None), q_offset=None, part=1.0)
@example(lengths=(1, MAX_LENGTH - 1), causal=False, sides=(5, 5), q_offset=None, part=1.0)
def test_key_range_of_long_sequences(
    library: ctypes.CDLL,
    lengths: tuple[int, int],
    causal: bool,
    sides: Window,
    q_offset: int | None,
    part: float,
) -> None:
    num_queries, num_keys = lengths
    num_keys = min(num_keys, MAX_LENGTH - num_queries)  # as the checks have it
    mask = Mask(causal, sides, q_offset)
    bounds = mask.bounds(num_queries, num_keys)
    query, key = int(part * (num_queries - 1)), int(part * (num_keys - 1))
    offset = num_keys - num_queries if q_offset is None else q_offset
    left, right = sides
    right = 0 if causal else right
    ((begin, end),) = intervals(library.key_ends, bounds, [query])
    assert begin == (0 if left is None else min(num_keys, max(0, query + offset - left)))
    assert end == (num_keys if right is None else min(num_keys, max(0, query + offset + right + 1)))
    ((begin, end),) = intervals(library.queries_of_keys, bounds, [key], [key + 127])
    last = min(num_keys - 1, key + 127)
    first_seeing = 0 if right is None else min(num_queries, max(0, key - right - offset))
    end_seeing = num_queries if left is None else last + left - offset + 1
    assert begin == first_seeing
    assert end == min(num_queries, max(0, end_seeing))
    # A tile of queries beyond the last one does not leave the range of an int.
    ((begin, end),) = intervals(library.key_ends, bounds, [num_queries + 255])
    assert 0 <= begin <= num_keys
    assert 0 <= end <= num_keys


# ------------------------------------------------------------------------------------ schedule.cuh

# block_q, block_k, tiles of 16 rows a warp, warps that share the keys, keys at a time.
FORWARD_TILES = (
    (16, 32, 1, 2, 16),
    (16, 128, 1, 4, 32),
    (16, 128, 1, 1, 64),
    (64, 16, 1, 1, 16),
    (64, 64, 2, 2, 32),
    (64, 48, 1, 1, 48),
    (128, 32, 2, 1, 16),
    (128, 128, 1, 1, 32),
)
# block_rows, block_q, rows of a warp, queries at a time.
BACKWARD_TILES = (
    (32, 16, 16, 16),
    (64, 32, 16, 32),
    (64, 32, 32, 16),
    (128, 48, 32, 48),
)
LONGER = st.one_of(st.integers(0, 40), st.integers(0, 300))


@many(max_examples=100)
@given(
    num_queries=LONGER,
    num_keys=LONGER,
    mask=MASKS,
    num_splits=st.integers(1, 40),
    tile=st.sampled_from(FORWARD_TILES),
)
@example(num_queries=0, num_keys=70, mask=CAUSAL, num_splits=2, tile=FORWARD_TILES[0])
@example(num_queries=70, num_keys=0, mask=CAUSAL, num_splits=2, tile=FORWARD_TILES[0])
@example(num_queries=300, num_keys=20, mask=CAUSAL, num_splits=3, tile=FORWARD_TILES[2])
@example(num_queries=300, num_keys=300, mask=BAND, num_splits=3, tile=FORWARD_TILES[2])
def test_query_stationary_blocks_visit_each_pair_once(
    library: ctypes.CDLL,
    num_queries: int,
    num_keys: int,
    mask: Mask,
    num_splits: int,
    tile: tuple[int, ...],
) -> None:
    counts = np.zeros((num_queries, num_keys), np.int32)
    num_wrong = library.count_forward(
        *mask.bounds(num_queries, num_keys), *tile, num_splits, pointer(counts)
    )
    assert num_wrong == 0
    np.testing.assert_array_equal(counts, mask.allowed(num_queries, num_keys))


@many(max_examples=100)
@given(
    num_queries=LONGER,
    heads=st.sampled_from(((1, 1), (6, 2), (6, 3), (21, 7), (80, 40), (5, 1))),
    block_q=st.sampled_from((64, 128, 192)),
    num_splits=st.integers(1, 4),
)
@example(num_queries=64, heads=(14, 7), block_q=64, num_splits=1)
def test_each_row_of_the_forward_belongs_to_one_row_of_a_tile(
    library: ctypes.CDLL, num_queries: int, heads: tuple[int, int], block_q: int, num_splits: int
) -> None:
    num_batches, (num_heads, heads_per_tile) = 2, heads
    counts = np.zeros((num_batches, num_heads, num_queries), np.int32)
    num_wrong = library.count_rows(
        num_batches, num_heads, num_queries, heads_per_tile, block_q, num_splits, pointer(counts)
    )
    assert num_wrong == 0
    np.testing.assert_array_equal(counts, num_splits)


@many(max_examples=60)
@given(
    num_queries=LONGER,
    num_keys=LONGER,
    mask=MASKS,
    side=st.sampled_from((1, 2)),
    groups=st.sampled_from(((1, 1, 1), (6, 3, 2), (6, 2, 6), (4, 4, 1), (6, 6, 3))),
    tile=st.sampled_from(BACKWARD_TILES),
)
@example(num_queries=0, num_keys=70, mask=FULL, side=2, groups=(6, 2, 3), tile=BACKWARD_TILES[0])
@example(num_queries=70, num_keys=0, mask=CAUSAL, side=1, groups=(6, 2, 3), tile=BACKWARD_TILES[0])
def test_key_stationary_blocks_visit_each_pair_once(
    library: ctypes.CDLL,
    num_queries: int,
    num_keys: int,
    mask: Mask,
    side: int,
    groups: tuple[int, int, int],
    tile: tuple[int, ...],
) -> None:
    num_batches, (num_heads, group1, group2) = 2, groups
    counts = np.zeros((num_batches, num_heads, num_queries, num_keys), np.int32)
    num_wrong = library.count_backward(
        *mask.bounds(num_queries, num_keys),
        side,
        num_batches,
        num_heads,
        group1,
        group2,
        *tile,
        pointer(counts),
    )
    assert num_wrong == 0
    expected = np.broadcast_to(mask.allowed(num_queries, num_keys), counts.shape)
    np.testing.assert_array_equal(counts, expected)


@many(max_examples=60)
@given(
    num_queries=st.one_of(LONGER, st.integers(100, 700)),
    num_keys=st.one_of(LONGER, st.integers(100, 700)),
    mask=MASKS,
    side=st.sampled_from((1, 2)),
    groups=st.sampled_from(((1, 1, 1), (6, 3, 2), (6, 2, 6), (4, 4, 1), (6, 6, 3))),
)
@pytest.mark.parametrize("most", [0, 1, 2, 4], ids=lambda most: f"heads-by-{most}")
@example(num_queries=0, num_keys=70, mask=FULL, side=2, groups=(6, 2, 3))
@example(num_queries=70, num_keys=0, mask=CAUSAL, side=1, groups=(6, 2, 3))
def test_blocks_that_go_round_visit_each_pair_once(
    library: ctypes.CDLL,
    most: int,
    num_queries: int,
    num_keys: int,
    mask: Mask,
    side: int,
    groups: tuple[int, int, int],
) -> None:
    num_batches, (num_heads, group1, group2) = 2, groups
    key_heads = num_batches * num_heads // (group1 if side == 1 else group2)
    # Blocks in any order, or in a fixed one in which so many heads alternate.
    num_interleaved = most and max(n for n in range(1, most + 1) if key_heads % n == 0)
    counts = np.zeros((num_batches, num_heads, num_queries, num_keys), np.int32)
    num_wrong = library.count_backward_in_rounds(
        *mask.bounds(num_queries, num_keys),
        side,
        num_batches,
        num_heads,
        group1,
        group2,
        num_interleaved,
        pointer(counts),
    )
    assert num_wrong == 0
    expected = np.broadcast_to(mask.allowed(num_queries, num_keys), counts.shape)
    np.testing.assert_array_equal(counts, expected)


@many(max_examples=60)
@given(
    num_queries=st.integers(1, 64),
    num_keys=LONGER,
    causal=st.booleans(),
    side=st.sampled_from((1, 2)),
    groups=st.sampled_from(((1, 1, 1), (6, 3, 3), (6, 2, 6), (4, 1, 4), (6, 6, 6))),
    num_blocks=st.integers(1, 40),
)
@example(num_queries=9, num_keys=70, causal=True, side=2, groups=(6, 6, 2), num_blocks=132)
def test_runs_of_key_tiles_visit_each_pair_once(
    library: ctypes.CDLL,
    num_queries: int,
    num_keys: int,
    causal: bool,
    side: int,
    groups: tuple[int, int, int],
    num_blocks: int,
) -> None:
    num_batches, (num_heads, group1, group2) = 2, groups
    counts = np.zeros((num_batches, num_heads, num_queries, num_keys), np.int32)
    mask = Mask(causal, takes_window=False)
    bounds, _ = mask.bounds(num_queries, num_keys)
    num_wrong = library.count_backward_in_runs(
        bounds, side, num_batches, num_heads, group1, group2, num_blocks, pointer(counts)
    )
    assert num_wrong == 0
    expected = np.broadcast_to(mask.allowed(num_queries, num_keys), counts.shape)
    np.testing.assert_array_equal(counts, expected)


# ---------------------------------------------------------------------------------------- smem.cuh


def tile_offsets(library: ctypes.CDLL, head_dim: int, num_rows: int) -> np.ndarray:
    offsets = np.empty((num_rows, head_dim // 8), np.int32)
    assert library.tile_offsets(head_dim, num_rows, pointer(offsets))
    return offsets


@pytest.mark.parametrize("head_dim", BUCKETS)
def test_layout_is_a_bijection(library: ctypes.CDLL, head_dim: int) -> None:
    for num_rows in (8, 16, 128):
        offsets = tile_offsets(library, head_dim, num_rows)
        expected = np.arange(0, num_rows * head_dim * 2, 16)
        np.testing.assert_array_equal(np.sort(offsets.ravel()), expected)
        # A row stays within itself, so that any run of rows is a tile.
        np.testing.assert_array_equal(
            np.sort(offsets, axis=1) // (head_dim * 2),
            np.broadcast_to(np.arange(num_rows)[:, None], offsets.shape),
        )


def assert_no_conflict(offsets: np.ndarray) -> None:
    """Eight accesses of 16 bytes reach the eight groups of four banks."""
    groups = np.sort(offsets // 16 % 8, axis=-1)
    assert (groups == np.arange(8)).all()


@pytest.mark.parametrize("head_dim", BUCKETS)
def test_ldmatrix_meets_no_bank_conflict(library: ctypes.CDLL, head_dim: int) -> None:
    offsets = tile_offsets(library, head_dim, 128)
    # The eight rows of a matrix, one chunk.
    assert_no_conflict(offsets.reshape(16, 8, -1).transpose(0, 2, 1))


@pytest.mark.parametrize("head_dim", BUCKETS)
@pytest.mark.parametrize("num_threads", [64, 128, 256])
def test_stores_meet_no_bank_conflict(
    library: ctypes.CDLL, head_dim: int, num_threads: int
) -> None:
    """Neighbouring threads store neighbouring chunks of 16 bytes, as load_tile deals them."""
    offsets = tile_offsets(library, head_dim, 128)
    num_chunks = head_dim // 8
    rows_at_a_time = num_threads // num_chunks
    threads = np.arange(rows_at_a_time * num_chunks // 8 * 8).reshape(-1, 8)
    for first_row in range(0, 128 - rows_at_a_time + 1, rows_at_a_time):
        assert_no_conflict(offsets[first_row + threads // num_chunks, threads % num_chunks])


@pytest.mark.parametrize("head_dim", BUCKETS)
def test_lane_addresses_are_the_layout(library: ctypes.CDLL, head_dim: int) -> None:
    offsets = tile_offsets(library, head_dim, 64)
    addresses = np.empty((6, head_dim // 16), np.uint32)
    # Tiles start at multiples of the permutation's period; test_plan.py holds the kernels to it.
    alignment = 128 if head_dim % 64 == 0 else 64
    for tile, lane_row, lane_chunk in itertools.product(
        (0, alignment, 7 * alignment, 227_328), range(16), (0, 1)
    ):
        assert library.lane_addresses(head_dim, tile, lane_row, lane_chunk, 48, pointer(addresses))
        expected = tile + offsets[lane_row : lane_row + 48 : 8, lane_chunk::2]
        np.testing.assert_array_equal(addresses, expected)


# ------------------------------------------------------------------------------------- entries.cuh

NUM_QUERIES_OF_RAGGED, NUM_KEYS_OF_RAGGED = 150, 170
CUTS = st.lists(st.integers(-3, 180), min_size=1, max_size=6).map(sorted)


def make_table(
    library: ctypes.CDLL, mask: Mask, lengths: dict[str, list[int]], sizes: tuple[int, int]
) -> tuple[tuple[Any, int], np.ndarray, np.ndarray, np.ndarray]:
    """Make a table; return the arguments of a range, what sees what, and both columns."""
    num_queries, num_keys = sizes
    names = tuple(lengths)
    packed = "cu_seqlens_q" in lengths
    ragged = Ragged(names, len(lengths["cu_seqlens_q"]) - 1 if packed else 0)
    problem = replace(make_problem(num_queries, num_keys, mask), ragged=ragged)
    arrays = {name: np.array(values, np.int32) for name, values in lengths.items()}
    fields = [
        (arrays[x.name].ctypes.data if x.name in arrays else 0) if isinstance(x, Address) else x
        for x in launch._table_params(problem, 0, has_keys=True).values
    ]
    params = np.frombuffer(launch.TABLE_PARAMS.pack(*fields), np.uint8)
    of_queries, of_keys = (np.empty((size, 2), np.int32) for size in sizes)
    library.make_table(pointer(params), pointer(of_queries), pointer(of_keys))
    seen = np.zeros(sizes, bool)
    if packed:
        ends = [
            np.clip(arrays[name], 0, size)
            for name, size in zip(("cu_seqlens_q", "cu_seqlens_k"), sizes, strict=True)
        ]
        parts = zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False)
    else:
        first = int(np.clip(arrays.get("kv_starts", [0])[0], 0, num_keys))
        most = int(np.clip(arrays.get("kv_lens", [num_keys])[0], 0, num_keys - first))
        rows = int(np.clip(arrays.get("q_lens", [num_queries])[0], 0, num_queries))
        parts = iter([(0, rows, first, first + most)])
    for q, q_end, k, k_end in parts:
        seen[q:q_end, k:k_end] = mask.allowed(q_end - q, k_end - k)
    bounds = pointer(np.array(launch._key_bounds(problem), np.int32)), 2
    return bounds, seen, of_queries, of_keys


@st.composite
def ragged_lengths(draw: Any) -> dict[str, list[int]]:
    if draw(st.booleans()):
        names = draw(st.sets(st.sampled_from(PADDING), min_size=1))
        return {name: [draw(st.integers(-3, 200))] for name in PADDING if name in names}
    queries, keys = draw(CUTS), draw(CUTS)
    count = min(len(queries), len(keys))
    return {"cu_seqlens_q": queries[:count], "cu_seqlens_k": keys[:count]}


@many(max_examples=200)
@given(lengths=ragged_lengths(), mask=MASKS)
@example(lengths={"cu_seqlens_q": [0, 5, 5, 150], "cu_seqlens_k": [0, 0, 170, 170]}, mask=FULL)
@example(lengths={"cu_seqlens_q": [7], "cu_seqlens_k": [9]}, mask=CAUSAL)
@example(lengths={"kv_lens": [0]}, mask=CAUSAL)
def test_tables_are_brute_force(
    library: ctypes.CDLL, lengths: dict[str, list[int]], mask: Mask
) -> None:
    sizes = NUM_QUERIES_OF_RAGGED, NUM_KEYS_OF_RAGGED
    bounds, seen, of_queries, of_keys = make_table(library, mask, lengths, sizes)
    for intervals_of, matrix in ((of_queries, seen), (of_keys, seen.T)):
        assert (np.diff(intervals_of, axis=0) >= 0).all()
        places = np.arange(matrix.shape[1])
        inside = (intervals_of[:, :1] <= places) & (places < intervals_of[:, 1:])
        np.testing.assert_array_equal(inside, matrix)
    # Tiles ask about queries beyond the last one, too, which are as the last one is.
    first = np.arange(0, sizes[0], 16)
    found = intervals(library.keys_of_queries, bounds, first, first + 63, out=3)
    for a, some, every, empty in zip(first, *found, strict=True):
        rows, keys = seen[a : a + 64], np.arange(sizes[1])
        assert (some[0] <= keys[rows.any(axis=0)]).all()
        assert (some[1] > keys[rows.any(axis=0)]).all()
        np.testing.assert_array_equal((every[0] <= keys) & (keys < every[1]), rows.all(axis=0))
        assert empty[0] == (not rows.any(axis=1).all())


@many(max_examples=100)
@given(
    lengths=ragged_lengths(),
    mask=MASKS,
    num_splits=st.integers(1, 6),
    tile=st.sampled_from(FORWARD_TILES),
)
def test_query_stationary_blocks_of_ragged_batches(
    library: ctypes.CDLL,
    lengths: dict[str, list[int]],
    mask: Mask,
    num_splits: int,
    tile: tuple[int, ...],
) -> None:
    sizes = NUM_QUERIES_OF_RAGGED, NUM_KEYS_OF_RAGGED
    bounds, seen, _, _ = make_table(library, mask, lengths, sizes)
    counts = np.zeros(sizes, np.int32)
    assert library.count_forward(*bounds, *tile, num_splits, pointer(counts)) == 0
    np.testing.assert_array_equal(counts, seen)


@many(max_examples=60)
@given(
    lengths=ragged_lengths(),
    mask=MASKS,
    side=st.sampled_from((1, 2)),
    groups=st.sampled_from(((1, 1, 1), (6, 3, 2), (4, 4, 1))),
    tile=st.sampled_from((*BACKWARD_TILES, None)),
)
def test_key_stationary_blocks_of_ragged_batches(
    library: ctypes.CDLL,
    lengths: dict[str, list[int]],
    mask: Mask,
    side: int,
    groups: tuple[int, int, int],
    tile: tuple[int, ...] | None,
) -> None:
    sizes = NUM_QUERIES_OF_RAGGED, NUM_KEYS_OF_RAGGED
    bounds, seen, _, _ = make_table(library, mask, lengths, sizes)
    counts = np.zeros((1, groups[0], *sizes), np.int32)
    arguments = (*bounds, side, 1, *groups)
    if tile is None:
        num_wrong = library.count_backward_in_rounds(*arguments, 0, pointer(counts))
    else:
        num_wrong = library.count_backward(*arguments, *tile, pointer(counts))
    assert num_wrong == 0
    np.testing.assert_array_equal(counts, np.broadcast_to(seen, counts.shape))

"""Problem: what is computed, described without its data."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamkl_cupy.problem import (
    INPUTS,
    ITEM_BYTES,
    MAX_GPU_SCALE,
    MAX_LENGTH,
    Device,
    Operand,
    Problem,
    Strides,
    check_gpu,
    check_head_dim,
    check_options,
    check_output,
    check_rows,
    check_strategy,
    check_window,
    check_wrt,
    describe,
    gradient_strides,
    lags_of,
)

CPU = Device("cpu")
CARD = Device("cuda", 0)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = np.cumprod((1, *shape[:0:-1]))[::-1]
    return tuple(int(stride) for stride in strides)


def operand(name: str, shape: tuple[int, ...], **changes: Any) -> Operand:
    fields: dict[str, Any] = {
        "name": name,
        "shape": shape,
        "strides": contiguous(shape),
        "dtype": "bfloat16",
        "device": CARD,
        "pointer": 4096 if np.prod(shape) else 0,
    }
    return Operand(**fields | changes)


def operands(
    batch: int = 2,
    heads: int = 6,
    key_heads: tuple[int, int] = (3, 2),
    lengths: tuple[int, int] = (10, 20),
    head_dims: tuple[int, int] = (64, 32),
    layout: str = "bhnd",
    **changes: Any,
) -> list[Operand]:
    result = []
    for side in (0, 1):
        for name, num_heads, length in (
            ("q", heads, lengths[0]),
            ("k", key_heads[side], lengths[1]),
        ):
            axes = (num_heads, length) if layout == "bhnd" else (length, num_heads)
            result.append(operand(f"{name}{side + 1}", (batch, *axes, head_dims[side]), **changes))
    return result


def test_all_sizes_are_read_in_both_layouts() -> None:
    for layout in ("bhnd", "bnhd"):
        problem = describe(*operands(layout=layout), causal=True, scale2=-3, layout=layout)
        assert problem.batch == 2
        assert (problem.num_heads, problem.num_key_heads1, problem.num_key_heads2) == (6, 3, 2)
        assert (problem.group1, problem.group2) == (2, 3)
        assert (problem.num_queries, problem.num_keys, problem.num_rows) == (10, 20, 120)
        assert (problem.head_dim1, problem.head_dim2) == (64, 32)
        assert (problem.dtype, problem.causal, problem.layout) == ("bfloat16", True, layout)
        assert (problem.scale1, problem.scale2) == (64**-0.5, -3.0)


def test_strides_are_in_the_canonical_order() -> None:
    bhnd, bnhd = describe(*operands()), describe(*operands(layout="bnhd"), layout="bnhd")
    assert bhnd.q1 == Strides(6 * 10 * 64, 10 * 64, 64)
    assert bnhd.q1 == Strides(6 * 10 * 64, 64, 6 * 64)
    assert bhnd.k2 == Strides(2 * 20 * 32, 20 * 32, 32)
    assert bnhd.k2 == Strides(2 * 20 * 32, 32, 2 * 32)
    assert bhnd.row == Strides(60, 10, 1)
    assert bnhd.row == Strides(60, 1, 6)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_rank_3_is_heads_and_rank_2_one_head(layout: str) -> None:
    three = [dataclasses.replace(o, shape=o.shape[1:], strides=o.strides[1:]) for o in operands()]
    problem = describe(*three, layout=layout)
    assert (problem.batch, problem.num_heads, problem.num_key_heads1) == (1, 6, 3)
    assert problem.q1 == Strides(0, 640, 64)
    assert problem.row == Strides(60, 10, 1)
    assert problem.layout == "bhnd"
    two = [dataclasses.replace(o, shape=o.shape[2:], strides=o.strides[2:]) for o in operands()]
    problem = describe(*two, layout=layout)
    assert (problem.batch, problem.num_heads, problem.num_queries) == (1, 1, 10)
    assert problem.k2 == Strides(0, 0, 32)


def test_strides_along_axes_of_length_1_do_not_count() -> None:
    plain = operands(batch=1, heads=1, key_heads=(1, 1))
    odd = [dataclasses.replace(o, strides=(7, -13, *o.strides[2:])) for o in plain]
    assert describe(*odd) == describe(*plain)
    assert describe(*odd).q1 == Strides(0, 0, 64)
    assert describe(*odd).aligned


def test_stride_0_is_kept() -> None:
    inputs = operands()
    inputs[1] = operand("k1", (2, 3, 20, 64), strides=(1280, 0, 64, 1))
    problem = describe(*inputs)
    assert problem.k1 == Strides(1280, 0, 64)
    assert problem.aligned


@pytest.mark.parametrize(
    ("change", "aligned"),
    [
        ({"pointer": 4096 + 16}, True),
        ({"pointer": 4096 + 2}, False),
        ({"pointer": 4096 + 8}, False),
        ({"strides": (1288, 640, 72, 1)}, True),
        ({"strides": (1284, 640, 64, 1)}, False),
        ({"strides": (1280, 641, 64, 1)}, False),
        ({"strides": (1280, 640, 68, 1)}, False),
    ],
)
@pytest.mark.parametrize("position", range(4))
def test_aligned_means_all_bases_and_strides_on_16_bytes(
    change: dict[str, Any], aligned: bool, position: int
) -> None:
    inputs = operands(heads=2, key_heads=(2, 2), lengths=(10, 10), head_dims=(64, 64))
    inputs[position] = dataclasses.replace(inputs[position], **change)
    assert describe(*inputs).aligned is aligned


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"lengths": (0, 20)}, {"lengths": (10, 0)}, {"heads": 0, "key_heads": (0, 0)}],
)
def test_empty_problems_need_no_memory(sizes: dict[str, Any]) -> None:
    inputs = [
        dataclasses.replace(o, strides=(-1, 3, 5, 7)) for o in operands(**sizes) if not o.size
    ]
    described = {o.name: o for o in operands(**sizes)} | {o.name: o for o in inputs}
    problem = describe(*(described[name] for name in INPUTS))
    assert problem.num_rows * problem.num_keys == 0
    assert problem.aligned
    assert problem.group1 >= 1


@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.lists(st.permutations(range(3)), min_size=4, max_size=4),
    st.sampled_from(["bhnd", "bnhd"]),
)
def test_offsets_of_views_are_those_of_numpy(
    sizes: tuple[int, int, int, int], orders: list[list[int]], layout: str
) -> None:
    batch, heads, num_queries, num_keys = sizes
    offsets = {}
    for name, order in zip(INPUTS, orders, strict=True):
        length = num_queries if name.startswith("q") else num_keys
        axes = (batch, heads, length) if layout == "bhnd" else (batch, length, heads)
        stored = np.arange(np.prod(axes) * 8).reshape(*(axes[axis] for axis in order), 8)
        offsets[name] = stored.transpose(*np.argsort(order), 3)
    inputs = [
        operand(name, array.shape, strides=tuple(stride // 8 for stride in array.strides))
        for name, array in offsets.items()
    ]
    problem = describe(*inputs, layout=layout)
    for name, array in offsets.items():
        strides = getattr(problem, name)
        canonical = array if layout == "bhnd" else array.swapaxes(1, 2)
        for b, h, n in np.ndindex(canonical.shape[:3]):
            offset = b * strides.batch + h * strides.head + n * strides.row
            assert offset == canonical[b, h, n, 0]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", INPUTS)
def test_gradients_are_contiguous_in_the_layout(layout: str, name: str) -> None:
    inputs = operands(layout=layout)
    problem = describe(*inputs, layout=layout)
    position = INPUTS.index(name)
    assert gradient_strides(problem, name) == getattr(problem, name)
    strided = dataclasses.replace(inputs[position], strides=(99840, 9984, 256, 1))
    inputs[position] = strided
    assert gradient_strides(describe(*inputs, layout=layout), name) == getattr(problem, name)


def test_a_problem_is_a_cheap_and_honest_key() -> None:
    problem, same = describe(*operands()), describe(*operands())
    assert problem == same
    assert hash(problem) == hash(same)
    assert {problem: 1}[same] == 1
    for change in (
        {"num_keys": 21},
        {"causal": True},
        {"aligned": False},
        {"row": Strides(1, 2, 3)},
    ):
        other = dataclasses.replace(problem, **change)
        assert other != problem
        assert hash(other) != hash(problem)
    for copied in (copy.copy(problem), pickle.loads(pickle.dumps(problem))):
        assert copied == problem
        assert hash(copied) == hash(problem)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 3  # type: ignore[misc]


def test_a_pickled_problem_carries_no_hash() -> None:
    # The hash of a string is another one in another process.
    constructor, arguments = describe(*operands()).__reduce__()
    assert constructor is Problem
    assert len(arguments) == len([f for f in dataclasses.fields(Problem) if f.init])


def test_every_selection_of_gradients_is_accepted_in_every_order() -> None:
    for count in (1, 2, 3, 4):
        for names in itertools.permutations(INPUTS, count):
            assert check_wrt(names) == names
            assert check_wrt(list(names)) == names
    for bad in ((), ("q3",), ("q1", "q1"), ([],), ("q1", None)):
        with pytest.raises(ValueError, match=r"^wrt: "):
            check_wrt(bad)
    for bad in ("q1", 3, None):
        with pytest.raises(TypeError, match=r"^wrt: "):
            check_wrt(bad)


def test_strategies() -> None:
    for strategy in ("auto", "separate"):
        check_strategy(strategy, True)
    for strategy in ("auto", "separate", "fused"):
        check_strategy(strategy, False)
    with pytest.raises(ValueError, match=r"^strategy: "):
        check_strategy("fused", True)


FAR = st.one_of(st.integers(-9, 9), st.integers(-(2**33), 2**33), st.integers(-(2**80), 2**80))


@given(
    lengths=st.tuples(*[st.one_of(st.integers(0, 9), st.integers(0, MAX_LENGTH // 2))] * 2),
    causal=st.booleans(),
    begin=st.one_of(st.none(), FAR),
    end=st.one_of(st.none(), FAR),
    q_offset=st.one_of(st.none(), FAR),
)
@example(lengths=(5, 7), causal=False, begin=-1, end=3, q_offset=2**70)
@example(lengths=(5, 7), causal=False, begin=-1, end=3, q_offset=-(2**70))
@example(lengths=(5, 7), causal=True, begin=None, end=None, q_offset=2**70)
def test_numbers_that_no_length_reaches_become_smaller_and_make_the_same_mask(
    lengths: tuple[int, int],
    causal: bool,
    begin: int | None,
    end: int | None,
    q_offset: int | None,
) -> None:
    # A window that begins and ends near the keys, wherever the queries are.
    offset = q_offset or 0
    left = None if begin is None else max(0, offset - begin)
    right = None if end is None else max(0, end - offset)
    window, nearer = check_window((left, right), q_offset)
    assert lags_of(*lengths, causal, window, nearer) == lags_of(
        *lengths, causal, (left, right), q_offset
    )
    assert all(side is None or 0 <= side <= 2 * MAX_LENGTH for side in window)
    assert (nearer is None) is (q_offset is None)
    assert -MAX_LENGTH <= (nearer or 0) <= MAX_LENGTH
    if abs(offset) <= MAX_LENGTH and max(left or 0, right or 0) <= MAX_LENGTH:
        assert (window, nearer) == ((left, right), q_offset)


@pytest.mark.parametrize("scale", [0, -1.5, 1e30, np.float32(0.5), np.float64(2), True.__int__()])
def test_scales_become_float(scale: Any) -> None:
    _, scale1, scale2, _ = check_options(False, scale, None, "bhnd")
    assert type(scale1) is float
    assert scale1 == scale
    assert scale2 is None


@pytest.mark.parametrize("head_dim", range(272))
def test_head_dims_with_a_kernel(head_dim: int) -> None:
    if head_dim in range(8, 257, 8):
        check_head_dim("q1", head_dim)
    else:
        with pytest.raises(ValueError, match=r"^q1: "):
            check_head_dim("q1", head_dim)


def test_check_gpu_looks_at_both_sides() -> None:
    problem = describe(*operands())
    check_gpu(problem)
    for change in (
        {"head_dim1": 12},
        {"head_dim2": 264},
        {"scale1": 2 * MAX_GPU_SCALE},
        {"scale2": -2 * MAX_GPU_SCALE},
    ):
        with pytest.raises(ValueError, match="expected"):
            check_gpu(dataclasses.replace(problem, **change))
    with pytest.raises(TypeError, match="float64"):
        check_gpu(dataclasses.replace(problem, dtype="float64"))


def test_largest_scale_is_finite_to_base_2_in_float32() -> None:
    assert np.isfinite(np.float32(MAX_GPU_SCALE * np.log2(np.e)))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(1.001 * MAX_GPU_SCALE * np.log2(np.e)))


ROWS = {"shape": (2, 6, 10), "device": CARD}


def test_upstream_gradient_may_have_any_strides_from_0_up() -> None:
    problem = describe(*operands())
    for strides in ((60, 10, 1), (0, 0, 0), (1, 2, 24), (120, 20, 2)):
        dkl = operand("dkl", (2, 6, 10), strides=strides, dtype="float32")
        assert check_rows(problem, dkl, contiguous=False, **ROWS) == Strides(*strides)
    dkl = operand("dkl", (2, 6, 10), strides=(60, 10, -1), dtype="float32")
    with pytest.raises(ValueError, match=r"^dkl: expected strides from 0 up"):
        check_rows(problem, dkl, contiguous=False, **ROWS)


def test_rows_follow_layout_and_rank() -> None:
    problem = describe(*operands(layout="bnhd"), layout="bnhd")
    dkl = operand("dkl", (2, 10, 6), dtype="float32")
    strides = check_rows(problem, dkl, shape=(2, 10, 6), device=CARD, contiguous=True)
    assert strides == problem.row
    three = [dataclasses.replace(o, shape=o.shape[1:], strides=o.strides[1:]) for o in operands()]
    dkl = operand("dkl", (6, 10), strides=(1, 6), dtype="float32")
    problem = describe(*three, layout="bnhd")
    assert check_rows(problem, dkl, shape=(6, 10), device=CARD, contiguous=False) == Strides(
        0, 1, 6
    )


def test_state_must_be_contiguous() -> None:
    problem = describe(*operands())
    lse = operand("state.lse1", (2, 6, 10), dtype="float32")
    check_rows(problem, lse, contiguous=True, **ROWS)
    for strides in ((0, 0, 0), (1, 2, 24), (60, 10, 2)):
        with pytest.raises(ValueError, match="C-contiguous"):
            check_rows(problem, dataclasses.replace(lse, strides=strides), contiguous=True, **ROWS)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_rows_are_float32_on_a_card_and_any_float_on_the_cpu(dtype: str) -> None:
    problem = describe(*operands(device=CPU))
    dkl = operand("dkl", (2, 6, 10), dtype=dtype, device=CPU)
    check_rows(problem, dkl, shape=(2, 6, 10), device=CPU, contiguous=False)
    problem = describe(*operands())
    dkl = operand("dkl", (2, 6, 10), dtype=dtype)
    if dtype == "float32":
        check_rows(problem, dkl, contiguous=False, **ROWS)
    else:
        with pytest.raises(TypeError, match=r"^dkl: expected float32, got "):
            check_rows(problem, dkl, contiguous=False, **ROWS)


def test_outputs_must_not_share_memory() -> None:
    def check(out: Operand, *others: Operand) -> None:
        check_output(out, shape=(4, 8), dtype="float32", device=CARD, alignment=16, others=others)

    out = operand("out", (4, 8), dtype="float32", pointer=4096)  # 4096 .. 4224
    q1 = operand("q1", (4, 8), strides=(16, 1), dtype="float32")  # spans 56 elements, 224 bytes
    check(out, dataclasses.replace(q1, pointer=4224))
    check(out, dataclasses.replace(q1, pointer=4096 - 224))
    check(out, operand("q1", (0, 8), pointer=4100))
    for pointer in (4220, 4096, 4096 - 220):
        with pytest.raises(ValueError, match="overlaps with that of q1"):
            check(out, dataclasses.replace(q1, pointer=pointer))

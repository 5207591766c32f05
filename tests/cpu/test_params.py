"""What Python and C++ agree on without a compiler between them: structs, templates, constants."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import catalogue, jit, launch, plan, tiling
from streamkl_cupy.problem import (
    CU_SEQLENS,
    LENGTHS,
    NO_WINDOW,
    PADDING,
    Problem,
    Ragged,
    Strides,
    gradient_strides,
)
from tests import host_compiler
from tests.pretended_driver import Cleared, Driver

SOURCES = jit.source_directory()
CARD = plan.device_facts("sm_90a")


def without_comments(file: str) -> str:
    return re.sub(r"//.*", "", (SOURCES / file).read_text())


# ----------------------------------------------------------------------------------------- structs

PLAIN_TYPES: dict[str, Any] = {
    "int": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "float": ctypes.c_float,
}
FORMATS = {
    ctypes.c_void_p: "Q",
    ctypes.c_int64: "q",
    ctypes.c_int32: "i",
    ctypes.c_uint32: "I",
    ctypes.c_float: "f",
}
PACKED = {
    "ForwardParams": launch.FORWARD_PARAMS,
    "PrepareParams": launch.PREPARE_PARAMS,
    "BackwardParams": launch.BACKWARD_PARAMS,
    "BothParams": launch.BOTH_PARAMS,
    "FinishParams": launch.FINISH_PARAMS,
    "MergeParams": launch.MERGE_PARAMS,
    "ReplaceParams": launch.REPLACE_PARAMS,
    "TableParams": launch.TABLE_PARAMS,
}


def parse_structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of params.cuh, by name. Data members are one level deep; functions are not."""
    types = dict(PLAIN_TYPES)
    text = without_comments("key_range.cuh") + without_comments("params.cuh")
    for name, body in re.findall(r"^struct (\w+) \{ *\n(.*?)^\};", text, re.DOTALL | re.MULTILINE):
        members = re.findall(r"^ {4}(?:const )?(\w+) ?([\w*, \[\]]+);\s*$", body, re.MULTILINE)
        fields = []
        for kind, names in members:
            for member in names.split(","):
                name_of_member, *length = re.findall(r"\w+", member)
                field = ctypes.c_void_p if "*" in member else types[kind]
                fields.append((name_of_member, field * int(length[0]) if length else field))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return {name: kind for name, kind in types.items() if name not in PLAIN_TYPES}


STRUCTS = parse_structs()


def flat(kind: Any, path: str = "", offset: int = 0) -> Iterator[tuple[str, str, int]]:
    """Path, format and offset of everything in a struct that is not a struct itself."""
    if kind in FORMATS:
        yield path, FORMATS[kind], offset
        return
    if issubclass(kind, ctypes.Array):
        for idx in range(kind._length_):
            inner = kind._type_
            yield from flat(inner, f"{path}[{idx}]", offset + idx * ctypes.sizeof(inner))
        return
    for name, inner in kind._fields_:
        yield from flat(inner, f"{path}.{name}".strip("."), offset + getattr(kind, name).offset)


def test_every_struct_is_packed() -> None:
    text = without_comments("params.cuh")
    assert set(re.findall(r"^struct (\w+Params)\b", text, re.MULTILINE)) == set(PACKED)
    used = {
        name
        for path in SOURCES.glob("*.cu")
        for name in re.findall(r"\bconst (?:__grid_constant__ )?(\w+) params\)", path.read_text())
    }
    assert used == set(PACKED)


@pytest.mark.skipif(
    host_compiler.missing_compiler() is not None, reason=str(host_compiler.missing_compiler())
)
def test_structs_lie_as_the_compiler_lays_them(tmp_path: Path) -> None:
    """Holds what is parsed here, so that the other tests need no compiler."""
    measured = [
        f"sizeof({name}), " + ", ".join(f"offsetof({name}, {path})" for path, _, _ in flat(kind))
        for name, kind in STRUCTS.items()
    ]
    source = tmp_path / "layouts.cpp"
    source.write_text(
        '#include <cstddef>\n#include "params.cuh"\n'
        f'extern "C" const unsigned long layouts[] = {{{", ".join(measured)}}};\n'
    )
    library = host_compiler.load(source, tmp_path)
    expected = list(
        itertools.chain.from_iterable(
            [ctypes.sizeof(kind), *(offset for _, _, offset in flat(kind))]
            for kind in STRUCTS.values()
        )
    )
    layouts = (ctypes.c_ulong * len(expected)).in_dll(library, "layouts")
    assert list(layouts) == expected


@pytest.mark.parametrize("name", PACKED)
def test_formats_are_the_structs(name: str) -> None:
    packed, kind = PACKED[name], STRUCTS[name]
    assert packed.size == ctypes.sizeof(kind)
    order, formats = packed.format[0], re.sub(r"\d+x$", "", packed.format[1:])
    assert order == "="
    offsets = [struct.calcsize(f"={formats[:idx]}") for idx in range(len(formats))]
    assert list(zip(formats, offsets, strict=True)) == [(f, o) for _, f, o in flat(kind)]


# ----------------------------------------------------------------------------------------- packing


def distinct_problem(dtype: str) -> Problem:
    """A problem no two numbers of which are the same, so that none can take another's place."""
    return Problem(
        dtype=dtype,
        batch=2,
        num_heads=12,
        num_key_heads1=4,
        num_key_heads2=3,
        num_queries=700,
        num_keys=3000,
        head_dim1=96,
        head_dim2=64,
        causal=True,
        scale1=0.11,
        scale2=-0.23,
        layout="bhnd",
        q1=Strides(10**9 + 1, 10**6 + 1, 101),
        k1=Strides(10**9 + 2, 10**6 + 2, 102),
        q2=Strides(10**9 + 3, 10**6 + 3, 103),
        k2=Strides(10**9 + 4, 10**6 + 4, 104),
        row=Strides(8400, 700, 1),
        aligned=False,
        window=(51, 77),
        q_offset=2222,
    )


INPUTS = ("q1", "k1", "q2", "k2")
RESULTS = ("kl", "lse1", "lse2", "lse1_low", "lse2_low")
ENTROPIES = ("entropy", "cross_entropy")
GRADIENTS = ("dq1", "dk1", "dq2", "dk2")
POINTERS = {
    name: 2**40 + idx * 4096
    for idx, name in enumerate((*INPUTS, *RESULTS, *ENTROPIES, "dkl", *GRADIENTS, *LENGTHS))
}
WORKSPACE = 2**45
DKL = Strides(77_000, 7000, 7)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def values(struct_name: str, params: bytes) -> dict[str, Any]:
    kind = STRUCTS[struct_name]
    return {
        path: struct.unpack_from(f"={form}", params, offset)[0] for path, form, offset in flat(kind)
    }


def tensor(name: str, strides: Strides) -> dict[str, int]:
    return {f"{name}.data": POINTERS[name], **rows(name, strides)}


def rows(name: str, strides: Strides) -> dict[str, int]:
    return {
        f"{name}.batch_stride": strides.batch,
        f"{name}.head_stride": strides.head,
        f"{name}.row_stride": strides.row,
    }


def common(problem: Problem) -> dict[str, Any]:
    """What the parameters of the forward and of the backward share."""
    return {
        **tensor("q1", problem.q1),
        **tensor("k1", problem.k1),
        **tensor("q2", problem.q2),
        **tensor("k2", problem.k2),
        "range.num_queries": 700,
        "range.num_keys": 3000,
        "range.is_causal": 0,
        "range.begin_lag": 51 - 2222,
        "range.end_lag": -2222,
        "num_heads": 12,
        "group1": 3,
        "group2": 4,
        "head_dim1": 96,
        "head_dim2": 64,
        "scale1": pytest.approx(0.11 * launch.LOG2_E, rel=1e-7),
        "scale2": pytest.approx(-0.23 * launch.LOG2_E, rel=1e-7),
        "table.of_queries": 0,
        "table.of_keys": 0,
        "tanh_scale1": 0.0,
        "tanh_scale2": 0.0,
    }


def test_forward_packs_each_value_in_its_field(driver: Driver) -> None:
    problem = distinct_problem("bfloat16")
    with plan.override(num_splits=5):
        chosen = plan.forward(problem, CARD)
    launch.forward(chosen, problem, 0).launch(POINTERS, WORKSPACE, 0)
    forward, reduce = driver.seen
    assert (forward.kernel, reduce.kernel) == ("forward_sm80", "reduce_splits")
    assert forward.params == reduce.params
    assert values("ForwardParams", forward.params) == {
        **common(problem),
        **rows("rows", problem.row),
        **{name: POINTERS[name] for name in RESULTS},
        "partials": WORKSPACE,
        "num_query_tiles": chosen.num_query_tiles,
        "num_splits": 5,
        "heads_per_tile": 1,
        "queries_per_tile": chosen.tile.stationary_rows,
        "masked_logit1": pytest.approx(launch.MASKED_LOGIT / (0.11 * launch.LOG2_E), rel=1e-7),
        "masked_logit2": pytest.approx(launch.MASKED_LOGIT / (-0.23 * launch.LOG2_E), rel=1e-7),
        "num_rows": 2 * 12 * 700,
        "entropy": 0,
        "cross_entropy": 0,
    }
    with plan.override(num_splits=5):
        chosen = plan.forward(problem, CARD, has_entropy=True)
    assert chosen.workspace_bytes == 24 * 5 * 2 * 12 * 700
    launch.forward(chosen, problem, 0).launch(POINTERS, WORKSPACE, 0)
    for step in driver.seen[2:]:
        packed = values("ForwardParams", step.params)
        assert {name: packed[name] for name in ENTROPIES} == {n: POINTERS[n] for n in ENTROPIES}


RAGGED = {
    "some": Ragged(("kv_lens",)),
    "padded": Ragged(PADDING),
    "packed": Ragged(CU_SEQLENS, 17, 90, 110),
}


@pytest.mark.parametrize("name", RAGGED)
def test_tables_of_ragged_batches(driver: Driver, name: str) -> None:
    problem = dataclasses.replace(distinct_problem("float16"), ragged=RAGGED[name])
    lengths = {n: POINTERS[n] if n in RAGGED[name].names else 0 for n in LENGTHS}
    of_problem = {
        **lengths,
        "left": 51,
        "right": 0,
        "q_offset": 2222,
        "has_offset": 1,
        "num_queries": 700,
        "num_keys": 3000,
        "num_sequences": 17 if name == "packed" else 0,
        "num_batches": 2,
    }
    with plan.override(num_splits=3):
        chosen = plan.forward(problem, CARD)
    launch.forward(chosen, problem, 0).launch(POINTERS, WORKSPACE, 0)
    table, forward, reduce = driver.seen
    of_queries = WORKSPACE + chosen.table_offset
    assert chosen.workspace_bytes == chosen.table_offset + 8 * 2 * 700
    expected = {"of_queries": of_queries, "of_keys": 0, **of_problem}
    assert (table.kernel, table.grid) == ("key_table", -(-2 * 700 // 256))
    assert values("TableParams", table.params) == expected
    for step in (forward, reduce):
        packed = values("ForwardParams", step.params)
        assert (packed["table.of_queries"], packed["table.of_keys"]) == (of_queries, 0)
    driver.seen.clear()
    planned = plan.backward(problem, CARD, ("q2", "k2"), strategy="separate")
    launch.backward(planned, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    table, cleared, _, *gradients = driver.seen
    assert cleared == Cleared(WORKSPACE + planned.max_dkl_offset, 4, 0)
    of_queries = WORKSPACE + planned.table_offset
    of_keys = of_queries + 8 * 2 * 700
    assert planned.workspace_bytes == planned.table_offset + 8 * 2 * 3700
    assert (table.kernel, table.grid) == ("key_table", -(-2 * 3700 // 256))
    assert values("TableParams", table.params) == {
        "of_queries": of_queries,
        "of_keys": of_keys,
        **of_problem,
    }
    for step in gradients:
        packed = values("BackwardParams", step.params)
        assert (packed["table.of_queries"], packed["table.of_keys"]) == (of_queries, of_keys)


def test_a_table_without_limits(driver: Driver) -> None:
    problem = dataclasses.replace(
        distinct_problem("bfloat16"),
        ragged=RAGGED["some"],
        causal=False,
        window=NO_WINDOW,
        q_offset=None,
    )
    launch.forward(plan.forward(problem, CARD), problem, 0).launch(POINTERS, WORKSPACE, 0)
    packed = values("TableParams", driver.seen[0].params)
    limits = {name: packed[name] for name in ("left", "right", "has_offset")}
    assert limits == {"left": -1, "right": -1, "has_offset": 0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_backward_packs_each_value_in_its_field(driver: Driver, dtype: str, strategy: str) -> None:
    problem = distinct_problem(dtype)
    chosen = plan.backward(problem, CARD, INPUTS, strategy=strategy)
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    max_dkl = WORKSPACE + chosen.max_dkl_offset if dtype == "float16" else 0
    scratch = WORKSPACE + chosen.scratch_offset
    seen = iter(driver.seen)
    for side in chosen.sides:
        dq, dk = f"q{side.side}", f"k{side.side}"
        if max_dkl:
            assert next(seen) == Cleared(max_dkl, 4, 0)
        step = next(seen)
        assert step.kernel == "backward_prepare"
        assert values("PrepareParams", step.params) == {
            **rows("rows", problem.row),
            **{name: POINTERS[name] for name in RESULTS},
            "dkl": POINTERS["dkl"],
            **rows("dkl_rows", DKL),
            "row_statistics": WORKSPACE,
            "max_dkl": max_dkl,
            "num_heads": 12,
            "num_queries": 700,
            "num_rows": 2 * 12 * 700,
            "mass1": 0,
            "weighted_dkl": 0,
            "is_given1": 0,
            "is_given2": 0,
        }
        expected = {
            **common(problem),
            "dkl": POINTERS["dkl"],
            **rows("dkl_rows", DKL),
            "row_statistics": WORKSPACE,
            "max_dkl": max_dkl,
            "dq": POINTERS["d" + dq],
            "dk": POINTERS["d" + dk],
            **rows("dq_rows", gradient_strides(problem, dq)),
            **rows("dk_rows", gradient_strides(problem, dk)),
            "dq_scratch": 0,
            "dq_counts": 0,
            "num_interleaved": 1,
            "gradient_scale": pytest.approx(0.11 if side.side == 1 else -0.23, rel=1e-7),
        }
        if strategy == "fused":
            assert next(seen) == Cleared(scratch, side.scratch_bytes, 0)
            expected |= {"dq_scratch": scratch, "num_blocks": side.key_blocks}
            step = next(seen)
            assert step.kernel == "backward_fused_sm80"
            assert values("BackwardParams", step.params) == expected
            step = next(seen)
            assert step.kernel == "backward_finish"
            assert values("FinishParams", step.params) == {
                "dq_scratch": scratch,
                "dq": POINTERS["d" + dq],
                **rows("dq_rows", gradient_strides(problem, dq)),
                "num_heads": 12,
                "num_queries": 700,
                "head_dim": 96 if side.side == 1 else 64,
                "num_row_tiles": 44,
                "heads_per_tile": 1,
                "gradient_scale": pytest.approx(0.11 if side.side == 1 else -0.23, rel=1e-7),
            }
        else:
            for kernel, num_blocks in (("dq", side.dq_blocks), ("dk", side.key_blocks)):
                step = next(seen)
                expected["num_blocks"] = num_blocks
                assert step.kernel == f"backward_{kernel}_sm80"
                assert values("BackwardParams", step.params) == expected
    assert next(seen, None) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_pass_for_both_sides_has_the_parameters_of_both(driver: Driver, dtype: str) -> None:
    keys = {"num_key_heads1": 3, "num_key_heads2": 3}
    problem = dataclasses.replace(
        distinct_problem(dtype), aligned=True, window=NO_WINDOW, q_offset=None, **keys
    )
    chosen = plan.backward(problem, CARD, INPUTS, deterministic=True)
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    *prepared, of_queries, of_keys = driver.seen
    max_dkl = WORKSPACE + chosen.max_dkl_offset if dtype == "float16" else 0
    statistics = {2: WORKSPACE, 1: WORKSPACE + 16 * problem.num_rows}
    assert [step for step in prepared if isinstance(step, Cleared)] == (
        2 * [Cleared(max_dkl, 4, 0)] if max_dkl else []
    )
    launches = [step for step in prepared if not isinstance(step, Cleared)]
    for side, step in zip((2, 1), launches, strict=True):
        assert step.kernel == "backward_prepare"
        packed = values("PrepareParams", step.params)
        assert (packed["row_statistics"], packed["max_dkl"]) == (statistics[side], max_dkl)
    assert chosen.both is not None
    for step, rows_of, num_blocks in (
        (of_queries, "q", chosen.both.dq_blocks),
        (of_keys, "k", chosen.both.key_blocks),
    ):
        assert step.kernel == f"backward_d{rows_of}_both_sm90"
        size = launch.BACKWARD_PARAMS.size
        assert len(step.params) == 2 * size
        for side, params in ((1, step.params[:size]), (2, step.params[size:])):
            dq, dk = f"q{side}", f"k{side}"
            assert values("BackwardParams", params) == {
                **common(problem),
                "group1": 4,
                "range.is_causal": 1,
                "range.begin_lag": 700,
                "range.end_lag": 700 - 3000,
                "dkl": POINTERS["dkl"],
                **rows("dkl_rows", DKL),
                "row_statistics": statistics[side],
                "max_dkl": max_dkl,
                "dq": POINTERS["d" + dq],
                "dk": POINTERS["d" + dk],
                **rows("dq_rows", gradient_strides(problem, dq)),
                **rows("dk_rows", gradient_strides(problem, dk)),
                "dq_scratch": 0,
                "dq_counts": 0,
                "num_interleaved": 1,
                "num_blocks": num_blocks,
                "gradient_scale": pytest.approx(0.11 if side == 1 else -0.23, rel=1e-7),
            }
        kernel = chosen.both.dq if rows_of == "q" else chosen.both.dk
        assert kernel is not None
        assert kernel.boxes is not None
        box_q, box_k = kernel.boxes
        assert [(one["pointer"], one["box"]) for one in step.maps] == [
            (POINTERS["q1"], box_q),
            (POINTERS["k1"], box_k),
            (POINTERS["q2"], box_q),
            (POINTERS["k2"], box_k),
        ]


def test_ordered_sums_have_counts_behind_the_scratch(driver: Driver) -> None:
    problem = dataclasses.replace(distinct_problem("bfloat16"), aligned=True)
    with plan.override(strategy="fused"):
        chosen = plan.backward(problem, CARD, ("q2", "k2"), deterministic=True)
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    _, cleared, fused, _ = driver.seen
    (side,), scratch = chosen.sides, WORKSPACE + chosen.scratch_offset
    assert side.counts_offset == 4 * 2 * 12 * 704 * 64
    assert side.scratch_bytes == side.counts_offset + 4 * 2 * 12 * 11
    assert cleared == Cleared(scratch, side.scratch_bytes, 0)
    packed = values("BackwardParams", fused.params)
    assert packed["dq_scratch"] == scratch
    assert packed["dq_counts"] == scratch + side.counts_offset
    assert packed["num_interleaved"] == side.num_interleaved == 6


def test_hopper_backward_brings_its_maps(driver: Driver) -> None:
    problem = dataclasses.replace(distinct_problem("bfloat16"), aligned=True)
    chosen = plan.backward(problem, CARD, ("q2", "k2"), strategy="fused")
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    prepare, cleared, fused, finish = driver.seen
    assert cleared == Cleared(WORKSPACE + chosen.scratch_offset, chosen.sides[0].scratch_bytes, 0)
    names = (prepare.kernel, fused.kernel, finish.kernel)
    assert names == ("backward_prepare", "backward_fused_sm90", "backward_finish")
    assert chosen.sides[0].fused is not None
    assert chosen.sides[0].fused.boxes is not None
    box_q, box_k = chosen.sides[0].fused.boxes
    assert [(one["pointer"], one["sizes"], one["box"]) for one in fused.maps] == [
        (POINTERS["q1"], (96, 700, 12, 2), box_q),
        (POINTERS["k1"], (96, 3000, 4, 2), box_k),
        (POINTERS["q2"], (64, 700, 12, 2), box_q),
        (POINTERS["k2"], (64, 3000, 3, 2), box_k),
    ]
    packed = values("BackwardParams", fused.params)
    assert packed["num_blocks"] == chosen.sides[0].key_blocks
    assert packed["dq_scratch"] == WORKSPACE + chosen.scratch_offset
    assert packed["dk"] == POINTERS["dk2"]
    assert len(prepare.arguments) == len(finish.arguments) == 1


@pytest.mark.parametrize(
    ("scale", "bound", "factor", "tanh_scale"),
    [
        (-0.23, 50.0, 50.0, -0.23 / 50),
        (0.0, 2.0, 2.0, 1 / launch.LARGEST_TANH_SCALE),
        (3.0, 1e300, launch.LARGEST_SOFTCAP, 3.0 / launch.LARGEST_SOFTCAP),
        (3.0, 1e-300, launch.SMALLEST_SCALE / launch.LOG2_E, launch.LARGEST_TANH_SCALE),
    ],
)
def test_a_bound_takes_the_place_of_the_scale(
    driver: Driver, scale: float, bound: float, factor: float, tanh_scale: float
) -> None:
    problem = dataclasses.replace(distinct_problem("bfloat16"), scale2=scale, softcap2=bound)
    chosen = plan.forward(problem, CARD)
    launch.forward(chosen, problem, 0).launch(POINTERS, WORKSPACE, 0)
    backward = plan.backward(problem, CARD, ("q2",))
    launch.backward(backward, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    for kernel in (*chosen.kernels, *backward.kernels):
        assert dict(kernel.template).get("kHasSoftcap", True)
    forward, gradient = driver.seen[0], driver.seen[-1]
    for name, step in (("ForwardParams", forward), ("BackwardParams", gradient)):
        packed = values(name, step.params)
        assert packed["scale1"] == pytest.approx(0.11 * launch.LOG2_E, rel=1e-7)
        assert packed["scale2"] == pytest.approx(factor * launch.LOG2_E, rel=1e-7)
        assert packed["tanh_scale1"] == 0
        assert packed["tanh_scale2"] == pytest.approx(tanh_scale, rel=1e-7)
    packed = values("ForwardParams", forward.params)
    masked = launch.MASKED_LOGIT / (factor * launch.LOG2_E)
    assert packed["masked_logit2"] == pytest.approx(masked, rel=1e-7)
    packed = values("BackwardParams", gradient.params)
    assert packed["gradient_scale"] == pytest.approx(scale, rel=1e-7)


def scale_error(scale: float) -> float:
    error = float(np.float32(scale * launch.LOG2_E)) / (scale * launch.LOG2_E) - 1
    assert 0 < abs(error) <= 2**-24
    return error


GIVEN_STRIDES = (Strides(90_000, 8000, 9), Strides(60_000, 5000, 6))


@pytest.mark.parametrize("given", [("lse1",), ("lse2",), ("lse1", "lse2")], ids=str)
@pytest.mark.parametrize("num_splits", [1, 5])
def test_given_log_sum_exps_come_after_the_forward(
    driver: Driver, given: tuple[str, ...], num_splits: int
) -> None:
    problem = distinct_problem("bfloat16")
    with plan.override(num_splits=num_splits):
        chosen = plan.forward(problem, CARD, given=given)
    strides = [s if f"lse{i}" in given else None for i, s in enumerate(GIVEN_STRIDES, 1)]
    addresses = {"mass1": 2**42, "given1": 2**42 + 4096, "given2": 2**42 + 8192}
    chain = launch.forward(chosen, problem, 0, (strides[0], strides[1]))
    chain.launch(POINTERS | addresses, WORKSPACE, 0)
    *computing, replacing = driver.seen
    assert replacing.kernel == "replace_lse"
    part_bytes = 4 * 2 * 12 * 700
    # The own values lie behind the partial states, and up to the end.
    assert chosen.own_offset >= 20 * num_splits * 2 * 12 * 700 * (num_splits > 1)
    assert chosen.own_offset + 4 * part_bytes == chosen.workspace_bytes
    places = [WORKSPACE + chosen.own_offset + part * part_bytes for part in range(4)]
    own = dict(zip(RESULTS, [POINTERS["kl"], *places], strict=True))
    for step in computing:
        packed = values("ForwardParams", step.params)
        assert {name: packed[name] for name in RESULTS} == own
    assert values("ReplaceParams", replacing.params) == {
        **{f"own.{name}": address for name, address in own.items()},
        **{name: POINTERS[name] for name in RESULTS},
        "mass1": addresses["mass1"],
        **rows("rows", problem.row),
        **{f"given{i}": addresses[f"given{i}"] if s else 0 for i, s in enumerate(strides, 1)},
        **rows("given1_rows", strides[0] or Strides(0, 0, 0)),
        **rows("given2_rows", strides[1] or Strides(0, 0, 0)),
        "scale1_error": pytest.approx(scale_error(0.11), rel=1e-6),
        "scale2_error": pytest.approx(scale_error(-0.23), rel=1e-6),
        "num_heads": 12,
        "num_queries": 700,
        "num_rows": 2 * 12 * 700,
    }


@pytest.mark.parametrize("given", [("lse1",), ("lse2",), ("lse1", "lse2")], ids=str)
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_the_mass_of_p1_goes_into_dkl(
    driver: Driver, strategy: str, given: tuple[str, ...]
) -> None:
    problem = distinct_problem("float16")
    plain = plan.backward(problem, CARD, INPUTS, strategy=strategy)
    chosen = plan.backward(problem, CARD, INPUTS, strategy=strategy, given=given)
    assert chosen.weighted_dkl_offset >= plain.workspace_bytes
    assert chosen.workspace_bytes == chosen.weighted_dkl_offset + 4 * 2 * 12 * 700
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS | {"mass1": 2**42}, WORKSPACE, 0)
    weighted = WORKSPACE + chosen.weighted_dkl_offset
    for step in driver.seen:
        if isinstance(step, Cleared):
            continue
        if step.kernel == "backward_prepare":
            packed = values("PrepareParams", step.params)
            assert packed["dkl"] == POINTERS["dkl"]
            assert rows("dkl_rows", DKL).items() <= packed.items()
            assert packed["mass1"] == 2**42
            assert packed["weighted_dkl"] == weighted
            assert (packed["is_given1"], packed["is_given2"]) == (
                int("lse1" in given),
                int("lse2" in given),
            )
        elif step.kernel != "backward_finish":
            packed = values("BackwardParams", step.params)
            assert packed["dkl"] == weighted
            assert rows("dkl_rows", problem.row).items() <= packed.items()


def test_merge_packs_each_value_in_its_field(driver: Driver) -> None:
    num_states, num_rows = 11, 5000
    chosen = plan.merge(num_rows, num_states, CARD)
    states = {
        f"{i}.{name}": 2**41 + (10 * i + part) * 4096
        for i in range(num_states)
        for part, name in enumerate(RESULTS)
    }
    launch.merge(chosen, num_rows, 0).launch(POINTERS | states, 0, 0)
    first, second = (values("MergeParams", step.params) for step in driver.seen)
    whole = {name: POINTERS[name] for name in RESULTS}
    for packed, sources in (
        (first, [{n: states[f"{i}.{n}"] for n in RESULTS} for i in range(8)]),
        (second, [whole, *({n: states[f"{i}.{n}"] for n in RESULTS} for i in range(8, 11))]),
    ):
        sources = sources + [dict.fromkeys(RESULTS, 0)] * (8 - (num := len(sources)))
        table = {f"states[{i}].{n}": x for i, of in enumerate(sources) for n, x in of.items()}
        assert packed == {**whole, **table, "num_rows": num_rows, "num_states": num}


def test_few_queries_of_a_key_head_are_one_tile(driver: Driver) -> None:
    problem = dataclasses.replace(distinct_problem("bfloat16"), aligned=True, num_queries=5)
    problem = dataclasses.replace(
        problem, num_key_heads1=problem.num_key_heads2, window=NO_WINDOW, q_offset=None
    )
    chosen = plan.backward(problem, CARD, ("q2", "k2"), strategy="fused")
    launch.backward(chosen, problem, DKL, 0).launch(POINTERS, WORKSPACE, 0)
    _, _, fused, finish = driver.seen
    assert fused.kernel == "backward_few_sm90"
    # Four heads of five queries are twenty rows: boxes have the heads before the queries.
    assert [(one["pointer"], one["sizes"], one["box"]) for one in fused.maps] == [
        (POINTERS["q1"], (96, 12, 5, 2), 4),
        (POINTERS["k1"], (96, 3000, 3, 2), 64),
        (POINTERS["q2"], (64, 12, 5, 2), 4),
        (POINTERS["k2"], (64, 3000, 3, 2), 64),
    ]
    packed = values("BackwardParams", fused.params)
    assert packed["num_blocks"] == chosen.sides[0].key_blocks == 2 * 3 * 47
    packed = values("FinishParams", finish.params)
    assert (packed["num_row_tiles"], packed["heads_per_tile"]) == (2, 4)


# --------------------------------------------------------------------------------------- templates


def template_parameters(kernel: str) -> tuple[tuple[str, type], ...]:
    """Names of the template parameters of a kernel, and the type of Python that they take."""
    kinds = {"class": str, "int": int, "bool": bool, "Mask": str}
    head = re.search(
        rf"(?:template <([^<>]*)>\s*)?__global__ void [^;{{]*?\b{kernel}\([^;{{]*?\bparams\)",
        without_comments(f"{kernel}.cu"),
    )
    assert head is not None, f"{kernel}.cu holds no __global__ of its name"
    parameters = [parameter.split() for parameter in (head[1] or "").split(",") if parameter]
    return tuple((name, kinds[kind]) for kind, name in parameters)


@pytest.mark.parametrize("arch", sorted(plan.TYPICAL_CARDS))
def test_plans_name_the_template_parameters_in_order(arch: str) -> None:
    found = {
        (kernel, tuple((name, type(value)) for name, value in template))
        for kernel, template in catalogue.specialisations(arch)
    }
    kernels = {path.stem for path in SOURCES.glob("*.cu")}
    assert found <= {(kernel, template_parameters(kernel)) for kernel in kernels}
    # Only Hopper runs Hopper's kernels.
    expected = {name for name in kernels if arch == "sm_90a" or "sm90" not in name}
    assert {kernel for kernel, _ in found} == expected


# --------------------------------------------------------------------------------------- constants


def constant(file: str, name: str) -> str:
    found = re.findall(rf"\b{name} = ([^;]+);", without_comments(file))
    assert len(found) == 1, f"{file}: {name} is defined {len(found)} times"
    return str(found[0])


def test_constants_are_the_same_on_both_sides() -> None:
    assert int(constant("reduce_splits.cu", "kNumThreads")) == plan.REDUCE_THREADS
    assert int(constant("backward_prepare.cu", "kPrepareThreads")) == plan.PREPARE_THREADS
    assert int(constant("backward_finish.cu", "kFinishThreads")) == plan.FINISH_THREADS
    assert int(constant("merge_states.cu", "kMergeThreads")) == plan.MERGE_THREADS
    assert int(constant("replace_lse.cu", "kReplaceThreads")) == plan.REPLACE_THREADS
    assert int(constant("key_table.cu", "kTableThreads")) == plan.TABLE_THREADS
    masks = re.search(r"enum Mask \{ ([^}]+) \}", without_comments("key_range.cuh"))
    assert masks is not None
    assert tuple(masks[1].split(", ")) == catalogue.MASKS
    assert ctypes.sizeof(STRUCTS["Interval"]) == plan.INTERVAL_BYTES
    masked = float(constant("kl_state.cuh", "kMaskedLogit").rstrip("f"))
    assert masked == launch.MASKED_LOGIT
    text = without_comments("kl_state.cuh")
    state = re.search(r"struct KlState \{\s*float ([^;]+);", text)
    more = re.search(r"struct EntropyState : KlState \{\s*float ([^;]+);", text)
    assert state is not None
    assert more is not None
    assert len(state[1].split(",")) == plan.STATE_FIELDS
    assert len(f"{state[1]},{more[1]}".split(",")) == tiling.ENTROPY_STATE_FIELDS

"""The commands of ``python -m bench``: which cases, which contenders, which columns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from . import ours, peers, workloads
from .case import GRADIENT_TOLERANCES, KL_TOLERANCE, NUM_SAMPLED_ROWS, Case
from .contender import Contender, Entry, Outputs
from .report import Column, Report, Row
from .runner import Say, admit, outputs_bytes, run_case
from .timing import ROUNDS, EventStopwatch, Timing, measure
from .workloads import STATISTIC_BYTES, Workload

ROUNDS_QUICK = 3
_RATE = (
    Column("case", "case"),
    Column("contender", "kernel"),
    Column("status", "status"),
    Column("error", "error", ".1e"),
    Column("median_ms", "ms", ".3f"),
    Column("spread", "spread", ".1%"),
    Column("rate", "rate", ".4g"),
    Column("unit", "unit"),
)
_DETAIL = Column("detail", "plan, tiles or reason")
_METHOD = (
    "Device time by CUDA events; medians of {rounds} rounds in which the kernels of a case take "
    "turns. Spread: slowest less fastest round, over the median. Random normal inputs."
)
_TOLERANCES = (
    "A kernel gets a figure only if its result was right in this run: norm-relative error against "
    "float64, on the first and last head and about {rows} sampled rows and keys, below {kl:.0e} "
    "for kl and lse and below {gradient:.0e} for gradients in {dtype}; no NaN anywhere."
)


def forward(options: argparse.Namespace, say: Say) -> Report:
    """The forward on square problems, beside its peers and the yardsticks."""
    base = _base(options, workloads.SQUARE, workloads.SQUARE_QUICK)
    names = _peers(options, ("triton", "chunked", "cudnn", "cublas"))
    rows: list[Row] = []
    for workload in workloads.masks(base, options.causal):
        case = Case(workload)
        entries = [ours.forward_entry(case), *peers.forward_entries(names, case)]
        if ours.kernel_names(ours.forward_plan(case)) != "forward_sm80":
            entries.insert(1, ours.portable_forward_entry(case))
        rows += _timed(_mask(workload), workload, entries, options, say, yardstick="cublas")
    return Report(
        name="forward",
        title=f"Forward, {_shape(base)}",
        columns=(*_RATE, Column("ratio", "of cuBLAS", ".2f"), _DETAIL),
        rows=rows,
        notes=[
            *_notes(options, base),
            "KL: 4 BH N_Q N_K d operations, attention the same; half of it with a causal mask.",
        ],
    )


def backward(options: argparse.Namespace, say: Say) -> Report:
    """The backward, the deterministic pair of kernels and the fused one."""
    base = _base(options, workloads.SQUARE, workloads.SQUARE_QUICK)
    names = _peers(options, ("triton", "cudnn", "cublas"))
    rows: list[Row] = []
    for workload in workloads.masks(base, options.causal):
        case = Case(workload)
        entries = [
            *(ours.backward_entry(case, strategy) for strategy in ("separate", "fused")),
            *peers.backward_entries(names, case),
        ]
        rows += _timed(_mask(workload), workload, entries, options, say, yardstick="cublas")
    gradients = "dQ2, dK2" if base.setting == 1 else "dQ1, dK1"
    return Report(
        name="backward" if base.setting == 1 else "backward_setting2",
        title=f"Backward ({gradients}), {_shape(base)}",
        columns=(*_RATE, Column("ratio", "of cuBLAS", ".2f"), _DETAIL),
        rows=rows,
        notes=[
            *_notes(options, base),
            "KL: 8 BH N_Q N_K d operations (four products) however many a program does; attention "
            "10 (five products); half of it with a causal mask.",
            "Ours and Triton: everything from the row statistics to gradients in the dtype of the "
            "inputs. Separate is deterministic, fused is not.",
        ],
    )


def small_q(options: argparse.Namespace, say: Say) -> Report:
    """Few queries on many keys, where only split keys fill the card."""
    base = _base(options, workloads.SMALL_Q, workloads.SMALL_Q_QUICK)
    base = replace(base, causal=options.causal == "causal")
    lengths = (options.nq,) if options.nq else workloads.SMALL_Q_LENGTHS
    names = _peers(options, ("triton", "eager", "copy", "read"))
    rows: list[Row] = []
    notes = _notes(options, base)
    for num_queries in lengths:
        workload = replace(base, num_queries=num_queries)
        case = Case(workload, unit="TB/s")
        entries = [
            ours.forward_entry(case),
            ours.forward_entry(case, label=", no split", overrides={"num_splits": 1}),
            ours.unshared_forward_entry(case),
            *peers.forward_entries(names, case),
        ]
        timed = _timed(f"N_Q = {num_queries}", workload, entries, options, say, yardstick="read")
        if all(row["status"] == "ok" for row in timed[:3]):
            gain, whole_gain = (row["median_ms"] / timed[0]["median_ms"] for row in timed[1:3])
            timed[0]["split_gain"], timed[0]["sharing_gain"] = gain, whole_gain
            notes.append(
                f"N_Q = {num_queries}: {gain:.1f} times as fast as with one block a row of tiles, "
                f"{whole_gain:.1f} times as fast as with keys shared by neither blocks nor warps."
            )
        rows += timed
    return Report(
        name="small_q",
        title=f"Forward with few queries, {_shape(base, lengths)}",
        columns=(*_RATE, Column("ratio", "of read only", ".2f"), _DETAIL),
        rows=rows,
        notes=[*notes, "Bytes: each input read once, three float32 a row written once."],
    )


def overhead(options: argparse.Namespace, say: Say) -> Report:
    """What a call costs the host: a problem so small that the device does not matter."""
    base = _base(options, workloads.OVERHEAD, workloads.OVERHEAD)
    base = replace(base, causal=options.causal == "causal")
    case = Case(base)
    entries = [
        ours.forward_entry(case),
        Entry("ours, CuPy arrays", lambda: _cupy_contender(case), ours=True),
        *(ours.backward_entry(case, strategy) for strategy in ("separate", "fused")),
        *peers.forward_entries(_peers(options, ("triton", "cudnn", "eager")), case),
        Entry("one torch.bmm", lambda: _bmm_contender(case)),
    ]
    rows: list[Row] = []
    contenders: dict[str, Contender] = {}
    for entry in entries:
        say(f"overhead: checking {entry.name}")
        row, contender = admit(entry)
        if row["contender"] != entry.name:
            row["contender"] = f"{entry.name}: {row['contender']}"
        rows.append(row)
        if contender is not None:
            contenders[row["contender"]] = contender
    calls = {name: contender.call for name, contender in contenders.items()}
    rounds = _rounds(options)
    figures: dict[str, dict[str, Timing]] = {}
    watches = (
        ("host_us", _host_watch),
        ("synchronised_us", _synchronised_watch),
        ("device_us", EventStopwatch()),
    )
    for key, watch in watches:
        say(f"overhead: {key}")
        figures[key] = measure(calls, watch, rounds=rounds)
    for row in rows:
        if row["contender"] in calls:
            medians = {key: figures[key][row["contender"]].median_ms * 1e3 for key in figures}
            row.update(medians, rounds=rounds)
    return Report(
        name="overhead",
        title=f"Cost of a call, {_shape(base)}",
        columns=(
            Column("contender", "call"),
            Column("status", "status"),
            Column("error", "error", ".1e"),
            Column("host_us", "host (us)", ".1f"),
            Column("synchronised_us", "to the result (us)", ".1f"),
            Column("device_us", "device (us)", ".1f"),
            _DETAIL,
        ),
        rows=rows,
        notes=[
            "Host: time for the call to return, many in a row. To the result: call and wait for "
            "the device. Device: kernels alone. Medians; hosts differ, so compare, do not quote.",
        ],
    )


def memory(options: argparse.Namespace, say: Say) -> Report:
    """Peak device memory of a call beyond its inputs, beside the formula and the logits."""
    base = _base(options, workloads.MEMORY, workloads.MEMORY_QUICK)
    base = replace(base, causal=options.causal == "causal")
    lengths = workloads.MEMORY_LENGTHS_QUICK if options.quick else workloads.MEMORY_LENGTHS
    sizes = [(length, length) for length in lengths]
    if options.n or options.nq or options.nk:
        sizes = [(base.num_queries, base.num_keys)]
    names = _peers(options, ("triton", "chunked", "eager"))
    rows: list[Row] = []
    for num_queries, num_keys in sizes:
        case = Case(replace(base, num_queries=num_queries, num_keys=num_keys))
        directions = {
            "forward": [ours.forward_entry(case), *peers.forward_entries(names, case)],
            "backward": [
                *(ours.backward_entry(case, strategy) for strategy in ("separate", "fused")),
                *peers.backward_entries(names, case),
            ],
        }
        formulas = {
            "ours": lambda case=case: _forward_formula(case),
            "ours, separate": lambda case=case: _backward_formula(case, "separate"),
            "ours, fused": lambda case=case: _backward_formula(case, "fused"),
        }
        for direction, entries in directions.items():
            for entry in entries:
                say(f"{case.workload.name}: {direction}, {entry.name}")
                row = {
                    "case": f"{num_queries} x {num_keys}",
                    "workload": case.workload.name,
                    "direction": direction,
                    **_memory_of(case, entry, direction),
                    "logits_bytes": case.workload.logits_bytes,
                }
                if row["status"] == "ok" and entry.name in formulas:
                    row["formula_bytes"] = formulas[entry.name]()
                rows.append(row)
        del case, directions, formulas, entries, entry  # all of them hold the inputs
    return Report(
        name="memory",
        title=(
            f"Peak device memory beyond the inputs, BH = {base.heads}, d1 = {base.head_dim1}, "
            f"d2 = {base.head_dim2}, {base.dtype}"
        ),
        columns=(
            Column("case", "N_Q x N_K"),
            Column("direction", "direction"),
            Column("contender", "call"),
            Column("status", "status"),
            Column("extra_bytes", "extra (bytes)", ",d"),
            Column("formula_bytes", "formula (bytes)", ",d"),
            Column("bytes_per_row", "bytes a row", ",.1f"),
            Column("logits_bytes", "both logit matrices", ",d"),
            _DETAIL,
        ),
        rows=rows,
        notes=[
            "Extra: peak of the bytes asked of PyTorch's allocator, less those before the call; "
            "for a backward also less the gradients.",
            "Formula: forward 20 bytes a query row and the workspace of the plan; backward the "
            "workspace of the plan.",
        ],
    )


def _base(options: argparse.Namespace, default: Workload, quick: Workload) -> Workload:
    """The default workload with what the options change."""
    workload = quick if options.quick else default
    changes = {
        "heads": options.bh,
        "num_queries": options.nq or options.n,
        "num_keys": options.nk or options.n,
        "head_dim1": options.d1 or options.d,
        "head_dim2": options.d2 or options.d,
        "dtype": options.dtype,
        "setting": options.setting,
    }
    return replace(workload, **{name: value for name, value in changes.items() if value})


def _peers(options: argparse.Namespace, default: Sequence[str]) -> Sequence[str]:
    return default if options.peers is None else options.peers


def _rounds(options: argparse.Namespace) -> int:
    return options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)


def _mask(workload: Workload) -> str:
    return "causal" if workload.causal else "full"


def _timed(
    label: str,
    workload: Workload,
    entries: Sequence[Entry],
    options: argparse.Namespace,
    say: Say,
    *,
    yardstick: str,
) -> list[Row]:
    stopwatch = EventStopwatch(flush_l2=options.flush_l2)
    rows = run_case(
        label, entries, stopwatch, rounds=_rounds(options), yardstick=yardstick, say=say
    )
    torch.cuda.empty_cache()
    return [{"workload": workload.name, **row} for row in rows]


def _shape(workload: Workload, query_lengths: Sequence[int] = ()) -> str:
    queries = " ".join(map(str, query_lengths or (workload.num_queries,)))
    lengths = f"N_Q = {queries}, N_K = {workload.num_keys}"
    dims = f"d1 = {workload.head_dim1}, d2 = {workload.head_dim2}"
    return f"BH = {workload.heads}, {lengths}, {dims}, {workload.dtype}"


def _notes(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [
        _METHOD.format(rounds=_rounds(options))
        + (" L2 is overwritten before each call." if options.flush_l2 else ""),
        _TOLERANCES.format(
            rows=NUM_SAMPLED_ROWS,
            kl=KL_TOLERANCE,
            gradient=GRADIENT_TOLERANCES[workload.dtype],
            dtype=workload.dtype,
        ),
    ]


def _host_watch(call: Callable[[], object], count: int) -> float:
    """Milliseconds until ``count`` calls have returned, the queue of the device empty before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed * 1e3


def _synchronised_watch(call: Callable[[], object], count: int) -> float:
    """Milliseconds of ``count`` calls, each waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _cupy_contender(case: Case) -> Contender:
    return Contender(
        name="CuPy arrays",
        call=ours.cupy_call(case),
        check=lambda outputs: ours.cupy_check(case, outputs),
        tolerances=case.tolerances_forward,
        work=case.forward_work,
        ours=True,
    )


def _bmm_contender(case: Case) -> Contender:
    transposed = case.k1.mT

    def check(outputs: Outputs) -> dict[str, float]:
        reference = case.q1.double() @ transposed.double()
        return {"s": float((outputs[0].double() - reference).norm() / reference.norm())}

    return Contender(
        name="cuBLAS",
        call=lambda: (torch.bmm(case.q1, transposed),),
        check=check,
        tolerances={"s": 1e-2},
        work=case.forward_work,
    )


def _forward_formula(case: Case) -> int:
    """kl, both lse and both low parts of every row, and the workspace."""
    rows: int = 5 * STATISTIC_BYTES * case.workload.num_rows
    workspace: int = ours.forward_plan(case).workspace_bytes
    return rows + workspace


def _backward_formula(case: Case, strategy: str) -> int:
    workspace: int = ours.backward_plan(case, strategy, strategy == "separate").workspace_bytes
    return workspace


def _memory_of(case: Case, entry: Entry, direction: str) -> Row:
    """The row of one entry: its peak if its result was right."""
    row, contender = admit(entry)
    if contender is None:
        return row
    requested = "requested_bytes.all"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[f"{requested}.current"]
    outputs = contender.call()
    torch.cuda.synchronize()
    extra = torch.cuda.memory_stats()[f"{requested}.peak"] - before
    if direction == "backward":
        extra -= outputs_bytes(outputs)
    return row | {"extra_bytes": extra, "bytes_per_row": extra / case.workload.num_rows}


COMMANDS = {
    "forward": forward,
    "backward": backward,
    "small-q": small_q,
    "overhead": overhead,
    "memory": memory,
}

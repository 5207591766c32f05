"""The commands of ``python -m bench``: which cases, which contenders, which columns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from streamkl_cupy.timing import PAUSE_MS, ROUND_MS, ROUNDS, Timing, measure

from . import accuracy, bars, cases, memory, ours, peers, torch_calls, tuning, workloads
from .bars import Bar
from .case import GRADIENT_TOLERANCES, KL_TOLERANCE, NUM_SAMPLED_ROWS, Case
from .cases import Spec
from .contender import Contender, Entry, Outputs
from .report import Column, Report, Row
from .runner import Say, admit, run_brief, run_case
from .timing import event_stopwatch
from .workloads import Workload

ROUNDS_QUICK = 3
# Rounds of one case together; what takes a second a call gets fewer.
BUDGET_MS = 4000.0
_RATE = (
    Column("case", "case"),
    Column("contender", "kernel"),
    Column("status", "status"),
    Column("error", "error", ".1e"),
    Column("median_ms", "ms", ".3f"),
    Column("min_ms", "fastest", ".3f"),
    Column("spread", "spread", ".1%"),
    Column("rate", "rate", ".4g"),
    Column("unit", "unit"),
)
_BARS = Column("bars_text", "reached")
_DETAIL = Column("detail", "plan, tiles or reason")
_METHOD = (
    "Device time by events; medians of {rounds} rounds (fewer where a call is long) in which the "
    f"contenders of a case take turns of {ROUND_MS:.0f} ms, each after {PAUSE_MS:.0f} ms of rest, "
    "in an order in which everybody follows everybody. A ratio is the median over the rounds of "
    "that in each. Fastest, spread: the fastest round; slowest less fastest, over the median. "
    "Random normal inputs."
)
_TOLERANCES = (
    "A kernel gets a figure only if its result was right in this run: norm-relative error against "
    "float64, on the first and last head and about {rows} sampled rows and keys, below {kl:.0e} "
    "for kl and lse and below {gradient:.0e} for gradients in {dtype}; no NaN anywhere."
)


def forward(options: argparse.Namespace, say: Say) -> Report:
    """The forward, beside its peers and the yardsticks."""
    custom = ((cases.AUTO, cases.PORTABLE), ("triton", "cudnn", "cublas"), "cublas")
    specs = _specs(options, cases.forward(), workloads.SQUARE, *custom)
    say("forward: compiling")
    ours.compile_ahead([spec.workload for spec in specs], ())
    rows: list[Row] = []
    for spec in specs:
        case = Case(spec.workload, unit=spec.unit)
        entries = [*_forward_entries(case, spec), *peers.forward_entries(spec.peers, case)]
        rows += _timed(spec, entries, options, say, case=case)
        del case, entries
    _interpolate(specs, rows, lambda shape: shape.forward_dim)
    return Report(
        name="forward",
        title=f"Forward, {_shape(specs[0].workload)}",
        columns=(*_RATE, Column("ratio", "of cuBLAS", ".2f"), _BARS, _DETAIL),
        rows=rows,
        notes=[
            *_notes(options, specs[0].workload),
            "KL: 2 BH N_Q N_K (d1 + d2) operations, attention 4 BH N_Q N_K d; half of it with a "
            "causal mask. Interpolated: on the line through the rates of the square problems with "
            "the nearest head dims. Where a case says nothing else, BH = 32 and N = 16K.",
        ],
    )


def backward(options: argparse.Namespace, say: Say) -> Report:
    """The backward: the fused kernel with sums in any order and in a fixed one, the separate ones,
    and what the plan chooses."""
    custom = (
        (cases.SEPARATE, cases.DETERMINISTIC, cases.FUSED),
        ("triton", "cudnn", "cublas"),
        "cublas",
    )
    specs = _specs(options, cases.backward(), workloads.SQUARE, *custom)
    say("backward: compiling")
    ours.compile_ahead([spec.workload for spec in specs], ("auto", "fused", "separate"))
    rows: list[Row] = []
    for spec in specs:
        case = Case(spec.workload, unit=spec.unit)
        entries = [*_backward_entries(case, spec), *peers.backward_entries(spec.peers, case)]
        rows += _timed(spec, entries, options, say, case=case, direction="backward")
        del case, entries
    _interpolate(specs, rows, lambda shape: shape.backward_dim)
    rows += _all_four(specs[0], options, say)
    return Report(
        name="backward" if specs[0].workload.setting == 1 else "backward_setting2",
        title=f"Backward, {_shape(specs[0].workload)}",
        columns=(*_RATE, Column("ratio", "of yardstick", ".2f"), _BARS, _DETAIL),
        rows=rows,
        notes=[
            *_notes(options, specs[0].workload),
            "Setting 1 gives dQ2 and dK2, Setting 2 dQ1 and dK1; where a case says nothing, "
            "Setting 1, full, BH = 32 and N = 16K.",
            "KL: 2 BH N_Q N_K (d1 + d2 + 2 d) operations, d of the side with gradients: four "
            "products, however many a program does; attention 10 BH N_Q N_K d (five products); "
            "half of it with a causal mask. Bytes: inputs, statistics and dkl read once, "
            "gradients written once.",
            "Ours and Triton: everything from the row statistics to gradients in the dtype of the "
            "inputs. Deterministic and separate: the same bits in every run.",
            *_brief_notes(specs),
        ],
    )


def small_q(options: argparse.Namespace, say: Say) -> Report:
    """Few queries on many keys, where only split keys fill the card."""
    custom = (cases.small_q()[0].ours, cases.small_q()[0].peers, "read")
    specs = _specs(options, cases.small_q(), workloads.SMALL_Q, *custom)
    say("small-q: compiling")
    ours.compile_ahead([spec.workload for spec in specs], ())
    rows: list[Row] = []
    notes = _notes(options, specs[0].workload)
    for spec in specs:
        case = Case(spec.workload, unit=spec.unit)
        entries = _forward_entries(case, spec)
        entries += peers.forward_entries(spec.peers, case)
        timed = _timed(spec, entries, options, say, case=case)
        gains = {row["entry"]: row.get("median_ms") for row in timed}
        own, whole = gains.get(cases.AUTO), gains.get(cases.WHOLE)
        if own and whole:
            notes.append(
                f"{spec.label}: {whole / own:.1f} times as fast as with one block a row of tiles."
            )
        if own and (unshared := gains.get(cases.UNSHARED)):
            notes.append(
                f"{spec.label}: {unshared / own:.1f} times as fast as with keys shared by neither "
                "blocks nor warps."
            )
        rows += timed
        del case, entries
    return Report(
        name="small_q",
        title=f"Forward with few queries, {_shape(specs[0].workload)}",
        columns=(*_RATE, Column("ratio", "of read only", ".2f"), _BARS, _DETAIL),
        rows=rows,
        notes=[*notes, "Bytes: each input read once, three float32 a row written once."],
    )


def lengths(options: argparse.Namespace, say: Say) -> Report:
    """Both directions over the length of the context."""
    custom = ((cases.AUTO,), ("triton",), "")
    specs = _specs(options, cases.lengths(), workloads.LENGTHS, *custom)
    return _both_directions("lengths", "Over the length of the context", specs, specs, options, say)


def all_peers(options: argparse.Namespace, say: Say) -> Report:
    """Every peer in both directions."""
    chosen = cases.peers()
    custom = (chosen[0].ours, chosen[0].peers, chosen[0].yardstick)
    specs = _specs(options, chosen, chosen[0].workload, *custom)
    return _both_directions("peers", "Every peer", specs, specs, options, say)


def ablation(options: argparse.Namespace, say: Say) -> Report:
    """What each part of the design brings, beside the same without it."""
    pair = (cases.AUTO, cases.WHOLE)
    forward_specs = _specs(options, cases.ablation_forward(), workloads.SQUARE, pair, (), "")
    pair = (cases.FUSED, cases.SEPARATE)
    backward_specs = _specs(options, cases.ablation_backward(), workloads.SQUARE, pair, (), "")
    portable = {"forward_kernel": "forward_sm80", "backward_kernel": "backward_fused_sm80"}
    return _both_directions(
        "ablation",
        "Each choice beside its alternative",
        forward_specs,
        backward_specs,
        options,
        say,
        strategies=("auto", "fused", "separate"),
        overrides=({}, portable),
    )


def _both_directions(
    name: str,
    title: str,
    forward_specs: Sequence[Spec],
    backward_specs: Sequence[Spec],
    options: argparse.Namespace,
    say: Say,
    *,
    strategies: Sequence[str] = ("auto",),
    overrides: Sequence[ours.Overrides] = ({},),
) -> Report:
    """A table of forwards and backwards; where they are of one problem, it is drawn once.

    ``strategies`` and ``overrides`` say which kernels are compiled ahead.
    """
    say(f"{name}: compiling")
    ours.compile_ahead([spec.workload for spec in forward_specs], (), overrides)
    ours.compile_ahead([spec.workload for spec in backward_specs], strategies, overrides)
    directions = {id(spec): [] for spec in (*forward_specs, *backward_specs)}
    for direction, specs in (("forward", forward_specs), ("backward", backward_specs)):
        for spec in specs:
            directions[id(spec)].append((direction, spec))
    rows: list[Row] = []
    for todo in directions.values():
        case = Case(todo[0][1].workload, unit=todo[0][1].unit)
        for direction, spec in todo:
            labelled = replace(spec, label=f"{direction}, {spec.label}")
            if direction == "forward":
                names = [peer for peer in spec.peers if peer != "kept"]
                entries = [*_forward_entries(case, spec), *peers.forward_entries(names, case)]
            else:
                if spec.calls is not None:
                    # The reference would take minutes without the statistics of all rows.
                    if not _is_right(case, rows):
                        continue
                    case.state = ours.forward_state(case)
                entries = [
                    *_backward_entries(case, spec),
                    *peers.backward_entries(spec.peers, case),
                ]
            rows += _timed(labelled, entries, options, say, case=case, direction=direction)
            del entries
        del case
    rows.sort(key=lambda row: row["direction"], reverse=True)
    specs = (*forward_specs, *backward_specs)
    return Report(
        name=name,
        title=f"{title}, {_shape(specs[0].workload)}",
        columns=(*_RATE, _BARS, _DETAIL),
        rows=rows,
        notes=[*_notes(options, specs[0].workload), *_brief_notes(specs)],
    )


def _is_right(case: Case, rows: Sequence[Row]) -> bool:
    """Whether our forward of a case has been found right."""
    about = {"workload": case.workload.name, "direction": "forward", "status": "ok"}
    return any(row["ours"] and about.items() <= row.items() for row in rows)


def _brief_notes(specs: Sequence[Spec]) -> list[str]:
    """Which cases have no rounds, and how many calls instead."""
    labels: dict[int, list[str]] = {}
    for spec in specs:
        if spec.calls is not None and spec.label not in labels.setdefault(spec.calls, []):
            labels[spec.calls].append(spec.label)
    return [
        f"Without rounds, median of {count} timed call{'s' if count > 1 else ''} each, "
        f"the last of which was checked: {'; '.join(names)}."
        for count, names in sorted(labels.items(), reverse=True)
    ]


def measure_accuracy(options: argparse.Namespace, say: Say) -> Report:
    """Every output against float64."""
    cells = cases.accuracy()
    chosen = cases.quick_cells(cells) if options.quick else cells
    return accuracy.run(chosen, _peers(options, accuracy.PEERS), say)


def measure_memory(options: argparse.Namespace, say: Say) -> Report:
    """Peak device memory of a call beyond its inputs."""
    custom = ((cases.AUTO, cases.SEPARATE, cases.FUSED), ("triton", "chunked", "eager"), "")
    return memory.run(_specs(options, cases.memory(), workloads.MEMORY, *custom), say)


def tune(options: argparse.Namespace, say: Say) -> Report:
    """How far the plan's choices are from the best of their candidates."""
    chosen = {"forward": cases.tune_forward, "backward": cases.tune_backward}[options.direction]()
    entry = cases.DETERMINISTIC if options.deterministic else cases.AUTO
    specs = _specs(options, chosen, workloads.SQUARE, (entry,), (), "")
    return tuning.run(
        options.direction, specs, rounds=_rounds(options), seconds=options.limit, say=say
    )


def overhead(options: argparse.Namespace, say: Say) -> Report:
    """What a call costs the host: a problem so small that the device does not matter."""
    base = _base(options, workloads.OVERHEAD)
    base = replace(base, causal=options.causal == "causal")
    case = Case(base)
    names = _peers(options, ("triton", "cudnn", "eager"))
    entries = [
        ours.forward_entry(case),
        torch_calls.kl_entry(case),
        Entry("ours, CuPy arrays", lambda: _cupy_contender(case), ours=True),
        *(ours.backward_entry(case, strategy) for strategy in ("separate", "fused")),
        *peers.forward_entries(names, case),
        *torch_calls.entries(case, with_triton="triton" in names),
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
        ("device_us", event_stopwatch()),
    )
    for key, watch in watches:
        say(f"overhead: {key}")
        figures[key] = measure(calls, watch, rounds=rounds)
    for row in rows:
        if row["contender"] in calls:
            medians = {key: figures[key][row["contender"]].median_ms * 1e3 for key in figures}
            row.update(medians, rounds=rounds)
    _compare_hosts(rows)
    return Report(
        name="overhead",
        title=f"Cost of a call, {_shape(base)}",
        columns=(
            Column("contender", "call"),
            Column("status", "status"),
            Column("error", "error", ".1e"),
            Column("host_us", "host (us)", ".1f"),
            Column("of_peer", "of the peer's", ".2f"),
            Column("peer", "peer"),
            Column("synchronised_us", "to the result (us)", ".1f"),
            Column("device_us", "device (us)", ".1f"),
            _DETAIL,
        ),
        rows=rows,
        notes=[
            "Host: time for the call to return, many in a row. To the result: call and wait for "
            "the device. Device: kernels alone. Medians; hosts differ, so compare, do not quote.",
            "The peer's: host time over that of the row named. A torch operator returns kl without "
            "gradients, torch autograd keeps what its backward needs; Triton's are built alike.",
        ],
    )


def _compare_hosts(rows: Sequence[Row]) -> None:
    """Set the host time of each call of ours beside that of the peer it is to be measured by."""
    by_name = {row["contender"]: row for row in rows if row["status"] == "ok"}
    for name, peer in torch_calls.MEASURED_BY.items():
        if name in by_name and peer in by_name:
            by_name[name]["peer"] = peer
            by_name[name]["of_peer"] = by_name[name]["host_us"] / by_name[peer]["host_us"]


_SHAPE_OPTIONS = ("bh", "n", "nq", "nk", "d", "d1", "d2", "dtype", "setting")


def _is_custom(options: argparse.Namespace) -> bool:
    """Whether the options name a problem of their own."""
    return any(getattr(options, name) is not None for name in _SHAPE_OPTIONS)


def _base(options: argparse.Namespace, default: Workload) -> Workload:
    """The default workload with what the options change."""
    workload = workloads.shrunk(default) if options.quick else default
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


def _specs(
    options: argparse.Namespace,
    specs: Sequence[Spec],
    default: Workload,
    entries: tuple[str, ...],
    peer_names: tuple[str, ...],
    yardstick: str,
) -> tuple[Spec, ...]:
    """The cases of a command, or the one problem that the options name."""
    if _is_custom(options):
        chosen: Sequence[Spec] = [
            Spec(
                "causal" if workload.causal else "full",
                workload,
                entries,
                peer_names,
                yardstick=yardstick,
                unit=specs[0].unit,
            )
            for workload in workloads.masks(_base(options, default), options.causal)
        ]
    else:
        wanted = {"full": (False,), "causal": (True,), "both": (False, True)}[options.causal]
        chosen = [spec for spec in specs if spec.workload.causal in wanted]
        chosen = cases.quick(chosen) if options.quick else chosen
    if options.peers is None:
        return tuple(chosen)
    return tuple(
        replace(
            spec,
            # Where calls take long, nobody takes part who does not by default.
            peers=tuple(name for name in options.peers if spec.calls is None or name in spec.peers),
            bars=tuple(
                bar
                for bar in spec.bars
                if any(name.startswith((*options.peers, cases.AUTO)) for name in bar.against)
            ),
        )
        for spec in chosen
    )


def _peers(options: argparse.Namespace, default: Sequence[str]) -> Sequence[str]:
    return default if options.peers is None else options.peers


def _rounds(options: argparse.Namespace) -> int:
    return options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)


def _forward_entries(case: Case, spec: Spec) -> list[Entry]:
    makers: dict[str, Callable[[Case], Entry]] = {
        cases.AUTO: ours.forward_entry,
        cases.PORTABLE: ours.portable_forward_entry,
        cases.WHOLE: ours.whole_forward_entry,
        cases.UNSHARED: ours.unshared_forward_entry,
    }
    entries = []
    for name in spec.ours:
        if name == cases.SPLITS:
            entries += ours.split_entries(case)
        elif name != cases.PORTABLE or not ours.is_portable(case):
            entries.append(makers[name](case))
    return entries


def _backward_entries(case: Case, spec: Spec) -> list[Entry]:
    makers: dict[str, Callable[[], Entry]] = {
        cases.AUTO: lambda: ours.backward_entry(case, "auto"),
        cases.FUSED: lambda: ours.backward_entry(case, "fused"),
        cases.SEPARATE: lambda: ours.backward_entry(case, "separate"),
        cases.PORTABLE_FUSED: lambda: ours.portable_backward_entry(case, "fused"),
        cases.PORTABLE_SEPARATE: lambda: ours.portable_backward_entry(case, "separate"),
        cases.DETERMINISTIC: lambda: ours.deterministic_backward_entry(case),
    }
    return [makers[name]() for name in spec.ours]


def _timed(
    spec: Spec,
    entries: Sequence[Entry],
    options: argparse.Namespace,
    say: Say,
    *,
    case: Case,
    direction: str = "forward",
) -> list[Row]:
    names = tuple(entry.name for entry in entries)
    stopwatch = event_stopwatch(flush_l2=options.flush_l2)
    if spec.calls is not None:
        shapes = case.output_shapes(direction)
        rows = run_brief(spec.label, entries, stopwatch, shapes, calls=spec.calls, say=say)
    else:
        rows = run_case(
            spec.label,
            entries,
            stopwatch,
            rounds=options.rounds or (not options.quick and spec.rounds) or _rounds(options),
            budget_ms=BUDGET_MS,
            yardstick=spec.yardstick or None,
            to_reach=[_expanded(bar, names) for bar in spec.bars],
            say=say,
        )
    torch.cuda.empty_cache()
    workload = spec.workload
    about = {
        "workload": workload.name,
        "direction": direction,
        "setting": workload.setting,
        "length": workload.num_keys,
        "mask": "causal" if workload.causal else "full",
        "headline": spec.headline,
    }
    return [{**about, **row} for row in rows]


def _expanded(bar: Bar, entries: Sequence[str]) -> Bar:
    """A bar beside the splits is one beside each of them."""
    against = []
    for name in bar.against:
        splits = [entry for entry in entries if entry.endswith(" splits")]
        against += splits if name == cases.SPLITS else [name]
    return replace(bar, against=tuple(against))


def _interpolate(
    specs: Sequence[Spec], rows: Sequence[Row], mean_dim: Callable[[Workload], float]
) -> None:
    """Bars of the problems with two head dims, from the rates of the square ones, and of windows
    and packed sequences, from the rate without."""
    rates = {(row["case"], row["entry"]): row.get("rate") for row in rows}
    for spec in specs:
        if spec.interpolated is None:
            continue
        entry = spec.ours[0]
        points = [
            (float(other.workload.head_dim1), rate)
            for other in specs
            if other.workload.head_dim1 == other.workload.head_dim2
            and other.workload.window is None
            and other.workload.softcap is None
            and not other.workload.lengths
            and replace(
                other.workload,
                head_dim1=spec.workload.head_dim1,
                head_dim2=spec.workload.head_dim2,
            )
            == replace(spec.workload, window=None, lengths=())
            and (rate := rates.get((other.label, entry))) is not None
        ]
        (row,) = (row for row in rows if (row["case"], row["entry"]) == (spec.label, entry))
        between = bars.interpolated(points, at=mean_dim(spec.workload))
        ours_rate = row.get("rate")
        ratio = ours_rate / between if between and ours_rate else None
        bars.put(row, bars.judged("the interpolated rate", spec.interpolated, ratio))


def _all_four(spec: Spec, options: argparse.Namespace, say: Say) -> list[Row]:
    """All four gradients in one call, as the plan chooses and in every other way, beside a call for
    each side."""
    both = (
        Case(replace(spec.workload, setting=1)),
        Case(replace(spec.workload, setting=2)),
    )
    sides = [ours.backward_entry(case, "auto", label=f", {' '.join(case.wrt)}") for case in both]
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("two fused passes", "fused", {}),
        ("one pass", "separate", {}),
        ("two separate passes", "separate", {"both": False}),
    )
    entries = [
        *sides,
        ours.both_sides_entry(both),
        *(
            ours.both_sides_entry(
                both, strategy, name=f"ours, {way}", label=f", {way}", overrides=o
            )
            for way, strategy, o in ways
        ),
    ]
    bar = Bar(entries[2].name, (sides[0].name, sides[1].name), "the two sides", is_sum=True)
    four = replace(spec, label="all four gradients", bars=(bar,), yardstick="", headline=False)
    return _timed(four, entries, options, say, case=both[0], direction="backward")


def _shape(workload: Workload) -> str:
    lengths = f"N_Q = {workload.num_queries}, N_K = {workload.num_keys}"
    dims = f"d1 = {workload.head_dim1}, d2 = {workload.head_dim2}"
    return f"BH = {workload.heads}, {lengths}, {dims}, {workload.dtype} where a case says no other"


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


COMMANDS = {
    "forward": forward,
    "backward": backward,
    "small-q": small_q,
    "tune": tune,
    "overhead": overhead,
    "memory": measure_memory,
    "lengths": lengths,
    "peers": all_peers,
    "ablation": ablation,
    "accuracy": measure_accuracy,
}

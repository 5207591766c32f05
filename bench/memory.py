"""``python -m bench memory``: peak device memory of a call, beside the formula and the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import bars, cases, ours, peers
from .case import Case
from .cases import Spec
from .contender import Contender, Entry, Outputs
from .report import Column, Report, Row
from .runner import Say, admit, outputs_bytes, poison
from .workloads import STATISTIC_BYTES, Workload

COLUMNS = (
    Column("case", "case"),
    Column("direction", "direction"),
    Column("contender", "call"),
    Column("status", "status"),
    Column("extra_bytes", "extra (bytes)", ",d"),
    Column("formula_bytes", "formula (bytes)", ",d"),
    Column("bytes_per_row", "bytes a row", ",.1f"),
    Column("logits_bytes", "both logit matrices", ",d"),
    Column("bars_text", "reached"),
    Column("detail", "plan, tiles or reason"),
)
OUT_OF_MEMORY = "out of memory"
_REQUESTED = "requested_bytes.all"


def run(specs: Sequence[Spec], say: Say) -> Report:
    """Measure every path and peer of every case; a peer that ran out of memory is done with.

    Parameters
    ----------
    specs
        The cases, the shorter of one kind before the longer.
    say
        Told what is going on.
    """
    say("memory: compiling")
    own = [spec.workload for spec in specs if spec.ours]
    ours.compile_ahead(own, ("fused", "separate"))
    rows: list[Row] = []
    for spec in specs:
        _measure_case(spec, rows, say)
        torch.cuda.empty_cache()
    base = specs[0].workload
    return Report(
        name="memory",
        title=(
            f"Peak device memory beyond the inputs, BH = {base.heads}, d1 = {base.head_dim1}, "
            f"d2 = {base.head_dim2}, {base.dtype}"
        ),
        columns=COLUMNS,
        rows=rows,
        notes=[
            "Extra: peak of the bytes asked of PyTorch's allocator, less those before the call; "
            "for a backward also less the gradients. Every result was checked.",
            "Formula: forward 20 bytes a query row and the workspace of the plan; backward the "
            "workspace of the plan.",
            *stops(rows),
        ],
    )


def _measure_case(spec: Spec, rows: list[Row], say: Say) -> None:
    """Append the rows of one case."""
    case = Case(spec.workload)
    for direction in ("forward", "backward"):
        if direction == "backward" and spec.ours and spec.calls is not None and case.state is None:
            return  # the forward was wrong, and without it the reference would take minutes
        for entry in _entries(spec, case, direction):
            say(f"{spec.label}: {direction}, {entry.name}")
            row = _about(spec.label, spec.workload, direction)
            if (where := stopped_at(rows, direction, entry.name)) is not None:
                row |= {"contender": entry.name, "entry": entry.name, "ours": entry.ours}
                row |= {"status": "skipped", "detail": f"{OUT_OF_MEMORY} at {where}"}
            else:
                row |= _measured(case, entry, direction, is_warm=spec.calls is None)
            if row["status"] == "ok" and entry.ours:
                row["formula_bytes"] = formula(case, entry.name, direction)
                share = row["formula_bytes"] / row["extra_bytes"] if row["extra_bytes"] else 1.0
                bars.put(row, bars.judged("formula / extra", 1.0, share))
                if direction == "forward" and spec.calls is not None:
                    case.state = ours.forward_state(case)
            rows.append(row)
            torch.cuda.empty_cache()


def _entries(spec: Spec, case: Case, direction: str) -> list[Entry]:
    if direction == "forward":
        own = [ours.forward_entry(case)] if spec.ours else []
        return [*own, *peers.forward_entries(spec.peers, case)]
    strategies = {cases.SEPARATE: "separate", cases.FUSED: "fused"}
    own = [ours.backward_entry(case, strategies[name]) for name in spec.ours if name in strategies]
    return [*own, *peers.backward_entries(spec.peers, case)]


def _about(label: str, workload: Workload, direction: str) -> Row:
    return {
        "case": label,
        "workload": workload.name,
        "direction": direction,
        "length": workload.num_keys,
        "num_queries": workload.num_queries,
        "heads": workload.heads,
        "logits_bytes": workload.logits_bytes,
    }


def stopped_at(rows: Sequence[Row], direction: str, entry: str) -> str | None:
    """The case in which an entry ran out of memory before; None if it did not."""
    about = {"direction": direction, "entry": entry, "detail": OUT_OF_MEMORY}
    return next((row["case"] for row in rows if about.items() <= row.items()), None)


def stops(rows: Sequence[Row]) -> list[str]:
    """Where each entry ran out of memory, in words."""
    return [
        f"{row['direction'].capitalize()}, {row['contender']}: out of memory at {row['case']}."
        for row in rows
        if row.get("detail") == OUT_OF_MEMORY
    ]


def formula(case: Case, entry: str, direction: str) -> int:
    """Extra bytes of a path of this package."""
    if direction == "forward":
        # kl, both lse and both low parts of every row.
        rows: int = 5 * STATISTIC_BYTES * case.workload.num_rows
        return rows + int(ours.forward_plan(case).workspace_bytes)
    is_separate = entry == cases.SEPARATE
    plan = ours.backward_plan(case, "separate" if is_separate else "fused", is_separate)
    return int(plan.workspace_bytes)


def _measured(case: Case, entry: Entry, direction: str, *, is_warm: bool) -> Row:
    """The row of one entry: the peak of the very call whose result was checked."""
    measured: dict[str, Any] = {}

    def watched(contender: Contender) -> Outputs:
        if is_warm:
            contender.call()
        poison(case.output_shapes(direction))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{_REQUESTED}.current"]
        outputs = contender.call()
        torch.cuda.synchronize()
        extra = torch.cuda.memory_stats()[f"{_REQUESTED}.peak"] - before
        if direction == "backward":
            extra -= outputs_bytes(outputs)
        measured["extra_bytes"] = extra
        measured["bytes_per_row"] = extra / case.workload.num_rows
        return outputs

    row, contender = admit(entry, watched)
    return row if contender is None else row | measured

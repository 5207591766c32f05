"""``python -m bench accuracy``: every output against float64, beside the textbook and the peers.

The rule is that of ``streamkl_cupy/audit.py``: an error of at most twice the textbook formula's,
plus a floor; eight times where logits reach 1000. It binds the kernels of this package alone: a
peer has its errors in the table, and the outputs named at which it would break the rule.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from streamkl_cupy import audit

from . import ours, peers, textbook
from .case import Case
from .cases import Cell
from .contender import Entry, Outputs, SkipError
from .report import Column, Report, Row
from .runner import Say, after_poison, plain
from .textbook import OUTPUTS, Solution
from .workloads import Workload

NUM_HEADS = 2
PEERS = ("triton", "eager")
WHOLE_PEERS = (*PEERS, "compile", "chunked")
TEXTBOOK, OURS, DETERMINISTIC = "textbook float32", "ours", "ours, deterministic"
# Logits from which the sums of the matrix units are the limit, and what is allowed there.
LARGE_LOGITS, LARGE_FACTOR, FACTOR = 1000.0, 8.0, 2.0
COLUMNS = (
    Column("case", "case"),
    Column("contender", "by"),
    Column("status", "status"),
    Column("true_kl", "true KL", ".2e"),
    *(Column(name, name, ".1e") for name in OUTPUTS),
    Column("kl_rms", "kl, absolute", ".1e"),
    Column("rule", "rule"),
    Column("detail", "plan, tiles or reason"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A cell with its inputs: one case for either setting, of the same tensors."""

    cell: Cell
    cases: tuple[Case, Case]

    @classmethod
    def of(cls, cell: Cell, device: str = "cuda", *, seed: int = 0) -> Problem:
        """Draw the inputs of a cell."""
        first = Case(workload_of(cell), device, seed=seed)
        # So that float16 holds the smallest of the gradients, dQ2, and the largest, dK1.
        changes: dict[str, object] = {"dkl": first.dkl / cell.logit_scale**0.5}
        for name in ("q1", "q2"):
            queries = getattr(first, name)
            changes[name] = (queries.float() * cell.logit_scale).to(queries.dtype)
        if cell.kind in ("near", "equal"):
            changes["q2"] = changes["q1"]
            changes["k2"] = first.k1
        if cell.kind == "near":
            assert cell.kl is not None
            changes["k2"] = textbook.moved(first.k1, cell.kl, seed + 1)
        first = first.changed(**changes)
        return cls(cell, (first, first.changed(workload=replace(first.workload, setting=2))))

    def solve(self, *, exact: bool) -> Solution:
        """The outputs in float64, or by the textbook formula."""
        case = self.cases[0]
        scales = (case.scale1, case.scale2)
        inputs = (case.q1, case.k1, case.q2, case.k2)
        parts = [
            textbook.solve(cut, dkl, scales, exact=exact, softcap=self.cell.softcap)
            for *cut, dkl in zip(
                *(x.split(self._lengths, 1) for x in (*inputs, case.dkl)), strict=True
            )
        ]
        return {name: torch.cat([part[name] for part in parts], 1) for name in OUTPUTS}

    @property
    def _lengths(self) -> list[int]:
        """Of the sequences, which have nothing to do with each other."""
        return [*self.cases[0].workload.lengths] or [self.cell.length]


def has_peers(cell: Cell) -> bool:
    """No peer has a bound of the logits, and Triton multiplies float32 in tf32."""
    return cell.softcap is None and cell.dtype != "float32"


def workload_of(cell: Cell) -> Workload:
    """Shapes and dtype of a cell."""
    lengths, dims = (cell.length,) * 2, (cell.head_dim,) * 2
    parts = (cell.length // 2, cell.length // 8, 1)
    packed = (*parts, cell.length - sum(parts)) if cell.kind == "packed" else ()
    return Workload(
        NUM_HEADS, *lengths, *dims, dtype=cell.dtype, lengths=packed, softcap=cell.softcap
    )


def run(cells: Sequence[Cell], peer_names: Sequence[str], say: Say) -> Report:
    """Compute every cell by everybody.

    Parameters
    ----------
    cells
        The problems.
    peer_names
        Who takes part beside the kernels of this package and the textbook formula.
    say
        Told what is going on.
    """
    say("accuracy: compiling")
    shapes = dict.fromkeys(map(workload_of, cells))
    settings = [replace(shape, setting=setting) for shape in shapes for setting in (1, 2)]
    ours.compile_ahead(settings, ("auto",))
    if "triton" in peer_names:
        _compile_triton(
            shape
            for cell, shape in zip(cells, map(workload_of, cells), strict=True)
            if has_peers(cell)
        )
    rows: list[Row] = []
    for cell in cells:
        say(f"accuracy: {cell.label}")
        rows += rows_of(Problem.of(cell), peer_names)
        torch.cuda.empty_cache()
    return Report(
        name="accuracy",
        title=f"Errors against float64, {NUM_HEADS} heads, N queries on N keys",
        columns=COLUMNS,
        rows=rows,
        notes=[
            "Error: norm(x - reference) / norm(reference) over all elements, and where the "
            "reference is 0 the root mean square of x. Absolute: root mean square of kl's error.",
            f"Rule: at most {FACTOR:g} times the error of the textbook float32 formula on the same "
            f"inputs ({LARGE_FACTOR:g} times where logits are {LARGE_LOGITS:g}), plus "
            f"{audit.FORWARD_FLOOR:g} for kl and lse and {audit.GRADIENT_FLOOR:g} for gradients; "
            "between equal sides kl is exactly 0. It binds ours; of a peer it says where it would "
            "be broken.",
            "Random normal inputs, queries multiplied by the size of the logits and the upstream "
            "gradient divided by its square root. Near sides: the "
            "keys of side 2 are those of side 1, some of their elements moved by steps of the "
            "dtype. True KL: mean over the rows in float64.",
            *floors(rows),
        ],
    )


def rows_of(problem: Problem, peer_names: Sequence[str]) -> list[Row]:
    """A row for everybody who computes a problem."""
    exact, baseline = problem.solve(exact=True), problem.solve(exact=False)
    allowed = limits(problem.cell, {n: textbook.error(baseline[n], exact[n]) for n in OUTPUTS})
    makers: dict[str, Callable[[], tuple[Solution, str]]] = {
        OURS: lambda: _ours(problem, deterministic=False),
        DETERMINISTIC: lambda: _ours(problem, deterministic=True),
        TEXTBOOK: lambda: (baseline, ""),
    }
    for name in peer_names if has_peers(problem.cell) else ():
        makers[name] = lambda name=name: _peer(problem, name)
    rows = []
    for name, make in makers.items():
        row = {"entry": name, "contender": name, "ours": name in (OURS, DETERMINISTIC)}
        row |= _about(problem.cell) | {"true_kl": float(exact["kl"].mean())}
        rows.append(row | _outcome(make, exact, allowed, problem.cell, is_ours=row["ours"]))
    return rows


def _about(cell: Cell) -> Row:
    return {
        "case": cell.label,
        "kind": cell.kind,
        "dtype": cell.dtype,
        "head_dim": cell.head_dim,
        "length": cell.length,
        "logit_scale": cell.logit_scale,
        "headline": cell.headline,
    }


def _outcome(
    make: Callable[[], tuple[Solution, str]],
    exact: Solution,
    allowed: Mapping[str, float],
    cell: Cell,
    *,
    is_ours: bool,
) -> Row:
    """What one participant came to, as the rest of its row."""
    try:
        solution, detail = make()
    except SkipError as error:
        return {"status": "skipped", "detail": str(error)}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"status": "skipped", "detail": "out of memory"}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:200]}
    errors = {name: textbook.error(x, exact[name]) for name, x in solution.items()}
    broken = breaches(cell, errors, allowed)
    row: Row = {
        "status": "wrong" if is_ours and broken else "ok",
        "detail": detail,
        "rule": f"broken: {', '.join(broken)}" if broken else "holds",
        "errors": plain(errors),
        "kl_rms": textbook.root_mean_square(solution["kl"].double() - exact["kl"]),
    }
    # JSON has no number for what is not finite; `errors` has the word, and `rule` the name.
    return row | {
        k: v if math.isfinite(v) else None for k, v in (errors | {"kl_rms": row["kl_rms"]}).items()
    }


def limits(cell: Cell, baseline: Mapping[str, float]) -> dict[str, float]:
    """The largest error that the rule allows for each output, from those of the textbook."""
    factor = LARGE_FACTOR if cell.logit_scale >= LARGE_LOGITS else FACTOR
    return {name: audit.limit(name, factor / 2 * error) for name, error in baseline.items()}


def breaches(
    cell: Cell, errors: Mapping[str, float], allowed: Mapping[str, float]
) -> tuple[str, ...]:
    """Outputs that break the rule."""
    broken = [name for name, error in errors.items() if not error <= allowed[name]]
    if cell.kind == "equal" and errors["kl"] != 0 and "kl" not in broken:
        broken.insert(0, "kl")
    return tuple(broken)


def floors(rows: Iterable[Row]) -> list[str]:
    """What is left of kl's error however near the sides are, in words, for each dtype."""
    notes = []
    near = [row for row in rows if row["kind"] == "near" and row["status"] == "ok"]
    for dtype in dict.fromkeys(row["dtype"] for row in near):
        found: dict[str, list[float]] = {}
        for row in near:
            if row["dtype"] == dtype and row["kl_rms"] is not None:
                found.setdefault(row["contender"], []).append(row["kl_rms"])
        words = (f"{name} {min(all_):.1e} to {max(all_):.1e}" for name, all_ in found.items())
        notes.append(f"Floor of kl between near sides, {dtype}, absolute: {'; '.join(words)}.")
    return notes


def _ours(problem: Problem, *, deterministic: bool) -> tuple[Solution, str]:
    entries = [
        ours.backward_entry(case, "auto", deterministic=deterministic) for case in problem.cases
    ]
    found, detail = _through(ours.forward_entry(problem.cases[0]), entries)
    if problem.cell.kind == "packed":  # whose gradients have the heads behind the length
        found = {name: x.transpose(0, 1) if x.ndim == 3 else x for name, x in found.items()}
    return found, detail


def _peer(problem: Problem, name: str) -> tuple[Solution, str]:
    if problem.cell.kind == "packed":
        raise SkipError("it takes no packed sequences here")
    if name not in WHOLE_PEERS:
        raise SkipError("it does not give kl and both log-sum-exps of every row")
    if name == "triton":
        return _triton(problem)
    (forward,) = peers.forward_entries([name], problem.cases[0])
    return _through(forward, [peers.backward_entries([name], c)[0] for c in problem.cases])


def _through(forward: Entry, backwards: Sequence[Entry]) -> tuple[Solution, str]:
    """The outputs of contenders, each written into memory that was poisoned."""
    contender = forward.make()
    outputs: list[Any] = [*after_poison(contender)]
    details = [contender.detail()]
    # Setting 1 gives the gradients of side 2.
    found = dict(zip(("kl", "lse1", "lse2"), outputs, strict=True))
    for side, entry in zip("21", backwards, strict=True):
        contender = entry.make()
        found |= zip(("dq" + side, "dk" + side), after_poison(contender), strict=True)
        details.append(contender.detail())
    return found, ", ".join(filter(None, details))


def _triton(problem: Problem, *, only_compile: bool = False) -> tuple[Solution, str]:
    """The peer with one tile for all, so that nothing is tuned: speed is not what is asked."""
    triton_kl = peers.load("triton").triton_kl
    for case in problem.cases:
        peers.load("triton").require(case)
    case = problem.cases[0]
    options = {"causal": False, "scale1": case.scale1, "scale2": case.scale2}
    config = triton_kl.FORWARD_CONFIGS[-2]
    configs = (triton_kl.DQ_CONFIGS[-1], triton_kl.DK_CONFIGS[-1])
    options["only_compile"] = only_compile
    try:
        state: Outputs = triton_kl.forward(*case.inputs, **options, config=config)
        found = dict(zip(("kl", "lse1", "lse2"), state, strict=True))
        for case, side in zip(problem.cases, "21", strict=True):
            setting = case.workload.setting
            tensors = (case.dkl, *case.inputs, *state)
            gradients = triton_kl.backward(
                *tensors, setting=setting, fused=False, **options, configs=configs
            )
            found |= zip(("dq" + side, "dk" + side), gradients, strict=True)
    except triton_kl.OutOfResources as error:
        raise SkipError("its tile does not fit this card at this head dim") from error
    return found, f"forward {config}, dq {configs[0]}, dk {configs[1]}"


def _compile_triton(shapes: Iterable[Workload]) -> None:
    """All of its kernels at once; whoever has no Triton is told when it comes to compute."""
    try:
        peers.load("triton")
    except SkipError:
        return
    import triton

    kinds = {(shape.dtype, shape.head_dim1) for shape in shapes}
    cells = [Cell("logits", dtype, head_dim, 256) for dtype, head_dim in sorted(kinds)]
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        for cell in cells:
            _triton(Problem.of(cell), only_compile=True)

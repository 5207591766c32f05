"""Time to the first result of a process: ``python -m bench startup`` runs this file as a child.

The clock starts when ``cupy.zeros(1)`` has returned, so neither the creation of the CUDA context
nor the import of CuPy counts; it stops when the result has come back to the host. The result is
held against the float64 reference after that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .digest import ROOT
from .report import Column, Report, Row

SHAPE = (4, 512, 128)
TOLERANCE = 1e-4
COLUMNS = (
    Column("case", "process"),
    Column("status", "status"),
    Column("error", "error", ".1e"),
    Column("import_s", "import (s)", ".3f"),
    Column("first_s", "first result (s)", ".3f"),
    Column("second_s", "second result (s)", ".5f"),
    Column("processes", "processes", "d"),
)


def child() -> None:
    """Measure this process, which must be fresh, and print the figures as JSON."""
    import numpy as np

    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal(SHAPE, dtype=np.float32).astype(np.float16) for _ in range(4)]

    import cupy

    cupy.zeros(1)
    cupy.cuda.Device().synchronize()

    start = time.perf_counter()
    import streamkl_cupy as skl

    imported = time.perf_counter()
    arrays = [cupy.asarray(host) for host in hosts]
    kl = skl.attention_kl(*arrays).get()
    first = time.perf_counter()
    skl.attention_kl(*arrays).get()
    second = time.perf_counter()

    expected = np.asarray(skl.reference.attention_kl(*hosts))
    figures = {
        "error": float(np.linalg.norm(kl - expected) / np.linalg.norm(expected)),
        "import_s": imported - start,
        "first_s": first - start,
        "second_s": second - first,
    }
    print(json.dumps(figures))


def run(*, warm_processes: int) -> Report:
    """A process with an empty cache of kernels, then ``warm_processes`` that find it full."""
    with tempfile.TemporaryDirectory() as directory:
        # CuPy keeps its own cache; it stays as it is, for CuPy is not what is measured.
        variables = os.environ | {"STREAMKL_CACHE_DIR": str(Path(directory) / "kernels")}
        cold = [_child(variables)]
        warm = [_child(variables) for _ in range(warm_processes)]
    rows = [
        _row("first process, kernels compiled", cold),
        _row("later process, kernels found", warm),
    ]
    shape = "x".join(map(str, SHAPE))
    return Report(
        name="startup",
        title=f"Time to the first attention_kl of a process, {shape} float16",
        columns=COLUMNS,
        rows=rows,
        notes=[
            "The clock starts when cupy.zeros(1) has returned and stops when kl is on the host.",
            "Medians over the processes of a row.",
        ],
    )


def _child(variables: dict[str, str]) -> dict[str, float]:
    code = "from bench.startup import child; child()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"the measured process ended with {result.returncode}:\n{result.stderr}")
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def _row(case: str, figures: list[dict[str, float]]) -> Row:
    errors = [figure["error"] for figure in figures]
    row: Row = {"case": case, "ours": True, "processes": len(figures)}
    if not all(error < TOLERANCE for error in errors):
        return row | {"status": "wrong", "errors": {"kl": list(map(str, errors))}}
    names = ("import_s", "first_s", "second_s")
    medians = {name: statistics.median(figure[name] for figure in figures) for name in names}
    return row | {"status": "ok", "error": max(errors), **medians}

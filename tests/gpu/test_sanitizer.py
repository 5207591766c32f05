"""compute-sanitizer over tests/gpu/smoke.py: bad accesses, races, wrong barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer")
# The slowest of the suite, so they are shared among workers.
NUM_PARTS = 3
SUMMARIES = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


def test_the_smoke_script(run_python: Callable[..., Any]) -> None:
    assert run_python("-m", "tests.gpu.smoke").stdout.endswith("every kernel ran\n")


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", SUMMARIES)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_nothing_is_found(tool: str, part: int) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    # CuPy asks the driver for things that it may not have, and copes with the answer.
    command += ["--report-api-errors", "no", sys.executable, "-m", "tests.gpu.smoke"]
    command += ["--part", str(part), str(NUM_PARTS)]
    if tool == "racecheck":
        command.append("--all-lanes")
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"part {part} of {NUM_PARTS} ran" in done.stdout, done.stdout[-8000:]
    assert SUMMARIES[tool] in done.stdout, done.stdout[-8000:]

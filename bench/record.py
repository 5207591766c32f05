"""Runs the GPU test suite and keeps what came out: ``python -m bench.record [pytest arguments]``.

Writes ``bench/results/gpu_suite.json``: the card, the versions, the digests of the code, how many
tests passed, failed and were skipped, in all and in each file. Arguments go to pytest (``-n 8``
works); without a path among them ``tests/gpu`` is run. The exit status is that of pytest. Where no
test ran, as on a machine with no card, nothing is written and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .digest import ROOT
from .report import RESULTS, environment

SCHEMA = 1
DEFAULT_PATH = "tests/gpu"
NAME = "gpu_suite"
OUTCOMES = ("passed", "failed", "errors", "skipped", "xfailed")
# Longer lists tell no more.
_MAX_LISTED = 50


def parse(junit: Path) -> dict[str, Any]:
    """Counts of a JUnit report that pytest wrote with ``junit_family=xunit1``.

    Parameters
    ----------
    junit
        The file.

    Returns
    -------
    dict
        ``counts`` (each of ``OUTCOMES``), ``files`` (the same for each test file), ``failures``
        (ids of failed tests) and ``skips`` (how often each reason was given).
    """
    files: dict[str, Counter[str]] = {}
    failures: list[str] = []
    skips: Counter[str] = Counter()
    for test in ElementTree.parse(junit).iter("testcase"):
        file = test.get("file") or test.get("classname") or "?"
        outcome = _outcome(test)
        files.setdefault(file, Counter())[outcome] += 1
        if outcome in ("failed", "errors"):
            failures.append(f"{file}::{test.get('name')}")
        skipped = test.find("skipped")
        if outcome == "skipped" and skipped is not None:
            skips[skipped.get("message") or ""] += 1
    total: Counter[str] = Counter()
    for counts in files.values():
        total += counts
    return {
        "counts": _all_outcomes(total),
        "files": {file: _all_outcomes(files[file]) for file in sorted(files)},
        "failures": sorted(failures)[:_MAX_LISTED],
        "skips": dict(skips.most_common(_MAX_LISTED)),
    }


def _outcome(test: ElementTree.Element) -> str:
    # A test that passed and whose teardown failed has an error only.
    for tag, outcome in (("failure", "failed"), ("error", "errors")):
        if test.find(tag) is not None:
            return outcome
    skipped = test.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def _all_outcomes(counts: Counter[str]) -> dict[str, int]:
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def pytest_command(junit: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs pytest with the arguments of the user."""
    has_path = any((ROOT / argument.split("::")[0]).exists() for argument in arguments)
    return [
        sys.executable,
        "-m",
        "pytest",
        f"--junitxml={junit}",
        "-o",
        "junit_family=xunit1",  # the only one that names the file of a test
        *([] if has_path else [DEFAULT_PATH]),
        *arguments,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, record, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.record", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--commit", help="the commit, for a tree without a git directory")
    options, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory) / "junit.xml"
        start = time.perf_counter()
        status = subprocess.run(pytest_command(junit, rest), cwd=ROOT).returncode
        seconds = time.perf_counter() - start
        if not junit.exists():
            print(f"pytest ended with {status} and no report; nothing recorded", file=sys.stderr)
            return status or 1
        outcome = parse(junit)
    if not any(outcome["counts"][name] for name in ("passed", "failed", "errors", "xfailed")):
        print("no test ran; nothing recorded", file=sys.stderr)
        return status or 1
    record = {
        "schema": SCHEMA,
        "name": NAME,
        "arguments": list(rest),
        "exit_status": status,
        "seconds": round(seconds, 1),
        **outcome,
        "environment": environment(commit=options.commit),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{NAME}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    counts = ", ".join(f"{count} {name}" for name, count in record["counts"].items() if count)
    print(f"{counts} in {seconds:.0f} s, written to {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())

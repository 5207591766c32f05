"""The examples run where there is no card, at a reduced size, and print what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Script, arguments, modules it needs beyond the base dependencies, and what it prints at last.
RUNS = [
    ("audit_your_arrays.py", "", "", "every output keeps the rule"),
    ("audit_your_arrays.py", "--causal", "", "every output keeps the rule"),
    ("distil_jax.py", "--passage 0 --steps 60", "jax", r"KL fell \d\d+\.\d times in 60 steps"),
    ("long_context_cupy.py", "--tokens 200", "", r"largest error of three rows against float64"),
]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # No card of this machine: what is promised without one is what is tested here.
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@pytest.mark.parametrize(("script", "arguments", "needs", "promise"), RUNS)
def test_it_prints_what_it_promises(script: str, arguments: str, needs: str, promise: str) -> None:
    for module in needs.split():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = run(script, *arguments.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(promise, done.stdout.splitlines()[-1]), done.stdout


def test_a_script_without_a_card_says_so() -> None:
    done = run("long_context_cupy.py", "--tokens", "100")
    assert re.match(r"no GPU \(.*\): 100 tokens with NumPy", done.stdout), done.stdout


def test_every_example_is_short_and_tested() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_examples*.py"))
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in listed, f"examples/README.md does not list {path.name}"
        assert len(path.read_text().splitlines()) < 80, path.name
        assert f'"{path.name}"' in tests, f"no test runs {path.name}"


def test_the_audit_of_a_file(tmp_path: Path) -> None:
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, 9, 8)).astype(ml_dtypes.bfloat16) for n in ("q1", "k1")}
    arrays |= {"q2": arrays["k1"], "k2": arrays["q1"]}
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    done = run("audit_your_arrays.py", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "q1 (2, 9, 8) bfloat16" in done.stdout

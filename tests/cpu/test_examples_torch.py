"""The examples that need torch run as they are and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 80

pytest.importorskip("torch")


def run(name: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["distil_torch.py", "distil_minilm.py"])
def test_it_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < MAX_LINES


def test_distil_torch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    said = run("distil_torch.py", "--steps", "20", "--plot", str(plot))
    fell = re.search(r"KL fell ([\d.]+) times in 20 steps$", said)
    assert fell is not None, said
    assert float(fell[1]) > 1.5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_distil_minilm() -> None:
    said = run("distil_minilm.py", "--steps", "25")
    losses = [float(x) for x in re.findall(r"teacher: cross-entropy ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 1, said
    for relation in ("q-k", "v-v"):
        divergences = [float(x) for x in re.findall(rf"{relation} ([\d.]+)", said)]
        assert divergences[-1] < divergences[0] / 2, said

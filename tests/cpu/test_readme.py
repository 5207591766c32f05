"""The README says what is so: its commands are those that CI runs, its figures were measured."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from bench import cases, readme
from bench.report import Report, Row

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHELL = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def speed_problems(text: str, root: Path) -> list[str]:
    """What is wrong with the block of speeds: figures without a file, or not those of the file."""
    (block,) = readme.BLOCK.findall(text)
    sources = re.findall(r"\]\((bench/results/[^)]+\.json)\)", block)
    if not sources:
        return ["figures without a file of results"] if re.search(r"\d", block) else []
    return [] if block == readme.render(sources, root) else [f"not what {sources} say"]


def test_two_commands_set_everything_up() -> None:
    assert len(SHELL) == 2
    for command in SHELL:
        assert command.count("\n") == 1, "each is one line to paste"
        assert command.startswith("python3 -m venv .venv && ")
    assert SHELL[0].strip().endswith("streamkl-cupy demo")
    assert SHELL[1].strip().endswith("pytest")


def test_ci_runs_the_test_command_word_for_word() -> None:
    script = ROOT / ".ci" / "run"
    printed = subprocess.run(
        ["bash", script, "--print-command"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == SHELL[1]
    assert 'bash -c "$command"' in script.read_text(encoding="utf-8")


def test_the_python_example_runs() -> None:
    pytest.importorskip("torch")
    code = PYTHON[0]
    lines = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 10
    small = code.replace('device="cuda"', 'device="cpu"').replace("8192", "32")
    assert small.count("cuda") == 0
    names: dict[str, object] = {}
    exec(small, names)
    assert names["dq2"].shape == names["q2"].shape  # type: ignore[attr-defined]
    assert float(names["loss"]) > 0  # type: ignore[arg-type]


def test_the_example_of_softcaps_runs() -> None:
    (code,) = (block for block in PYTHON if "softcap1" in block)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 9, 128)) for name in ("q1", "k1", "q2", "k2")}
    names: dict[str, Any] = {"skl": skl, **arrays}
    exec(code, names)
    halved = {name: x / 2 if name[0] == "q" else x for name, x in arrays.items()}
    expected = skl.attention_kl(**halved, causal=True, softcap1=50.0, softcap2=50.0)
    np.testing.assert_allclose(names["kl"], expected, rtol=1e-12, atol=1e-15)


def test_the_jax_example_runs() -> None:
    jax = pytest.importorskip("jax")
    (code,) = (block for block in PYTHON if "import jax" in block)
    assert "(1, 8192, 32, 128)" in code
    names: dict[str, object] = {}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        exec(code.replace("8192, 32, 128", "12, 2, 8"), names)
    assert names["dk2"].shape == names["k2"].shape == (1, 12, 2, 8)  # type: ignore[attr-defined]
    assert float(names["value"]) > 0  # type: ignore[arg-type]


def test_the_torch_example_runs() -> None:
    torch = pytest.importorskip("torch")
    (code,) = (block for block in PYTHON if "streamkl_cupy.torch" in block)
    names: dict[str, object] = {name: torch.randn(2, 9, 8) for name in ("q1", "k1", "q2", "k2")}
    exec(code, names)
    assert names["q2"].grad.abs().max() > 0  # type: ignore[attr-defined]
    assert names["k2"].grad is None  # type: ignore[attr-defined]


def test_every_figure_of_the_table_comes_from_a_file_of_results() -> None:
    assert speed_problems(README, ROOT) == []


@pytest.mark.parametrize("name", readme.BLOCKS)
def test_every_other_block_is_what_the_results_say(name: str) -> None:
    (text,) = readme.block(name).findall(README)
    assert text == readme.BLOCKS[name](ROOT), "run python -m bench.readme"


def write_results(
    directory: Path, name: str, card: str, rows: list[Row], notes: list[str] | None = None
) -> None:
    environment = {
        "device": {"name": card, "driver_version": "1"},
        "date": "",
        "commit": None,
        "versions": {},
        "digests": {"cuda_src": ""},
    }
    report = Report(
        name, f"Title {name}", readme.COLUMNS, rows, notes=notes or [], environment=environment
    )
    report.write(directory)


def speed_row(case: str, name: str, ms: float, **others: object) -> Row:
    row: Row = {"case": case, "contender": name, "entry": name, "status": "ok", "ours": False}
    return row | {"median_ms": ms, "rate": 1000 / ms, "unit": "TFLOP/s", "detail": ""} | others


def ours_row(case: str, entry: str, ms: float, **others: object) -> Row:
    return speed_row(case, "forward_sm90", ms, entry=entry, ours=True, **others)


def test_without_results_a_block_has_no_figure(tmp_path: Path) -> None:
    assert {
        name: make(tmp_path) for name, make in readme.BLOCKS.items() if name != "published"
    } == {
        "peers": "",
        "plots": "",
        "accuracy": "",
    }
    assert readme.as_published(tmp_path).count("| - |") == readme.as_published(tmp_path).count(
        "BH ="
    )


def test_each_place_where_a_peer_wins_has_a_line(tmp_path: Path) -> None:
    rows = [
        ours_row("a", "ours", 4.0),
        # Slower and asked for by nobody.
        ours_row("a", "ours, portable", 9.0),
        speed_row("a", "triton", 5.0),
        speed_row("a", "torch compile", 3.0),
        speed_row("a", "cuDNN attention", 1.0),
        speed_row("a", "cuBLAS bf16 8192^3", 0.5),
        ours_row("b", "ours, fused", 2.0),
        ours_row("b", "ours, separate", 3.0),
        speed_row("b", "triton", 2.5),
        speed_row("b", "torch eager", 1.0, status="wrong"),
        speed_row("b", "FlashAttention-2", 2.5),
        {
            "case": "c",
            "contender": "forward_sm90",
            "entry": "ours",
            "status": "wrong",
            "ours": True,
        },
        speed_row("c", "triton", 2.5),
    ]
    write_results(tmp_path / "bench" / "results", "forward", "NVIDIA X", rows)
    text = readme.peers(tmp_path)
    assert text.splitlines() == [
        "A peer that computes the same is faster in 1 of 3 comparisons:",
        "",
        "- [forward, a](bench/results/forward.json): torch compile 3 ms, ours 4 ms",
        "",
        "Softmax attention, which has other products to do on the same matrix units, runs at a "
        "higher rate in 1 of 2:",
        "",
        "- [forward, a](bench/results/forward.json): cuDNN attention 1000, ours 250 TFLOP/s",
    ]
    write_results(tmp_path / "bench" / "results", "forward", "NVIDIA X", rows[:3])
    assert readme.peers(tmp_path) == (
        "A peer that computes the same is faster in 0 of 1 comparisons.\n"
    )


def test_published_figures_stand_beside_ours_of_the_same_problem_alone(tmp_path: Path) -> None:
    shape = "bh32_q65536_k65536_d128x128_bf16"
    rows = [
        ours_row("1", "ours", 250.0, workload=shape, setting=1),
        ours_row("2", "ours", 260.0, workload=shape, setting=2),
    ]
    write_results(tmp_path / "bench" / "results", "backward", "NVIDIA X", rows)
    text = readme.as_published(tmp_path)
    assert "as published (ms)" in text
    assert "| backward, Setting 1, BH = 32, N = 64K, full | 511 | 275 TFLOP/s | 250 |\n" in text
    assert "| backward, Setting 2, BH = 32, N = 64K, full | 521 | 270 TFLOP/s | 260 |\n" in text
    assert "| forward, BH = 32, N = 64K, full | 231 | 305 TFLOP/s | - |\n" in text


def test_only_pictures_of_results_that_exist_are_shown(tmp_path: Path) -> None:
    results = tmp_path / "bench" / "results"
    write_results(results, "lengths", "NVIDIA X", [])
    for name in ("lengths", "memory"):
        (results / f"{name}.png").touch()
    assert readme.pictures(tmp_path) == (
        "[![Speed over context length](bench/results/lengths.png)](bench/results/lengths.json)\n"
    )


def test_the_table_of_accuracy_has_a_column_for_everybody(tmp_path: Path) -> None:
    def row(name: str, case: str, kind: str, **others: object) -> Row:
        about: Row = {"case": case, "contender": name, "kind": kind, "dtype": "bfloat16"}
        errors = dict.fromkeys(("kl", "lse1", "dq1", "dk1", "dq2", "dk2"), 1e-7)
        about |= {"headline": True, "status": "ok", "rule": "holds", "ours": False}
        return about | errors | {"lse2": 2e-7} | others

    rows = [
        row("ours", "logits 1", "logits"),
        row("eager", "logits 1", "logits", rule="broken: lse2, dk1", dk1=None),
        {"case": "logits 1", "contender": "triton", "status": "skipped", "dtype": "bfloat16"}
        | {"kind": "logits", "headline": True, "ours": False},
        row("ours", "KL about 0.01", "near"),
        row("ours", "not shown", "logits", headline=False),
    ]
    notes = ["Something.", "Floor of kl between near sides: 1e-7."]
    write_results(tmp_path / "bench" / "results", "accuracy", "NVIDIA X", rows, notes)
    lines = readme.accuracy(tmp_path).splitlines()
    assert lines[0].startswith("[Title accuracy](bench/results/accuracy.json), NVIDIA X, driver 1;")
    assert lines[2] == "| case | output | ours | eager |"
    assert "| logits 1 | lse | 2.0e-07 | 2.0e-07 (breaks the rule) |" in lines
    assert "| logits 1 | dk1 | 1.0e-07 | not finite (breaks the rule) |" in lines
    assert "| KL about 0.01 | kl | 1.0e-07 | - |" in lines
    assert len([line for line in lines if line.startswith("|")]) == 2 + 6 + 1
    assert lines[-1] == "- Floor of kl between near sides: 1e-7."
    assert "not shown" not in "".join(lines)


def test_a_figure_changed_by_hand_is_found(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"case": "full", "contender": "forward", "status": "ok", "median_ms": 3.14159, "rate": 512},
        {"case": "full", "contender": "eager", "status": "skipped"},
        {"case": "long", "contender": "forward", "status": "ok", "headline": False},
    ]
    write_results(tmp_path / "bench" / "results", "speed", "NVIDIA X", rows)
    path = "bench/results/speed.json"
    table = readme.render([path], tmp_path)
    assert table.startswith(f"One NVIDIA X. [Title speed]({path}).\n")
    assert "| speed, full | forward | 3.14 | 512 | - | - |\n" in table
    assert "eager" not in table
    assert "long" not in table
    text = f"<!-- speed:begin -->\n{table}<!-- speed:end -->\n"
    assert speed_problems(text, tmp_path) == []
    assert speed_problems(text.replace("3.14", "2.14"), tmp_path) == [f"not what ['{path}'] say"]
    made_up = "<!-- speed:begin -->\nTwice as fast: 600 TFLOP/s\n<!-- speed:end -->\n"
    assert speed_problems(made_up, tmp_path) == ["figures without a file of results"]


def test_the_recorded_accuracy_has_every_problem() -> None:
    """A problem that came in after the last run on a card is not measured yet."""
    rows = json.loads((ROOT / "bench/results/accuracy.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {cell.label for cell in cases.accuracy()}


def test_results_of_two_cards_make_no_table(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_results(tmp_path, name, f"NVIDIA {name}", [])
    with pytest.raises(ValueError, match="expected results of one card"):
        readme.render(["x.json", "y.json"], tmp_path)


def test_links_lead_to_files() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_the_map_names_the_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "streamkl_cupy").glob("*.py")):
        assert re.search(rf"\b{re.escape(path.name)}\b", text), f"{path.name} is not on the map"

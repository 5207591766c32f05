"""The README says what is so: its commands are those that CI runs, its figures were measured."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench import readme
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


def write_results(directory: Path, name: str, card: str, rows: list[Row]) -> None:
    environment = {
        "device": {"name": card, "driver_version": "1"},
        "date": "",
        "commit": None,
        "versions": {},
        "digests": {"cuda_src": ""},
    }
    Report(name, f"Title {name}", readme.COLUMNS, rows, environment=environment).write(directory)


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

"""The wheel, the sdist and the editable install: all three find the kernels' sources."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import __version__, jit

ROOT = Path(__file__).resolve().parents[2]

# What an installed package says of itself, from a directory where the checkout is not in sight.
PROBE = """
import importlib.metadata, json, pathlib
import streamkl_cupy
from streamkl_cupy import jit
print(json.dumps({
    "package": str(pathlib.Path(streamkl_cupy.__file__).resolve().parent),
    "sources": str(jit.source_directory()),
    "digest": jit.source_digest(),
    "version": streamkl_cupy.__version__,
    "metadata": importlib.metadata.version("streamkl-cupy"),
}))
"""


def run(*command: str | Path, cwd: Path, path: Path | str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def probe(python: str | Path, *, cwd: Path, path: Path | str = "") -> dict[str, str]:
    answer: dict[str, str] = json.loads(run(python, "-c", PROBE, cwd=cwd, path=path))
    return answer


def build(target: str, source: Path, out: Path) -> Path:
    # Run as a module: the command may not be on PATH, and an isolated build would need an index.
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", target, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def checkout_digest() -> str:
    return jit.source_digest(ROOT / "cuda_src")


def files_below(root: Path) -> set[str]:
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in paths if path.suffix != ".pyc"}


def test_the_wheel_holds_every_kernel_source_and_the_sample(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"streamkl_cupy/cuda_src/" + name for name in files_below(ROOT / "cuda_src")}
    assert expected
    assert {name for name in names if "cuda_src/" in name} == expected
    assert "streamkl_cupy/data/minilm_attention_qk.npz" in names
    assert "streamkl_cupy/py.typed" in names
    licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"streamkl_cupy"}


def test_the_metadata_names_python_and_the_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(archive.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"cu12", "cu13", "test", "dev", "bench"}
    base = {
        re.split("[>=<;]", requirement)[0].strip().replace("_", "-")
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert base == {"ml-dtypes", "numpy", "rich", "scipy"}


def test_an_installed_wheel_finds_its_own_sources(installed: Path, checkout_digest: str) -> None:
    answer = probe(sys.executable, cwd=installed.parent, path=installed)
    assert Path(answer["package"]) == installed / "streamkl_cupy"
    assert Path(answer["sources"]) == installed / "streamkl_cupy" / "cuda_src"
    assert answer["digest"] == checkout_digest
    assert answer["version"] == answer["metadata"]


def test_the_console_script_works(installed: Path) -> None:
    script = installed / "bin" / "streamkl-cupy"
    version = probe(sys.executable, cwd=installed.parent, path=installed)["version"]
    output = run(script, "--version", cwd=installed.parent, path=installed)
    assert output.split() == ["streamkl-cupy", version]


def test_a_wheel_from_the_sdist_is_the_wheel_from_the_checkout(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    # Only Python from 3.10.12 and 3.11.4 on has filters, and warns where none is named.
    filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", **filters)
    (source,) = (tmp_path / "unpacked").iterdir()
    for folder in ("cuda_src", "tests", "bench", "examples"):
        assert files_below(source / folder) == files_below(ROOT / folder)
    again = build("wheel", source, tmp_path / "wheel")

    def contents(path: Path) -> dict[str, int]:
        return {info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()}

    assert contents(again) == contents(wheel)


def test_an_editable_install_finds_the_sources_of_the_checkout(
    tmp_path: Path, checkout_digest: str
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    # Build backend and dependencies come from the environment that runs the tests. Path files are
    # read in the order of their names: the editable install is found before one in there.
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    (packages / "zz_dependencies.pth").write_text("\n".join(here) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    # An installation there would count as the one to replace.
    run(*pip, "--ignore-installed", "--no-index", "--no-build-isolation", "-e", ROOT, cwd=tmp_path)
    answer = probe(python, cwd=tmp_path)
    assert Path(answer["package"]) == ROOT / "streamkl_cupy"
    assert Path(answer["sources"]) == ROOT / "cuda_src"
    assert answer["digest"] == checkout_digest
    assert answer["version"] == answer["metadata"]


def test_the_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", *ROOT.glob("streamkl_cupy/*.py")]
    pattern = re.compile(rf"""version\w*["']?\s*[:=]\s*["']?{re.escape(__version__)}\b""")
    holders = [path.name for path in files if pattern.search(path.read_text())]
    assert holders == ["__init__.py"]

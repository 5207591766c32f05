"""Who imports whom: down only, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "streamkl_cupy"

# A module may import modules of lower levels only. A new module needs a place here.
LEVELS = {
    "env": 0,
    "problem": 0,
    "reference": 0,
    "state": 0,
    "tiling": 0,
    "timing": 0,
    "jit": 1,
    "plan": 1,
    "tensor_map": 1,
    "catalogue": 2,
    "chain": 2,
    "interop": 2,
    "choices": 3,
    "launch": 4,
    "api": 5,
    "audit": 6,
    "jax": 6,
    "torch": 6,
    "tune": 6,
    "cli": 7,
    "__main__": 8,
}

# Modules that may name an array library at all, and where.
HOMES = {
    "cupy": {
        "chain",
        "interop",
        "jit",
        "launch",
        "tensor_map",
        "torch",
        "jax",
        "cli",
        "audit",
        "tune",
    },
    "torch": {"torch"},
    "jax": {"jax"},
    "cuda": {"jit", "cli"},
}

# Modules that do not need even the base dependencies.
PURE = {"catalogue", "env", "plan", "problem", "state", "tiling", "timing"}

SOURCES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(module: str) -> tuple[set[str], set[str]]:
    """Modules of the package that a module imports anywhere, and other top-level packages."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ("streamkl_cupy." if node.level else "") + (node.module or "")
            base = base.rstrip(".")
            if base == "streamkl_cupy":
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                names = [base]
        for name in names:
            top, _, rest = name.partition(".")
            if top != "streamkl_cupy":
                outside.add(top)
            elif rest:
                inside.add(rest.partition(".")[0])
    return {name for name in inside if (PACKAGE / f"{name}.py").exists()}, outside


def modules_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running `code`."""
    script = (
        f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    assert module in LEVELS, f"give {module} a level in this file"
    inside, _ = imports(module)
    for name in inside:
        assert LEVELS[name] < LEVELS[module], f"{module} must not import {name}"


@pytest.mark.parametrize("module", SOURCES)
def test_array_libraries_are_named_at_home_only(module: str) -> None:
    _, outside = imports(module)
    for library, homes in HOMES.items():
        assert library not in outside or module in homes, f"{module} must not import {library}"


def test_the_reference_imports_nothing_of_the_package() -> None:
    assert imports("reference")[0] == set()


@pytest.mark.parametrize("module", sorted(PURE & set(SOURCES)))
def test_pure_modules_need_the_standard_library_only(module: str) -> None:
    _, outside = imports(module)
    assert outside <= sys.stdlib_module_names
    assert "numpy" not in modules_after(f"import streamkl_cupy.{module}")


@pytest.mark.parametrize(
    "module",
    sorted((PURE | {"api", "interop", "reference"}) & set(SOURCES)),
)
def test_importing_a_module_loads_no_array_library(module: str) -> None:
    assert not {"cupy", "torch", "jax", "cuda"} & modules_after(f"import streamkl_cupy.{module}")


def test_importing_the_package_loads_next_to_nothing() -> None:
    loaded = modules_after("import streamkl_cupy; dir(streamkl_cupy); streamkl_cupy.__version__")
    assert not {"cupy", "torch", "jax", "cuda", "numpy", "scipy", "rich"} & loaded


def test_a_call_on_the_cpu_loads_no_array_library() -> None:
    loaded = modules_after(
        "import numpy as np, streamkl_cupy as skl\n"
        "q = np.ones((3, 4))\n"
        "state = skl.attention_kl(q, q, q, q, return_state=True)\n"
        "skl.attention_kl_backward(np.ones(3), q, q, q, q, state)\n"
    )
    assert not {"cupy", "torch", "jax", "cuda"} & loaded


def test_the_core_works_where_no_array_library_can_be_imported() -> None:
    modules_after(
        "import sys\n"
        "blocked = {'cupy', 'torch', 'jax', 'jaxlib', 'cuda', 'triton'}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import numpy as np, streamkl_cupy as skl\n"
        "from streamkl_cupy import audit, cli\n"
        "q, k = np.random.default_rng(0).normal(size=(2, 5, 8))\n"
        "state = skl.attention_kl(q, k, k, q, causal=True, return_state=True)\n"
        "dq2, dk2 = skl.attention_kl_backward(np.ones(5), q, k, k, q, state, causal=True)\n"
        "assert state.kl[-1] > 0 and dk2.any()\n"
        "assert audit.measure(q, k, k, q, np.ones(5)).passes\n"
        "assert cli.main(['demo', '--json', '--device', 'cpu']) == 0\n"
        "assert not blocked & sys.modules.keys()\n"
    )


def test_public_names() -> None:
    import streamkl_cupy

    for name in streamkl_cupy.__all__:
        assert name in dir(streamkl_cupy)
        assert getattr(streamkl_cupy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        streamkl_cupy.nothing  # noqa: B018
    assert streamkl_cupy.attention_kl is streamkl_cupy.api.attention_kl
    assert streamkl_cupy.reference.attention_kl is not streamkl_cupy.attention_kl


def test_the_version_has_one_source() -> None:
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "streamkl_cupy/__init__.py"' in project

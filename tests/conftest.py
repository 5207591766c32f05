"""What every test shares: the seed, and the skip of tests/gpu on a machine with no card."""

from __future__ import annotations

import importlib.util
import os
import zlib
from pathlib import Path

# The tests multiply small matrices, which several threads of OpenBLAS only slow down. It reads this
# when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from streamkl_cupy.cli import find_card

GPU_TESTS = Path(__file__).parent / "gpu"

_MISSING = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the rng fixture (default 0)")


def pytest_configure(config: pytest.Config) -> None:
    cupy, text = find_card()
    config.stash[_MISSING] = None if cupy else text


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (change it with --seed)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = config.stash[_MISSING]
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # Without CuPy the files under tests/gpu cannot even be imported.
    if GPU_TESTS in collection_path.parents and importlib.util.find_spec("cupy") is None:
        return True
    return None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    missing = config.stash[_MISSING]
    if missing is not None:
        terminalreporter.write_line(f"tests/gpu: skipped, {missing}", yellow=True)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on ``--seed`` and the test alone, not on the order of tests."""
    seed = request.config.getoption("--seed")
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])

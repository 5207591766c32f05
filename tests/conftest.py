"""What every test shares: the seed, and the skip of tests/gpu on a machine with no card."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path

import numpy as np
import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the rng fixture (default 0)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MISSING] = _missing_card()


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
    return True if GPU_TESTS in collection_path.parents and not _HAS_CUPY else None


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


_MISSING = pytest.StashKey[str | None]()
_HAS_CUPY = importlib.util.find_spec("cupy") is not None


def _missing_card() -> str | None:
    """Why the GPU tests cannot run here, in a few words; None if they can."""
    if not _HAS_CUPY:
        return "CuPy is not installed (extras cu12 and cu13)"
    import cupy

    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no NVIDIA card can be used here ({error})"
    if num_devices == 0:
        return "there is no NVIDIA card"
    capability = int(cupy.cuda.Device(0).compute_capability)
    if capability < 80:
        return f"the card is sm_{capability}, the kernels need sm_80 or newer"
    return None

"""What the tests on a card share as fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import launch
from streamkl_cupy.chain import Bound, Chain, Kernel
from tests.gpu.card import POISON, Cupy, Library, Torch

ROOT = Path(__file__).resolve().parents[2]

# JAX would take most of the card for one of several processes that share it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes tens of seconds")
    workers = getattr(config.option, "numprocesses", None)
    if workers:
        # Else every worker's NumPy starts a thread for each core. The workers inherit this.
        threads = str(max(1, (os.cpu_count() or 1) // workers))
        os.environ.setdefault("OPENBLAS_NUM_THREADS", threads)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that at the end no worker is waited for.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch, where it can use the card."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch cannot use the card")
    return module


@pytest.fixture(scope="session")
def jax() -> Any:
    """JAX, where it can use the card."""
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"this JAX cannot use the card: {error}")
    return module


@pytest.fixture
def cupy_library() -> Cupy:
    return Cupy()


@pytest.fixture
def is_hopper(cupy_library: Cupy) -> bool:
    """Whether the card has Hopper's kernels."""
    return launch.device_facts(cupy_library.device.id).arch == "sm_90a"


@pytest.fixture
def torch_library(torch: Any) -> Torch:
    return Torch(torch)


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> Library:
    """Each of the libraries."""
    return request.getfixturevalue(f"{request.param}_library")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Let all memory that CuPy allocates be full of NaN: results and workspaces alike."""
    import cupy

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        if size:
            memory.memset_async(POISON, size)
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The kernels launched so far, each with its template arguments."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def record(of: type[Chain | Bound]) -> None:
        original = of.launch

        def recorded(chain: Any, *arguments: Any) -> None:
            for step in chain.steps:
                if isinstance(step, Kernel):
                    calls.append((step.plan.kernel, dict(step.plan.template)))
            original(chain, *arguments)

        monkeypatch.setattr(of, "launch", recorded)

    record(Chain)
    record(Bound)
    return calls


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a fresh interpreter, with environment variables, and expect it to succeed."""

    def run(
        *arguments: str, timeout: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    return run

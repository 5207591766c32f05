"""The declared specialisations compile for every architecture, without spills, stack or excess.

They are found again in the cache when nothing has changed, so only the first run takes minutes.
``python -m tests.compile_all`` does the same for every specialisation there is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamkl_cupy import jit
from tests import compile_all
from tests.compile_all import Outcome, Task

MISSING = compile_all.missing_compiler()
if MISSING is not None:
    pytest.skip(MISSING, allow_module_level=True)


@pytest.fixture
def arch(request: pytest.FixtureRequest) -> str:
    """An architecture, where the installed NVRTC knows it."""
    from cuda.bindings import nvrtc

    name = str(request.param)
    number = int("".join(filter(str.isdigit, name)))
    if number not in nvrtc.nvrtcGetSupportedArchs()[1]:
        pytest.skip(f"the installed NVRTC does not know {name}")
    return name


@pytest.mark.parametrize("arch", compile_all.ARCHITECTURES, indirect=True)
def test_declared(arch: str) -> None:
    todo = compile_all.tasks(arch, only_declared=True)
    assert todo
    outcomes = list(compile_all.compile_tasks(todo, os.cpu_count() or 1))
    assert {outcome.task for outcome in outcomes} == set(todo)
    problems = [f"{o.task.name}: {problem}" for o in outcomes for problem in o.problems]
    assert not problems, "\n".join(problems)


def test_every_kernel_is_declared() -> None:
    kernels = {path.stem for path in jit.source_directory().glob("*.cu")}
    for arch in ("sm_80", "sm_90a"):
        declared = {task.kernel for task in compile_all.tasks(arch, only_declared=True)}
        assert declared <= kernels
        unused = kernels - declared
        assert all("sm90" in kernel and arch == "sm_80" for kernel in unused), (arch, unused)


# --------------------------------------------------------------------- the checks can fail: on toys

TOYS = {
    "good": "__global__ void __launch_bounds__(192) good(float* x) { *x = 1.0f; }",
    "unbounded": "__global__ void unbounded(float* x) { *x = 1.0f; }",
    "wrong": "__global__ void __launch_bounds__(128) wrong(float* x) { *x = oops; }",
    "missing": "__global__ void __launch_bounds__(128) another(float* x) { *x = 1.0f; }",
    # An array indexed at run time has to live in memory.
    "stack": """__global__ void __launch_bounds__(128) stack(float* x, int n) {
    float a[32];
    for (int i = 0; i < 32; ++i) a[(i * n) & 31] = x[i];
    *x = a[n & 31];
}""",
    "spilling": """__global__ void __launch_bounds__(1024) spilling(float* x, int n) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i] = a[i] * a[(i * 7 + j) % 96] + a[(i + j) % 96];
    }
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i * n] = a[i];
}""",
}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    for name, text in TOYS.items():
        (sources / f"{name}.cu").write_text(text)
    return [Task(name, (), "sm_80", sources) for name in TOYS]


def test_checks_on_toys(toys: list[Task]) -> None:
    outcomes: dict[str, Outcome] = {}
    for outcome in compile_all.compile_tasks(toys, 2):
        outcomes[outcome.task.kernel] = outcome
    assert outcomes["good"].problems == ()
    assert outcomes["good"].usage is not None
    expected = {
        "unbounded": "no __launch_bounds__",
        "wrong": 'identifier "oops" is undefined',
        "missing": 'identifier "missing" is undefined',
        "stack": "bytes of stack frame",
        "spilling": "bytes of spills",
    }
    for kernel, text in expected.items():
        assert any(text in problem for problem in outcomes[kernel].problems), outcomes[kernel]


def test_too_many_registers_and_slow_products_are_problems() -> None:
    usage = jit.ResourceUsage(registers=168, stack_bytes=0, spill_bytes=0)
    assert compile_all.check(usage, 384, "") == []
    assert compile_all.check(usage, 392, "") == ["168 registers, 160 are there for 392 threads"]
    line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async are serialized"
    assert compile_all.check(usage, 128, f"a\n{line}\nb\n") == [line]


@pytest.mark.parametrize(
    ("num_threads", "budget"),
    [(32, 255), (128, 255), (256, 255), (257, 248), (288, 224), (384, 168), (512, 128), (1024, 64)],
)
def test_register_budget(num_threads: int, budget: int) -> None:
    assert compile_all.register_budget(num_threads) == budget


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"], indirect=True)
def test_launch_bounds_are_read_from_the_cubin(toys: list[Task], arch: str) -> None:
    for kernel, num_threads in (("good", 192), ("unbounded", None)):
        built = jit.build(kernel, (), arch, sources=toys[0].sources)
        assert compile_all.max_threads(built.path.read_bytes(), built.symbol) == num_threads


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"], indirect=True)
def test_stack_is_read_from_the_cubin(toys: list[Task], arch: str) -> None:
    for kernel in ("good", "stack", "spilling"):
        built = jit.build(kernel, (), arch, sources=toys[0].sources)
        num_bytes = jit.stack_bytes(built.path.read_bytes())
        assert num_bytes == jit.resource_usage(built).stack_bytes
        assert (num_bytes > 0) == (kernel != "good")


@pytest.mark.parametrize("cubin", [b"", b"no ELF file", bytes(4096)])
def test_what_is_no_cubin_has_no_stack(cubin: bytes) -> None:
    with pytest.raises(ValueError, match="expected an ELF file"):
        jit.stack_bytes(cubin)


def test_the_command_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_all, "missing_compiler", lambda: "there is none")
    assert compile_all.main([]) == 2
    assert capsys.readouterr().out == "there is none\n"


def test_the_command(
    toys: list[Task], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[tuple[str, bool]] = []

    def tasks(arch: str, only_declared: bool) -> list[Task]:
        chosen.append((arch, only_declared))
        return toys

    monkeypatch.setattr(compile_all, "tasks", tasks)
    arguments = ["--arch", "sm_80", "--jobs", "1", "--declared", "--kernel"]
    assert compile_all.main([*arguments, "good"]) == 0
    assert compile_all.main([*arguments, "unbounded"]) == 1
    assert chosen == [("sm_80", True)] * 2
    out = " ".join(capsys.readouterr().out.split())
    assert "1 kernels, 0 of them with a problem" in out
    assert "sm_80 unbounded: no __launch_bounds__, so no budget of registers" in out

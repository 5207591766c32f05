"""jit.py on toy kernels: what is compiled, what is found again, and what is refused.

Tests that compile are skipped where NVRTC is not installed; the others replace the compiler.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import env, jit
from tests.compile_all import missing_compiler

REPOSITORY = Path(jit.__file__).resolve().parents[1]
TEMPLATE: jit.Template = (("Element", "bf16"), ("kFactor", 3), ("kIsNegative", True))
EXPRESSION = "toy<bf16, 3, true>"
SYMBOL = "_Z3toyI4bf16Li3ELb1EEvPf"

SOURCES = {
    "base.cuh": "#pragma once\nstruct bf16 {};\nstruct fp16 {};\n",
    "ptx/multiply.cuh": """
#pragma once
#include "../base.cuh"
template <class Element>
__device__ inline float multiply(float a, float b) { return a * b; }
""",
    "toy.cu": """
#include "ptx/multiply.cuh"
template <class Element, int kFactor, bool kIsNegative>
__global__ void __launch_bounds__(128) toy(float* x) {
    x[threadIdx.x] = multiply<Element>(x[threadIdx.x], kIsNegative ? -kFactor : kFactor);
}
""",
    "plain.cu": "__global__ void plain(float* x) { *x = 1.0f; }\n",
}


MISSING = missing_compiler()
needs_nvrtc = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def nvrtc() -> None:
    if MISSING is not None:
        pytest.skip(MISSING)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "sources"
    for name, text in SOURCES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that does not exist yet, and a module with no memory."""
    for name in list(os.environ):
        if name.startswith("STREAMKL_"):
            monkeypatch.delenv(name)
    directory = tmp_path / "cache"
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(directory))
    monkeypatch.setattr(jit, "_temporary", {})
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_loaded_before_fork", False)
    return directory


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The real compiler, and the list of what it has compiled."""
    expressions: list[str] = []
    compile_ = jit._compile

    def count(directory: Path, kernel: str, expression: str, *rest: str) -> Any:
        expressions.append(expression)
        return compile_(directory, kernel, expression, *rest)

    monkeypatch.setattr(jit, "_compile", count)
    return expressions


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that gives 400 KB for every kernel, and the list of what it has compiled."""
    expressions: list[str] = []

    def compile_(directory: Path, kernel: str, expression: str, *_: str) -> Any:
        expressions.append(expression)
        return jit._Compiled(expression.encode().ljust(400_000, b"."), f"_Z{expression}", "log\n")

    monkeypatch.setattr(jit, "_compile", compile_)
    monkeypatch.setattr(jit, "compiler_identity", lambda: "fake 1")
    return expressions


def toy(kFactor: int) -> jit.Template:
    return (("Element", "bf16"), ("kFactor", kFactor), ("kIsNegative", True))


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def run_python(code: str, *arguments: object, **variables: str) -> str:
    """Run code in a new interpreter; what it prints."""
    finished = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        cwd=REPOSITORY.anchor,  # the working directory comes before PYTHONPATH
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# ------------------------------------------------------------------------------- names and sources


def test_render() -> None:
    assert jit.render("toy", TEMPLATE) == EXPRESSION
    assert jit.render("plain", ()) == "plain"
    assert jit.render("toy", (("k", -1), ("b", False))) == "toy<-1, false>"


def test_render_errors() -> None:
    with pytest.raises(
        TypeError, match=r"^template: expected an int, a bool or a str for kScale, "
    ):
        jit.render("toy", (("kScale", 1.5),))  # type: ignore[arg-type]
    for kernel in ("../toy", "Toy", "", "toy<1>"):
        with pytest.raises(ValueError, match=f"^kernel: .* got {re.escape(repr(kernel))}; "):
            jit.render(kernel, ())


def test_arch_errors(sources: Path) -> None:
    for arch in ("90", "compute_90", "sm_90/x", "sm_9"):
        with pytest.raises(ValueError, match=f"^arch: .* got '{arch}'; "):
            jit.build("plain", (), arch, sources=sources)


@pytest.mark.parametrize("place", ["streamkl_cupy/cuda_src", "cuda_src"])
def test_sources_are_found_in_the_package_and_beside_it(tmp_path: Path, place: str) -> None:
    package = tmp_path / "streamkl_cupy"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("env.py", "jit.py"):
        shutil.copy(Path(jit.__file__).parent / name, package)
    code = "from streamkl_cupy import jit; print(jit.source_directory())"
    (tmp_path / place).mkdir()
    assert run_python(code, PYTHONPATH=str(tmp_path)).strip() == str(tmp_path.resolve() / place)
    (tmp_path / place).rmdir()
    code = """
from streamkl_cupy import jit
try:
    jit.source_directory()
except RuntimeError as error:
    print(error)
"""
    assert "found neither; install streamkl-cupy again" in run_python(
        code, PYTHONPATH=str(tmp_path)
    )


def test_digest_sees_names_and_contents_of_all_sources_and_no_place(
    sources: Path, tmp_path: Path
) -> None:
    digests = [jit.source_digest(sources)]
    assert jit.source_digest(shutil.copytree(sources, tmp_path / "elsewhere")) == digests[0]
    header = sources / "ptx" / "multiply.cuh"
    header.write_text(header.read_text().replace("a * b", "b * a"))
    digests.append(jit.source_digest(sources))
    header.rename(header.with_name("times.cuh"))
    digests.append(jit.source_digest(sources))
    (sources / "ptx" / "new.cuh").touch()
    digests.append(jit.source_digest(sources))
    assert len(set(digests)) == 4
    (sources / "README.md").write_text("what is no source compiles to nothing")
    assert jit.source_digest(sources) == digests[-1]


def test_digest_of_the_package() -> None:
    assert jit.source_digest() == jit.source_digest(jit.source_directory())


# ----------------------------------------------------------------------------------------- compile


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_build(sources: Path, cache: Path, compiled: list[str], arch: str) -> None:
    built = jit.build("toy", TEMPLATE, arch, sources=sources)
    cubin = built.path.read_bytes()
    assert built.path.parent == cache
    assert cubin.startswith(b"\x7fELF")
    assert built.symbol == SYMBOL
    assert SYMBOL.encode() in cubin
    usage = jit.resource_usage(built)
    assert 0 < usage.registers < 64
    assert usage.stack_bytes == usage.spill_bytes == 0
    assert "\0" not in built.log
    sidecar = json.loads(built.path.with_suffix(".json").read_text())
    assert sidecar["symbol"] == SYMBOL
    assert sidecar["log"] == built.log
    assert re.fullmatch("[0-9a-f]{64}", sidecar["checksum"])
    assert files(cache) == {built.path.name, f"{built.path.stem}.json"}
    assert jit.build("toy", TEMPLATE, arch, sources=sources) == built
    assert compiled == [EXPRESSION]


@needs_nvrtc
def test_a_kernel_without_template_arguments(sources: Path) -> None:
    assert jit.build("plain", (), "sm_80", sources=sources).symbol == "_Z5plainPf"


@needs_nvrtc
def test_a_second_process_compiles_nothing(sources: Path) -> None:
    code = """
import sys
from pathlib import Path
from streamkl_cupy import jit
for factor in range(3):
    template = (("Element", "bf16"), ("kFactor", factor), ("kIsNegative", True))
    print(jit.build("toy", template, "sm_80", sources=Path(sys.argv[1])))
print("cuda.core" in sys.modules, "cupy" in sys.modules)
"""
    first = run_python(code, sources).splitlines()
    second = run_python(code, sources).splitlines()
    assert first[-1] == "True False"
    assert second[-1] == "False False", "finding a kernel must not import the compiler"
    assert first[:-1] == second[:-1]


@needs_nvrtc
def test_a_changed_header_is_compiled(sources: Path, compiled: list[str]) -> None:
    before = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    header = sources / "ptx" / "multiply.cuh"
    header.write_text(header.read_text().replace("a * b", "a * b + 5.0f"))
    after = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert len(compiled) == 2
    assert before.path.read_bytes() != after.path.read_bytes()


@needs_nvrtc
def test_an_edit_during_the_compile_is_not_kept_under_the_old_digest(
    sources: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header, compile_ = sources / "ptx" / "multiply.cuh", jit._compile

    def compile_and_edit(*arguments: Any) -> Any:
        result = compile_(*arguments)
        if len(compiled) == 1:
            header.write_text(header.read_text().replace("a * b", "a + b"))
        return result

    monkeypatch.setattr(jit, "_compile", compile_and_edit)
    built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert len(compiled) == 2
    assert jit.cache_info().num_kernels == 1
    assert jit.source_digest(sources)
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(compiled) == 2


@needs_nvrtc
def test_arithmetic_is_ieee_and_the_language_is_cpp17() -> None:
    from cuda.bindings import nvrtc
    from cuda.core import ProgramOptions

    source = b"""
static_assert(__cplusplus == 201703L, "C++17");
__global__ void plain(float* x) { x[0] = sqrtf(x[1]) / x[2] + sinf(x[3]); }
"""
    options = ProgramOptions(arch="compute_80", **jit._OPTIONS).as_bytes("nvrtc")
    # Through cuda.core the text of PTX can only be had with a driver.
    _, program = nvrtc.nvrtcCreateProgram(source, b"plain.cu", 0, [], [])
    assert not nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    assert b"sqrt.rn.f32" in ptx
    assert b"div.rn.f32" in ptx
    assert b".ftz" not in ptx
    assert b".approx" not in ptx


@needs_nvrtc
def test_compile_error_names_the_kernel_and_shows_the_lines(sources: Path) -> None:
    header = sources / "ptx" / "multiply.cuh"
    header.write_text(header.read_text().replace("a * b", "a * oops"))
    with pytest.raises(jit.CompileError) as caught:
        jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    error = caught.value
    assert error.kernel == EXPRESSION
    assert error.arch == "sm_80"
    first, *lines = str(error).splitlines()
    assert first.startswith(f"{EXPRESSION}: NVRTC (")
    assert first.endswith("could not compile it for sm_80:")
    assert 'multiply.cuh(5): error: identifier "oops" is undefined' in lines[0]
    assert "a * oops" in lines[1]
    assert 'error detected in the compilation of "toy.cu"' in error.log
    assert jit.cache_info().num_kernels == 0


@needs_nvrtc
def test_compile_error_of_wrong_template_arguments_and_arch(sources: Path) -> None:
    with pytest.raises(jit.CompileError, match=r"expected an expression|cannot determine|error"):
        jit.build("toy", TEMPLATE[:1], "sm_80", sources=sources)
    with pytest.raises(jit.CompileError, match="invalid value for --gpu-architecture"):
        jit.build("toy", TEMPLATE, "sm_999", sources=sources)


def test_error_lines() -> None:
    log = "note\n\na.cu(1): error: bad\n  x = y;\n\nwarning: w\n\0\nptxas fatal : too much\n"
    assert jit._error_lines(log) == "a.cu(1): error: bad\n  x = y;\nptxas fatal : too much"
    assert jit._error_lines("one\n\ntwo\n\0") == "one\ntwo"
    long = "\n".join(f"a.cu({i}): error: bad" for i in range(40))
    assert (
        jit._error_lines(long).splitlines()[-1] == "... 10 more lines in the log of this exception"
    )


@needs_nvrtc
def test_no_such_kernel(sources: Path) -> None:
    with pytest.raises(ValueError, match=r"^kernel: expected one with a source file, got 'none' "):
        jit.build("none", (), "sm_80", sources=sources)


@pytest.mark.parametrize("module", ["cuda.pathfinder", "cuda.core", "cuda"])
def test_missing_packages(sources: Path, module: str) -> None:
    if module == "cuda.core" and MISSING is not None:
        pytest.skip(MISSING)
    code = """
import sys
from pathlib import Path
sys.modules[sys.argv[1]] = None
from streamkl_cupy import jit
try:
    jit.build("plain", (), "sm_80", sources=Path(sys.argv[2]))
except ImportError as error:
    print(error)
"""
    message = run_python(code, module, sources)
    assert 'pip install "streamkl-cupy[cu13]"' in message
    assert 'pip install "streamkl-cupy[cu12]"' in message
    assert "cuda." in message


def test_missing_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'CuPy is needed .* pip install "streamkl-cupy\[cu13\]"'):
        jit._cupy()


@needs_nvrtc
def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def fail(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", fail)
    with pytest.raises(
        ImportError, match=r'NVRTC.* not found: pip install "streamkl-cupy\[cu13\]"'
    ):
        jit.compiler_identity.__wrapped__()


@needs_nvrtc
def test_identity_is_of_the_library_that_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda import pathfinder

    identity = jit.compiler_identity.__wrapped__
    library = Path(str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)).resolve()
    assert identity().startswith(f"{library.name} {library.stat().st_size} ")

    def place(path: str | None) -> None:
        loaded = types.SimpleNamespace(abs_path=path)
        monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: loaded)

    seen = set()
    content = bytes(range(256)) * 4096
    for changed in (content, b"x" + content[1:], content[:-1] + b"x", content + b"x"):
        (tmp_path / "libnvrtc.so").write_bytes(changed)
        (tmp_path / "link.so").unlink(missing_ok=True)
        (tmp_path / "link.so").symlink_to("libnvrtc.so")
        place(str(tmp_path / "link.so"))
        seen.add(identity())
    assert len(seen) == 4
    for path in (None, str(tmp_path / "gone.so")):
        place(path)
        assert re.fullmatch(r"nvrtc \d+\.\d+", identity())


# --------------------------------------------------------------------------------------- the cache


def test_everything_that_matters_is_in_the_key(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {jit.build("toy", TEMPLATE, "sm_80", sources=sources).path}
    paths.add(jit.build("toy", TEMPLATE, "sm_86", sources=sources).path)
    paths.add(jit.build("toy", toy(4), "sm_80", sources=sources).path)
    paths.add(jit.build("plain", (), "sm_80", sources=sources).path)
    monkeypatch.setattr(jit, "compiler_identity", lambda: "fake 2")
    paths.add(jit.build("toy", TEMPLATE, "sm_80", sources=sources).path)
    monkeypatch.setitem(jit._OPTIONS, "fma", False)
    paths.add(jit.build("toy", TEMPLATE, "sm_80", sources=sources).path)
    (sources / "new.cuh").touch()
    paths.add(jit.build("toy", TEMPLATE, "sm_80", sources=sources).path)
    assert len(paths) == len(fake) == 7


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _change(name: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, name: value}))

    return change


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".cubin", _flip),
        (".cubin", _truncate),
        (".cubin", lambda path: os.truncate(path, 0)),
        (".cubin", Path.unlink),
        (".json", _truncate),
        (".json", lambda path: os.truncate(path, 0)),
        (".json", Path.unlink),
        (".json", lambda path: path.write_text("[1]")),
        (".json", lambda path: path.write_bytes(b"\xff\xfe\xff")),
        (".json", _change("expression", "toy<bf16, 4, true>")),
        (".json", _change("symbol", "_Z5plainPf")),
        (".json", _change("symbol", None)),
        (".json", _change("checksum", "0" * 64)),
        (".json", _change("log", 1)),
    ],
)
def test_a_damaged_file_is_built_again(
    sources: Path, fake: list[str], suffix: str, damage: Callable[[Path], None]
) -> None:
    built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    good = built.path.read_bytes(), built.path.with_suffix(".json").read_bytes()
    damage(built.path.with_suffix(suffix))
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(fake) == 2
    assert (built.path.read_bytes(), built.path.with_suffix(".json").read_bytes()) == good
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(fake) == 2


@needs_nvrtc
def test_racing_processes(sources: Path, cache: Path, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from streamkl_cupy import jit
import cuda.core
sources, start = Path(sys.argv[1]), Path(sys.argv[2])
Path(sys.argv[3]).touch()
while not start.exists():
    time.sleep(0.001)
for factor in range(5):
    template = (("Element", "bf16"), ("kFactor", factor), ("kIsNegative", True))
    built = jit.build("toy", template, "sm_80", sources=sources)
    assert jit._read(built.path.parent, built.path.stem, jit.render("toy", template)) == built
print("done")
"""
    start = tmp_path / "start"
    ready = [tmp_path / f"ready{i}" for i in range(3)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(sources), str(start), str(flag)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for flag in ready
    ]
    deadline = time.monotonic() + 60
    while not all(flag.exists() for flag in ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    start.touch()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == "done\n"
    names = files(cache)
    assert len(names) == 10, names
    assert all(name.endswith((".cubin", ".json")) for name in names)


def test_mixed_files_of_two_processes_are_built_again(sources: Path, fake: list[str]) -> None:
    built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    # The other process compiled to other bytes, and its cubin landed last.
    jit.replace_file(built.path, b"other bytes")
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(fake) == 2


def test_threads_compile_a_kernel_once(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, start = jit._compile, threading.Barrier(8)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return compile_(*arguments)

    def build(_: int) -> jit.Built:
        start.wait(10)
        return jit.build("toy", TEMPLATE, "sm_80", sources=sources)

    monkeypatch.setattr(jit, "_compile", slow)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(build, range(8)))) == 1
    assert fake == [EXPRESSION]


def test_threads_compile_different_kernels_at_the_same_time(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, both_inside = jit._compile, threading.Barrier(2)

    def together(*arguments: Any) -> Any:
        both_inside.wait(10)  # breaks if one of the two has to wait for the other
        return compile_(*arguments)

    monkeypatch.setattr(jit, "_compile", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: jit.build("toy", toy(i), "sm_80", sources=sources), range(2)))
    assert len(fake) == 2


def test_a_failed_compile_is_tried_again(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise jit.CompileError(EXPRESSION, "sm_80", "fake 1", "error: no")

    with monkeypatch.context() as patch:
        patch.setattr(jit, "_compile", fail)
        with pytest.raises(jit.CompileError):
            jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources).path.exists()


def test_the_limit_evicts_what_was_used_least_recently(
    sources: Path, cache: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMKL_CACHE_SIZE", "1")  # two kernels of 400 KB fit, three do not
    first = jit.build("toy", toy(1), "sm_80", sources=sources)
    second = jit.build("toy", toy(2), "sm_80", sources=sources)
    for path in cache.iterdir():
        os.utime(path, ns=(0, 10**17 if path.stem == first.path.stem else 2 * 10**17))
    assert jit.build("toy", toy(1), "sm_80", sources=sources) == first  # now the second is older
    third = jit.build("toy", toy(3), "sm_80", sources=sources)
    assert files(cache) == {
        f"{built.path.stem}{suffix}" for built in (first, third) for suffix in (".cubin", ".json")
    }
    assert jit.cache_info().size_bytes <= 10**6
    jit.build("toy", toy(2), "sm_80", sources=sources)
    assert fake == [jit.render("toy", toy(i)) for i in (1, 2, 3, 2)]
    assert second.path.exists()


def test_the_kernel_just_built_stays_even_over_the_limit(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "cache_size", lambda: 1000)
    for factor in range(3):
        assert jit.build("toy", toy(factor), "sm_80", sources=sources).path.exists()
        assert jit.cache_info().num_kernels == 1


def test_a_wrong_limit_is_refused_before_the_compile(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMKL_CACHE_SIZE", "much")
    with pytest.raises(ValueError, match=r"^STREAMKL_CACHE_SIZE: "):
        jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert fake == []


def test_info_and_clear(sources: Path, cache: Path, fake: list[str]) -> None:
    assert jit.cache_info() == jit.CacheInfo(cache, 0, 0, 512_000_000)
    assert jit.cache_clear() == 0
    assert not cache.exists(), "asking must not create the directory"
    for factor in range(3):
        jit.build("toy", toy(factor), "sm_80", sources=sources)
    info = jit.cache_info()
    assert info.num_kernels == 3
    assert info.size_bytes == sum(path.stat().st_size for path in cache.iterdir())
    others = {"tuned.json", "notes.cubin", ".streamkl-writing.tmp"}
    for name in (*others, ".streamkl-dead.tmp"):
        (cache / name).write_text("{}")
    os.utime(cache / ".streamkl-dead.tmp", (0, 0))
    assert jit.cache_clear() == 3
    assert files(cache) == others
    assert jit.cache_info().num_kernels == 0


def test_debug_tells_what_happens(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    jit.build("toy", toy(1), "sm_80", sources=sources)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("STREAMKL_DEBUG", "1")
    jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    out, err = capsys.readouterr()
    assert out == ""
    compiled, found = err.splitlines()
    assert compiled.startswith(f"streamkl_cupy: {EXPRESSION} sm_80: compiled in ")
    assert found.startswith(f"streamkl_cupy: {EXPRESSION}: found ")


# ----------------------------------------------------------------------------------- the directory


def test_platform_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    name = "streamkl-cupy"
    assert jit._platform_directory("linux") == tmp_path / ".cache" / name
    assert jit._platform_directory("darwin") == tmp_path / "Library" / "Caches" / name
    assert jit._platform_directory("win32") == tmp_path / "AppData" / "Local" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert jit._platform_directory("linux") == tmp_path / "xdg" / name
    assert jit._platform_directory("win32") == tmp_path / "local" / name
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jit._platform_directory("linux") == tmp_path / ".cache" / name


@pytest.mark.skipif(sys.platform != "linux", reason="the platform directory of Linux")
def test_the_platform_directory_is_the_default(
    sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STREAMKL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert built.path.parent == tmp_path / "xdg" / "streamkl-cupy" == jit.cache_directory()


posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no owners and modes")


@posix
def test_the_directory_is_for_its_owner_alone(sources: Path, cache: Path, fake: list[str]) -> None:
    before = os.umask(0)
    try:
        jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}


def _refusals(sources: Path) -> list[str]:
    """The message with which each function refuses the directory."""
    messages = []
    for function in (
        lambda: jit.build("toy", TEMPLATE, "sm_80", sources=sources),
        jit.cache_directory,
        jit.cache_info,
        jit.cache_clear,
    ):
        with pytest.raises(jit.CacheError) as caught:
            function()
        messages.append(str(caught.value))
    return messages


@posix
def test_the_directory_of_another_user_is_refused(
    sources: Path, cache: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for message in _refusals(sources):
        assert message == (
            f"cache directory: expected one that belongs to user {owner + 1}, got {cache}, which "
            f"belongs to user {owner}; remove it, or set STREAMKL_CACHE_DIR to a directory of "
            "your own."
        )


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o702])
def test_a_directory_that_others_can_write_is_refused(
    sources: Path, cache: Path, fake: list[str], mode: int
) -> None:
    cache.mkdir()
    cache.chmod(mode)
    for message in _refusals(sources):
        assert f"expected mode 700, got {mode:o} for {cache}" in message
        assert message.endswith(f"run chmod 700 {cache}.")


@posix
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_refused(
    sources: Path, cache: Path, fake: list[str], tmp_path: Path, dangling: bool
) -> None:
    target = tmp_path / "target"
    if not dangling:
        target.mkdir(mode=0o700)
    cache.symlink_to(target)
    for message in _refusals(sources):
        assert message.startswith(
            f"cache directory: expected a directory, got the symbolic link {cache}; remove it, or "
        )
    assert dangling or not files(target)


def test_a_file_in_the_place_of_the_directory_is_refused(
    sources: Path, cache: Path, fake: list[str]
) -> None:
    cache.write_text("")
    for message in _refusals(sources):
        assert f"got {cache}, which is a file; " in message


def test_a_link_above_the_directory_is_fine(
    sources: Path, fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "link" / "cache"))
    jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert len(files(tmp_path / "target" / "cache")) == 2


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that nobody can create, root neither: its parent is a file."""
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_a_temporary_directory_with_one_warning(
    sources: Path, unwritable: Path, tmp_path: Path, fake: list[str]
) -> None:
    with pytest.warns(RuntimeWarning) as warned:
        built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit.build("toy", toy(4), "sm_80", sources=sources)
        assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(warned) == 1
    assert str(warned[0].message).startswith(
        f"streamkl_cupy: compiled kernels cannot be kept in {unwritable} ("
    )
    assert "Set STREAMKL_CACHE_DIR to a directory that can be written" in str(warned[0].message)
    assert len(fake) == 2
    directory = built.path.parent
    assert directory.parent == tmp_path / "temporary"
    assert sys.platform == "win32" or stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert jit.cache_directory() == directory
    assert jit.cache_info().directory == directory
    assert jit.cache_info().num_kernels == jit.cache_clear() == 2


def test_a_temporary_directory_that_was_cleaned_away_is_made_again(
    sources: Path, unwritable: Path, fake: list[str]
) -> None:
    with pytest.warns(RuntimeWarning):
        built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    shutil.rmtree(built.path.parent)
    with pytest.warns(RuntimeWarning):
        assert jit.build("toy", TEMPLATE, "sm_80", sources=sources).path.exists()


def test_the_temporary_directory_goes_with_its_process(unwritable: Path) -> None:
    code = """
import os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from streamkl_cupy import jit
directory = jit.cache_directory()
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        sys.exit()  # runs what is registered for the exit: nothing of the parent's may go
    assert os.waitpid(child, 0)[1] == 0
print(directory, directory.is_dir())
"""
    directory, existed = run_python(code).split()
    assert existed == "True"
    assert not Path(directory).exists()


def test_nothing_at_all_can_be_written(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(jit.CacheError, match=r"nor a temporary directory .* can be written; set "):
        jit.cache_directory()


@pytest.mark.parametrize("nobody", ["~", ""])
def test_no_home_directory(nobody: str, unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMKL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", nobody))
    with pytest.warns(RuntimeWarning, match="the user has no home directory"):
        assert jit.cache_directory().is_dir()


def test_a_full_disk_leaves_no_half_file_and_goes_to_the_temporary_directory(
    sources: Path,
    cache: Path,
    fake: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if Path(target).parent == cache and target.suffix == ".json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)
    assert built.path.parent.parent == tmp_path / "temporary"
    assert files(cache) == {built.path.name}, "no temporary file may stay"
    assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    assert len(fake) == 1


def test_a_directory_that_can_only_be_read_serves_what_it_holds(
    sources: Path, cache: Path, fake: list[str], unwritable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(cache))
    built = jit.build("toy", TEMPLATE, "sm_80", sources=sources)

    def refuse(*_: object, **__: object) -> bool:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "utime", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.build("toy", TEMPLATE, "sm_80", sources=sources) == built
    with pytest.warns(RuntimeWarning, match="it is not writable"):
        other = jit.build("toy", toy(4), "sm_80", sources=sources)
    assert other.path.parent != cache
    assert len(fake) == 2


# -------------------------------------------------------------------------------------------- load


class FakeCupy(types.ModuleType):
    """What jit.py uses of CuPy, and a record of the calls."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.current = -1
        self.loads: list[tuple[int, str, str]] = []
        self.limits: list[tuple[int, int]] = []
        self.error: Exception | None = None
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                self.before, fake.current = fake.current, self.index

            def __exit__(self, *_: object) -> None:
                fake.current = self.before

        class CUDADriverError(RuntimeError):
            pass

        class RawKernel:
            def __init__(self) -> None:
                self.kernel = object()

            def __setattr__(self, name: str, value: Any) -> None:
                if name == "max_dynamic_shared_size_bytes":
                    fake.limits.append((fake.current, value))
                super().__setattr__(name, value)

        class RawModule:
            def __init__(self, *, path: str) -> None:
                self.path = path

            def get_function(self, symbol: str) -> RawKernel:
                if fake.error is not None:
                    raise fake.error
                time.sleep(0.05)
                fake.loads.append((fake.current, self.path, symbol))
                return RawKernel()

        self.RawModule = RawModule
        driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
        self.cuda = types.SimpleNamespace(Device=Device, driver=driver)


@pytest.fixture
def cupy(sources: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    module = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(jit, "source_directory", lambda: sources)
    return module


def test_function_loads_once_a_device(cupy: FakeCupy, fake: list[str]) -> None:
    assert not jit.is_loaded("toy", TEMPLATE, "sm_80", 0)
    first = jit.function("toy", TEMPLATE, "sm_80", 0)
    assert jit.is_loaded("toy", TEMPLATE, "sm_80", 0)
    assert not jit.is_loaded("toy", TEMPLATE, "sm_80", 1)
    assert not jit.is_loaded("toy", toy(4), "sm_80", 0)
    assert jit.function("toy", TEMPLATE, "sm_80", 0) is first
    second = jit.function("toy", TEMPLATE, "sm_80", 1)
    assert second is not first
    path = str(jit.build("toy", TEMPLATE, "sm_80").path)
    assert cupy.loads == [(0, path, f"_Z{EXPRESSION}"), (1, path, f"_Z{EXPRESSION}")]
    assert cupy.limits == []
    assert fake == [EXPRESSION]


def test_function_raises_the_limit_of_shared_memory_when_asked(cupy: FakeCupy) -> None:
    for shared_memory in (0, 100_000, 50_000, 100_000, 0, 200_000):
        jit.function("toy", TEMPLATE, "sm_80", 1, shared_memory=shared_memory)
    assert cupy.limits == [(1, 100_000), (1, 200_000)]
    assert len(cupy.loads) == 1
    assert cupy.current == -1


def test_threads_load_once(cupy: FakeCupy, fake: list[str]) -> None:
    start = threading.Barrier(8)

    def load(_: int) -> object:
        start.wait(10)
        return jit.function("toy", TEMPLATE, "sm_80", 0, shared_memory=65536)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(load, range(8)))) == 1
    assert len(cupy.loads) == len(cupy.limits) == len(fake) == 1


def test_a_cubin_that_the_driver_refuses(cupy: FakeCupy) -> None:
    cupy.error = cupy.cuda.driver.CUDADriverError("CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(RuntimeError, match=r"refused .*\.cubin, built by NVRTC fake 1: CUDA_ERROR"):
        jit.function("toy", TEMPLATE, "sm_80", 0)
    assert not jit.is_loaded("toy", TEMPLATE, "sm_80", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_process_can_build_but_not_use_what_was_loaded(sources: Path) -> None:
    code = """
import os, sys
from streamkl_cupy import jit
jit._loaded["slot"] = object()
jit._locks["held by a thread"].acquire() if "held by a thread" in jit._locks else None
jit._guard.acquire()  # as if another thread were inside at the time of the fork
child = os.fork()
if child == 0:
    try:
        assert jit._lock("another") is not None
        jit.function("toy", (), "sm_80", 0)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert run_python(code).strip() == (
        "toy: the process was forked from one that had already loaded kernels, and CUDA does not "
        'survive a fork; start processes with multiprocessing.get_context("spawn") instead.'
    )


# ----------------------------------------------------------------------------------- log of ptxas


def test_resource_usage_picks_the_entry_and_adds_what_it_calls() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    100 bytes stack frame, 100 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'mine' for 'sm_80'
ptxas info    : Function properties for mine
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size\0
ptxas info    : Compile time = 2.530 ms
ptxas info    : Function properties for callee
    16 bytes stack frame, 0 bytes spill stores, 1 bytes spill loads
"""
    usage = jit.resource_usage(jit.Built(Path("x"), "mine", log))
    assert usage == jit.ResourceUsage(registers=40, stack_bytes=24, spill_bytes=17)


@pytest.mark.parametrize("log", ["", "ptxas info    : Used 40 registers"])
def test_resource_usage_without_a_report(log: str) -> None:
    with pytest.raises(ValueError, match=r"^log: expected the report of ptxas on mine, got "):
        jit.resource_usage(jit.Built(Path("x"), "mine", log))


@needs_nvrtc
def test_resource_usage_sees_stack_and_spills(sources: Path) -> None:
    (sources / "plain.cu").write_text("""
__global__ void __launch_bounds__(1024) plain(float* x, int n) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i] = a[i] * a[(i * 7 + j) % 96] + a[(i + j) % 96];
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i * n] = a[i];
}
""")
    usage = jit.resource_usage(jit.build("plain", (), "sm_80", sources=sources))
    assert usage.registers <= 64
    assert usage.stack_bytes > 0
    assert usage.spill_bytes > 0

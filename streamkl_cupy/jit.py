"""From a kernel's name to a loaded function: the only compile and the only load of the package.

sources -> digest -> NVRTC -> cubin on disk -> ``cupy.RawModule`` -> function.

A cubin is kept in a per-user directory under a name that holds a digest of everything it depends
on: every source in ``cuda_src``, the options, the architecture, the template arguments and the
NVRTC library. Beside it lies a JSON file with the checksum, the symbol and the log of ptxas.
Finding a cubin imports no compiler, so a second process starts fast; compiling needs neither a GPU
nor a driver, nor CuPy.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamkl_cupy import env

if TYPE_CHECKING:
    import cupy

Template = tuple[tuple[str, int | bool | str], ...]

# Part of every key, so that a change here leaves the old files alone and unused.
_FORMAT = 1

# Keyword arguments of cuda.core.ProgramOptions. Nothing here relaxes IEEE float32; -v makes ptxas
# write registers, stack and spills into the log.
_OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
    "fma": True,
    "use_fast_math": False,
    "ptxas_options": ["-v"],
}

_SUFFIXES = (".cu", ".cuh")
_KERNEL_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
_ARCH_PATTERN = re.compile(r"sm_[0-9]{2,3}[af]?")
_FILE_PATTERN = re.compile(r"([a-z][a-z0-9_]*-sm_[0-9]{2,3}[af]?-[0-9a-f]{32})\.(cubin|json)")
_UNFINISHED_PATTERN = re.compile(r"\.streamkl-.*\.tmp")
# A file of a process that died while writing; a living one needs milliseconds.
_UNFINISHED_SECONDS = 3600.0

_INSTALL = (
    'pip install "streamkl-cupy[cu13]" (CUDA 13) or pip install "streamkl-cupy[cu12]" (CUDA 12)'
)


class CompileError(RuntimeError):
    """NVRTC refused a kernel.

    Attributes
    ----------
    kernel : str
        The kernel with its template arguments, as C++ writes it.
    arch : str
        The architecture it was compiled for.
    log : str
        Everything that NVRTC wrote; the message holds only the lines about errors.
    """

    def __init__(self, kernel: str, arch: str, compiler: str, log: str) -> None:
        self.kernel = kernel
        self.arch = arch
        self.log = log
        super().__init__(
            f"{kernel}: NVRTC ({compiler}) could not compile it for {arch}:\n{_error_lines(log)}"
        )


class CacheError(RuntimeError):
    """The directory of the compiled kernels is not safe to use."""


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel on disk."""

    path: Path
    """The cubin."""
    symbol: str
    """Name of the entry function in the cubin (mangled)."""
    log: str
    """What NVRTC and ptxas wrote: warnings, registers, stack and spills."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What one kernel takes of the card, as ptxas reports it."""

    registers: int
    """Registers a thread."""
    stack_bytes: int
    """Bytes of stack frame a thread, the kernel and the functions that it calls together."""
    spill_bytes: int
    """Bytes of spill stores and spill loads a thread, likewise."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """State of the directory of compiled kernels."""

    directory: Path
    num_kernels: int
    size_bytes: int
    limit_bytes: int


@dataclass(slots=True)
class _Loaded:
    raw_kernel: Any  # cupy.RawKernel, which alone can set attributes
    function: cupy.cuda.Function
    shared_memory: int


@dataclass(frozen=True, slots=True)
class _Compiled:
    cubin: bytes
    symbol: str
    log: str


_guard = threading.Lock()
_locks: dict[object, threading.Lock] = {}
_loaded: dict[tuple[str, Template, str, int], _Loaded] = {}
_temporary: dict[Path, Path] = {}  # unusable directory -> the one of this process in its place
_loaded_before_fork = False


def render(kernel: str, template: Template) -> str:
    """Write a kernel with its template arguments as C++ does.

    Parameters
    ----------
    kernel : str
        Name of the kernel, which is also the stem of its ``.cu`` file.
    template : tuple of (str, int or bool or str)
        Name and value of each argument in the order of the declaration. A string is taken
        verbatim (the name of a type), a bool becomes ``true`` or ``false``.

    Returns
    -------
    str
        For instance ``forward_sm80<bf16, 128, 128, true>``; the name alone without arguments.

    Raises
    ------
    TypeError
        If a value is of another type.
    ValueError
        If `kernel` cannot be the stem of a file of ``cuda_src``.

    Examples
    --------
    >>> render("forward_sm80", (("Element", "bf16"), ("kHeadDim1", 128), ("kHasLow", True)))
    'forward_sm80<bf16, 128, true>'
    """
    if not _KERNEL_PATTERN.fullmatch(kernel):
        raise ValueError(
            f"kernel: expected lower-case letters, digits and _, got {kernel!r}; "
            "give the stem of a .cu file of cuda_src."
        )
    if not template:
        return kernel
    return f"{kernel}<{', '.join(_literal(name, value) for name, value in template)}>"


def source_directory() -> Path:
    """Find ``cuda_src``: inside the package (wheel) or beside it (checkout, editable install).

    Returns
    -------
    pathlib.Path
        The directory of the kernels' sources.

    Raises
    ------
    RuntimeError
        If it is in neither place.

    Examples
    --------
    >>> source_directory().name
    'cuda_src'
    """
    package = Path(__file__).resolve().parent
    places = (package / "cuda_src", package.parent / "cuda_src")
    for place in places:
        if place.is_dir():
            return place
    raise RuntimeError(
        f"cuda_src: expected the kernels' sources at {places[0]} or {places[1]}, found neither; "
        "install streamkl-cupy again."
    )


def source_digest(sources: Path | None = None) -> str:
    """Digest of the name and the content of every source, ``.cu`` or ``.cuh``, below a directory.

    Parameters
    ----------
    sources : pathlib.Path, optional
        The directory; by default :func:`source_directory`.

    Returns
    -------
    str
        SHA-256, 64 hexadecimal digits. It does not depend on where the directory is.

    Examples
    --------
    >>> len(source_digest())
    64
    """
    root = str(source_directory() if sources is None else sources)
    digest = hashlib.sha256()
    for relative, path in sorted(_files_below(root, "")):
        if not relative.endswith(_SUFFIXES):  # the README compiles to nothing
            continue
        with open(path, "rb") as file:
            content = file.read()
        digest.update(f"{relative}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def compiler_identity() -> str:
    """Tell which NVRTC library compiles in this process.

    Two libraries of one version that come from different places are told apart only if they
    differ: the identity is the file's name, its size and a digest of its beginning and its end,
    where the build id, the version and the tables of sections and symbols lie. Versions alone
    would not do: NVRTC reports no patch level, and package metadata says nothing of a library that
    comes from a system toolkit or that another package has loaded first.

    Returns
    -------
    str
        For instance ``libnvrtc.so.13 109338064 5f0c6a7b9e3d1c42``.

    Raises
    ------
    ImportError
        If there is no NVRTC or no package that finds it; the message says what to install.

    Examples
    --------
    >>> compiler_identity().split()[0]  # doctest: +SKIP
    'libnvrtc.so.13'
    """
    try:
        from cuda import pathfinder
    except ImportError as error:
        raise ImportError(f"cuda.pathfinder is needed to find NVRTC: {_INSTALL}") from error
    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError as error:
        raise ImportError(
            f"NVRTC, which compiles the kernels, was not found: {_INSTALL}"
        ) from error
    try:
        return _file_identity(Path(library.abs_path).resolve(strict=True))
    except (OSError, TypeError):
        # Some loaders tell no path, or one that cannot be read; then the version has to do.
        return _reported_version()


def build(kernel: str, template: Template, arch: str, *, sources: Path | None = None) -> Built:
    """Find a kernel's cubin on disk, or compile it and keep it there.

    Needs neither a GPU, nor a driver, nor CuPy. Safe to call from several threads and processes
    at once: the threads of one process compile a kernel once, other kernels meanwhile.

    Parameters
    ----------
    kernel : str
        Stem of a ``.cu`` file, which is also the name of the ``__global__`` in it.
    template : tuple of (str, int or bool or str)
        Template arguments, see :func:`render`.
    arch : str
        Architecture of the card, for instance ``sm_80`` or ``sm_90a``.
    sources : pathlib.Path, optional
        Directory of the sources; by default :func:`source_directory`.

    Returns
    -------
    Built
        Path of the cubin, symbol and log.

    Raises
    ------
    CompileError
        If NVRTC refuses the kernel.
    CacheError
        If the cache directory belongs to another user, is a symbolic link, or others can write
        to it.
    ImportError
        If a package that is needed to compile is missing.
    ValueError, TypeError
        If an argument or a ``STREAMKL_*`` variable is malformed.

    Examples
    --------
    >>> built = build("reduce_splits", (), "sm_80")  # doctest: +SKIP
    >>> built.path.suffix  # doctest: +SKIP
    '.cubin'
    """
    directory = source_directory() if sources is None else sources
    expression = render(kernel, template)
    if not _ARCH_PATTERN.fullmatch(arch):
        raise ValueError(
            f"arch: expected an architecture such as sm_80 or sm_90a, got {arch!r}; "
            "give the one of the card."
        )
    compiler = compiler_identity()
    while True:
        digest = source_digest(directory)
        name = f"{kernel}-{arch}-{_key(digest, expression, arch, compiler)}"
        with _lock(name):
            built = _find(name, expression)
            if built is not None:
                return built
            limit_bytes = env.cache_size()
            start = time.perf_counter()
            compiled = _compile(directory, kernel, expression, arch, compiler)
            # An edit while NVRTC was reading must not land under the digest from before.
            if source_digest(directory) == digest:
                built = _store(name, expression, compiled, limit_bytes)
                _report(f"{expression} {arch}: compiled in {time.perf_counter() - start:.2f} s")
                return built


def function(
    kernel: str,
    template: Template,
    arch: str,
    device_index: int,
    *,
    shared_memory: int = 0,
) -> cupy.cuda.Function:
    """Give a kernel that is ready to launch on a device, built and loaded at the first call.

    A later call is one look-up. Safe to call from several threads at once.

    Parameters
    ----------
    kernel, template, arch
        As in :func:`build`.
    device_index : int
        Device to load it on.
    shared_memory : int, optional
        Bytes of dynamic shared memory a block that the launch will ask for. Above 48 KiB a kernel
        has to be allowed them, which is done here.

    Returns
    -------
    cupy.cuda.Function
        Call it with grid, block, arguments, ``shared_mem=`` and ``stream=``, under the device.

    Raises
    ------
    ImportError
        If CuPy or a package that is needed to compile is missing.
    RuntimeError
        If the driver refuses the cubin, or in a process that was forked from one that had loaded
        kernels. Otherwise as in :func:`build`.

    Examples
    --------
    >>> kernel = function("reduce_splits", (), "sm_90a", 0)  # doctest: +SKIP
    """
    slot = (kernel, template, arch, device_index)
    loaded = _loaded.get(slot)
    if loaded is not None and loaded.shared_memory >= shared_memory:
        return loaded.function
    if _loaded_before_fork:
        raise RuntimeError(
            f"{kernel}: the process was forked from one that had already loaded kernels, and CUDA "
            "does not survive a fork; start processes with "
            'multiprocessing.get_context("spawn") instead.'
        )
    with _lock(slot):
        loaded = _loaded.get(slot)
        if loaded is None:
            loaded = _load(build(kernel, template, arch), device_index)
            _loaded[slot] = loaded
            _report(f"{render(kernel, template)} {arch}: loaded on device {device_index}")
        if shared_memory > loaded.shared_memory:
            with _cupy().cuda.Device(device_index):
                loaded.raw_kernel.max_dynamic_shared_size_bytes = shared_memory
            loaded.shared_memory = shared_memory
        return loaded.function


def is_loaded(kernel: str, template: Template, arch: str, device_index: int) -> bool:
    """Whether :func:`function` would answer at once, without a compile or a load.

    During the capture of a CUDA graph nothing can be loaded: ask first.

    Parameters
    ----------
    kernel, template, arch, device_index
        As in :func:`function`.

    Returns
    -------
    bool

    Examples
    --------
    >>> is_loaded("reduce_splits", (), "sm_80", 0)
    False
    """
    return (kernel, template, arch, device_index) in _loaded


def resource_usage(built: Built) -> ResourceUsage:
    """Read registers, stack and spills of a kernel out of its log.

    Parameters
    ----------
    built : Built
        What :func:`build` returned.

    Returns
    -------
    ResourceUsage

    Raises
    ------
    ValueError
        If the log does not report on the kernel.

    Examples
    --------
    >>> log = '''ptxas info    : Compiling entry function 'f' for 'sm_80'
    ... ptxas info    : Function properties for f
    ... ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ... ptxas info    : Used 10 registers, used 1 barriers, 360 bytes cmem[0]'''
    >>> resource_usage(Built(Path("f.cubin"), "f", log))
    ResourceUsage(registers=10, stack_bytes=0, spill_bytes=0)
    """
    registers: int | None = None
    stack_bytes = spill_bytes = 0
    has_properties = False
    entries = set(re.findall(r"Compiling entry function '([^']+)'", built.log))
    entry = of = ""
    for line in built.log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            entry = of = found[1]
        elif found := re.search(r"Function properties for '?([^\s']+)", line):
            of = found[1]
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            # Functions that were not inlined are reported beside the entry that calls them.
            if of == built.symbol or of not in entries:
                stack_bytes += int(found[1])
                spill_bytes += int(found[2]) + int(found[3])
            has_properties = has_properties or of == built.symbol
        elif entry == built.symbol and (found := re.search(r"Used (\d+) registers", line)):
            registers = int(found[1])
    if registers is None or not has_properties:
        raise ValueError(f"log: expected the report of ptxas on {built.symbol}, got {built.log!r}.")
    return ResourceUsage(registers, stack_bytes, spill_bytes)


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread of a cubin's kernels: what spilled registers take, if nothing else.

    Read off the ELF section ``.nv.info``, for the log is silent under some versions of cuda.core.

    Parameters
    ----------
    cubin : bytes
        Of one kernel.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If it is no cubin, or one that does not say.
    """
    try:
        # EIATTR_MIN_STACK_SIZE: a symbol and its bytes.
        words = [words for kind, words in cubin_attributes(cubin, ".nv.info") if kind == 0x12]
        return max(num_bytes for _, num_bytes in words)
    except (IndexError, struct.error, ValueError) as error:
        raise ValueError("cubin: expected an ELF file that tells the stack of a kernel") from error


def cubin_attributes(cubin: bytes, section: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """What an ELF section of attributes says: the kind of each (``EIATTR_...``) and its words.

    Parameters
    ----------
    cubin : bytes
        The file.
    section : str
        ``".nv.info"``, or with a dot and a symbol behind it that of one kernel.

    Yields
    ------
    tuple of int and tuple of int
        Attributes whose value is of words of 32 bits; the others are passed over.
    """
    (section_offset,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, num_sections, names_idx = struct.unpack_from("<HHH", cubin, 58)
    sections = [
        struct.unpack_from("<IIQQQQ", cubin, section_offset + idx * entry_size)
        for idx in range(num_sections)
    ]
    for name_offset, _, _, _, position, size in sections:
        name = sections[names_idx][4] + name_offset
        if cubin[name : cubin.index(b"\0", name)].decode() != section:
            continue
        end = position + size
        while position < end:
            # Format, kind, and 16 bits: the value, or the bytes of what follows.
            form, kind, value = struct.unpack_from("<BBH", cubin, position)
            position += 4
            if form == 4:
                yield kind, struct.unpack_from(f"<{value // 4}I", cubin, position)
                position += value


def cache_directory() -> Path:
    """Directory that compiled kernels are written to; it exists after the call.

    ``STREAMKL_CACHE_DIR``, else ``streamkl-cupy`` in the cache directory of the platform. If that
    one cannot be written, a temporary directory for this process, with a warning.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    CacheError
        If the directory belongs to another user, is a symbolic link, or others can write to it.

    Examples
    --------
    >>> cache_directory().is_dir()
    True
    """
    wanted = _wanted_directory()
    with _guard:
        temporary = _current_temporary(wanted)
    if temporary is not None:
        return temporary
    try:
        _create(wanted)
    except OSError as error:
        return _temporary_directory(wanted, error)
    return wanted


def cache_info() -> CacheInfo:
    """Count the kernels on disk and their bytes; creates nothing.

    Returns
    -------
    CacheInfo

    Raises
    ------
    CacheError
        As in :func:`cache_directory`.

    Examples
    --------
    >>> cache_info().limit_bytes
    512000000
    """
    entries = [entry for directory in _existing_directories() for entry in _entries(directory)]
    wanted = _wanted_directory()
    with _guard:
        temporary = _current_temporary(wanted)
    return CacheInfo(
        directory=wanted if temporary is None else temporary,
        num_kernels=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        limit_bytes=env.cache_size(),
    )


def cache_clear() -> int:
    """Remove every compiled kernel from disk and nothing else; what is loaded stays loaded.

    Returns
    -------
    int
        Number of kernels removed.

    Raises
    ------
    CacheError
        As in :func:`cache_directory`.

    Examples
    --------
    >>> cache_clear()  # doctest: +SKIP
    12
    """
    num_removed = 0
    for directory in _existing_directories():
        _remove_unfinished(directory)
        for entry in _entries(directory):
            _remove(directory, entry.name)
            num_removed += 1
    return num_removed


def beside(name: str) -> Path:
    """Where a small file beside the compiled kernels would lie; creates and checks nothing."""
    return _wanted_directory() / name


def read_beside(name: str) -> tuple[Path, bytes] | None:
    """A small file that lies beside the compiled kernels; None if there is none.

    Parameters
    ----------
    name : str
        Not that of a kernel's file, so that nothing here removes it.

    Returns
    -------
    tuple of pathlib.Path and bytes, or None

    Raises
    ------
    CacheError
        As in :func:`cache_directory`.
    OSError
        If it is there and cannot be read.
    """
    for directory in _existing_directories():
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            return path, path.read_bytes()
    return None


def write_beside(name: str, content: bytes) -> Path:
    """Write such a file, whole or not at all; returns where it is.

    Raises
    ------
    CacheError
        As in :func:`cache_directory`.
    OSError
        If it cannot be written.
    """
    path = cache_directory() / name
    replace_file(path, content)
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".streamkl-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ---------------------------------------------------------------------------------- compile, load


def _literal(name: str, value: int | bool | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, str)):
        return str(value)
    raise TypeError(
        f"template: expected an int, a bool or a str for {name}, got {type(value).__name__}; "
        "other values cannot be written as a template argument."
    )


def _files_below(directory: str, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files_below(entry.path, f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", entry.path


def _file_identity(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(2**16))
        file.seek(max(0, size - 2**16))
        digest.update(file.read())
    return f"{path.name} {size} {digest.hexdigest()[:16]}"


def _reported_version() -> str:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(
            f"cuda.bindings is needed to ask NVRTC its version: {_INSTALL}"
        ) from error
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def _key(digest: str, expression: str, arch: str, compiler: str) -> str:
    text = json.dumps([_FORMAT, digest, _OPTIONS, expression, arch, compiler], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _compile(directory: Path, kernel: str, expression: str, arch: str, compiler: str) -> _Compiled:
    # cuda.core puts its modules together while it is imported; a second thread would find it half
    # done.
    with _lock("cuda.core"):
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            raise ImportError(f"cuda.core is needed to compile the kernels: {_INSTALL}") from error
    source = directory / f"{kernel}.cu"
    if not source.is_file():
        raise ValueError(
            f"kernel: expected one with a source file, got {kernel!r} and no {source}; "
            "give the stem of a .cu file of cuda_src."
        )
    options = ProgramOptions(name=source.name, arch=arch, include_path=str(directory), **_OPTIONS)
    log = io.StringIO()
    program = None
    try:
        program = Program(source.read_text(encoding="utf-8"), "c++", options)
        code = program.compile("cubin", name_expressions=(expression,), logs=log)
        cubin, symbol = bytes(code.code), code.symbol_mapping[expression]
    except Exception as error:  # NVRTC's error types are private to cuda.core
        raise CompileError(expression, arch, compiler, f"{error}\n{log.getvalue()}") from error
    finally:
        # A Program that is left to the cycle collector, with the traceback, complains on stderr.
        program = None
    symbol = symbol.decode() if isinstance(symbol, bytes) else str(symbol)
    return _Compiled(cubin, symbol, _tidy(log.getvalue()))


def _tidy(log: str) -> str:
    """A log without the zero bytes that NVRTC pads it with, and without times: what is compiled
    twice is described by the same text."""
    lines = (line.rstrip("\0 \t\r") for line in log.splitlines())
    return "".join(f"{line}\n" for line in lines if line and "Compile time =" not in line)


def _error_lines(log: str, limit: int = 30) -> str:
    """The paragraphs of a compiler's log that speak of an error, or else its end."""
    lines = [line.rstrip("\0 \t\r") for line in log.splitlines()]
    kept: list[str] = []
    keeping = False
    for line in lines:
        keeping = bool(line) and (keeping or re.search(r"\b(error|fatal)\b", line) is not None)
        if keeping:
            kept.append(line)
    if not kept:
        kept = [line for line in lines if line][-limit:]
    if len(kept) > limit:
        kept = [*kept[:limit], f"... {len(kept) - limit} more lines in the log of this exception"]
    return "\n".join(kept)


def _load(built: Built, device_index: int) -> _Loaded:
    cupy = _cupy()
    with cupy.cuda.Device(device_index):
        try:
            raw_kernel = cupy.RawModule(path=str(built.path)).get_function(built.symbol)
            return _Loaded(raw_kernel, raw_kernel.kernel, shared_memory=0)
        except cupy.cuda.driver.CUDADriverError as error:
            raise RuntimeError(
                f"{built.symbol}: the driver of device {device_index} refused {built.path}, built "
                f"by NVRTC {compiler_identity()}: {error}; if the driver is older than that NVRTC, "
                f"install the extra of the driver's CUDA version: {_INSTALL}."
            ) from error


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"CuPy is needed to run on a GPU: {_INSTALL}") from error
    return cupy


def _lock(name: object) -> threading.Lock:
    with _guard:
        return _locks.setdefault(name, threading.Lock())


def _after_fork() -> None:
    """In a forked child: no thread holds a lock, and no CUDA module is valid any more."""
    global _guard, _loaded_before_fork
    _guard = threading.Lock()
    _locks.clear()
    _loaded_before_fork = _loaded_before_fork or bool(_loaded)
    _loaded.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _report(text: str) -> None:
    if env.debug():
        print(f"streamkl_cupy: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------ files on disk


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size_bytes: int
    used_ns: int  # when it was last found or written


def _platform_directory(platform: str = sys.platform) -> Path:
    home = Path(os.path.expanduser("~"))
    if platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else home / "AppData" / "Local"
    elif platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        # The XDG standard tells to ignore a relative path.
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else home / ".cache"
    return base / "streamkl-cupy"


def _wanted_directory() -> Path:
    return env.cache_dir() or _platform_directory()


def _create(directory: Path) -> None:
    if not directory.is_absolute():
        raise FileNotFoundError("the user has no home directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # It exists if an earlier run made it, or a process that races this one.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError("it is not writable")


def _check(directory: Path) -> None:
    """Refuse a directory in which somebody else could place code for this user's card."""
    found = os.lstat(directory)
    remedy = "remove it, or set STREAMKL_CACHE_DIR to a directory of your own"
    if stat.S_ISLNK(found.st_mode):
        raise CacheError(
            f"cache directory: expected a directory, got the symbolic link {directory}; {remedy}."
        )
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(
            f"cache directory: expected a directory, got {directory}, which is a file; {remedy}."
        )
    if sys.platform == "win32":
        return  # LOCALAPPDATA is the user's own; there are neither user ids nor mode bits
    if found.st_uid != os.geteuid():
        raise CacheError(
            f"cache directory: expected one that belongs to user {os.geteuid()}, got {directory}, "
            f"which belongs to user {found.st_uid}; {remedy}."
        )
    if found.st_mode & 0o022:
        raise CacheError(
            f"cache directory: expected mode 700, got {stat.S_IMODE(found.st_mode):o} for "
            f"{directory}, so that others can write to it; run chmod 700 {directory}."
        )


def _current_temporary(wanted: Path) -> Path | None:
    """The directory in the place of an unusable one, unless it has been cleaned away since."""
    directory = _temporary.get(wanted)
    return directory if directory is not None and directory.is_dir() else None


def _temporary_directory(wanted: Path, reason: OSError) -> Path:
    with _guard:
        temporary = _current_temporary(wanted)
        if temporary is not None:
            return temporary
        try:
            directory = Path(tempfile.mkdtemp(prefix="streamkl-cupy-"))
        except OSError as error:
            raise CacheError(
                f"cache directory: neither {wanted} ({reason}) nor a temporary directory ({error}) "
                "can be written; set STREAMKL_CACHE_DIR to a directory of your own."
            ) from error
        _temporary[wanted] = directory
        atexit.register(_remove_temporary, directory, os.getpid())
    warnings.warn(
        f"streamkl_cupy: compiled kernels cannot be kept in {wanted} ({reason}); they go to "
        f"{directory}, which is removed when the process ends. Set STREAMKL_CACHE_DIR to a "
        "directory that can be written, or every process compiles again.",
        RuntimeWarning,
        stacklevel=3,
    )
    return directory


def _remove_temporary(directory: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child must not take the directory from its parent
        shutil.rmtree(directory, ignore_errors=True)


def _existing_directories() -> Iterator[Path]:
    """Where a kernel may be found. A directory that can only be read serves too."""
    wanted = _wanted_directory()
    with _guard:
        temporary = _current_temporary(wanted)
    for directory in (wanted, temporary):
        if directory is not None and directory.is_absolute() and os.path.lexists(directory):
            _check(directory)
            yield directory


def _find(name: str, expression: str) -> Built | None:
    for directory in _existing_directories():
        built = _read(directory, name, expression)
        if built is not None:
            _report(f"{expression}: found {built.path}")
            return built
    return None


def _read(directory: Path, name: str, expression: str) -> Built | None:
    """A kernel in a directory, or None if it is not there or not as it was written."""
    path, sidecar = directory / f"{name}.cubin", directory / f"{name}.json"
    try:
        fields = json.loads(sidecar.read_bytes())
        cubin = path.read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or fields.get("expression") != expression:
        return None
    symbol, log = fields.get("symbol"), fields.get("log")
    if not isinstance(symbol, str) or not isinstance(log, str):
        return None
    if fields.get("checksum") != _checksum(cubin, symbol, log):
        return None
    # A directory that can only be read is never evicted from either.
    with contextlib.suppress(OSError):
        os.utime(sidecar)
    return Built(path, symbol, log)


def _store(name: str, expression: str, compiled: _Compiled, limit_bytes: int) -> Built:
    directory = cache_directory()
    try:
        built = _write(directory, name, expression, compiled)
    except OSError as error:  # a full disk, a quota, a directory removed by somebody else
        directory = _temporary_directory(_wanted_directory(), error)
        built = _write(directory, name, expression, compiled)
    # What cannot be removed, because another process holds it open, waits for the next time.
    with contextlib.suppress(OSError):
        _evict(directory, limit_bytes, keep=name)
    return built


def _write(directory: Path, name: str, expression: str, compiled: _Compiled) -> Built:
    """Write both files, each by a rename. Files of two processes that race may end up mixed only
    if their contents differ; the checksum tells, and the kernel is built again."""
    built = Built(directory / f"{name}.cubin", compiled.symbol, compiled.log)
    fields = {
        "expression": expression,
        "symbol": compiled.symbol,
        "checksum": _checksum(compiled.cubin, compiled.symbol, compiled.log),
        "log": compiled.log,
    }
    replace_file(built.path, compiled.cubin)
    replace_file(directory / f"{name}.json", json.dumps(fields, indent=1).encode())
    return built


def _checksum(cubin: bytes, symbol: str, log: str) -> str:
    digest = hashlib.sha256(cubin)
    digest.update(f"\0{symbol}\0{log}".encode())
    return digest.hexdigest()


def _entries(directory: Path) -> list[_Entry]:
    """The kernels in a directory, least recently used first."""
    sizes: dict[str, int] = {}
    used: dict[str, int] = {}
    with os.scandir(directory) as files:
        for file in files:
            found = _FILE_PATTERN.fullmatch(file.name)
            if found is None:
                continue
            try:
                info = file.stat()
            except FileNotFoundError:
                continue  # removed by another process meanwhile
            sizes[found[1]] = sizes.get(found[1], 0) + info.st_size
            used[found[1]] = max(used.get(found[1], 0), info.st_mtime_ns)
    entries = [_Entry(name, size, used[name]) for name, size in sizes.items()]
    return sorted(entries, key=lambda entry: (entry.used_ns, entry.name))


def _evict(directory: Path, limit_bytes: int, keep: str) -> None:
    """Remove what was used least recently until the directory is within its limit."""
    _remove_unfinished(directory)
    entries = _entries(directory)
    excess = sum(entry.size_bytes for entry in entries) - limit_bytes
    for entry in entries:
        if excess <= 0:
            return
        if entry.name != keep:  # about to be loaded, even if it alone is over the limit
            _remove(directory, entry.name)
            excess -= entry.size_bytes


def _remove(directory: Path, name: str) -> None:
    for suffix in ("json", "cubin"):
        (directory / f"{name}.{suffix}").unlink(missing_ok=True)


def _remove_unfinished(directory: Path) -> None:
    oldest = time.time() - _UNFINISHED_SECONDS
    with os.scandir(directory) as files:
        for file in files:
            try:
                if _UNFINISHED_PATTERN.fullmatch(file.name) and file.stat().st_mtime < oldest:
                    os.unlink(file.path)
            except FileNotFoundError:
                continue  # removed by another process meanwhile

"""Arrays of other libraries: taken in without a copy, handed back in kind.

The only place that knows other array libraries exist. None of them is imported for its own sake:
the library of an array is loaded already, and CuPy is imported when the first CUDA array comes.

=======  =====================  =====================  ==========================  =============
library  in, on the CPU         in, on CUDA            out, on CUDA                stream
=======  =====================  =====================  ==========================  =============
NumPy    as it is
CuPy                            its attributes         ``cupy.empty``              CuPy's
torch    ``Tensor.numpy``       its attributes         torch's allocator           torch's
JAX      ``numpy.asarray``      ``cupy.from_dlpack``   ``cupy.empty`` and DLPack   CuPy's
others   ``numpy.from_dlpack``  ``cupy.from_dlpack``   ``cupy.empty`` and DLPack   CuPy's
=======  =====================  =====================  ==========================  =============

"Others" have ``__dlpack__`` and the ``__array_namespace__`` of the array API standard, whose
``from_dlpack`` makes the results. torch's attributes are read directly because an exchange by
DLPack takes longer than a launch, and so does a look at each attribute of each tensor: tensors on
CUDA like those of an earlier call are recognised by the guards that torch.compile has for its code,
and only their addresses are read.

torch and CuPy free memory in stream order, so a caller may drop an input as soon as the call
returns. The others free on streams of their own: there the call waits for the kernels to finish.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamkl_cupy.problem import CPU_DTYPES, Device, Operand, message

# Shape, strides, dtype, index of the device, and an address of the same alignment (0 for none).
Key = tuple[tuple[int, ...], tuple[int, ...], str, int, int]

# Shapes that are remembered.
_REMEMBERED = 4096

CPU = -1  # in the place of a CUDA device's index

# Device types of DLPack.
_DLPACK_CPU = (1, 3)  # pageable and page-locked memory
_DLPACK_CUDA = (2, 13)  # device and managed memory

_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906

_NUMPY_DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "uint8")}
_NUMPY_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
# What the reference reads: inputs, rows and lengths.
_VIEWED = (*CPU_DTYPES, "int32")

# CuPy, from its first use in this process on.
_cupy: Any = None
# The process that first used CUDA. It does not survive a fork.
_cuda_process: int | None = None


class Library(Protocol):
    """An array library."""

    name: str

    def take(self, argument: str, value: Any) -> Array:
        """Look at an array; raise if its memory cannot be used as it is."""
        ...

    def recognise(self, names: tuple[str, ...], values: tuple[Any, ...]) -> Group | None:
        """Look at several at once, if they are like those of an earlier call."""
        ...

    def remember(self, names: tuple[str, ...], group: Group) -> None:
        """Recognise arrays like these from now on."""
        ...


class HostLibrary(Library, Protocol):
    """A library with arrays on the CPU."""

    def from_numpy(self, values: NDArray[Any], like: Array) -> Any:
        """Make an array of the values on the device of `like`."""
        ...


class CudaLibrary(Library, Protocol):
    """A library with arrays on CUDA devices. All but the stream wants the device to be current."""

    def current_stream(self, index: int) -> int:
        """Handle of the caller's current stream on a device."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> tuple[Any, int]:
        """Allocate a buffer in the order of that stream; return it and its address."""
        ...

    def settle(self, stream: int) -> None:
        """Make it safe for the caller to drop the inputs of what was launched on the stream."""
        ...

    def hand_back(self, buffer: Any) -> Any:
        """Turn a buffer into an array of the library."""
        ...


class Array:
    """One array of the caller as the rest of the package sees it.

    Attributes
    ----------
    value
        The caller's own object.
    library
        The library it belongs to.
    pointer, readonly
        As in `problem.Operand`.
    view
        On the CPU a NumPy array of the same memory. On CUDA whatever has to live as long as the
        address is used.
    key
        Hashable; equal for two arrays that make no difference to a `problem.Problem`.
    """

    __slots__ = ("key", "library", "pointer", "readonly", "value", "view")

    def __init__(
        self,
        value: Any,
        library: Library,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        index: int,
        pointer: int,
        readonly: bool = False,
        view: Any = None,
    ) -> None:
        self.value = value
        self.library = library
        self.pointer = pointer
        self.readonly = readonly
        self.view = view
        # Of the address only this counts: whether there is one, and how it is aligned.
        self.key: Key = (shape, strides, dtype, index, pointer and 16 + (pointer & 15))

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.key[0]

    @property
    def dtype(self) -> str:
        """As `problem.Operand` spells it."""
        return self.key[2]

    @property
    def index(self) -> int:
        """Index of the CUDA device, or `CPU`."""
        return self.key[3]

    @property
    def device(self) -> Device:
        """Where the array lies."""
        return device_of(self.index)

    def operand(self, name: str) -> Operand:
        """Describe the array under the name of an argument."""
        shape, strides, dtype, index, _ = self.key
        return Operand(name, shape, strides, dtype, device_of(index), self.pointer, self.readonly)


class Group:
    """Several arrays of one library.

    Attributes
    ----------
    library
        The library.
    keys
        Of each array, as in `Array`. The same object again where they have been recognised.
    pointers
        Address of each.
    arrays
        The arrays themselves; none where they have been recognised, which happens on CUDA only.
    """

    __slots__ = ("arrays", "keys", "library", "pointers")

    def __init__(
        self,
        library: Library,
        keys: tuple[Key, ...],
        pointers: tuple[int, ...],
        arrays: tuple[Array, ...] = (),
    ) -> None:
        self.library = library
        self.keys = keys
        self.pointers = pointers
        self.arrays = arrays

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes of the first array."""
        return self.keys[0][0]

    def operands(self, names: Iterable[str]) -> list[Operand]:
        """Describe the arrays under the names of arguments."""
        return [
            Operand(name, shape, strides, dtype, device_of(index), pointer)
            for name, (shape, strides, dtype, index, _), pointer in zip(
                names, self.keys, self.pointers, strict=True
            )
        ]


def operand_of(name: str, key: Key) -> Operand:
    """Describe an array by its key alone: all that a check of what is only read needs."""
    shape, strides, dtype, index, alignment = key
    return Operand(name, shape, strides, dtype, device_of(index), alignment)


def take(argument: str, value: Any, like: Array | Group | None = None, first: str = "q1") -> Array:
    """Look at an array of the caller. No data is read or copied.

    Parameters
    ----------
    argument
        Its name in messages.
    value
        An array of NumPy, CuPy, torch or JAX, or one with ``__dlpack__`` and
        ``__array_namespace__``.
    like
        The first array of the call, whose library it must share.
    first
        What messages call that one.

    Returns
    -------
    Array
        Where it lies and what it looks like.

    Raises
    ------
    TypeError
        If it is no array, belongs to another library, would lose a gradient, or is lazy, sparse
        or traced.
    ValueError
        If it does not lie on the CPU or one CUDA device.

    Examples
    --------
    >>> import numpy as np
    >>> take("q1", np.zeros((4, 8), np.float32)).shape
    (4, 8)
    """
    library = _libraries.get(type(value)) or _find_library(argument, value)
    if like is not None and library is not like.library and library.name != like.library.name:
        raise TypeError(
            message(
                argument,
                f"an array of {like.library.name} like {first}",
                f"one of {library.name} ({type(value).__name__})",
                "pass all arrays of a call from one library",
            )
        )
    return library.take(argument, value)


def take_all(names: tuple[str, ...], values: tuple[Any, ...], like: Group | None = None) -> Group:
    """Look at several arrays of one library.

    Parameters
    ----------
    names
        Their names in messages.
    values
        The arrays.
    like
        As `take`; by default the first of them.

    Returns
    -------
    Group
        What `take` says of each.

    Raises
    ------
    TypeError, ValueError
        As `take`.

    Examples
    --------
    >>> import numpy as np
    >>> take_all(("q1", "k1"), (np.zeros((4, 8)), np.zeros((5, 8)))).shape
    (4, 8)
    """
    library = _libraries.get(type(values[0]))
    if library is not None and (like is None or library is like.library):
        group = library.recognise(names, values)
        if group is not None:
            return group
    arrays: list[Array] = []
    for name, value in zip(names, values, strict=True):
        first = like or (arrays[0] if arrays else None)
        arrays.append(take(name, value, first, "q1" if like else names[0]))
    keys = tuple([array.key for array in arrays])
    pointers = tuple([array.pointer for array in arrays])
    group = Group(arrays[0].library, keys, pointers, tuple(arrays))
    group.library.remember(names, group)
    return group


def device_of(index: int) -> Device:
    """Name the device whose index is as in `Array`."""
    return Device("cpu") if index == CPU else Device("cuda", index)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Find a NumPy dtype by its name, bfloat16 included."""
    return _NUMPY_DTYPES[name]


def cupy() -> Any:
    """Import CuPy.

    Raises
    ------
    ImportError
        If it is not installed; the message says what to install.
    RuntimeError
        In a process that was forked after CUDA had been used.
    """
    return _cupy or _import_cupy()


def _import_cupy() -> Any:
    global _cupy, _cuda_process
    process = os.getpid()
    if _cuda_process is None:
        _cuda_process = process
    elif _cuda_process != process:
        raise RuntimeError(
            f"CUDA was first used in process {_cuda_process}, from which this process, {process}, "
            "was forked, and CUDA does not survive a fork; start workers with "
            'multiprocessing.get_context("spawn").'
        )
    try:
        import cupy as module
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need CuPy, which cannot be imported; install streamkl-cupy[cu13] "
            "(CUDA 13) or streamkl-cupy[cu12] (CUDA 12)."
        ) from error
    _cupy = module
    return module


def _after_fork() -> None:
    """In a forked child: look at the process again before CuPy is used."""
    global _cupy
    _cupy = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class under_device:
    """Make a CUDA device the current one for the length of a ``with`` block.

    Unlike ``cupy.cuda.Device`` it makes the device's context current even in a thread that has not
    used CUDA yet: the runtime would wait for its first call, and the driver does not wait.
    """

    __slots__ = ("_index", "_previous", "_runtime")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        runtime = self._runtime = cupy().cuda.runtime
        self._previous = runtime.getDevice()
        runtime.setDevice(self._index)

    def __exit__(self, *_: object) -> None:
        if self._previous != self._index:
            self._runtime.setDevice(self._previous)


def current_device() -> int:
    """Index of the current CUDA device."""
    index: int = cupy().cuda.runtime.getDevice()
    return index


def is_capturing(stream: int) -> bool:
    """Whether a stream records a CUDA graph, so that no kernel can be loaded now."""
    runtime = cupy().cuda.runtime
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        # What the default stream answers while another stream of the device records.
        if error.status == _CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        raise


class _Forgetful:
    """Libraries whose arrays are looked at one by one."""

    def recognise(self, names: tuple[str, ...], values: tuple[Any, ...]) -> Group | None:
        return None

    def remember(self, names: tuple[str, ...], group: Group) -> None:
        pass


class _NumPy(_Forgetful):
    name = "numpy"

    def take(self, argument: str, value: Any) -> Array:
        return Array(
            value,
            self,
            value.shape,
            _element_strides(argument, value),
            value.dtype.name,
            CPU,
            value.__array_interface__["data"][0],
            not value.flags.writeable,
            value,
        )

    def from_numpy(self, values: NDArray[Any], like: Array) -> Any:
        return values


class _CuPy(_Forgetful):
    name = "cupy"

    def take(self, argument: str, value: Any) -> Array:
        memory = value.data
        strides = _element_strides(argument, value)
        return Array(
            value, self, value.shape, strides, value.dtype.name, memory.device_id, memory.ptr
        )

    def current_stream(self, index: int) -> int:
        stream: int = cupy().cuda.get_current_stream(index).ptr
        return stream

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> tuple[Any, int]:
        buffer = cupy().empty(shape, _NUMPY_DTYPES[dtype])
        return buffer, buffer.data.ptr

    def settle(self, stream: int) -> None:
        """CuPy's pool hands freed memory out again in the order of the stream."""

    def hand_back(self, buffer: Any) -> Any:
        return buffer


class _Exchange(_CuPy):
    """A library of the array API standard, reached by DLPack; CuPy allocates for it on CUDA."""

    def __init__(self, name: str, from_dlpack: Any) -> None:
        self.name = name
        self._from_dlpack = from_dlpack

    def take(self, argument: str, value: Any) -> Array:
        kind, index = value.__dlpack_device__()
        if kind in _DLPACK_CPU:
            view = _import_dlpack(argument, value, np.from_dlpack)
            return self._wrap(_NumPy().take(argument, view), value)
        if kind in _DLPACK_CUDA:
            with under_device(index):
                view = _import_dlpack(argument, value, cupy().from_dlpack)
            return self._wrap(_CuPy().take(argument, view), value)
        raise _wrong_device(argument, f"one on a device of DLPack type {int(kind)}")

    def _wrap(self, array: Array, value: Any, readonly: bool = False) -> Array:
        array.view = array.value
        array.value = value
        array.library = self
        array.readonly |= readonly
        return array

    def from_numpy(self, values: NDArray[Any], like: Array) -> Any:
        return self._from_dlpack(values)

    def settle(self, stream: int) -> None:
        cupy().cuda.runtime.streamSynchronize(stream)

    def hand_back(self, buffer: Any) -> Any:
        return self._from_dlpack(buffer)


class _Jax(_Exchange):
    def __init__(self, jax: Any) -> None:
        super().__init__("jax", jax.dlpack.from_dlpack)
        self._device_put = jax.device_put

    def take(self, argument: str, value: Any) -> Array:
        if value.is_deleted():
            remedy = "pass one that was not donated"
            raise ValueError(message(argument, "a JAX array with data", "a deleted one", remedy))
        devices = value.devices()
        if len(devices) != 1:
            remedy = "call once per shard, for example inside jax.shard_map by streamkl_cupy.jax"
            if _is_merged(argument):
                remedy = "merge once per shard, value.addressable_shards[i].data"
            got = f"one sharded over {len(devices)} devices"
            raise ValueError(message(argument, "a JAX array on one device", got, remedy))
        kind, index = value.__dlpack_device__()
        dtype = value.dtype.name
        if dtype not in _VIEWED:
            # No view is made of what is refused by its dtype anyway.
            place = CPU if kind in _DLPACK_CPU else index
            return Array(value, self, value.shape, (0,) * value.ndim, dtype, place, 0, True)
        if kind in _DLPACK_CPU:
            # DLPack would lose bfloat16 here, and this shares the memory as well.
            array = _NumPy().take(argument, np.asarray(value))
        elif kind in _DLPACK_CUDA:
            with under_device(index):
                array = _CuPy().take(argument, cupy().from_dlpack(value))
        else:
            raise _wrong_device(argument, f"one on {next(iter(devices))}")
        return self._wrap(array, value, readonly=True)

    def from_numpy(self, values: NDArray[Any], like: Array) -> Any:
        return self._device_put(values, next(iter(like.value.devices())))


class _Torch:
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._forward_ad = torch.autograd.forward_ad
        self._names: dict[Any, str] = {}  # dtype of torch -> name
        self._dtypes = {name: getattr(torch, name) for name in _NUMPY_DTYPES}
        # What the code of torch.compile looks at tensors by, all at once and in less time than one
        # of them takes otherwise; and what it allocates by, on the current device, where
        # torch.empty would look at its options for as long as a launch takes.
        self._guards = torch._C._dynamo.guards
        self._empty_strided = self._guards._empty_strided_cuda
        # A guard, and the keys of what it lets pass.
        self._seen: dict[tuple[Any, ...], tuple[Any, tuple[Key, ...]]] = {}

    def take(self, argument: str, value: Any) -> Array:
        if value.requires_grad and self._torch.is_grad_enabled():
            raise TypeError(_lost_gradient(argument, "one that requires grad"))
        if self._forward_ad._current_level >= 0 and self._has_tangent(value):
            raise TypeError(_lost_gradient(argument, "one with a forward-mode tangent"))
        # Conjugation is as lazy as negation, but then the dtype is complex and refused as such.
        if value.is_neg():
            raise TypeError(
                message(
                    argument,
                    "a torch tensor whose memory holds its values",
                    "one that is negated lazily",
                    "pass value.resolve_neg() of it",
                )
            )
        if value.layout is not self._torch.strided:
            raise _not_dense(argument, f"one of layout {value.layout}")
        dtype = self._names.get(value.dtype) or self._name(value.dtype)
        view = None
        if value.is_cuda:
            index = value.get_device()
        elif value.is_cpu:
            index = CPU
        else:
            raise _wrong_device(argument, f"one on torch device {value.device}")
        try:
            shape, strides, pointer = tuple(value.shape), value.stride(), value.data_ptr()
            if index == CPU:
                view = self._numpy(value, dtype)
        except RuntimeError as error:
            if value.is_nested:
                raise _not_dense(argument, "a nested one") from error
            raise _wrapped_tensor(argument, "one without (inside torch.func?)") from error
        return Array(value, self, shape, strides, dtype, index, pointer, False, view)

    def recognise(self, names: tuple[str, ...], values: tuple[Any, ...]) -> Group | None:
        try:
            seen = self._seen.get(self._traits(names, values))
        except (AttributeError, RuntimeError):  # no tensors, or nested ones, which have no shape
            return None
        # No guard asks for tangents.
        if seen is None or self._forward_ad._current_level >= 0:
            return None
        guard, keys = seen
        if not guard.check(*values):
            return None
        pointers = tuple([value.data_ptr() for value in values])
        return Group(self, keys, pointers) if _are_aligned(pointers) else None

    def remember(self, names: tuple[str, ...], group: Group) -> None:
        values = [array.value for array in group.arrays]
        # A guard asks whether gradients are required, and not whether they are enabled.
        if group.keys[0][3] == CPU or any(value.requires_grad for value in values):
            return
        if not _are_aligned(group.pointers):
            return
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        guard = self._guards.TensorGuards(
            *values,
            dynamic_dims_sizes=[list(value.shape) for value in values],
            dynamic_dims_strides=[list(value.stride()) for value in values],
        )
        self._seen[self._traits(names, values)] = guard, group.keys

    def _traits(self, names: tuple[str, ...], values: Sequence[Any]) -> tuple[Any, ...]:
        """What finds the guard that is worth a try: a query's traits, and a length of keys."""
        first = values[0]
        return names, first.device, first.shape, values[-1].shape

    def from_numpy(self, values: NDArray[Any], like: Array) -> Any:
        if values.dtype == _NUMPY_DTYPES["bfloat16"]:
            return self._torch.from_numpy(values.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(values)

    def current_stream(self, index: int) -> int:
        # torch.cuda.current_stream makes an object of it first, as slowly as a launch.
        stream: int = self._torch._C._cuda_getCurrentRawStream(index)
        return stream

    def empty(self, shape: tuple[int, ...], dtype: str, index: int) -> tuple[Any, int]:
        # torch alone can allocate inside torch.cuda.graph, and knows the memory as its own.
        buffer = self._empty_strided(shape, _contiguous_strides(shape), self._dtypes[dtype])
        return buffer, buffer.data_ptr()

    def settle(self, stream: int) -> None:
        """torch's allocator hands freed memory out again in the order of the stream."""

    def hand_back(self, buffer: Any) -> Any:
        return buffer

    def _has_tangent(self, value: Any) -> bool:
        return self._forward_ad.unpack_dual(value).tangent is not None

    def _name(self, dtype: Any) -> str:
        return self._names.setdefault(dtype, str(dtype).removeprefix("torch."))

    def _numpy(self, value: Any, dtype: str) -> NDArray[Any] | None:
        if dtype not in _VIEWED:
            return None  # refused by its dtype later
        value = value.detach()
        if dtype != "bfloat16":
            view: NDArray[Any] = value.numpy()
            return view
        bits: NDArray[Any] = value.view(self._torch.int16).numpy()
        return bits.view(_NUMPY_DTYPES[dtype])


# Library of each type of array seen so far. Writing an entry twice is harmless.
_libraries: dict[type, Library] = {}


def _find_library(argument: str, value: Any) -> Library:
    """Find the library of an array of a type not seen before, and remember it."""
    kind = type(value)
    library: Library
    if _is_instance(value, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise _wrapped_tensor(argument, kind.__name__)
        library = _Torch(torch)
    elif _is_instance(value, "cupy", "ndarray"):
        library = _CuPy()
    elif _is_instance(value, "jax", "Array"):
        jax = sys.modules["jax"]
        if isinstance(value, jax.core.Tracer):
            remedy = "inside jit, grad or vmap call streamkl_cupy.jax"
            if _is_merged(argument):
                remedy = f"call merge_states outside of jit, grad and vmap, and {_BACKWARD}"
            got = f"a tracer ({kind.__name__})"
            raise TypeError(message(argument, "a JAX array with values", got, remedy))
        library = _Jax(jax)
    elif isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            remedy = "pass value.filled(...) of it"
            raise TypeError(message(argument, "an array without mask", kind.__name__, remedy))
        library = _NumPy()
    elif all(hasattr(value, name) for name in ("__dlpack__", "__dlpack_device__")):
        if not hasattr(value, "__array_namespace__"):
            raise TypeError(
                message(
                    argument,
                    "an array with __array_namespace__, which tells how to make results",
                    f"{kind.__module__}.{kind.__name__}",
                    "pass a NumPy, CuPy, torch or JAX array that shares its memory",
                )
            )
        namespace = value.__array_namespace__()
        library = _Exchange(namespace.__name__, namespace.from_dlpack)
    else:
        raise TypeError(
            message(
                argument,
                "an array of NumPy, CuPy, torch or JAX, or another one with __dlpack__",
                kind.__name__,
                "convert it, for example by numpy.asarray",
            )
        )
    return _libraries.setdefault(kind, library)


def _is_instance(value: Any, module: str, name: str) -> bool:
    # An array of a library that is not loaded, or still loading, cannot exist.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _import_dlpack(argument: str, value: Any, from_dlpack: Any) -> Any:
    try:
        return from_dlpack(value)
    except (BufferError, NotImplementedError, RuntimeError, TypeError) as error:
        raise TypeError(
            message(
                argument,
                "an array that can be shared by DLPack",
                f"{type(value).__name__}, which cannot ({error})",
                "pass a NumPy, CuPy, torch or JAX array",
            )
        ) from error


def _element_strides(argument: str, value: Any) -> tuple[int, ...]:
    """Strides in elements of an array that has them in bytes."""
    item_bytes = value.dtype.itemsize or 1
    strides = []
    for length, stride in zip(value.shape, value.strides, strict=True):
        if length > 1 and stride % item_bytes:
            raise ValueError(
                message(
                    argument,
                    f"strides that are multiples of its element size, {item_bytes} bytes",
                    f"strides of {value.strides} bytes",
                    "pass a copy of it",
                )
            )
        strides.append(stride // item_bytes)
    return tuple(strides)


def _are_aligned(pointers: tuple[int, ...]) -> bool:
    """Whether all are addresses, and multiples of 16: what the keys of remembered arrays say."""
    return 0 not in pointers and not functools.reduce(operator.or_, pointers) & 15


@functools.lru_cache(maxsize=_REMEMBERED)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# No front door has `merge_states`, so what others find there is got by other means.
_BACKWARD = "attention_kl_backward with the merged state for the gradients of each part"


def _is_merged(argument: str) -> bool:
    """Whether messages speak of an array of a state that is to be merged."""
    return argument.startswith("states[")


def _lost_gradient(argument: str, got: str) -> str:
    remedy = "call streamkl_cupy.torch, which is differentiable, or pass value.detach()"
    if _is_merged(argument):
        remedy = f"pass value.detach(), and call {_BACKWARD}"
    return message(argument, "a torch tensor outside autograd", got, remedy)


def _not_dense(argument: str, got: str) -> TypeError:
    return TypeError(message(argument, "a dense torch tensor", got, "pass a dense, padded copy"))


def _wrapped_tensor(argument: str, got: str) -> TypeError:
    remedy = "call streamkl_cupy.torch, which can be traced and transformed"
    if _is_merged(argument):
        remedy = f"call merge_states outside of torch.func and torch.compile, and {_BACKWARD}"
    return TypeError(message(argument, "a torch tensor with memory of its own", got, remedy))


def _wrong_device(argument: str, got: str) -> ValueError:
    remedy = "move it to the CPU or to a CUDA device"
    return ValueError(message(argument, "an array on the CPU or a CUDA device", got, remedy))

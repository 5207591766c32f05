"""Chains of launches on one card: all arguments written down once, but the addresses.

A `Chain` is made of steps: a `Kernel` with its parameter struct and its tensor maps, or a
`Clear` of some memory. Where an address belongs stands an `Address`, the name of an array. A launch
of the chain fills in the addresses, and costs the host little more than what the driver takes.

The arguments of all kernels lie in one block of host memory, which the driver copies at each
launch. No two calls share one at the same time: a call takes a block that is free, or makes another
one, and puts it back when it has launched.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from streamkl_cupy import jit
from streamkl_cupy.plan import KernelPlan
from streamkl_cupy.tensor_map import MAP_ALIGNMENT, MAP_BYTES, Tensor, encode, move

_WORD_BYTES = 8  # of an address


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an array that a launch names, and some bytes beyond it.

    ``"workspace"`` is the workspace of the launch.
    """

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Params:
    """A parameter struct and the value of each field; an `Address` stands for what it becomes."""

    layout: struct.Struct
    values: tuple[int | float | Address, ...]


class Map(NamedTuple):
    """A tensor map: the array it is of, and the rest."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch. The arguments of the kernel are one struct of all maps, if there are any, and the
    parameters; kernels may share the latter."""

    plan: KernelPlan
    params: Params
    maps: tuple[Map, ...] = ()


@dataclass(frozen=True, slots=True)
class Clear:
    """Zeros written to memory."""

    address: Address
    size: int


Step: TypeAlias = Kernel | Clear


class _Block:
    """Memory for the arguments of one launch of a chain.

    Attributes
    ----------
    address
        Where it begins.
    words
        The same, as unsigned integers of 64 bits.
    mapped
        The address that each tensor map in it says.
    """

    __slots__ = ("address", "mapped", "words")

    def __init__(self, template: bytes, inner: Iterable[tuple[int, int]]) -> None:
        memory = bytearray(len(template) + MAP_ALIGNMENT)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -first % MAP_ALIGNMENT
        self.address = first + start
        memory[start : start + len(template)] = template
        self.words = memoryview(memory)[start : start + len(template)].cast("Q")
        self.mapped: dict[int, int] = {}
        for word, offset in inner:
            self.words[word] = self.address + offset

    def write_map(self, offset: int, tensor: Tensor, pointer: int) -> None:
        """Let the tensor map at an offset say another address than it does."""
        if offset in self.mapped:
            move(self.address + offset, pointer)
        else:
            encode(self.address + offset, tensor, pointer)
        self.mapped[offset] = pointer


_Run: TypeAlias = Callable[[_Block, int], None]
# What one address of a launch belongs in, words and maps, each with bytes beyond the address.
_Fields: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, Tensor, int]]]


class Chain:
    """Steps, one after the other, on one card.

    Parameters
    ----------
    arch
        Architecture of the card, which the kernels are built for.
    device_index
        The card.
    steps
        What to do; also an attribute.
    """

    __slots__ = (
        "_addresses",
        "_arch",
        "_blocks",
        "_device_index",
        "_inner",
        "_maps",
        "_places",
        "_runs",
        "_template",
        "_workspace",
        "steps",
    )

    def __init__(self, arch: str, device_index: int, steps: Iterable[Step]) -> None:
        self._arch = arch
        self._device_index = device_index
        self.steps = tuple(steps)
        self._runs: tuple[_Run, ...] = ()
        self._blocks: deque[_Block] = deque()
        # Where in a block: words for addresses of arrays and in the workspace, the bytes of maps,
        # and words that hold the address of a place in the block itself.
        self._addresses: list[tuple[int, str, int]] = []
        self._workspace: list[tuple[int, str, int]] = []
        self._maps: list[tuple[int, str, Tensor]] = []
        self._inner: list[tuple[int, int]] = []
        self._places: list[int] = []  # of each step: where its run begins to read
        template = bytearray()
        placed: dict[Params, int] = {}
        for step in self.steps:
            if isinstance(step, Clear):
                self._places.append(self._place_address(template, step.address))
                continue
            arguments = [self._place_maps(template, step.maps)] if step.maps else []
            if step.params not in placed:
                placed[step.params] = self._place_params(template, step.params)
            arguments.append(placed[step.params])
            self._places.append(len(template))
            for offset in arguments:
                self._inner.append((len(template) // _WORD_BYTES, offset))
                template += bytes(_WORD_BYTES)
        self._template = bytes(template)

    def load(self) -> None:
        """Build and load all kernels, unless they are: what no launch during a capture can do.

        Raises
        ------
        ImportError, RuntimeError
            As `jit.function`.
        """
        if not self._runs:
            self._runs = tuple(map(self._ready, self.steps, self._places))

    def launch(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Launch all steps. The card must be current.

        Parameters
        ----------
        pointers
            The address of every array that the steps name.
        workspace
            The address of the workspace; 0 without one.
        stream
            Handle of the stream.

        Raises
        ------
        ImportError, RuntimeError
            As `load`, or what the driver says of a launch.
        """
        runs = self._runs
        if not runs:
            self.load()
            runs = self._runs
        try:
            block = self._blocks.pop()
        except IndexError:
            block = _Block(self._template, self._inner)
        words, mapped = block.words, block.mapped
        for word, name, offset in self._addresses:
            words[word] = pointers[name] + offset
        for word, _, offset in self._workspace:
            words[word] = workspace + offset
        for offset, name, tensor in self._maps:
            if mapped.get(offset) != pointers[name]:
                block.write_map(offset, tensor, pointers[name])
        for run in runs:
            run(block, stream)
        self._blocks.append(block)

    def bind(self, places: Mapping[str, tuple[int, int]]) -> Bound:
        """Fix the order of the addresses; build and load all kernels, as `load` does.

        Parameters
        ----------
        places
            Of each array that there is, ``"workspace"`` included: its position among the addresses
            of a launch, and how many bytes beyond that address it begins. The others have the
            address 0.

        Raises
        ------
        ImportError, RuntimeError
            As `load`.
        """
        self.load()
        words: dict[int, list[tuple[int, int]]] = {}
        maps: dict[int, list[tuple[int, Tensor, int]]] = {}
        for word, name, offset in (*self._addresses, *self._workspace):
            if name in places:
                position, beyond = places[name]
                words.setdefault(position, []).append((word, beyond + offset))
        for place, name, tensor in self._maps:
            position, beyond = places[name]
            maps.setdefault(position, []).append((place, tensor, beyond))
        num_addresses = 1 + max((position for position, _ in places.values()), default=-1)
        fields = [(words.get(i, []), maps.get(i, [])) for i in range(num_addresses)]
        return Bound(self.steps, places, self._runs, self._template, self._inner, fields)

    def _place_address(self, template: bytearray, address: Address) -> int:
        """Append a word for an address; return its offset."""
        offset = len(template)
        template += bytes(_WORD_BYTES)
        self._fill_in(offset, address)
        return offset

    def _fill_in(self, offset: int, address: Address) -> None:
        """Note that an address belongs at an offset."""
        word = offset // _WORD_BYTES
        fields = self._workspace if address.name == "workspace" else self._addresses
        fields.append((word, address.name, address.offset))

    def _place_params(self, template: bytearray, params: Params) -> int:
        """Append a struct; return its offset."""
        offset = len(template)
        known = [0 if isinstance(value, Address) else value for value in params.values]
        template += params.layout.pack(*known)
        template += bytes(-len(template) % _WORD_BYTES)
        for position, value in enumerate(params.values):
            if isinstance(value, Address):
                # A format without counts before a field: one letter each, after the "=".
                field = struct.calcsize(params.layout.format[: 1 + position])
                self._fill_in(offset + field, value)
        return offset

    def _place_maps(self, template: bytearray, maps: tuple[Map, ...]) -> int:
        """Append tensor maps; return the offset of the first."""
        template += bytes(-len(template) % MAP_ALIGNMENT)
        offset = len(template)
        for name, tensor in maps:
            self._maps.append((len(template), name, tensor))
            template += bytes(MAP_BYTES)
        return offset

    def _ready(self, step: Step, place: int) -> _Run:
        """A step that has only to be told its block and the stream."""
        import cupy

        if isinstance(step, Clear):
            return _clear(cupy.cuda.runtime.memsetAsync, place // _WORD_BYTES, step.size)
        plan = step.plan
        function = jit.function(
            plan.kernel,
            plan.template,
            self._arch,
            self._device_index,
            shared_memory=plan.shared_memory,
        )
        return _start(cupy.cuda.driver.launchKernel, function, plan, place)


class Bound:
    """A chain whose addresses come in a fixed order, loaded.

    What a launch costs here is what has changed: a block remembers the addresses in it. For callers
    whose arrays mostly lie where they lay before.

    Attributes
    ----------
    steps
        Of the chain.
    places
        As `Chain.bind` takes them.
    """

    __slots__ = ("_blocks", "_fields", "_inner", "_runs", "_template", "places", "steps")

    def __init__(
        self,
        steps: tuple[Step, ...],
        places: Mapping[str, tuple[int, int]],
        runs: tuple[_Run, ...],
        template: bytes,
        inner: Iterable[tuple[int, int]],
        fields: Sequence[_Fields],
    ) -> None:
        self.steps = steps
        self.places = places
        self._runs = runs
        self._template = template
        self._inner = inner
        self._fields = fields  # of each position
        self._blocks: deque[tuple[_Block, Sequence[int | None]]] = deque()

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch all steps. The card must be current.

        Parameters
        ----------
        addresses
            The addresses. The list is kept: leave it as it is.
        stream
            Handle of the stream.

        Raises
        ------
        RuntimeError
            What the driver says of a launch.
        """
        try:
            block, held = self._blocks.pop()
        except IndexError:
            block, held = _Block(self._template, self._inner), [None] * len(self._fields)
        if held != addresses:
            for position, before in enumerate(held):
                if before != (address := addresses[position]):
                    words, maps = self._fields[position]
                    for word, offset in words:
                        block.words[word] = address + offset
                    for place, tensor, offset in maps:
                        block.write_map(place, tensor, address + offset)
        for run in self._runs:
            run(block, stream)
        self._blocks.append((block, addresses))


def _clear(memset: Any, word: int, size: int) -> _Run:
    def run(block: _Block, stream: int) -> None:
        memset(block.words[word], 0, size, stream)

    return run


def _start(launch_kernel: Any, function: Any, plan: KernelPlan, place: int) -> _Run:
    """A launch by CuPy's binding of cuLaunchKernel. Where a function of CuPy is called itself, CuPy
    looks at every argument, which takes longer than the launch."""
    grid, threads, shared_memory = plan.grid, plan.block, plan.shared_memory

    def run(block: _Block, stream: int) -> None:
        arguments = block.address + place
        launch_kernel(function.ptr, grid, 1, 1, threads, 1, 1, shared_memory, stream, arguments, 0)

    return run

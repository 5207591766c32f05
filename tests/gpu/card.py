"""What the tests on a card share: arrays there, calls with them, and what has to come out.

An upload keeps the strides of a NumPy array, and what lies between its elements is NaN. An output
is full of NaN before the call and lies between guards, which nobody may write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

import streamkl_cupy as skl
from streamkl_cupy import interop, launch, plan, reference
from streamkl_cupy.audit import FORWARD_FLOOR, GRADIENT_FLOOR, error, nonfinite_rows
from streamkl_cupy.problem import INPUTS, LENGTHS, Problem, Ragged, describe, describe_lengths
from tests.cases import DTYPES, draw
from tests.compare import assert_accurate, baseline_backward, baseline_forward

STATE = ("kl", "lse1", "lse2", "lse1_low", "lse2_low")
ROW_DTYPE = "float32"
POISON = 0xFF  # four or two of these are a NaN
GUARD_BYTES = 512

Arrays = Mapping[str, Any]


class Library(Protocol):
    """An array library on the card."""

    name: str

    def put(self, memory: np.ndarray) -> Any:
        """Copy bytes to the card, as a flat array of them."""
        ...

    def view(
        self, memory: Any, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        """Make an array of flat bytes, from `offset` on; strides in elements."""
        ...

    def get(self, array: Any) -> np.ndarray:
        """Copy an array back, in order with the current stream."""
        ...

    def check(self, array: Any, dtype: str, shape: Sequence[int]) -> None:
        """Fail unless it is a C-contiguous array of this library, on the library's device."""
        ...


class Cupy:
    name = "cupy"

    def __init__(self, device: int | None = None) -> None:
        import cupy

        self.cupy = cupy
        self.device = cupy.cuda.Device(device)

    def put(self, memory: np.ndarray) -> Any:
        with self.device:
            return self.cupy.asarray(memory)

    def view(
        self, memory: Any, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        kind = np.dtype(DTYPES.get(dtype, dtype))
        steps = tuple(stride * kind.itemsize for stride in strides)
        return self.cupy.ndarray(tuple(shape), kind, memory.data + offset, steps)

    def get(self, array: Any) -> np.ndarray:
        with array.device:
            if array.dtype == ml_dtypes.bfloat16:
                return self.cupy.asnumpy(array.view(np.uint16)).view(ml_dtypes.bfloat16)
            return self.cupy.asnumpy(array)

    def check(self, array: Any, dtype: str, shape: Sequence[int]) -> None:
        assert type(array) is self.cupy.ndarray
        assert array.dtype == DTYPES[dtype]
        assert array.shape == tuple(shape)
        assert array.flags.c_contiguous
        assert array.device == self.device


class Torch:
    name = "torch"

    def __init__(self, torch: Any, device: int | None = None) -> None:
        self.torch = torch
        self.device = torch.cuda.current_device() if device is None else device

    def put(self, memory: np.ndarray) -> Any:
        return self.torch.from_numpy(memory).to(f"cuda:{self.device}")

    def view(
        self, memory: Any, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        kind = getattr(self.torch, dtype)
        if memory.numel() == 0:  # torch does not look at no bytes as another dtype
            return self.torch.empty_strided(
                tuple(shape), tuple(strides), dtype=kind, device=memory.device
            )
        return memory[offset:].view(kind).as_strided(tuple(shape), tuple(strides))

    def get(self, array: Any) -> np.ndarray:
        if array.dtype == self.torch.bfloat16:
            return array.view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()

    def check(self, array: Any, dtype: str, shape: Sequence[int]) -> None:
        assert type(array) is self.torch.Tensor
        assert array.dtype == getattr(self.torch, dtype)
        assert tuple(array.shape) == tuple(shape)
        assert array.is_contiguous()
        assert array.device == self.torch.device("cuda", self.device)
        assert not array.requires_grad


def random_inputs(
    rng: np.random.Generator, dtype: str = "bfloat16", **shape: Any
) -> dict[str, np.ndarray]:
    """Draw ``q1 k1 q2 k2`` in `dtype` and ``dkl`` in float32, as `tests.cases.draw`."""
    arrays = draw(rng, **shape)
    return {n: x.astype(DTYPES[dtype]) if n in INPUTS else x for n, x in arrays.items()}


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if len(shape) else ()


def upload(library: Library, host: np.ndarray, offset: int = 0) -> Any:
    """Copy a NumPy array of any strides to an array of the same, `offset` bytes off alignment."""
    strides = [stride // host.itemsize for stride in host.strides]
    if host.size == 0:
        offset, count, strides = 0, 0, list(contiguous(host.shape))
    else:
        pairs = zip(host.shape, strides, strict=True)
        count = 1 + sum((length - 1) * stride for length, stride in pairs)
    memory = np.full(offset + count * host.itemsize, POISON, np.uint8)
    if count:
        typed = memory[offset:].view(host.dtype)
        view = np.lib.stride_tricks.as_strided(typed, host.shape, host.strides)
        view[...] = host
    return library.view(library.put(memory), offset, host.dtype.name, host.shape, strides)


def upload_all(library: Library, hosts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Copy every array as `upload` does."""
    return {name: upload(library, host) for name, host in hosts.items()}


@dataclass(frozen=True, slots=True)
class Output:
    """An array to write to: full of NaN, between guards."""

    library: Library
    memory: Any
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @classmethod
    def make(cls, library: Library, shape: Sequence[int], dtype: str) -> Output:
        """Allocate it C-contiguous, aligned as an array of its own is."""
        num_bytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
        memory = library.put(np.full(num_bytes + 2 * GUARD_BYTES, POISON, np.uint8))
        array = library.view(memory, GUARD_BYTES, dtype, shape, contiguous(shape))
        return cls(library, memory, dtype, tuple(shape), array)

    def read(self) -> np.ndarray:
        """Copy it back; fail if a guard was written to."""
        memory = self.library.get(self.memory)
        stop = memory.size - GUARD_BYTES
        assert (memory[:GUARD_BYTES] == POISON).all(), "written to before the first element"
        assert (memory[stop:] == POISON).all(), "written to past the last element"
        return memory[GUARD_BYTES:stop].view(DTYPES[self.dtype]).reshape(self.shape)


def run(
    library: Library,
    arrays: Arrays,
    options: Mapping[str, Any],
    *,
    wrt: Sequence[str] = INPUTS,
    into: bool = False,
    **choices: Any,
) -> dict[str, np.ndarray]:
    """Call forward and backward; return ``kl lse1 lse2`` and the gradients as NumPy arrays.

    Parameters
    ----------
    library
        Of the arrays.
    arrays
        ``q1 k1 q2 k2``, and ``dkl`` unless `wrt` is empty.
    options
        ``causal scale1 scale2 layout``, as far as they are not the defaults.
    wrt
        The gradients, if any.
    into
        Hand in guarded outputs full of NaN as ``out=``; else look at what the calls allocated.
    **choices
        ``strategy`` and ``deterministic``.
    """
    qk = [arrays[name] for name in INPUTS]
    dtype = str(qk[0].dtype).removeprefix("torch.")
    shapes = {name: tuple(arrays[name].shape) for name in INPUTS}
    rows = shapes["q1"][:-1]
    if "cu_seqlens_q" in options:
        rows = rows[::-1]
    names = ["d" + name for name in wrt]
    if into:
        parts = {name: Output.make(library, rows, ROW_DTYPE) for name in STATE}
        state = skl.KLState(**{name: part.array for name, part in parts.items()})
        assert skl.attention_kl(*qk, **options, return_state=True, out=state) is state
        gradients = [Output.make(library, shapes[name], dtype) for name in wrt]
        if wrt:
            out = tuple(gradient.array for gradient in gradients)
            returned = skl.attention_kl_backward(
                arrays["dkl"], *qk, state, wrt=tuple(wrt), out=out, **options, **choices
            )
            assert all(ours is theirs for ours, theirs in zip(returned, out, strict=True))
        results = {name: part.read() for name, part in parts.items()}
        results |= {n: gradient.read() for n, gradient in zip(names, gradients, strict=True)}
    else:
        state = skl.attention_kl(*qk, **options, return_state=True)
        returned = ()
        if wrt:
            returned = skl.attention_kl_backward(
                arrays["dkl"], *qk, state, wrt=tuple(wrt), **options, **choices
            )
        results = {}
        for name in STATE:
            library.check(getattr(state, name), ROW_DTYPE, rows)
            results[name] = library.get(getattr(state, name))
        for name, gradient in zip(wrt, returned, strict=True):
            library.check(gradient, dtype, shapes[name])
            results["d" + name] = library.get(gradient)
    for name in ("lse1_low", "lse2_low"):
        low, high = results.pop(name), results[name.removesuffix("_low")]
        # It is what float32 cannot hold of a log-sum-exp, so it is no more than half a step.
        finite = np.isfinite(high)
        assert (np.abs(low[finite]) <= np.spacing(np.abs(high[finite]))).all(), name
        assert not np.isnan(low[high == -np.inf]).any(), name
    return results


def matrix_unit_floor(
    name: str, baseline: np.ndarray, ref: np.ndarray, floor: float | None = None
) -> float:
    """A floor that lets an output be off by eight times the baseline instead of two.

    Where all logits share an offset a thousand times larger than their differences, the matrix
    units' own sum is the limit: they align 16 products to the largest and cut what lies more
    than two bits below float32. A NumPy model of that cut gives the card's error within 1 %
    (cuda_src/README.md, "Accuracy"). The textbook formula rounds each sum to nearest. Gradients
    at logits of 1e3 and more were seen at three times the baseline, which was not modelled.
    """
    bad = nonfinite_rows(name, ref)
    extra = 6 * error(np.asarray(baseline)[~bad], ref[~bad])
    if floor is None:
        floor = GRADIENT_FLOOR if name.startswith("d") else FORWARD_FLOOR
    return floor + extra


class Expected:
    """The float64 reference and the textbook formula of one problem, to hold results against."""

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        options: Mapping[str, Any],
        wrt: Sequence[str] = INPUTS,
        *,
        is_saturated: bool = False,
        has_offset: bool = False,
    ) -> None:
        qk = [inputs[name] for name in INPUTS]
        self.state = reference.attention_kl(*qk, **options, return_state=True)
        self.values: dict[str, np.ndarray] = self.state._asdict()
        self.baselines = dict(zip(self.values, baseline_forward(*qk, **options), strict=True))
        self.floors: dict[str, float] = {}
        if wrt:
            names = ["d" + name for name in wrt]
            problem = (inputs["dkl"], *qk)
            exact = reference.attention_kl_backward(*problem, self.state, wrt=wrt, **options)
            textbook = baseline_backward(*problem, wrt=wrt, **options)
            self.values |= zip(names, exact, strict=True)
            self.baselines |= zip(names, textbook, strict=True)
            if is_saturated:
                self._add_floors(inputs, options.get("scale1"))
        if has_offset:
            self._allow_matrix_units()

    def check(self, ours: Mapping[str, np.ndarray]) -> None:
        """Fail unless every output in `ours` keeps the accuracy rule."""
        for name, value in ours.items():
            baseline, floor = self.baselines[name], self.floors.get(name)
            assert_accurate(name, value, self.values[name], baseline, floor)

    def _allow_matrix_units(self) -> None:
        for name, baseline in self.baselines.items():
            own = self.floors.get(name)
            self.floors[name] = matrix_unit_floor(name, baseline, self.values[name], own)

    def _add_floors(self, inputs: Mapping[str, np.ndarray], scale1: float | None) -> None:
        """Let gradients of side 1 be off by what float32 logits and kl leave of them.

        They are P1 times a difference of numbers of the size of the logits. Where P1 is one key
        alone the difference is zero, and a few float32 steps are all that is left. The kernels drop
        what is below the rounding error of kl, and that may be a little less than is there.
        """
        with np.errstate(all="ignore"):
            size = sum(np.abs(x) for x in self.state) * np.abs(inputs["dkl"].astype(np.float64))
            steps = np.where(np.isfinite(size), size, 0) * 2.0**-21
        scale = inputs["q1"].shape[-1] ** -0.5 if scale1 is None else abs(scale1)
        for name, other in (("dq1", "k1"), ("dk1", "q1")):
            if name not in self.values:
                continue
            lengths = np.linalg.norm(inputs[other].astype(np.float64), axis=-1)
            lengths = lengths[np.isfinite(lengths)].max(initial=0)
            exact = self.values[name]
            norm = float(np.linalg.norm(exact[np.isfinite(exact)]))
            off = scale * float(np.linalg.norm(steps)) * float(lengths)
            self.floors[name] = GRADIENT_FLOOR + (off / norm if norm > 0 else off)


def seen_keys(num_queries: int, num_keys: int, options: Mapping[str, Any]) -> np.ndarray:
    """The matrix of a mask, row by row."""
    offset = options.get("q_offset", num_keys - num_queries)
    left, right = (None if x == -1 else x for x in options.get("window", (None, None)))
    place = np.arange(num_keys) - np.arange(num_queries)[:, None] - offset
    seen = np.ones(place.shape, bool)
    if left is not None:
        seen &= place >= -left
    if options.get("causal") or right is not None:
        seen &= place <= (0 if options.get("causal") else right)
    return seen


def problem_of(arrays: Arrays, options: Mapping[str, Any]) -> Problem:
    """The description that a call with these arrays plans by."""
    operands = [interop.take(name, arrays[name]).operand(name) for name in INPUTS]
    lengths = tuple(name for name in LENGTHS if name in options)
    most = [options.get(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    ragged = None
    if lengths:
        ragged = describe_lengths(lengths, *most)
        if ragged.is_packed:
            longest = (x or len(arrays[n]) for x, n in zip(most, ("q1", "k1"), strict=True))
            ragged = Ragged(lengths, len(options["cu_seqlens_q"]) - 1, *longest)
    masks = {n: x for n, x in options.items() if n not in LENGTHS and "seqlen" not in n}
    return describe(*operands, **masks, ragged=ragged)


def forward_plan(arrays: Arrays, options: Mapping[str, Any]) -> plan.ForwardPlan:
    """The plan of the forward of such a call."""
    problem = problem_of(arrays, options)
    return plan.forward(problem, launch.device_facts(interop.take("q1", arrays["q1"]).index))


def backward_plan(
    arrays: Arrays, options: Mapping[str, Any], wrt: Sequence[str], **choices: Any
) -> plan.BackwardPlan:
    """The plan of the backward of such a call."""
    problem = problem_of(arrays, options)
    facts = launch.device_facts(interop.take("q1", arrays["q1"]).index)
    return plan.backward(problem, facts, tuple(wrt), **choices)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree bit for bit, NaN and signed zeros included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

"""Launch: one function per kernel sequence, argument order and workspaces. Everything it does a
plan has decided.

The parameter structs of ``cuda_src/params.cuh`` are packed here; ``tests/cpu/test_params.py``
compares the layouts.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamkl_cupy import jit, tensor_map
from streamkl_cupy.plan import BackwardPlan, DeviceFacts, ForwardPlan, KernelPlan, SidePlan
from streamkl_cupy.problem import Problem, Strides, gradient_strides

LOG2_E = 1.4426950408889634
# The kernels divide by the scale to write masked logits. So small a scale gives the logits of a
# scale of zero.
SMALLEST_SCALE = 1e-20
MASKED_LOGIT = -1e18  # kMaskedLogit of kl_state.cuh

# Fields in the order of params.cuh; every field lies at its natural alignment, so there is no
# padding between them.
_TENSOR = "Qqqq"
_ROWS = "qqq"
_RANGE = "iii"
FORWARD_PARAMS = struct.Struct(
    "=" + _TENSOR * 4 + _ROWS + "QQQQQ" + "Q" + _RANGE + "iii" + "ii" + "ii" + "ff" + "ff" + "q"
)
PREPARE_PARAMS = struct.Struct("=" + _ROWS + "QQQQQ" + "Q" + _ROWS + "Q" + "Q" + "ii" + "q")
BACKWARD_PARAMS = struct.Struct(
    "="
    + _TENSOR * 4
    + "Q"
    + _ROWS
    + "Q"
    + "Q"
    + "QQ"
    + _ROWS * 2
    + "Q"
    + _RANGE
    + "iii"
    + "ii"
    + "i"
    + "ff"
    + "f"
)
FINISH_PARAMS = struct.Struct("=" + "Q" + "Q" + _ROWS + "iii" + "i" + "f" + "4x")


class _Stream:
    """What CuPy needs of a stream that another library owns."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@functools.cache
def device_facts(device_index: int) -> DeviceFacts:
    """Read what plans depend on off a card.

    Raises
    ------
    RuntimeError
        The card is older than sm_80.
    """
    import cupy

    device = cupy.cuda.Device(device_index)
    capability, attributes = device.compute_capability, device.attributes
    if int(capability) < 80:
        name = cupy.cuda.runtime.getDeviceProperties(device_index)["name"].decode()
        raise RuntimeError(
            f"device: expected compute capability 8.0 or higher; got {name} with "
            f"{capability[:-1]}.{capability[-1]}. Pass arrays on the CPU to compute with the "
            "float64 reference instead"
        )
    # Only sm_90 has instructions of its own that kernels use.
    arch = f"sm_{capability}{'a' if capability == '90' else ''}"
    return DeviceFacts(
        arch, attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"]
    )


def forward(
    plan: ForwardPlan,
    problem: Problem,
    pointers: Mapping[str, int],
    workspace: int,
    stream: int,
    device_index: int,
) -> None:
    """Launch the forward, then ``reduce_splits`` if the keys are split.

    Parameters
    ----------
    plan, problem
        What to run, and on what.
    pointers
        Addresses of ``q1 k1 q2 k2`` and of the outputs ``kl lse1 lse2 lse1_low lse2_low``; all but
        ``kl`` may be 0.
    workspace
        Address of ``plan.workspace_bytes`` bytes.
    stream
        Address of the stream.
    device_index
        The card the addresses belong to, which must be current.
    """
    if not plan.kernels:
        return
    scale1, scale2 = _log2_scale(problem.scale1), _log2_scale(problem.scale2)
    params = FORWARD_PARAMS.pack(
        *_inputs(problem, pointers),
        *_strides(problem.row),
        pointers["kl"],
        pointers["lse1"],
        pointers["lse2"],
        pointers["lse1_low"],
        pointers["lse2_low"],
        workspace,
        *_key_range(problem),
        problem.num_heads,
        problem.group1,
        problem.group2,
        problem.head_dim1,
        problem.head_dim2,
        plan.num_query_tiles,
        plan.num_splits,
        scale1,
        scale2,
        MASKED_LOGIT / scale1,
        MASKED_LOGIT / scale2,
        problem.num_rows,
    )
    for kernel in plan.kernels:
        structs = (*_maps(problem, pointers, kernel), params)
        _launch(kernel, plan.arch, structs, stream, device_index)


def backward(
    plan: BackwardPlan,
    problem: Problem,
    dkl: Strides,
    pointers: Mapping[str, int],
    workspace: int,
    stream: int,
    device_index: int,
) -> None:
    """Launch the backward, one side after the other.

    Parameters
    ----------
    plan, problem
        What to run, and on what.
    dkl
        Strides of the upstream gradient.
    pointers
        Addresses of ``q1 k1 q2 k2 dkl kl lse1 lse2 lse1_low lse2_low`` (low parts may be 0) and of
        the gradients wanted,
        ``dq1 dk1 dq2 dk2``.
    workspace
        Address of ``plan.workspace_bytes`` bytes, aligned to 256.
    stream
        Address of the stream.
    device_index
        The card the addresses belong to, which must be current.
    """
    import cupy

    max_dkl = workspace + plan.max_dkl_offset if problem.dtype == "float16" else 0
    scratch = workspace + plan.scratch_offset
    for side in plan.sides:
        if max_dkl:
            cupy.cuda.runtime.memsetAsync(max_dkl, 0, 4, stream)
        if side.prepare is not None:
            params = PREPARE_PARAMS.pack(
                *_strides(problem.row),
                pointers["kl"],
                pointers["lse1"],
                pointers["lse2"],
                pointers["lse1_low"],
                pointers["lse2_low"],
                pointers["dkl"],
                *_strides(dkl),
                workspace,
                max_dkl,
                problem.num_heads,
                problem.num_queries,
                problem.num_rows,
            )
            _launch(side.prepare, plan.arch, (params,), stream, device_index)
        backward_params = functools.partial(
            _backward_params, problem, dkl, pointers, workspace, max_dkl, side
        )
        if side.fused is not None:
            cupy.cuda.runtime.memsetAsync(scratch, 0, side.scratch_bytes, stream)
        for kernel, num_blocks in (
            (side.fused, side.key_blocks),
            (side.dq, side.dq_blocks),
            (side.dk, side.key_blocks),
        ):
            if kernel is not None:
                params = backward_params(scratch if kernel is side.fused else 0, num_blocks)
                structs = (*_maps(problem, pointers, kernel), params)
                _launch(kernel, plan.arch, structs, stream, device_index)
        if side.finish is not None:
            params = _finish_params(problem, pointers, scratch, side)
            _launch(side.finish, plan.arch, (params,), stream, device_index)


def _backward_params(
    problem: Problem,
    dkl: Strides,
    pointers: Mapping[str, int],
    row_statistics: int,
    max_dkl: int,
    side: SidePlan,
    scratch: int,
    num_blocks: int,
) -> bytes:
    dq, dk = f"q{side.side}", f"k{side.side}"
    return BACKWARD_PARAMS.pack(
        *_inputs(problem, pointers),
        pointers["dkl"],
        *_strides(dkl),
        row_statistics,
        max_dkl,
        pointers.get("d" + dq, 0),
        pointers.get("d" + dk, 0),
        *_strides(gradient_strides(problem, dq)),
        *_strides(gradient_strides(problem, dk)),
        scratch,
        *_key_range(problem),
        problem.num_heads,
        problem.group1,
        problem.group2,
        problem.head_dim1,
        problem.head_dim2,
        num_blocks,
        _log2_scale(problem.scale1),
        _log2_scale(problem.scale2),
        problem.scale1 if side.side == 1 else problem.scale2,
    )


def _finish_params(
    problem: Problem, pointers: Mapping[str, int], scratch: int, side: SidePlan
) -> bytes:
    dq = f"q{side.side}"
    return FINISH_PARAMS.pack(
        scratch,
        pointers["d" + dq],
        *_strides(gradient_strides(problem, dq)),
        problem.num_heads,
        problem.num_queries,
        problem.head_dim1 if side.side == 1 else problem.head_dim2,
        -(-problem.num_queries // 16),
        problem.scale1 if side.side == 1 else problem.scale2,
    )


def _maps(problem: Problem, pointers: Mapping[str, int], kernel: KernelPlan) -> tuple[bytes, ...]:
    """The tensor maps of q1 k1 q2 k2 in one struct, for a kernel that uses them."""
    if kernel.boxes is None:
        return ()
    box_q, box_k = kernel.boxes
    queries = problem.batch, problem.num_heads, problem.num_queries
    keys1 = problem.batch, problem.num_key_heads1, problem.num_keys
    keys2 = problem.batch, problem.num_key_heads2, problem.num_keys
    encode, dtype = tensor_map.encode, problem.dtype
    dim1, dim2 = problem.head_dim1, problem.head_dim2
    maps = (
        encode(pointers["q1"], (*queries, dim1), problem.q1, dtype, box_q),
        encode(pointers["k1"], (*keys1, dim1), problem.k1, dtype, box_k),
        encode(pointers["q2"], (*queries, dim2), problem.q2, dtype, box_q),
        encode(pointers["k2"], (*keys2, dim2), problem.k2, dtype, box_k),
    )
    return (b"".join(maps),)


def _launch(
    kernel: KernelPlan, arch: str, structs: tuple[bytes, ...], stream: int, device_index: int
) -> None:
    function = jit.function(
        kernel.kernel, kernel.template, arch, device_index, shared_memory=kernel.shared_memory
    )
    # A struct goes by value as an array of one void; a NumPy scalar in its place would crash the
    # process.
    arguments: Any = tuple(np.frombuffer(one, dtype=f"V{len(one)}") for one in structs)
    function(
        (kernel.grid,),
        (kernel.block,),
        arguments,
        shared_mem=kernel.shared_memory,
        stream=_Stream(stream),
    )


def _inputs(problem: Problem, pointers: Mapping[str, int]) -> tuple[int, ...]:
    q1, k1, q2, k2 = problem.q1, problem.k1, problem.q2, problem.k2
    return (
        *(pointers["q1"], q1.batch, q1.head, q1.row),
        *(pointers["k1"], k1.batch, k1.head, k1.row),
        *(pointers["q2"], q2.batch, q2.head, q2.row),
        *(pointers["k2"], k2.batch, k2.head, k2.row),
    )


def _strides(strides: Strides) -> tuple[int, int, int]:
    return strides.batch, strides.head, strides.row


def _key_range(problem: Problem) -> tuple[int, int, int]:
    return problem.num_queries, problem.num_keys, int(problem.causal)


def _log2_scale(scale: float) -> float:
    scaled = scale * LOG2_E
    if abs(scaled) >= SMALLEST_SCALE:
        return scaled
    return -SMALLEST_SCALE if scaled < 0 else SMALLEST_SCALE

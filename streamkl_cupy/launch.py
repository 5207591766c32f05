"""Launch: one function per chain of kernels, argument order and workspaces. Everything it does a
plan has decided.

`forward` and `backward` write down every argument of every kernel but the addresses. The `Chain`
that comes back is launched as often as the same shapes come again, at any addresses.

The parameter structs of ``cuda_src/params.cuh`` are packed here; ``tests/cpu/test_params.py``
compares the layouts.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import replace
from typing import TypeAlias

from streamkl_cupy import choices
from streamkl_cupy.chain import Address, Chain, Clear, Kernel, Map, Params, Step
from streamkl_cupy.plan import (
    INTERVAL_BYTES,
    MERGED_AT_ONCE,
    BackwardPlan,
    DeviceFacts,
    ForwardPlan,
    KernelPlan,
    MergePlan,
    SidePlan,
)
from streamkl_cupy.problem import (
    CU_SEQLENS,
    INPUTS,
    MAX_LENGTH,
    PADDING,
    Problem,
    Strides,
    gradient_strides,
)
from streamkl_cupy.tensor_map import Tensor
from streamkl_cupy.tiling import FLOAT_BYTES

LOG2_E = 1.4426950408889634
# The kernels divide by the scale to write masked logits. So small a scale gives the logits of a
# scale of zero.
SMALLEST_SCALE = 1e-20
MASKED_LOGIT = -1e18  # kMaskedLogit of kl_state.cuh
# Bounds above it bound nothing that the kernels take for a logit. Arguments of a tanh stay within
# float32: where a factor is larger, every product but 0 lies at the bound.
LARGEST_SOFTCAP = 1e17
LARGEST_TANH_SCALE = 1e37

# Fields in the order of params.cuh; every field lies at its natural alignment, so there is no
# padding between them.
_TENSOR = "Qqqq"
_ROWS = "qqq"
_RANGE = "iiiii"
_TABLE = "QQ"
FORWARD_PARAMS = struct.Struct(
    "="
    + _TENSOR * 4
    + _ROWS
    + "QQQQQ"
    + "Q"
    + _RANGE
    + "iii"
    + "ii"
    + "ii"
    + "ii"
    + "ff"
    + "ff"
    + "q"
    + "QQ"
    + _TABLE
    + "ff"
)
PREPARE_PARAMS = struct.Struct(
    "=" + _ROWS + "QQQQQ" + "Q" + _ROWS + "Q" + "Q" + "ii" + "q" + "Q" + "Q" + "ii"
)
BACKWARD_PARAMS = struct.Struct(
    "="
    + _TENSOR * 4
    + "Q"
    + _ROWS
    + "Q"
    + "Q"
    + "QQ"
    + _ROWS * 2
    + "QQ"
    + _RANGE
    + "iii"
    + "ii"
    + "i"
    + "ff"
    + "f"
    + _TABLE
    + "ff"
    + "q"
)
# Those of side 1, then those of side 2.
BOTH_PARAMS = struct.Struct(BACKWARD_PARAMS.format + BACKWARD_PARAMS.format[1:])
REPLACE_PARAMS = struct.Struct(
    "=" + "QQQQQ" + "QQQQQQ" + _ROWS + "QQ" + _ROWS * 2 + "ff" + "ii" + "q"
)
MERGE_PARAMS = struct.Struct("=" + "QQQQQ" + "QQQQQ" * MERGED_AT_ONCE + "q" + "i" + "4x")
FINISH_PARAMS = struct.Struct("=" + "Q" + "Q" + _ROWS + "iii" + "ii" + "f")
TABLE_PARAMS = struct.Struct("=" + _TABLE + "QQQ" + "QQ" + "qqq" + "iiii" + "q")

# What the arrays of a launch are called; one that there is not has the address 0.
STATE = ("kl", "lse1", "lse2", "lse1_low", "lse2_low")
GRADIENTS = ("dq1", "dk1", "dq2", "dk2")
ENTROPIES = ("entropy", "cross_entropy")
# Beside a state with given log-sum-exps: the mass of P1, and what was given.
GIVEN = ("mass1", "given1", "given2")
# Strides of the given lse1 and lse2, None where the row's own serves.
GivenStrides: TypeAlias = tuple[Strides | None, Strides | None]


@functools.cache
def device_facts(device_index: int) -> DeviceFacts:
    """Read what plans depend on off a card, and what was tuned on it.

    Raises
    ------
    RuntimeError
        The card is older than sm_80.
    """
    import cupy

    device = cupy.cuda.Device(device_index)
    capability, attributes = device.compute_capability, device.attributes
    name = cupy.cuda.runtime.getDeviceProperties(device_index)["name"].decode()
    if int(capability) < 80:
        raise RuntimeError(
            f"device: expected compute capability 8.0 or higher; got {name} with "
            f"{capability[:-1]}.{capability[-1]}. Pass arrays on the CPU to compute with the "
            "float64 reference instead"
        )
    # Only sm_90 has instructions of its own that kernels use.
    arch = f"sm_{capability}{'a' if capability == '90' else ''}"
    facts = DeviceFacts(
        arch, attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"]
    )
    return replace(facts, tuned=choices.load(name, facts))


def forward(
    plan: ForwardPlan, problem: Problem, device_index: int, given: GivenStrides = (None, None)
) -> Chain:
    """Write down the forward, ``reduce_splits`` if the keys are split, and ``replace_lse`` if a
    log-sum-exp is given.

    Parameters
    ----------
    plan, problem
        What to run, and on what.
    device_index
        The card.
    given
        Strides of what is given.

    Returns
    -------
    Chain
        Launch it with the addresses of ``q1 k1 q2 k2`` and of the outputs
        ``kl lse1 lse2 lse1_low lse2_low``, of which all but ``kl`` may be 0, and a workspace of
        ``plan.workspace_bytes`` bytes. Where the plan has the entropy also with those of
        ``entropy`` and ``cross_entropy``, where a log-sum-exp is given with those of ``given1``,
        ``given2`` and the output ``mass1``, which may be 0. Where the problem is ragged also with
        those of its lengths.
    """
    own = [Address(name) for name in STATE]
    if plan.given:
        part_bytes = FLOAT_BYTES * problem.num_rows
        own[1:] = [
            Address("workspace", plan.own_offset + part * part_bytes)
            for part in range(len(own) - 1)
        ]
    scale1, scale2 = map(_log2_scale, _factors(problem))
    params = Params(
        FORWARD_PARAMS,
        (
            *_inputs(problem),
            *_strides(problem.row),
            *own,
            Address("workspace"),
            *_key_bounds(problem),
            problem.num_heads,
            problem.group1,
            problem.group2,
            problem.head_dim1,
            problem.head_dim2,
            plan.num_query_tiles,
            plan.num_splits,
            plan.heads_per_tile,
            plan.queries_per_tile,
            scale1,
            scale2,
            MASKED_LOGIT / scale1,
            MASKED_LOGIT / scale2,
            problem.num_rows,
            *(Address(name) if plan.has_entropy else 0 for name in ENTROPIES),
            *_table(problem, plan.table_offset, has_keys=False),
            *_tanh_scales(problem),
        ),
    )
    steps = []
    for kernel in plan.kernels:
        if kernel.kernel == "key_table":
            steps.append(Kernel(kernel, _table_params(problem, plan.table_offset, has_keys=False)))
            continue
        if kernel.kernel == "replace_lse":
            steps.append(Kernel(kernel, _replace_params(problem, own, given)))
            continue
        maps = _maps(problem, kernel, plan.heads_per_tile)
        steps.append(Kernel(kernel, params, maps))
    return Chain(plan.arch, device_index, steps)


def backward(plan: BackwardPlan, problem: Problem, dkl: Strides, device_index: int) -> Chain:
    """Write down the backward, one side after the other.

    Parameters
    ----------
    plan, problem
        What to run, and on what.
    dkl
        Strides of the upstream gradient.
    device_index
        The card.

    Returns
    -------
    Chain
        Launch it with the addresses of ``q1 k1 q2 k2 dkl kl lse1 lse2 lse1_low lse2_low`` (low
        parts may be 0) and of the gradients ``dq1 dk1 dq2 dk2`` (0 for what is not wanted), and a
        workspace of ``plan.workspace_bytes`` bytes, aligned to 256; where a log-sum-exp was given
        to the forward also with that of its ``mass1``, where the problem is ragged with those of
        its lengths.
    """
    is_scaled = problem.dtype == "float16"
    max_dkl = Address("workspace", plan.max_dkl_offset) if is_scaled else 0
    scratch = Address("workspace", plan.scratch_offset)
    # What the gradients are multiplied by, row by row.
    weight, weight_strides = Address("dkl"), dkl
    mass1: tuple[int | Address, int | Address] = (0, 0)
    if plan.given:
        weight, weight_strides = Address("workspace", plan.weighted_dkl_offset), problem.row
        mass1 = (Address("mass1"), weight)
    backward_params = functools.partial(
        _backward_params, problem, weight, weight_strides, max_dkl, plan.table_offset
    )
    steps: list[Step] = []
    if plan.table is not None:
        steps.append(Kernel(plan.table, _table_params(problem, plan.table_offset, has_keys=True)))
    for side in plan.sides:
        if isinstance(max_dkl, Address):
            steps.append(Clear(max_dkl, 4))
        if side.prepare is not None:
            params = Params(
                PREPARE_PARAMS,
                (
                    *_strides(problem.row),
                    *map(Address, STATE),
                    Address("dkl"),
                    *_strides(dkl),
                    Address("workspace", side.statistics_offset),
                    max_dkl,
                    problem.num_heads,
                    problem.num_queries,
                    problem.num_rows,
                    *mass1,
                    int("lse1" in plan.given),
                    int("lse2" in plan.given),
                ),
            )
            steps.append(Kernel(side.prepare, params))
        if side.fused is not None:
            steps.append(Clear(scratch, side.scratch_bytes))
        counts: Address | int = 0
        if side.counts_offset is not None:
            counts = Address("workspace", plan.scratch_offset + side.counts_offset)
        for kernel, num_blocks in (
            (side.fused, side.key_blocks),
            (side.dq, side.dq_blocks),
            (side.dk, side.key_blocks),
        ):
            if kernel is not None:
                places = (scratch, counts) if kernel is side.fused else (0, 0)
                fields = backward_params(side, places, num_blocks)
                params = Params(BACKWARD_PARAMS, fields)
                maps = _maps(problem, kernel, side.heads_per_tile)
                steps.append(Kernel(kernel, params, maps))
        if side.finish is not None:
            steps.append(Kernel(side.finish, _finish_params(problem, scratch, side)))
    if plan.both is not None:
        side2, side1 = plan.sides
        for kernel, num_blocks in (
            (plan.both.dq, plan.both.dq_blocks),
            (plan.both.dk, plan.both.key_blocks),
        ):
            if kernel is not None:
                fields = (
                    *backward_params(side1, (0, 0), num_blocks),
                    *backward_params(side2, (0, 0), num_blocks),
                )
                steps.append(Kernel(kernel, Params(BOTH_PARAMS, fields), _maps(problem, kernel)))
    return Chain(plan.arch, device_index, steps)


def merge(plan: MergePlan, num_rows: int, device_index: int) -> Chain:
    """Write down the merge of states.

    Parameters
    ----------
    plan
        What to run.
    num_rows
        Of each state.
    device_index
        The card.

    Returns
    -------
    Chain
        Launch it with the addresses of ``kl lse1 lse2 lse1_low lse2_low``, the result, and of
        ``0.kl 0.lse1 ...``, the states (low parts may be 0).
    """
    whole = [Address(name) for name in STATE]
    steps = []
    for kernel, (first, stop) in zip(plan.kernels, plan.takes, strict=False):
        fields: list[int | Address] = [] if first == 0 else [*whole]
        fields += [Address(f"{i}.{name}") for i in range(first, stop) for name in STATE]
        num_states = len(fields) // len(STATE)
        fields += [0] * (len(STATE) * (MERGED_AT_ONCE - num_states))
        params = Params(MERGE_PARAMS, (*whole, *fields, num_rows, num_states))
        steps.append(Kernel(kernel, params))
    return Chain(plan.arch, device_index, steps)


def _maps(problem: Problem, kernel: KernelPlan, heads_per_tile: int = 1) -> tuple[Map, ...]:
    """The tensor maps of q1 k1 q2 k2, for a kernel that uses them."""
    if kernel.boxes is None:
        return ()
    box_q, box_k = kernel.boxes
    queries = problem.batch, problem.num_heads, problem.num_queries
    keys1 = problem.batch, problem.num_key_heads1, problem.num_keys
    keys2 = problem.batch, problem.num_key_heads2, problem.num_keys
    dim1, dim2, dtype = problem.head_dim1, problem.head_dim2, problem.dtype
    return (
        Map("q1", Tensor((*queries, dim1), problem.q1, dtype, box_q, heads_per_tile)),
        Map("k1", Tensor((*keys1, dim1), problem.k1, dtype, box_k)),
        Map("q2", Tensor((*queries, dim2), problem.q2, dtype, box_q, heads_per_tile)),
        Map("k2", Tensor((*keys2, dim2), problem.k2, dtype, box_k)),
    )


def _replace_params(problem: Problem, own: list[Address], given: GivenStrides) -> Params:
    names = ("given1", "given2")
    return Params(
        REPLACE_PARAMS,
        (
            *own,
            *map(Address, STATE),
            Address("mass1"),
            *_strides(problem.row),
            *(0 if of is None else Address(n) for n, of in zip(names, given, strict=True)),
            *(step for of in given for step in _strides(of or Strides(0, 0, 0))),
            *map(_log2_scale_error, _factors(problem)),
            problem.num_heads,
            problem.num_queries,
            problem.num_rows,
        ),
    )


def _backward_params(
    problem: Problem,
    dkl: Address,
    dkl_strides: Strides,
    max_dkl: Address | int,
    table_offset: int,
    side: SidePlan,
    scratch_and_counts: tuple[Address | int, Address | int],
    num_blocks: int,
) -> tuple[int | float | Address, ...]:
    dq, dk = f"q{side.side}", f"k{side.side}"
    return (
        *_inputs(problem),
        dkl,
        *_strides(dkl_strides),
        Address("workspace", side.statistics_offset),
        max_dkl,
        Address("d" + dq),
        Address("d" + dk),
        *_strides(gradient_strides(problem, dq)),
        *_strides(gradient_strides(problem, dk)),
        *scratch_and_counts,
        *_key_bounds(problem),
        problem.num_heads,
        problem.group1,
        problem.group2,
        problem.head_dim1,
        problem.head_dim2,
        num_blocks,
        *map(_log2_scale, _factors(problem)),
        problem.scale1 if side.side == 1 else problem.scale2,
        *_table(problem, table_offset, has_keys=True),
        *_tanh_scales(problem),
        side.num_interleaved,
    )


def _finish_params(problem: Problem, scratch: Address, side: SidePlan) -> Params:
    dq = f"q{side.side}"
    return Params(
        FINISH_PARAMS,
        (
            scratch,
            Address("d" + dq),
            *_strides(gradient_strides(problem, dq)),
            problem.num_heads,
            problem.num_queries,
            problem.head_dim1 if side.side == 1 else problem.head_dim2,
            -(-problem.num_queries * side.heads_per_tile // 16),
            side.heads_per_tile,
            problem.scale1 if side.side == 1 else problem.scale2,
        ),
    )


def _table(problem: Problem, offset: int, has_keys: bool) -> tuple[int | Address, int | Address]:
    """Where the tables of queries and of keys lie, if there are any."""
    if problem.ragged is None:
        return 0, 0
    of_keys = offset + INTERVAL_BYTES * problem.batch * problem.num_queries
    return Address("workspace", offset), Address("workspace", of_keys) if has_keys else 0


def _table_params(problem: Problem, offset: int, has_keys: bool) -> Params:
    assert problem.ragged is not None
    names = problem.ragged.names
    left, right = problem.window
    right = 0 if problem.causal else right
    # Further out no query tells the difference.
    sides = (-1 if side is None else min(side, 2 * MAX_LENGTH) for side in (left, right))
    q_offset = max(-4 * MAX_LENGTH, min(4 * MAX_LENGTH, problem.q_offset or 0))
    return Params(
        TABLE_PARAMS,
        (
            *_table(problem, offset, has_keys),
            *(Address(name) if name in names else 0 for name in PADDING),
            *(Address(name) if name in names else 0 for name in CU_SEQLENS),
            *sides,
            q_offset,
            int(problem.q_offset is not None),
            problem.num_queries,
            problem.num_keys,
            problem.ragged.num_sequences,
            problem.batch,
        ),
    )


def _inputs(problem: Problem) -> tuple[int | Address, ...]:
    fields: list[int | Address] = []
    for name in INPUTS:
        fields += (Address(name), *_strides(getattr(problem, name)))
    return tuple(fields)


def _strides(strides: Strides) -> tuple[int, int, int]:
    return strides.batch, strides.head, strides.row


def _key_bounds(problem: Problem) -> tuple[int, ...]:
    return problem.num_queries, problem.num_keys, int(problem.mask == "causal"), *problem.lags


def _factors(problem: Problem) -> tuple[float, float]:
    """What makes logits of what the products of queries and keys become: the scale, or the bound of
    a tanh."""
    bounds = (min(bound, LARGEST_SOFTCAP) for bound in (problem.softcap1, problem.softcap2))
    scale1, scale2 = (
        bound or scale
        for bound, scale in zip(bounds, (problem.scale1, problem.scale2), strict=True)
    )
    return scale1, scale2


def _tanh_scales(problem: Problem) -> tuple[float, ...]:
    """What makes arguments of a tanh of products; 0 for a side without a bound and no other."""
    found = []
    for scale, bound in ((problem.scale1, problem.softcap1), (problem.scale2, problem.softcap2)):
        size = abs(scale) / min(bound, LARGEST_SOFTCAP) if bound else 0.0
        size = min(max(size, 1 / LARGEST_TANH_SCALE), LARGEST_TANH_SCALE) if bound else 0.0
        found.append(math.copysign(size, scale))
    return tuple(found)


def _log2_scale(scale: float) -> float:
    scaled = scale * LOG2_E
    if abs(scaled) >= SMALLEST_SCALE:
        return scaled
    return -SMALLEST_SCALE if scaled < 0 else SMALLEST_SCALE


def _log2_scale_error(scale: float) -> float:
    """Relative error of the scale in base 2, which the kernels have in float32."""
    scaled = _log2_scale(scale)
    rounded: float = struct.unpack("f", struct.pack("f", scaled))[0]
    return rounded / scaled - 1

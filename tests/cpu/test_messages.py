"""The texts of the errors: the argument, what was expected, what came, what to do."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import interop
from streamkl_cupy.problem import (
    Device,
    Operand,
    check_gpu,
    check_output,
    check_rows,
    describe,
    message,
)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def inputs(**changes: Any) -> dict[str, Any]:
    arrays = {
        "q1": zeros(2, 4, 5, 8),
        "k1": zeros(2, 2, 7, 8),
        "q2": zeros(2, 4, 5, 6),
        "k2": zeros(2, 4, 7, 6),
    }
    return arrays | changes


def forward(**changes: Any) -> Callable[[], Any]:
    return lambda: skl.attention_kl(**inputs(**changes))


def state(**changes: Any) -> Any:
    return skl.KLState(**{name: zeros(2, 4, 5) for name in ("kl", "lse1", "lse2")} | changes)


def backward(**changes: Any) -> Callable[[], Any]:
    arguments = {"dkl": zeros(2, 4, 5), "state": state()}
    return lambda: skl.attention_kl_backward(**inputs(**arguments | changes))


def packed(**changes: Any) -> dict[str, Any]:
    arrays = {name: zeros(8, 4, 3) for name in ("q1", "k1", "q2", "k2")}
    ends = {name: np.int32([0, 5, 8]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return arrays | ends | changes


def packed_state() -> Any:
    return skl.KLState(**{name: zeros(4, 8) for name in ("kl", "lse1", "lse2")})


def double_rows() -> dict[str, Any]:
    return {name: np.zeros((2, 4, 5)) for name in ("kl", "lse1", "lse2")}


def readonly(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def misaligned(*shape: int) -> np.ndarray:
    size = 4 * int(np.prod(shape))
    return np.zeros(size + 1, np.uint8)[1:].view(np.float32).reshape(shape)


def overlapping() -> Callable[[], Any]:
    memory = np.zeros(2 * 4 * 5 * 8)
    q1 = memory.view(np.float32)[: 2 * 4 * 5 * 8].reshape(2, 4, 5, 8)
    return forward(q1=q1, out=memory[:40].reshape(2, 4, 5))


BHND = "layout 'bhnd'"
HEAD_DIM_MAJOR = zeros(2, 4, 8, 5).swapaxes(2, 3)

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # What is no array, or not one array.
    "list": (
        forward(q1=[[1.0]]),
        TypeError,
        "q1: expected an array of NumPy, CuPy, torch or JAX, or another one with __dlpack__, got "
        "list; convert it, for example by numpy.asarray.",
    ),
    "none": (
        backward(dkl=None),
        TypeError,
        "dkl: expected an array of NumPy, CuPy, torch or JAX, or another one with __dlpack__, got "
        "NoneType; convert it, for example by numpy.asarray.",
    ),
    "masked": (
        forward(k2=np.ma.zeros((2, 4, 7, 6))),
        TypeError,
        "k2: expected an array without mask, got MaskedArray; pass value.filled(...) of it.",
    ),
    # dtypes.
    "integer": (
        forward(q2=zeros(2, 4, 5, 6, dtype=np.int64)),
        TypeError,
        "q2: expected bfloat16, float16, float32 or float64 on the CPU, got int64; cast the four "
        "inputs to one of them.",
    ),
    "float8": (
        forward(q2=zeros(2, 4, 5, 6, dtype=ml_dtypes.float8_e4m3fn)),
        TypeError,
        "q2: expected bfloat16, float16, float32 or float64 on the CPU, got float8_e4m3fn; cast "
        "the four inputs to one of them.",
    ),
    "mixed dtypes": (
        forward(k2=zeros(2, 4, 7, 6, dtype=np.float16)),
        TypeError,
        "k2: expected the dtype of q1, float32, got float16; cast the four inputs to one dtype.",
    ),
    "dkl dtype": (
        backward(dkl=zeros(2, 4, 5, dtype=np.int32)),
        TypeError,
        "dkl: expected bfloat16, float16, float32 or float64, got int32; cast it.",
    ),
    # Shapes.
    "rank 1": (
        forward(q1=zeros(8)),
        ValueError,
        "q1: expected 2, 3 or 4 axes, got 1 (shape (8,)); pass (batch, heads, length, head_dim), "
        "(batch * heads, length, head_dim) or (length, head_dim).",
    ),
    "rank 5": (
        forward(k1=zeros(1, 2, 2, 7, 8)),
        ValueError,
        "k1: expected 2, 3 or 4 axes, got 5 (shape (1, 2, 2, 7, 8)); pass (batch, heads, length, "
        "head_dim), (batch * heads, length, head_dim) or (length, head_dim).",
    ),
    "mixed ranks": (
        forward(k1=zeros(2, 7, 8)),
        ValueError,
        "k1: expected 4 axes like q1, got 3 (shape (2, 7, 8)); give the four inputs the same "
        "number of axes.",
    ),
    "batch": (
        forward(k2=zeros(3, 4, 7, 6)),
        ValueError,
        "k2: expected the batch size of q1, 2, got 3 (shape (3, 4, 7, 6), "
        f"{BHND}); give the four inputs the same batch size.",
    ),
    "query heads": (
        forward(q2=zeros(2, 2, 5, 6)),
        ValueError,
        f"q2: expected the number of heads of q1, 4, got 2 (shape (2, 2, 5, 6), {BHND}); give both "
        "queries the same heads.",
    ),
    "queries": (
        forward(q2=zeros(2, 4, 4, 6)),
        ValueError,
        f"q2: expected the length of q1, 5, got 4 (shape (2, 4, 4, 6), {BHND}); compare the same "
        "queries on both sides.",
    ),
    "keys": (
        forward(k2=zeros(2, 4, 8, 6)),
        ValueError,
        f"k2: expected the length of k1, 7, got 8 (shape (2, 4, 8, 6), {BHND}); compare over the "
        "same keys on both sides.",
    ),
    "head dim": (
        forward(k2=zeros(2, 4, 7, 8)),
        ValueError,
        f"k2: expected the head dimension of q2, 6, got 8 (shape (2, 4, 7, 8), {BHND}); give q2 "
        "and k2 the same head dimension.",
    ),
    "no head dim": (
        forward(q1=zeros(2, 4, 5, 0), k1=zeros(2, 2, 7, 0)),
        ValueError,
        "q1: expected a head dimension of at least 1, got 0 (shape (2, 4, 5, 0), "
        f"{BHND}); pass heads with components.",
    ),
    "groups": (
        forward(k1=zeros(2, 3, 7, 8)),
        ValueError,
        "k1: expected a number of heads that divides the 4 of q1, got 3 (shape (2, 3, 7, 8), "
        f"{BHND}); pass one key head for each group of query heads, or check layout=.",
    ),
    "layout": (
        forward(layout="bnhd"),
        ValueError,
        "k2: expected the length of k1, 2, got 4 (shape (2, 4, 7, 6), layout 'bnhd'); compare over "
        "the same keys on both sides.",
    ),
    "dkl shape": (
        backward(dkl=zeros(2, 4)),
        ValueError,
        "dkl: expected the shape of q1 without its last axis, (2, 4, 5), got (2, 4); pass one "
        "value a query row.",
    ),
    "state shape": (
        backward(state=state(lse2=zeros(2, 5, 4))),
        ValueError,
        "state.lse2: expected the shape of q1 without its last axis, (2, 4, 5), got (2, 5, 4); "
        "pass one value a query row.",
    ),
    "dkl shape of packed sequences": (
        lambda: skl.attention_kl_backward(**packed(dkl=zeros(8, 4), state=packed_state())),
        ValueError,
        "dkl: expected the shape of kl, (H, N_Q) for packed sequences, (4, 8), got (8, 4); pass "
        "one value a query row.",
    ),
    "given shape of packed sequences": (
        lambda: skl.attention_kl(**packed(lse2=zeros(8, 4))),
        ValueError,
        "lse2: expected the shape of kl, (H, N_Q) for packed sequences, (4, 8), got (8, 4); pass "
        "one value a query row.",
    ),
    # Memory.
    "last stride": (
        forward(q1=HEAD_DIM_MAJOR),
        ValueError,
        "q1: expected a last stride of 1, got strides (160, 40, 1, 5) for shape (2, 4, 5, 8); make "
        "the head dimension contiguous, for example by a contiguous copy.",
    ),
    "negative stride": (
        forward(q1=zeros(2, 4, 5, 8)[:, ::-1]),
        ValueError,
        "q1: expected strides from 0 up, got strides (160, -40, 8, 1) for shape (2, 4, 5, 8); pass "
        "a copy of it.",
    ),
    "negative stride of dkl": (
        backward(dkl=zeros(2, 4, 5)[..., ::-1]),
        ValueError,
        "dkl: expected strides from 0 up, got strides (20, 5, -1) for shape (2, 4, 5); pass a copy "
        "of it.",
    ),
    "state strides": (
        backward(state=state(lse1=zeros(2, 4, 10)[..., ::2])),
        ValueError,
        "state.lse1: expected a C-contiguous array, got strides (40, 10, 2) for shape (2, 4, 5); "
        "pass a contiguous array.",
    ),
    "misaligned": (
        forward(q1=misaligned(2, 4, 5, 8)),
        ValueError,
        "q1: expected an address that is a multiple of 4 bytes, got one with remainder "
        "1; pass a copy of it.",
    ),
    "strides off the elements": (
        forward(k1=np.zeros((2, 2, 7, 9), "f4,i1")["f0"][..., :8]),
        ValueError,
        "k1: expected strides that are multiples of its element size, 4 bytes, got strides of "
        "(630, 315, 45, 5) bytes; pass a copy of it.",
    ),
    # Options.
    "causal": (
        forward(causal=1),
        TypeError,
        "causal: expected True or False, got 1 (int); pass bool(...) of it.",
    ),
    "softcap that is no number": (
        forward(softcap1="50"),
        TypeError,
        "softcap1: expected a finite number above 0, or 0 or None for no bound, got '50' (str); "
        "pass the bound of the logits of that side, for example 50.0.",
    ),
    "softcap that is a bool": (
        forward(softcap2=True),
        TypeError,
        "softcap2: expected a finite number above 0, or 0 or None for no bound, got True (bool); "
        "pass the bound of the logits of that side, for example 50.0.",
    ),
    "negative softcap": (
        forward(softcap2=-1),
        ValueError,
        "softcap2: expected a finite number above 0, or 0 or None for no bound, got -1; "
        "pass the bound of the logits of that side, for example 50.0.",
    ),
    "infinite softcap": (
        backward(softcap1=float("inf")),
        ValueError,
        "softcap1: expected a finite number above 0, or 0 or None for no bound, got inf; "
        "pass the bound of the logits of that side, for example 50.0.",
    ),
    "window of one side": (
        forward(window=(3,)),
        ValueError,
        "window: expected two whole numbers from 0 up, or -1 or None for no limit, got (3,) "
        "(tuple); pass how many keys a query sees on each side, for example window=(4096, 0).",
    ),
    "window that is no pair": (
        forward(window=3),
        TypeError,
        "window: expected a tuple of two whole numbers from 0 up, or -1 or None for no limit, got "
        "3 (int); pass how many keys a query sees on each side, for example window=(4096, 0).",
    ),
    "window of floats": (
        forward(window=(3.0, None)),
        TypeError,
        "window: expected two whole numbers from 0 up, or -1 or None for no limit, got "
        "(3.0, None) (tuple); pass how many keys a query sees on each side, for example "
        "window=(4096, 0).",
    ),
    "negative window": (
        forward(window=(-2, 0)),
        ValueError,
        "window: expected two whole numbers from 0 up, or -1 or None for no limit, got (-2, 0) "
        "(tuple); pass how many keys a query sees on each side, for example window=(4096, 0).",
    ),
    "q_offset": (
        forward(q_offset=True),
        TypeError,
        "q_offset: expected a whole number, got True (bool); pass the place of the first query "
        "among the keys, or leave it out.",
    ),
    "lengths of another dtype": (
        forward(kv_lens=np.zeros(2, np.int64)),
        TypeError,
        "kv_lens: expected int32, got int64; cast it to int32.",
    ),
    "lengths of another shape": (
        forward(q_lens=np.zeros(3, np.int32)),
        ValueError,
        "q_lens: expected one length a batch entry, shape (2,), got (3,); pass it for the whole "
        "batch.",
    ),
    "lengths of heads": (
        lambda: skl.attention_kl(*[zeros(6, 5, 8)] * 4, kv_lens=np.zeros(6, np.int32)),
        ValueError,
        "kv_lens: expected one length a batch entry, shape (1,), got (6,); pass one length for all "
        "heads, or batch and heads apart, at rank 4.",
    ),
    "ends that decrease": (
        lambda: skl.attention_kl(**packed(cu_seqlens_q=np.int32([0, 5, 3]))),
        ValueError,
        "cu_seqlens_q: expected ends that never decrease, from 0 up to at most the length, 8, got "
        "3 after 5 (index 2); pass where each sequence begins and where the last one ends.",
    ),
    "ends beyond the keys": (
        lambda: skl.attention_kl(**packed(cu_seqlens_k=np.int32([0, 5, 9]))),
        ValueError,
        "cu_seqlens_k: expected ends that never decrease, from 0 up to at most the length, 8, got "
        "9 (index 2); pass where each sequence begins and where the last one ends.",
    ),
    "packed queries alone": (
        forward(cu_seqlens_q=np.zeros(3, np.int32)),
        ValueError,
        "cu_seqlens_k: expected an array together with cu_seqlens_q, got None; pass both.",
    ),
    "packed and padded": (
        forward(
            cu_seqlens_q=np.zeros(3, np.int32),
            cu_seqlens_k=np.zeros(3, np.int32),
            kv_lens=np.zeros(2, np.int32),
        ),
        ValueError,
        "cu_seqlens_q: expected None together with kv_lens, got an array; leave out kv_lens, or "
        "cu_seqlens_q and cu_seqlens_k.",
    ),
    "packed at rank 4": (
        forward(cu_seqlens_q=np.zeros(3, np.int32), cu_seqlens_k=np.zeros(3, np.int32)),
        ValueError,
        "q1: expected 3 axes with cu_seqlens_q and cu_seqlens_k, got 4 (shape (2, 4, 5, 8)); pass "
        "(length of all sequences, heads, head_dim), or kv_lens= for a padded batch.",
    ),
    "the longest of no sequences": (
        forward(max_seqlen_q=3),
        ValueError,
        "max_seqlen_q: expected None without cu_seqlens_q, got 3; pass cu_seqlens_q and "
        "cu_seqlens_k as well, or leave it out.",
    ),
    "the longest below zero": (
        forward(max_seqlen_k=-1),
        ValueError,
        "max_seqlen_k: expected a whole number from 0 up, got -1; pass the length of the longest "
        "sequence.",
    ),
    "the longest on the device": (
        forward(max_seqlen_k=np.zeros(1)),
        TypeError,
        "max_seqlen_k: expected a whole number from 0 up, got array([0.]) (ndarray); pass the "
        "length of the longest sequence as an int, or leave it out.",
    ),
    "return_state": (
        forward(return_state="yes"),
        TypeError,
        "return_state: expected True or False, got 'yes' (str); pass bool(...) of it.",
    ),
    "infinite scale": (
        forward(scale1=float("inf")),
        ValueError,
        "scale1: expected a finite number, got inf; pass a finite one, or leave it out for "
        "head_dim ** -0.5.",
    ),
    "huge scale": (
        forward(scale2=10**400),
        ValueError,
        f"scale2: expected a finite number, got {10**400}; pass a finite one, or leave it out for "
        "head_dim ** -0.5.",
    ),
    "scale in an array": (
        forward(scale2=np.ones(1)),
        TypeError,
        "scale2: expected a real number, got array([1.]) (ndarray); pass float(...) of it, or "
        "leave it out for head_dim ** -0.5.",
    ),
    "unknown layout": (
        forward(layout="nhd"),
        ValueError,
        'layout: expected "bhnd" (batch, heads, length, head_dim) or "bnhd" (heads and length '
        "swapped), got 'nhd'; name the order of the axes of the four inputs.",
    ),
    "no layout": (
        forward(layout=None),
        TypeError,
        'layout: expected "bhnd" (batch, heads, length, head_dim) or "bnhd" (heads and length '
        "swapped), got None; name the order of the axes of the four inputs.",
    ),
    "wrt of one name": (
        backward(wrt="q2"),
        TypeError,
        "wrt: expected a tuple of one or more of 'q1', 'k1', 'q2', 'k2', each at most once, got "
        '\'q2\' (str); name the inputs whose gradients you want, for example wrt=("q2", "k2").',
    ),
    "unknown wrt": (
        backward(wrt=("q2", "v")),
        ValueError,
        "wrt: expected one or more of 'q1', 'k1', 'q2', 'k2', each at most once, got ('q2', 'v') "
        '(tuple); name the inputs whose gradients you want, for example wrt=("q2", "k2").',
    ),
    "strategy": (
        backward(strategy="fast"),
        ValueError,
        'strategy: expected "auto", "fused" or "separate", got \'fast\'; leave it out, or pass '
        '"auto", to let the package choose.',
    ),
    "fused and deterministic": (
        backward(strategy="fused", deterministic=True),
        ValueError,
        'strategy: expected "auto" or "separate" with deterministic=True, got \'fused\', whose '
        'sums arrive in no fixed order; leave strategy out or pass "separate".',
    ),
    "deterministic": (
        backward(deterministic=None),
        TypeError,
        "deterministic: expected True or False, got None (NoneType); pass bool(...) of it.",
    ),
    # The state.
    "kl as state": (
        backward(state=zeros(2, 4, 5)),
        TypeError,
        "state: expected a KLState, got ndarray; pass the result of attention_kl(..., "
        "return_state=True) or KLState.from_lse(...).",
    ),
    "half a state": (
        backward(state=state(lse1=None)),
        TypeError,
        "state.lse1: expected an array of NumPy, CuPy, torch or JAX, or another one with "
        "__dlpack__, got NoneType; convert it, for example by numpy.asarray.",
    ),
    # Where to write.
    "out dtype": (
        forward(out=zeros(2, 4, 5)),
        TypeError,
        "out: expected float64, got float32; allocate it as float64.",
    ),
    "out shape": (
        forward(out=zeros(2, 4, 6, dtype=float)),
        ValueError,
        "out: expected the shape of the result, (2, 4, 5), got (2, 4, 6); allocate it in that "
        "shape.",
    ),
    "out strides": (
        forward(out=zeros(5, 4, 2, dtype=float).T),
        ValueError,
        "out: expected a C-contiguous array, got strides (1, 2, 8) for shape (2, 4, 5); pass a "
        "contiguous array.",
    ),
    "out expanded": (
        forward(out=np.lib.stride_tricks.as_strided(np.zeros(1), (2, 4, 5), (0, 0, 0))),
        ValueError,
        "out: expected a C-contiguous array, got strides (0, 0, 0) for shape (2, 4, 5); pass a "
        "contiguous array.",
    ),
    "out read-only": (
        forward(out=readonly(zeros(2, 4, 5, dtype=float))),
        ValueError,
        "out: expected an array to write to, got a read-only one; pass a writable array, or leave "
        "out= out.",
    ),
    "out overlaps": (
        overlapping(),
        ValueError,
        "out: expected memory of its own, got memory that overlaps with that of q1; allocate it "
        "separately.",
    ),
    "out is a state": (
        forward(out=state()),
        TypeError,
        "out: expected an array for kl, got KLState; pass out.kl, or return_state=True as well.",
    ),
    "out is no state": (
        forward(out=zeros(2, 4, 5, dtype=float), return_state=True),
        TypeError,
        "out: expected a KLState with return_state=True, got ndarray; allocate one.",
    ),
    "part of out": (
        forward(out=state(), return_state=True),
        TypeError,
        "out.kl: expected float64, got float32; allocate it as float64.",
    ),
    "out is no tuple": (
        backward(out=zeros(2, 4, 5, 6)),
        TypeError,
        "out: expected a tuple of 2 arrays, in the order of wrt=('q2', 'k2'), got ndarray; put "
        "the arrays into a tuple.",
    ),
    "out is short": (
        backward(out=(zeros(2, 4, 5, 6),)),
        ValueError,
        "out: expected a tuple of 2 arrays, in the order of wrt=('q2', 'k2'), got one of length 1; "
        "pass one array for each gradient.",
    ),
    "gradient shape": (
        backward(out=(zeros(2, 4, 5, 6), zeros(2, 4, 5, 6))),
        ValueError,
        "out[1]: expected the shape of the result, (2, 4, 7, 6), got (2, 4, 5, 6); allocate it in "
        "that shape.",
    ),
    # Given log-sum-exps.
    "given shape": (
        forward(lse1=zeros(2, 4, 6)),
        ValueError,
        "lse1: expected the shape of q1 without its last axis, (2, 4, 5), got (2, 4, 6); pass one "
        "value a query row.",
    ),
    "given dtype": (
        forward(lse2=np.zeros((2, 4, 5), int)),
        TypeError,
        "lse2: expected bfloat16, float16, float32 or float64, got int64; cast it.",
    ),
    "given number": (
        forward(lse2=1.5),
        TypeError,
        "lse2: expected an array of NumPy, CuPy, torch or JAX, or another one with __dlpack__, got "
        "float; convert it, for example by numpy.asarray.",
    ),
    "out is not for what is given": (
        forward(lse1=zeros(2, 4, 5), return_state=True, out=state()),
        ValueError,
        "out: expected a KLState with given=('lse1',) and arrays for kl, lse1, lse2, mass1, got "
        "given=() and kl, lse1, lse2; make it with what this call returns.",
    ),
    "out is for what is given": (
        forward(return_state=True, out=state(mass1=zeros(2, 4, 5), given=("lse1",))),
        ValueError,
        "out: expected a KLState with given=() and arrays for kl, lse1, lse2, got "
        "given=('lse1',) and kl, lse1, lse2, mass1; make it with what this call returns.",
    ),
    # Entropies.
    "no place for the entropies": (
        forward(return_entropy=True, out=state()),
        ValueError,
        "out: expected a KLState with given=() and arrays for cross_entropy, entropy, kl, lse1, "
        "lse2, got given=() and kl, lse1, lse2; make it with what this call returns.",
    ),
    "entropy of what is given": (
        forward(lse2=zeros(2, 4, 5), return_entropy=True),
        ValueError,
        "return_entropy: expected False with given log-sum-exps, got True; leave out lse2.",
    ),
    "return_entropy": (
        forward(return_entropy=1),
        TypeError,
        "return_entropy: expected True or False, got 1 (int); pass bool(...) of it.",
    ),
    "given name": (
        backward(state=state(given=("kl",), mass1=zeros(2, 4, 5))),
        ValueError,
        'state.given: expected a tuple of "lse1", "lse2", both or none, got (\'kl\',); pass the '
        "state of attention_kl.",
    ),
    "no mass": (
        backward(state=state(given=("lse2",))),
        TypeError,
        "state.mass1: expected an array, because state.given is ('lse2',), got None; pass the "
        "state of attention_kl.",
    ),
    "shape of the mass": (
        backward(state=state(given=("lse2",), mass1=zeros(2, 4, 1))),
        ValueError,
        "state.mass1: expected the shape of q1 without its last axis, (2, 4, 5), got (2, 4, 1); "
        "pass one value a query row.",
    ),
    # Merging.
    "a state with a given log-sum-exp": (
        lambda: skl.merge_states(state(), state(given=("lse1", "lse2"), mass1=zeros(2, 4, 5))),
        ValueError,
        "states[1]: expected a state with log-sum-exps of its own, got one with given lse1 and "
        "lse2; add up kl and mass1 of parts that share what is given.",
    ),
    "no state": (
        lambda: skl.merge_states(),
        ValueError,
        "states: expected at least one KLState, got none; pass the states of the parts, for "
        "example merge_states(*states).",
    ),
    "a list of states": (
        lambda: skl.merge_states([state()]),  # type: ignore[arg-type]
        TypeError,
        "states[0]: expected a KLState, got list; pass the result of "
        "attention_kl(..., return_state=True) or KLState.from_lse(...).",
    ),
    "rows of a state": (
        lambda: skl.merge_states(state(), state(lse2=zeros(2, 4, 6))),
        ValueError,
        "states[1].lse2: expected the shape of states[0].kl, (2, 4, 5), got (2, 4, 6); pass "
        "states of the same query rows.",
    ),
    "dtype of a state": (
        lambda: skl.merge_states(state(), state(kl=np.zeros((2, 4, 5), int))),
        TypeError,
        "states[1].kl: expected bfloat16, float16, float32 or float64, got int64; cast it.",
    ),
    "strides of a state": (
        lambda: skl.merge_states(state(kl=zeros(5, 4, 2).T)),
        ValueError,
        "states[0].kl: expected a C-contiguous array, got strides (1, 2, 8) for shape (2, 4, 5); "
        "pass a contiguous array.",
    ),
    "merged into part of itself": (
        lambda: skl.merge_states(one := state(**double_rows()), out=one),
        ValueError,
        "out.kl: expected memory of its own, got memory that overlaps with that of states[0].kl; "
        "allocate it separately.",
    ),
    # Preparing.
    "warmup head dim": (
        lambda: skl.warmup(12, 64),
        ValueError,
        "head_dim1: expected a head dimension that is a multiple of 8 from 8 to 256 on a GPU, got "
        "12; pad with zeros to 16 and keep the scale of 12.",
    ),
    "warmup head dim type": (
        lambda: skl.warmup(64, 64.0),
        TypeError,
        "head_dim2: expected a head dimension that is a multiple of 8 from 8 to 256 on a GPU, got "
        "64.0 (float); pass an int.",
    ),
    "warmup dtype": (
        lambda: skl.warmup(dtype="float64"),
        ValueError,
        'dtype: expected "bfloat16", "float16" or "float32", got \'float64\'; name the dtype of '
        "the inputs.",
    ),
    "warmup precision": (
        lambda: skl.warmup(precision="tf32"),
        ValueError,
        "precision: expected None with bfloat16 inputs, got 'tf32'; leave it out, or cast the "
        "inputs to float32.",
    ),
    "warmup device and arch": (
        lambda: skl.warmup(device=0, arch="sm_90a"),
        ValueError,
        "arch: expected None together with device, got 'sm_90a'; leave out device to build for an "
        "arch, or arch to load on a device.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_texts(case: str) -> None:
    call, error, text = CASES[case]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
    assert type(caught.value) is error


def test_every_text_has_the_one_form() -> None:
    for _, _, text in CASES.values():
        argument, _, rest = text.partition(": expected ")
        assert re.fullmatch(r"\w+(\[\d\])?(\.\w+)?", argument)
        expected, _, rest = rest.partition(", got ")
        got, _, remedy = rest.rpartition("; ")
        assert text == message(argument, expected, got, remedy.removesuffix("."))
        assert expected
        assert got
        assert remedy


# On a GPU: the same checks, on descriptions.


def operand(name: str, *shape: int, **changes: Any) -> Operand:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    fields = {"dtype": "bfloat16", "device": Device("cuda", 1), "pointer": 4096} | changes
    return Operand(name, shape, strides, **fields)


def on_card(q1: Operand | None = None, k1: Operand | None = None, head_dim: int = 8) -> Any:
    q = operand("q1", 5, head_dim)
    k = operand("k1", 7, head_dim)
    return describe(q1 or q, k1 or k, operand("q2", 5, 8), operand("k2", 7, 8))


GPU_CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (
        lambda: on_card(q1=operand("q1", 5, 8, dtype="float64")),
        TypeError,
        "q1: expected bfloat16, float16 or float32 on a GPU, got float64; cast the four inputs to "
        "one of them.",
    ),
    "dtypes": (
        lambda: on_card(k1=operand("k1", 7, 8, dtype="float32")),
        TypeError,
        "k1: expected the dtype of q1, bfloat16, got float32; cast the four inputs to one dtype.",
    ),
    "device": (
        lambda: on_card(k1=operand("k1", 7, 8, device=Device("cuda", 0))),
        ValueError,
        "k1: expected an array on cuda:1 like q1, got one on cuda:0; move it to cuda:1.",
    ),
    "cpu": (
        lambda: on_card(k1=operand("k1", 7, 8, device=Device("cpu"))),
        ValueError,
        "k1: expected an array on cuda:1 like q1, got one on the CPU; move it to cuda:1.",
    ),
    "no memory": (
        lambda: on_card(k1=operand("k1", 7, 8, pointer=0)),
        ValueError,
        "k1: expected an array with data, got a null address; pass an array whose memory is "
        "allocated.",
    ),
    "odd address": (
        lambda: on_card(k1=operand("k1", 7, 8, pointer=4097)),
        ValueError,
        "k1: expected an address that is a multiple of 2 bytes, got one with remainder "
        "1; pass a copy of it.",
    ),
    "length": (
        lambda: describe(
            operand("q1", 5, 8),
            operand("k1", 2**31, 8),
            operand("q2", 5, 8),
            operand("k2", 2**31, 8),
        ),
        ValueError,
        "k1: expected a length of at most 2147418112, got 2147483648 (shape (2147483648, 8), "
        "layout 'bhnd'); split the sequence.",
    ),
    "head dim": (
        lambda: check_gpu(on_card(head_dim=20)),
        ValueError,
        "q1 and k1: expected a head dimension that is a multiple of 8 from 8 to 256 on a GPU, got "
        "20; pad with zeros to 24 and keep the scale of 20.",
    ),
    "large head dim": (
        lambda: check_gpu(on_card(head_dim=264)),
        ValueError,
        "q1 and k1: expected a head dimension that is a multiple of 8 from 8 to 256 on a GPU, got "
        "264; compute on the CPU, where any head dimension is accepted.",
    ),
    "scale": (
        lambda: check_gpu(
            describe(*[operand(n, 5, 8) for n in ("q1", "k1", "q2", "k2")], scale2=-3e38)
        ),
        ValueError,
        "scale2: expected a magnitude below 2.3e38 on a GPU, where logits are float32, got -3e+38; "
        "scale the queries instead.",
    ),
    "dkl": (
        lambda: check_rows(
            on_card(),
            operand("dkl", 5),
            shape=(5,),
            device=Device("cuda", 1),
            contiguous=False,
        ),
        TypeError,
        "dkl: expected float32, got bfloat16; cast it to float32.",
    ),
    "dkl device": (
        lambda: check_rows(
            on_card(),
            operand("dkl", 5, dtype="float32", device=Device("cuda", 0)),
            shape=(5,),
            device=Device("cuda", 1),
            contiguous=False,
        ),
        ValueError,
        "dkl: expected an array on cuda:1 like q1, got one on cuda:0; move it to cuda:1.",
    ),
    "gradient address": (
        lambda: check_output(
            operand("out[0]", 5, 8, pointer=4104),
            shape=(5, 8),
            dtype="bfloat16",
            device=Device("cuda", 1),
            alignment=16,
            others=(),
        ),
        ValueError,
        "out[0]: expected an address that is a multiple of 16 bytes, got one with "
        "remainder 8; pass a copy of it.",
    ),
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_texts_on_a_gpu(case: str) -> None:
    call, error, text = GPU_CASES[case]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


# Other libraries.


def raises(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch")

    def forward(self, **changes: Any) -> Callable[[], Any]:
        arrays = {name: self.torch.from_numpy(array) for name, array in inputs().items()}
        return lambda: skl.attention_kl(**arrays | changes)

    def test_mixed_libraries(self) -> None:
        raises(
            TypeError,
            "k1: expected an array of torch like q1, got one of numpy (ndarray); pass all arrays "
            "of a call from one library.",
            self.forward(k1=inputs()["k1"]),
        )
        raises(
            TypeError,
            "k2: expected an array of numpy like q1, got one of torch (Tensor); pass all arrays "
            "of a call from one library.",
            forward(k2=self.torch.zeros(2, 4, 7, 6)),
        )
        raises(
            TypeError,
            "dkl: expected an array of numpy like q1, got one of torch (Tensor); pass all arrays "
            "of a call from one library.",
            backward(dkl=self.torch.zeros(2, 4, 5)),
        )

    def test_requires_grad(self) -> None:
        text = (
            "q2: expected a torch tensor outside autograd, got one that requires grad; call "
            "streamkl_cupy.torch, which is differentiable, or pass value.detach()."
        )
        q2 = self.torch.zeros(2, 4, 5, 6, requires_grad=True)
        raises(TypeError, text, self.forward(q2=q2))
        raises(TypeError, text, self.forward(q2=self.torch.nn.Parameter(q2.detach())))
        raises(TypeError, text, self.forward(q2=q2 * 2))

    def test_forward_mode(self) -> None:
        forward_ad = self.torch.autograd.forward_ad
        k1 = self.torch.zeros(2, 2, 7, 8)
        with forward_ad.dual_level():
            self.forward(k1=k1)()
            raises(
                TypeError,
                "k1: expected a torch tensor outside autograd, got one with a forward-mode "
                "tangent; call streamkl_cupy.torch, which is differentiable, or pass "
                "value.detach().",
                self.forward(k1=forward_ad.make_dual(k1, self.torch.ones_like(k1))),
            )

    def test_function_transforms(self) -> None:
        text = (
            "q1: expected a torch tensor outside autograd, got one that requires grad; call "
            "streamkl_cupy.torch, which is differentiable, or pass value.detach()."
        )
        q1 = self.torch.zeros(2, 4, 5, 8)
        raises(
            TypeError,
            text,
            lambda: self.torch.func.grad(lambda q: self.forward(q1=q)().sum())(q1),
        )
        text = (
            "q1: expected a torch tensor with memory of its own, got one without (inside "
            "torch.func?); call streamkl_cupy.torch, which can be traced and transformed."
        )
        raises(
            TypeError,
            text,
            lambda: self.torch.func.vmap(lambda q: self.forward(q1=q)())(q1[None]),
        )

    def test_lazily_negated(self) -> None:
        q1 = self.torch.zeros(2, 4, 5, 8, dtype=self.torch.complex64).conj().imag
        raises(
            TypeError,
            "q1: expected a torch tensor whose memory holds its values, got one that is negated "
            "lazily; pass value.resolve_neg() of it.",
            self.forward(q1=q1),
        )

    def test_lazily_conjugated(self) -> None:
        q1 = self.torch.zeros(2, 4, 5, 8, dtype=self.torch.complex64).conj()
        raises(
            TypeError,
            "q1: expected bfloat16, float16, float32 or float64 on the CPU, got complex64; cast "
            "the four inputs to one of them.",
            self.forward(q1=q1),
        )

    def test_sparse_and_nested(self) -> None:
        raises(
            TypeError,
            "q1: expected a dense torch tensor, got one of layout torch.sparse_coo; pass a dense, "
            "padded copy.",
            self.forward(q1=self.torch.zeros(2, 4, 5, 8).to_sparse()),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = self.torch.nested.nested_tensor([self.torch.zeros(5, 8)])
        raises(
            TypeError,
            "q1: expected a dense torch tensor, got a nested one; pass a dense, padded copy.",
            self.forward(q1=nested),
        )

    def test_meta(self) -> None:
        raises(
            ValueError,
            "q1: expected an array on the CPU or a CUDA device, got one on torch device meta; move "
            "it to the CPU or to a CUDA device.",
            self.forward(q1=self.torch.zeros(2, 4, 5, 8, device="meta")),
        )

    def test_fake_tensors(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            q1 = self.torch.zeros(2, 4, 5, 8)
        raises(
            TypeError,
            "q1: expected a torch tensor with memory of its own, got FakeTensor; call "
            "streamkl_cupy.torch, which can be traced and transformed.",
            self.forward(q1=q1),
        )

    def test_dtype(self) -> None:
        raises(
            TypeError,
            "q1: expected bfloat16, float16, float32 or float64 on the CPU, got float8_e4m3fn; "
            "cast the four inputs to one of them.",
            self.forward(q1=self.torch.zeros(2, 4, 5, 8).to(self.torch.float8_e4m3fn)),
        )


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax")

    def forward(self, **changes: Any) -> Callable[[], Any]:
        cpu = self.jax.devices("cpu")[0]
        arrays = {name: self.jax.device_put(array, cpu) for name, array in inputs().items()}
        return lambda: skl.attention_kl(**arrays | changes)

    @pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
    def test_tracers(self, transform: str) -> None:
        function = getattr(self.jax, transform)(lambda q: self.forward(q1=q)().sum())
        with pytest.raises(TypeError) as caught:
            function(self.jax.numpy.zeros((2, 4, 5, 8)))
        text = str(caught.value)
        assert text.startswith("q1: expected a JAX array with values, got a tracer (")
        assert text.endswith("Tracer); inside jit, grad or vmap call streamkl_cupy.jax.")

    def test_arrays_are_not_written_to(self) -> None:
        raises(
            ValueError,
            "out: expected an array to write to, got a read-only one; pass a writable array, or "
            "leave out= out.",
            self.forward(out=self.jax.numpy.zeros((2, 4, 5))),
        )

    def test_deleted(self) -> None:
        q1 = self.jax.numpy.zeros((2, 4, 5, 8))
        q1.delete()
        raises(
            ValueError,
            "q1: expected a JAX array with data, got a deleted one; pass one that was not donated.",
            self.forward(q1=q1),
        )

    def test_dtype(self) -> None:
        raises(
            TypeError,
            "q1: expected bfloat16, float16, float32 or float64 on the CPU, got int32; cast the "
            "four inputs to one of them.",
            self.forward(q1=self.jax.numpy.zeros((2, 4, 5, 8), int)),
        )


def test_a_library_without_a_namespace() -> None:
    class Bare:
        __module__ = "somewhere"

        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    raises(
        TypeError,
        "q1: expected an array with __array_namespace__, which tells how to make results, got "
        "somewhere.Bare; pass a NumPy, CuPy, torch or JAX array that shares its memory.",
        forward(q1=Bare()),
    )


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(interop, "_cuda_process", None)
    monkeypatch.setattr(interop, "_cupy", None)
    raises(
        ImportError,
        "arrays on a GPU need CuPy, which cannot be imported; install streamkl-cupy[cu13] "
        "(CUDA 13) or streamkl-cupy[cu12] (CUDA 12).",
        interop.cupy,
    )


def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_cuda_process", 7)
    monkeypatch.setattr(interop, "_cupy", object())
    monkeypatch.setattr("os.getpid", lambda: 8)
    interop._after_fork()
    raises(
        RuntimeError,
        "CUDA was first used in process 7, from which this process, 8, was forked, and CUDA does "
        'not survive a fork; start workers with multiprocessing.get_context("spawn").',
        interop.cupy,
    )

"""The accuracy rule: no output may be worse than twice the textbook float32 formula, plus a floor.

`error`, `baseline_forward` and `baseline_backward` are those that ``streamkl-cupy audit`` shows.
On top of them `assert_accurate` judges one output, `assert_all_accurate` all outputs of a problem,
and the ``sampled_*`` functions compute some rows of a problem too long to be computed whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkl_cupy import reference
from streamkl_cupy.audit import (
    baseline_backward,
    baseline_forward,
    error,
    limit,
    nonfinite_rows,
)

__all__ = [
    "assert_accurate",
    "assert_all_accurate",
    "baseline_backward",
    "baseline_forward",
    "error",
    "round_mantissa",
    "sample_rows",
    "sampled_forward",
    "sampled_key_gradients",
    "sampled_query_gradients",
]

INPUTS = ("q1", "k1", "q2", "k2")
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def assert_accurate(
    name: str,
    ours: np.ndarray,
    ref: np.ndarray,
    baseline: np.ndarray,
    floor: float | None = None,
) -> None:
    """Fail unless ``error(ours) <= 2 * error(baseline) + floor``, non-finite where `ref` is.

    Parameters
    ----------
    name
        The output: ``"kl" "lse1" "lse2"``, or ``"dq1"`` and so on. A gradient counts as
        non-finite by whole rows (its last axis is the head dimension).
    ours, ref, baseline
        The output under test, in float64, and by the textbook formula; of one shape.
    floor
        1e-6 for kl and lse and 1e-5 for gradients unless given.
    """
    ours, ref, baseline = (np.asarray(x).astype(np.float64) for x in (ours, ref, baseline))
    assert ours.shape == ref.shape, f"{name}: shape {ours.shape}, expected {ref.shape}"
    bad = nonfinite_rows(name, ref)
    wrong = np.argwhere(nonfinite_rows(name, ours) != bad)
    if wrong.size:
        first = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} rows are finite in one of ours and the reference only; "
            f"the first is {first}: ours {ours[first]}, reference {ref[first]}"
        )
    if name.startswith("lse"):
        # The reference has -inf for rows without keys and for no other.
        no_keys = ref == -np.inf
        assert (ours[no_keys] == -np.inf).all(), f"{name}: not -inf in every row without keys"
    our_error, baseline_error = error(ours[~bad], ref[~bad]), error(baseline[~bad], ref[~bad])
    assert np.isfinite(baseline_error), f"{name}: the baseline is not finite where the reference is"
    allowed = limit(name, baseline_error) if floor is None else 2 * baseline_error + floor
    if not our_error <= allowed:
        finite, difference = np.isfinite(ref), np.zeros_like(ref)
        difference[finite] = np.abs(ours[finite] - ref[finite])
        worst = tuple(int(i) for i in np.unravel_index(difference.argmax(), ref.shape))
        raise AssertionError(
            f"{name}: error {our_error:.3e}, allowed {allowed:.3e} (baseline {baseline_error:.3e});"
            f" farthest off at {worst}: ours {ours[worst]!r}, reference {ref[worst]!r}"
        )


def assert_all_accurate(
    ours: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
) -> None:
    """Hold every output in `ours` against the reference and the baseline of the same inputs.

    Parameters
    ----------
    ours
        Any of ``kl lse1 lse2 dq1 dk1 dq2 dk2``, as NumPy arrays.
    inputs
        ``q1 k1 q2 k2``, and ``dkl`` if gradients are among `ours`.
    options
        ``causal scale1 scale2 layout``, as far as they are not the defaults.
    """
    qk = [inputs[name] for name in INPUTS]
    state = reference.attention_kl(*qk, **options, return_state=True)
    refs: dict[str, np.ndarray] = state._asdict()
    baselines = dict(zip(refs, baseline_forward(*qk, **options), strict=True))
    wrt = [name for name in INPUTS if "d" + name in ours]
    if wrt:
        problem = (inputs["dkl"], *qk)
        exact = reference.attention_kl_backward(*problem, state, wrt=wrt, **options)
        textbook = baseline_backward(*problem, wrt=wrt, **options)
        for name, ref, baseline in zip(wrt, exact, textbook, strict=True):
            refs["d" + name], baselines["d" + name] = ref, baseline
    for name, value in ours.items():
        assert_accurate(name, value, refs[name], baselines[name])


def sample_rows(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Sorted positions in ``range(length)``, at most `count`, the first and the last among them."""
    if length <= count:
        return np.arange(length)
    inner = rng.choice(length - 2, size=count - 2, replace=False) + 1
    return np.concatenate([[0], np.sort(inner), [length - 1]])


def sampled_forward(
    q1: np.ndarray,
    k1: np.ndarray,
    q2: np.ndarray,
    k2: np.ndarray,
    rows: np.ndarray,
    *,
    baseline: bool = False,
    causal: bool = False,
    scale1: float | None = None,
    scale2: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``kl, lse1, lse2`` of some query rows, by the float64 reference or by the baseline.

    Parameters
    ----------
    q1, k1, q2, k2
        All of a few heads: ``(N, D)`` or ``(H, N, D)``, with heads that fit as in the reference.
    rows
        Positions of the query rows, the same in every head.

    Returns
    -------
    tuple of ndarray
        Each ``(len(rows),)`` or ``(H, len(rows))``.
    """
    scales = {"scale1": scale1, "scale2": scale2}
    parts = []
    for some, seen in _row_parts(q1, k1, rows, causal):
        problem = q1[..., some, :], k1[..., seen, :], q2[..., some, :], k2[..., seen, :]
        if baseline:
            parts.append(baseline_forward(*problem, **scales))
        else:
            parts.append(reference.attention_kl(*problem, **scales, return_state=True))
    kl, lse1, lse2 = (np.concatenate(values, axis=-1) for values in zip(*parts, strict=True))
    return kl, lse1, lse2


def sampled_query_gradients(
    dkl: np.ndarray,
    q1: np.ndarray,
    k1: np.ndarray,
    q2: np.ndarray,
    k2: np.ndarray,
    rows: np.ndarray,
    *,
    wrt: Sequence[str] = ("q2",),
    baseline: bool = False,
    causal: bool = False,
    scale1: float | None = None,
    scale2: float | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of some query rows: of ``q1``, ``q2`` or both, each ``(..., len(rows), D)``.

    `dkl` is ``(N_Q,)`` or ``(H, N_Q)``, the other arguments are those of `sampled_forward`.
    """
    scales = {"scale1": scale1, "scale2": scale2}
    parts = []
    for some, seen in _row_parts(q1, k1, rows, causal):
        problem = q1[..., some, :], k1[..., seen, :], q2[..., some, :], k2[..., seen, :]
        upstream = dkl[..., some]
        if baseline:
            parts.append(baseline_backward(upstream, *problem, wrt=wrt, **scales))
        else:
            state = reference.attention_kl(*problem, **scales, return_state=True)
            parts.append(
                reference.attention_kl_backward(upstream, *problem, state, wrt=wrt, **scales)
            )
    return tuple(np.concatenate(values, axis=-2) for values in zip(*parts, strict=True))


def sampled_key_gradients(
    dkl: np.ndarray,
    q1: np.ndarray,
    k1: np.ndarray,
    q2: np.ndarray,
    k2: np.ndarray,
    state: reference.ReferenceState,
    keys: np.ndarray,
    *,
    wrt: Sequence[str] = ("k2",),
    baseline: bool = False,
    causal: bool = False,
    scale1: float | None = None,
    scale2: float | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of some key rows: of ``k1``, ``k2`` or both, each ``(..., len(keys), D)``.

    A key gradient sums over every query, so it needs the statistics of all of them.

    Parameters
    ----------
    dkl, q1, k1, q2, k2
        All of a few heads; a key head with every query head that shares it.
    state
        ``kl, lse1, lse2`` of every query row in float64, to about 1e-8 absolute: from the
        reference, or from a forward under test whose rows `sampled_forward` has confirmed.
    keys
        Positions of the key rows, the same in every head.
    """
    scales = {"scale1": scale1, "scale2": scale2}
    backward = _baseline_key_gradients if baseline else reference.attention_kl_backward
    num_queries, num_keys = q1.shape[-2], k1.shape[-2]
    parts = []
    for some in np.asarray(keys)[:, None] if causal else [np.asarray(keys)]:
        first = max(0, int(some[0]) - (num_keys - num_queries)) if causal else 0
        part = (
            dkl[..., first:],
            q1[..., first:, :],
            k1[..., some, :],
            q2[..., first:, :],
            k2[..., some, :],
            reference.ReferenceState(*(x[..., first:] for x in state)),
        )
        parts.append(backward(*part, wrt=wrt, **scales))
    return tuple(np.concatenate(values, axis=-2) for values in zip(*parts, strict=True))


def round_mantissa(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the significant bits of `dtype`, to nearest even, whatever the exponent."""
    mantissa, exponent = np.frexp(x)
    bits = SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)


def _row_parts(
    q: np.ndarray, k: np.ndarray, rows: np.ndarray, causal: bool
) -> list[tuple[np.ndarray, slice]]:
    """Query rows that see the same keys, with these keys."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    rows = np.asarray(rows)
    if not causal:
        return [(rows, slice(None))]
    ends = np.clip(rows + 1 + num_keys - num_queries, 0, num_keys)
    return [(rows[i : i + 1], slice(0, int(end))) for i, end in enumerate(ends)]


def _baseline_key_gradients(
    dkl: np.ndarray,
    q1: np.ndarray,
    k1: np.ndarray,
    q2: np.ndarray,
    k2: np.ndarray,
    state: reference.ReferenceState,
    *,
    wrt: Sequence[str],
    scale1: float | None,
    scale2: float | None,
) -> tuple[np.ndarray, ...]:
    """`baseline_backward` for keys that are not all there, so that the state has to be given."""
    key_inputs = {"k1": k1, "k2": k2}
    # Rank 3, and the few keys repeated for every query head that shares them.
    queries, keys, scales, log_p = {}, {}, {}, {}
    for t, q, k, scale, lse in (
        ("1", q1, k1, scale1, state.lse1),
        ("2", q2, k2, scale2, state.lse2),
    ):
        queries[t] = q.reshape(-1, *q.shape[-2:]).astype(np.float32)
        keys[t] = k.reshape(-1, *k.shape[-2:]).astype(np.float32)
        repeats = len(queries[t]) // len(keys[t])
        scales[t] = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
        logits = queries[t] @ np.repeat(keys[t], repeats, axis=0).swapaxes(1, 2) * scales[t]
        log_p[t] = (logits - lse.reshape(-1, lse.shape[-1], 1)).astype(np.float32)
    kl, upstream = (
        np.asarray(x, np.float32).reshape(len(queries["1"]), -1, 1) for x in (state.kl, dkl)
    )
    dlogits = {
        "1": upstream * (np.exp(log_p["1"]) * (log_p["1"] - log_p["2"] - kl)),
        "2": upstream * (np.exp(log_p["2"]) - np.exp(log_p["1"])),
    }
    gradients = []
    for name in wrt:
        t = name[1]
        key = key_inputs[name]
        product = round_mantissa(dlogits[t], str(key.dtype)).swapaxes(1, 2) @ queries[t]
        total = product.reshape(len(keys[t]), -1, *product.shape[1:]).sum(axis=1)
        gradients.append((scales[t] * total).astype(key.dtype).reshape(key.shape))
    return tuple(gradients)

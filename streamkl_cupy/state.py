"""KLState: what the forward hands to the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class SupportsDLPack(Protocol):
    """An array of any library that shares its memory by DLPack."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class KLState:
    """The result of the forward for each query row, with all that the backward needs.

    Every array has the shape of q1 without its last axis, of packed sequences ``(H, N_Q)``, and
    belongs to the caller's library. The log-sum-exps are not differentiable.

    Attributes
    ----------
    kl
        KL divergence, in nats. float32 on the GPU, float64 on the CPU.
    lse1, lse2
        Log-sum-exp of the scaled logits of each side, in nats; -inf for a row without keys. Where
        one was given to the call, that one, but on rows without keys and on rows that are NaN.
    lse1_low, lse2_low
        What ``lse1`` and ``lse2`` lack of the true value in float32 (``lse + low``), which the
        backward needs where logits are large. None means zero.
    given
        Which of ``"lse1"`` and ``"lse2"`` were given to the call.
    mass1
        Where one was given, the sum of P1 over the keys of the call: 1 if lse1 is the row's own,
        0 for a row without keys. Else None.
    entropy, cross_entropy
        Where asked for, the entropy of P1 and its cross-entropy with P2, in nats: 0 for a row
        without keys. Else None.

    Examples
    --------
    >>> import numpy as np
    >>> state = KLState.from_lse(np.zeros(3), np.ones(3), np.ones(3))
    >>> state.lse1_low is None
    True
    """

    kl: SupportsDLPack
    lse1: SupportsDLPack
    lse2: SupportsDLPack
    lse1_low: SupportsDLPack | None = None
    lse2_low: SupportsDLPack | None = None
    mass1: SupportsDLPack | None = None
    given: tuple[str, ...] = ()
    entropy: SupportsDLPack | None = None
    cross_entropy: SupportsDLPack | None = None

    @classmethod
    def from_lse(cls, kl: SupportsDLPack, lse1: SupportsDLPack, lse2: SupportsDLPack) -> KLState:
        """Build a state from values that the caller has computed.

        Parameters
        ----------
        kl
            KL divergence of each query row, in nats, C-contiguous, of the shape of q1 without its
            last axis, of packed sequences ``(H, N_Q)``. Needed for the gradients of q1 and k1 only.
        lse1, lse2
            Log-sum-exp of each query row over the allowed keys, in nats, likewise.

        Returns
        -------
        KLState
            The state, without low parts. An ``lse`` that is off by x makes every probability of
            its side off by the factor ``exp(x)``.

        Notes
        -----
        The arrays are checked by the call that uses them.

        Examples
        --------
        >>> import numpy as np
        >>> state = KLState.from_lse(np.zeros(3), np.ones(3), np.ones(3))
        >>> state.lse1.shape
        (3,)
        """
        return cls(kl, lse1, lse2)

"""KL divergence between two attention distributions, and its gradients, in one pass over the keys.

>>> import streamkl_cupy as skl
>>> import numpy as np
>>> q, k = np.ones((2, 8)), np.eye(3, 8)
>>> skl.attention_kl(q, k, q, k)
array([0., 0.])

Importing the package needs neither a GPU nor CuPy, torch or JAX. What is asked of it first is
loaded then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamkl_cupy import reference as reference
    from streamkl_cupy.api import attention_kl as attention_kl
    from streamkl_cupy.api import attention_kl_backward as attention_kl_backward
    from streamkl_cupy.api import merge_states as merge_states
    from streamkl_cupy.api import warmup as warmup
    from streamkl_cupy.state import KLState as KLState

__version__ = "0.1.0"

__all__ = [
    "KLState",
    "__version__",
    "attention_kl",
    "attention_kl_backward",
    "merge_states",
    "reference",
    "warmup",
]

_HOMES = {
    "KLState": "streamkl_cupy.state",
    "attention_kl": "streamkl_cupy.api",
    "attention_kl_backward": "streamkl_cupy.api",
    "merge_states": "streamkl_cupy.api",
    "warmup": "streamkl_cupy.api",
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("streamkl_cupy.reference")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""KL and gradients at 128K tokens with CuPy alone: time, memory, and some rows against float64.

Two matrices of 128K x 128K a head would take 68 GB in float16; nothing of that size is ever stored.
Without a GPU it says so and runs a small size with NumPy.

    python examples/long_context_cupy.py [--tokens 131072] [--heads 4]
"""

import argparse
import time

import numpy as np

import streamkl_cupy as skl
from streamkl_cupy.audit import error
from streamkl_cupy.cli import find_card

HEAD_DIM, SMALL = 128, 512


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()
    cupy, card = find_card()
    tokens = options.tokens if cupy else min(options.tokens, SMALL)
    print(card if cupy else f"no GPU ({card}): {tokens} tokens with NumPy, in float64")
    shape = (options.heads, tokens, HEAD_DIM)
    library = cupy or np
    rng = library.random.default_rng(0)
    q1, k1, q2, k2 = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(4))
    # The gradient of the mean, one number for all rows: a view of stride 0.
    kind = np.float32 if cupy else np.float64
    dkl = library.broadcast_to(library.asarray(1 / (shape[0] * tokens), kind), shape[:2])

    if cupy:
        skl.warmup(HEAD_DIM, HEAD_DIM, "float16")
        pool = cupy.cuda.MemoryPool()  # of the two calls alone
        cupy.cuda.set_allocator(pool.malloc)
    start = time.perf_counter()
    state = skl.attention_kl(q1, k1, q2, k2, causal=True, return_state=True)
    mean = float(state.kl.mean())
    middle = time.perf_counter()
    dq2, dk2 = skl.attention_kl_backward(dkl, q1, k1, q2, k2, state, causal=True)
    if cupy:
        cupy.cuda.Device().synchronize()
        extra = pool.total_bytes() - dq2.nbytes - dk2.nbytes
    stop = time.perf_counter()

    print(f"{shape[0]} heads x {tokens} tokens x {HEAD_DIM}, causal: mean KL {mean:.6f}")
    print(f"forward {middle - start:.3f} s, backward {stop - middle:.3f} s")
    matrices = 2 * shape[0] * tokens**2 * q1.itemsize
    print(f"both distributions in float16 would be {matrices / 1e9:.3f} GB")
    if cupy:
        print(f"extra memory beside inputs and gradients: {extra / 1e9:.3f} GB")

    # A causal row sees the keys up to its own: the float64 reference of that row alone.
    worst = 0.0
    for row in (0, tokens // 3, tokens - 1):
        parts = [x[0, row : row + 1] for x in (q1, q2)] + [x[0, : row + 1] for x in (k1, k2)]
        one, two, keys1, keys2 = (np.asarray(x.get() if cupy else x) for x in parts)
        exact = skl.reference.attention_kl(one, keys1, two, keys2)
        worst = max(worst, error(np.asarray([float(state.kl[0, row])]), exact))
    print(f"largest error of three rows against float64: {worst:.1e}")
    raise SystemExit(0 if worst <= 1e-4 else "expected errors of at most 1e-4")


if __name__ == "__main__":
    main()

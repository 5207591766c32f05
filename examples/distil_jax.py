"""Distil the attention of a teacher into a student with JAX: the loss falls by ten times and more.

The teacher is the last layer of a real sentence encoder, the student starts as the layer below: its
queries and keys are linear maps of that layer's, and the maps are trained by Adam, under jit.

    python examples/distil_jax.py [--steps 300] [--passage 2]
"""

import argparse
import importlib.resources
import time

import jax
import numpy as np
from jax import numpy as jnp

from streamkl_cupy.jax import attention_kl

LEARNING_RATE, DECAY1, DECAY2 = 5e-4, 0.9, 0.99


def load(passage):
    """Queries and keys of one passage: teacher's and student's, each (heads, tokens, head dim)."""
    path = importlib.resources.files("streamkl_cupy") / "data" / "minilm_attention_qk.npz"
    with path.open("rb") as file, np.load(file) as sample:
        start, stop = sample["cu_seqlens"][passage : passage + 2]
        names = ("q_teacher", "k_teacher", "q_student", "k_student")
        return [jnp.asarray(sample[name][:, start:stop]) for name in names]


def loss(maps, teacher, features):
    # The maps are float32; what the kernels multiply is float16, as in the teacher.
    q, k = (jnp.einsum("nf,hfd->hnd", features, m).astype(jnp.float16) for m in maps)
    return attention_kl(*teacher, q, k, reduction="mean")


@jax.jit
def adam(step, maps, moments, teacher, features):
    value, gradients = jax.value_and_grad(loss)(maps, teacher, features)
    first = jax.tree.map(lambda m, g: DECAY1 * m + (1 - DECAY1) * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: DECAY2 * v + (1 - DECAY2) * g * g, moments[1], gradients)
    rate = LEARNING_RATE * jnp.sqrt(1 - DECAY2**step) / (1 - DECAY1**step)
    maps = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), maps, first, second)
    return value, maps, (first, second)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--passage", type=int, default=2, choices=(0, 1, 2))
    options = parser.parse_args()
    *teacher, q, k = load(options.passage)
    heads, tokens, head_dim = q.shape

    # What the student computes from: all heads side by side. It starts by handing on its own.
    features = jnp.concatenate([*q, *k], axis=1).astype(jnp.float32)
    own = jnp.eye(2 * heads * head_dim).reshape(-1, 2 * heads, head_dim).swapaxes(0, 1)
    maps = own[:heads], own[heads:]
    moments = jax.tree.map(jnp.zeros_like, (maps, maps))
    print(f"{heads} heads, {tokens} tokens, on {q.device}")
    start = time.perf_counter()
    first = None
    for step in range(1, options.steps + 1):
        value, maps, moments = adam(step, maps, moments, teacher, features)
        first = value if first is None else first
        if step == 1 or step % 50 == 0:
            print(f"step {step:4}: KL(teacher || student) {value:.4f}")
    seconds = time.perf_counter() - start
    ratio = float(first / loss(maps, teacher, features))
    print(f"KL fell {ratio:.1f} times in {options.steps} steps and {seconds:.1f} s")
    raise SystemExit(0 if ratio >= 10 else "expected the KL to fall at least 10 times")


if __name__ == "__main__":
    main()

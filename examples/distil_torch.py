"""Train a student's attention to match a teacher's, on the attention of a real sentence encoder.

The teacher is the last layer of all-MiniLM-L6-v2 on a passage of the GPL-3, its queries and keys as
they are. The student sees the queries and keys of the layer before, and learns two linear maps of
them, to heads of half the size. Run: python examples/distil_torch.py [--device cpu]
"""

from __future__ import annotations

import argparse
import importlib.resources

import matplotlib
import numpy as np
import torch

from streamkl_cupy.torch import attention_kl

matplotlib.use("Agg")  # draws to a file, without a screen
from matplotlib import pyplot

HEADS, HEAD_DIM = 12, 16


def load(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The teacher's queries and keys ``(heads, tokens, 32)`` and the student's features."""
    path = importlib.resources.files("streamkl_cupy") / "data" / "minilm_attention_qk.npz"
    with path.open("rb") as file, np.load(file) as sample:
        last = slice(*sample["cu_seqlens"][-2:].tolist())
        names = ("q_teacher", "k_teacher", "q_student", "k_student")
        q1, k1, q2, k2 = (torch.from_numpy(sample[name][:, last]).to(device) for name in names)
    # Every head of the student may use what all heads of its layer know of a token.
    features = torch.cat([q2, k2]).transpose(0, 1).flatten(1).float()
    return q1, k1, features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", default="distil_torch.png", metavar="FILE")
    options = parser.parse_args()

    torch.manual_seed(0)
    q1, k1, features = load(options.device)
    student = torch.nn.Linear(features.shape[1], 2 * HEADS * HEAD_DIM, device=options.device)
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, eta_min=1e-4)

    history = []
    for step in range(options.steps + 1):
        projected = student(features).unflatten(1, (2, HEADS, HEAD_DIM)).to(q1.dtype)
        q2, k2 = projected.permute(1, 2, 0, 3)  # views: nothing is copied
        loss = attention_kl(q1, k1, q2, k2, reduction="mean")
        history.append(loss.item())
        if step % max(options.steps // 10, 1) == 0:
            print(f"step {step:4d}: mean KL(teacher || student) = {loss.item():.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    axes.semilogy(history)
    axes.set(xlabel="step", ylabel="mean KL (nats)", title="A student's attention learns")
    figure.savefig(options.plot, dpi=150)
    print(f"plot: {options.plot}")
    print(f"KL fell {history[0] / history[-1]:.1f} times in {options.steps} steps")


if __name__ == "__main__":
    main()

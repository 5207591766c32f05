"""MiniLM-style distillation: query-key and value-value relations of a transformer's last layer.

A small causal transformer learns to predict the characters of Python's own standard library; a
smaller one then learns to relate characters as it does (https://arxiv.org/abs/2002.10957), its
heads half as wide. Run: python examples/distil_minilm.py [--device cpu]
"""

import argparse
import inspect
import textwrap

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from streamkl_cupy.torch import attention_kl

LENGTH, BATCH, HEADS = 128, 8, 4


class Transformer(nn.Module):
    """Causal; the queries, keys and values of its last layer stay in ``last``."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position.weight
        for qkv, mix in zip(self.qkv, self.mix, strict=True):
            self.last = qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(*self.last, is_causal=True)
            x = x + mix(attended.transpose(1, 2).flatten(2)).relu()
        return self.head(self.norm(x))


def relations(teacher: Transformer, student: Transformer) -> tuple[Tensor, Tensor]:
    """KL between how queries see keys, and between how values see values."""
    (q1, k1, v1), (q2, k2, v2) = (model.last.to(torch.bfloat16) for model in (teacher, student))
    options = {"causal": True, "reduction": "mean"}
    return attention_kl(q1, k1, q2, k2, **options), attention_kl(v1, v1, v2, v2, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of each of the two")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = "".join(map(inspect.getsource, (argparse, inspect, textwrap)))
    text = torch.tensor([min(ord(character), 127) for character in source])
    teacher = Transformer(width=128, layers=4).to(options.device)
    student = Transformer(width=64, layers=2).to(options.device)
    for model in (teacher, student):
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for step in range(options.steps + 1):
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
            batch = text[starts + torch.arange(LENGTH)].to(options.device)
            with torch.set_grad_enabled(model is teacher):
                logits = teacher(batch)
            if model is teacher:
                loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
                said = f"teacher: cross-entropy {loss:.4f}"
            else:
                student(batch)
                qk, vv = relations(teacher, student)
                loss, said = qk + vv, f"student: KL of q-k {qk:.4f}, of v-v {vv:.4f}"
            if step % max(options.steps // 5, 1) == 0:
                print(f"step {step:4d}, {said}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()

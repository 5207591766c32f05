"""How accurate is it on your arrays? Errors against float64 beside those of the textbook formula.

Save ``q1 k1 q2 k2`` (and, if you have it, ``dkl``) with `numpy.savez` and pass the file; without
one, a passage of the sample attention is audited. The rule is that no error is more than twice
that of the textbook formula in float32, plus 1e-6 for kl and lse or 1e-5 for gradients.

    python examples/audit_your_arrays.py [yours.npz] [--causal]
"""

import argparse
import importlib.resources

import numpy as np

from streamkl_cupy import audit
from streamkl_cupy.cli import find_card


def load(path):
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("q1", "k1", "q2", "k2", "dkl") if name in file}
    # NumPy writes bfloat16 as two raw bytes.
    bfloat16 = audit.DTYPES["bfloat16"]
    return {n: x.view(bfloat16) if x.dtype == np.dtype("V2") else x for n, x in arrays.items()}


def sample():
    path = importlib.resources.files("streamkl_cupy") / "data" / "minilm_attention_qk.npz"
    names = {"q1": "q_teacher", "k1": "k_teacher", "q2": "q_student", "k2": "k_student"}
    with path.open("rb") as file, np.load(file) as arrays:
        stop = arrays["cu_seqlens"][1]
        return {name: arrays[stored][:, :stop] for name, stored in names.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("npz", nargs="?", help="your arrays")
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    arrays = load(options.npz) if options.npz else sample()
    # Without an upstream gradient of yours: that of the mean.
    rows = arrays["q1"].shape[:-1]
    arrays.setdefault("dkl", np.full(rows, 1 / np.prod(rows), np.float32))
    cupy, card = find_card()
    report = audit.measure(**arrays, causal=options.causal, cupy=cupy)

    where = card if cupy else f"the CPU, in float64 ({card})"
    print(f"{options.npz or 'sample attention'}: q1 {arrays['q1'].shape} {arrays['q1'].dtype}")
    print(f"computed on {where}")
    print(f"{'output':8}{'error':>10}{'textbook':>10}{'allowed':>10}")
    for line in report.lines:
        verdict = "" if line.passes else "  TOO LARGE"
        figures = f"{line.error:10.1e}{line.baseline:10.1e}{line.limit:10.1e}"
        print(f"{line.name:8}{figures}{verdict}")
    print("every output keeps the rule" if report.passes else "the rule is broken")
    raise SystemExit(0 if report.passes else 1)


if __name__ == "__main__":
    main()

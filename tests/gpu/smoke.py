"""Every kernel once or twice on small shapes, through CuPy alone: ``python -m tests.gpu.smoke``.

What compute-sanitizer watches, so no time goes into anything else. The values are tested elsewhere;
here they only have to be finite. With ``--all-lanes`` every lane of a warp arrives at its barriers
(``cuda_src/ptx/mbarrier.cuh``), without which the race checker sees races that are none.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import cupy
import numpy as np

from streamkl_cupy import jit, plan
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, backward_plan, forward_plan, random_inputs, run, upload

# Dtype, lengths, options, splits of the keys, and by how many bytes inputs are off alignment.
RUNS = (
    ("bfloat16", {"num_queries": 130, "num_keys": 150}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 150, "num_keys": 40}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 70, "num_keys": 130}, {}, 3, 0),
    ("bfloat16", {"num_queries": 33, "num_keys": 150}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 3, "num_keys": 300}, {"causal": True}, 4, 0),
    ("float16", {"num_queries": 3, "num_keys": 300}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 100, "num_keys": 90}, {"causal": True}, 1, 2),
    ("float16", {"num_queries": 130, "num_keys": 150}, {"causal": True}, 1, 0),
)
HEADS = {"heads": 4, "key_heads1": 2, "key_heads2": 1}


def let_all_lanes_arrive(directory: Path) -> None:
    """Build from a copy of the sources, in the directory, that differs in this alone."""
    copy = directory / "cuda_src"
    shutil.copytree(jit.source_directory(), copy)
    header = copy / "ptx" / "mbarrier.cuh"
    text = header.read_text(encoding="utf-8")
    changed = text.replace("kAllLanesArrive = false", "kAllLanesArrive = true")
    assert changed != text
    header.write_text(changed, encoding="utf-8")
    jit.source_directory = lambda: copy


def main() -> None:
    library, rng = Cupy(), np.random.default_rng(0)
    ran: set[str] = set()
    for dtype, lengths, options, num_splits, offset in RUNS:
        inputs = random_inputs(rng, dtype, **HEADS, **lengths)
        arrays = {n: upload(library, x, offset * (n in INPUTS)) for n, x in inputs.items()}
        with plan.override(num_splits=num_splits):
            ran |= {kernel.kernel for kernel in forward_plan(arrays, options).kernels}
            for strategy in ("fused", "separate"):
                chosen = backward_plan(arrays, options, INPUTS, strategy=strategy)
                ran |= {kernel.kernel for kernel in chosen.kernels}
                results = run(library, arrays, options, strategy=strategy, into=True)
                for name, values in results.items():
                    finite = np.isfinite(values.astype(np.float32))
                    # A row without keys has a log-sum-exp of -inf.
                    assert finite.all() or name.startswith("lse"), name
        cupy.cuda.Device().synchronize()
        print(f"ran {dtype} {lengths} {options} splits {num_splits} offset {offset}", flush=True)
    missing = {path.stem for path in jit.source_directory().glob("*.cu")} - ran
    assert not missing, f"never launched: {sorted(missing)}"
    print("every kernel ran", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if "--all-lanes" in sys.argv:
            let_all_lanes_arrive(Path(place))
        main()

"""Plants one fault at a time in a copy of the source and requires the suite to notice it.

    python tests/mutants.py

A text that no longer occurs exactly once is an error, so that no mutant silently stops being one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What is wrong, where, the text, the fault, and the tests that ought to see it.
MUTANTS = [
    (
        "causal off by one",
        "jflash/masks.py",
        "return at.k <= at.q",
        "return at.k < at.q",
        "schedule.py causal",
    ),
    (
        "window off by one",
        "jflash/masks.py",
        "True if self.left is None else behind <= _bound(self.left)",
        "True if self.left is None else behind < _bound(self.left)",
        "schedule.py window",
    ),
    (
        "padding sees padding",
        "jflash/masks.py",
        "return (self.q_ids == self.k_ids) & (self.q_ids >= 0)",
        "return self.q_ids == self.k_ids",
        "schedule.py segments",
    ),
    (
        "a run of full blocks one too long",
        "jflash/schedule.py",
        "full_hi = jnp.clip((row(a.hi, n * there - 1) + 1) // there, full_lo, hi)",
        "full_hi = jnp.clip((row(a.hi, n * there - 1) + 1) // there + 1, full_lo, hi)",
        "schedule.py causal",
    ),
    (
        "the cotangent of lse dropped",
        "jflash/rules.py",
        "delta = delta - jnp.where(empty, 0, dlse)",
        "delta = delta + 0 * jnp.where(empty, 0, dlse)",
        "attention.py float32",
    ),
    (
        "dq without the scale",
        "jflash/xla.py",
        'dq = x.product("...gqk,...kD->...gqD", draw, k_)',
        'dq = x.product("...gqk,...kD->...gqD", draw / x.unit, k_)',
        "attention.py float32",
    ),
    (
        "key heads tiled instead of repeated",
        "jflash/grouped.py",
        "return x.reshape(*x.shape[:-3], problem.h, problem.group, *x.shape[-2:])",
        "return x.reshape(*x.shape[:-3], problem.group, problem.h, *x.shape[-2:]).swapaxes(-3, -4)",
        "attention.py gqa",
    ),
    (
        "a dropout offset of 0",
        "jflash/xla.py",
        "(operands.dropout[0], operands.dropout[1]), operands.row_offsets or (0, 0)",
        "(operands.dropout[0], operands.dropout[1]), (0, 0)",
        "attention.py offsets",
    ),
    (
        "d and D swapped",
        "jflash/xla.py",
        "dk, dv = x.full((*lead, problem.D, block_k)), x.full((*lead, problem.d, block_k))",
        "dk, dv = x.full((*lead, problem.d, block_k)), x.full((*lead, problem.D, block_k))",
        "failure_cases.py C07",
    ),
    (
        "2^x never 0",
        "jflash/exp2.py",
        "return jnp.where(y < -126, 0, lax.bitcast_convert_type(bits, jnp.float32))",
        "return jnp.where(y < -126, 1e-5, lax.bitcast_convert_type(bits, jnp.float32))",
        "attention.py float32",
    ),
    (
        "the drop-in aligned bottom-right",
        "jflash/api.py",
        "mask = mask and Moved(mask, t - T)",
        "mask = mask and Moved(mask, 0)",
        "dot_product_attention.py top_left",
    ),
    (
        "a sink counted in lse",
        "jflash/rules.py",
        "out = _times(out, _sink_weight(operands, lse))",
        "out, lse = _times(out, _sink_weight(operands, lse)), lse + 0.1",
        "attention.py sinks",
    ),
]


def survives(folder: Path, tests: str) -> bool:
    """Whether the tests named "file keyword" pass in `folder`."""
    file, keyword = tests.split()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/test_{file}", "-k", keyword]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    if done.returncode not in (0, 1):
        sys.exit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """The exit status: 1 if a mutant survives."""
    alive = 0
    for name, path, text, fault, tests in MUTANTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for part in ("jflash", "pallas_kernels", "tests", "pyproject.toml"):
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                copy(ROOT / part, folder / part)
            source = (folder / path).read_text()
            if source.count(text) != 1:
                sys.exit(f"{name}: {path} has {source.count(text)} times: {text}")
            (folder / path).write_text(source.replace(text, fault))
            begin = time.perf_counter()
            lives = survives(folder, tests)
        alive += lives
        print(
            f"{'SURVIVES' if lives else 'caught':8s} {time.perf_counter() - begin:5.0f} s  {name}", flush=True
        )
    print(f"{len(MUTANTS) - alive} of {len(MUTANTS)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

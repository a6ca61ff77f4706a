"""Plants one fault at a time in a copy of the source and requires the tests to notice it.

    python tests/mutants.py [WORDS]      only the mutants in whose name these occur

A text that no longer occurs exactly once is an error, so that no mutant silently stops being one;
so is a test that fails without a fault.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MASK = "test_masks.py::test_masks_show_what_their_twins_do[{}-gqa]"
CALL = "test_attention.py::test_forward_and_gradients[xla-{}]"
# What is wrong, where, the text, the fault, and a test that ought to see it.
MUTANTS = [
    (
        "causal off by one",
        "jflash/masks.py",
        "return at.k <= at.q",
        "return at.k < at.q",
        MASK.format("causal"),
    ),
    (
        "window off by one",
        "jflash/masks.py",
        "True if self.left is None else behind <= _bound(self.left)",
        "True if self.left is None else behind < _bound(self.left)",
        MASK.format("window"),
    ),
    (
        "padding sees padding",
        "jflash/masks.py",
        "return (self.q_ids == self.k_ids) & (self.q_ids >= 0)",
        "return self.q_ids == self.k_ids",
        MASK.format("segments padded"),
    ),
    (
        "a run of full blocks one too long",
        "jflash/schedule.py",
        "full_hi = jnp.clip((row(a.hi, n * there - 1) + 1) // there, full_lo, hi)",
        "full_hi = jnp.clip((row(a.hi, n * there - 1) + 1) // there + 1, full_lo, hi)",
        "test_schedule.py::test_masks_and_schedules[causal-(37, 37)]",
    ),
    (
        "some and every swapped in ~",
        "jflash/masks.py",
        "return every ^ True, some ^ True",
        "return some ^ True, every ^ True",
        "test_schedule.py::test_masks_and_schedules[not-(37, 37)]",
    ),
    (
        "the cotangent of lse dropped",
        "jflash/rules.py",
        "delta = delta - jnp.where(empty, 0, dlse)",
        "delta = delta + 0 * jnp.where(empty, 0, dlse)",
        CALL.format("mha, none-float32"),
    ),
    (
        "lse stands still in second order",
        "jflash/rules.py",
        "(f, *_tangent(call, (), point, f))",
        "(f, *map(jnp.zeros_like, _tangent(call, (), point, f)))",
        "test_forward_mode.py::test_transformations[reverse over reverse-xla]",
    ),
    (
        "the summed cotangent of what is not mapped",
        "jflash/linear_maps.py",
        "x.sum(0) if n is None",
        "x.mean(0) if n is None",
        "test_forward_mode.py::test_transformations[gradient of vmap-xla]",
    ),
    (
        "dq without the scale",
        "jflash/xla.py",
        'dq = x.product("...gqk,...kD->...gqD", draw, k_)',
        'dq = x.product("...gqk,...kD->...gqD", draw / x.unit, k_)',
        CALL.format("mha, none-float32"),
    ),
    (
        "the scale of d instead of D",
        "jflash/validate.py",
        "_scale(call, scale, D)",
        "_scale(call, scale, v.shape[-1])",
        CALL.format("wide keys, dense BHTt, bias Tt-float16"),
    ),
    (
        "d and D swapped",
        "jflash/xla.py",
        "dk, dv = x.full((*lead, problem.D, block_k)), x.full((*lead, problem.d, block_k))",
        "dk, dv = x.full((*lead, problem.d, block_k)), x.full((*lead, problem.D, block_k))",
        CALL.format("wide keys, dense BHTt, bias Tt-float16"),
    ),
    (
        "key heads tiled instead of repeated",
        "jflash/grouped.py",
        "return x.reshape(*x.shape[:-3], problem.h, problem.group, *x.shape[-2:])",
        "return x.reshape(*x.shape[:-3], problem.group, problem.h, *x.shape[-2:]).swapaxes(-3, -4)",
        CALL.format("cross, dense B1Tt, bias BHTt-float32"),
    ),
    (
        "2^x never 0",
        "jflash/exp2.py",
        "return jnp.where(y < -126, 0, lax.bitcast_convert_type(bits, jnp.float32))",
        "return lax.bitcast_convert_type(bits, jnp.float32)",
        CALL.format("cross, dense B1Tt, bias BHTt-float32"),
    ),
    (
        "the drop-in aligned bottom-right",
        "jflash/api.py",
        "mask = mask and Moved(mask, t - T)",
        "mask = mask and Moved(mask, 0)",
        "test_dot_product_attention.py::test_windows_are_top_left",
    ),
    (
        "a sink counted in lse",
        "jflash/rules.py",
        "out = _times(out, _sink_weight(operands, lse))",
        "out, lse = _times(out, _sink_weight(operands, lse)), lse + 0.1",
        CALL.format("one key, dense BHT1, sinks-float32"),
    ),
    (
        "what a hidden key holds reaches dq",
        "jflash/xla.py",
        "k_ = x.seen(k, visible) if masked else k",
        "k_ = k",
        "test_attention.py::test_what_takes_no_part_may_hold_nan[D=1, segments unsorted, bias 11T1-xla]",
    ),
    (
        "a dropout offset of 0",
        "jflash/xla.py",
        "(operands.dropout[0], operands.dropout[1]), operands.row_offsets or (0, 0)",
        "(operands.dropout[0], operands.dropout[1]), (0, 0)",
        "test_dropout.py::test_parts_draw_what_the_whole_would[xla]",
    ),
    (
        "a device counts its own heads",
        "jflash/sharding.py",
        "operands, b=batch_index(problem, operands), h=head_index(problem, operands)",
        "operands, b=batch_index(problem, operands)",
        "test_meshes.py::test_explicit_mesh_hands_functions_the_indices_of_the_whole",
    ),
    (
        "packed sequences aligned top-left",
        "jflash/packing.py",
        "q_positions = jnp.arange(N, dtype=jnp.int32) - q_end + k_end - q_start",
        "q_positions = jnp.arange(N, dtype=jnp.int32) - cu_q[i]",
        "test_packing.py::test_equals_a_loop_over_the_sequences",
    ),
    (
        "the scheduler sees positions that start anew",
        "jflash/masks.py",
        "moved = lambda x, start: Blocks(x.x + start.x, x.axis)",
        "moved = lambda x, start: Blocks(x.x + 0 * start.x, x.axis)",
        "test_packing.py::test_self_attention_visits_what_has_a_visible_pair",
    ),
    (
        "of sequences that start at one row the first taken",
        "jflash/packing.py",
        'i = jnp.searchsorted(cu, row, side="right").astype(jnp.int32) - 1',
        'i = jnp.searchsorted(cu, row, side="left").astype(jnp.int32)',
        "test_packing.py::test_ids_and_positions",
    ),
    (
        "slopes of sequences aligned top-left",
        "jflash/flash_attn_varlen.py",
        "jnp.arange(T)[None] + (m - n)[:, None]",
        "jnp.arange(T)[None] + 0 * (m - n)[:, None]",
        "test_flash_attn_varlen.py::test_the_numbers_of_pytorch[slopes of sequences]",
    ),
    (
        "a sum over devices dropped",
        "jflash/sharding.py",
        "return lax.psum(wide, axes).astype(x.dtype)",
        "return x",
        "test_sharding.py::test_the_gradient_of_a_replicated_operand_is_one_sum[automatic]",
    ),
    (
        "parts of a group beside whole groups",
        "jflash/sharding.py",
        'axes[: len(of_h)] == of_h and parts(of_h) == of_names["h"]',
        "axes[: len(of_h)] == of_h",
        "test_sharding.py::test_parts_of_groups_need_whole_heads",
    ),
]


def run(folder: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """Runs the tests in `folder`, whose modules come before installed ones; 0: passed, 1: failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def main(words: str) -> int:
    """The exit status: 1 if a mutant survives."""
    mutants = [mutant for mutant in MUTANTS if words in mutant[0]]
    alive = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for part in ("jflash", "pallas_kernels", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        healthy = run(folder, sorted({tests for *_, tests in mutants}))
        if healthy.returncode:
            sys.exit(f"tests fail without a fault:\n{healthy.stdout[-2000:]}")
        for name, path, text, fault, tests in mutants:
            begin = time.perf_counter()
            source = (folder / path).read_text()
            if source.count(text) != 1:
                sys.exit(f"{name}: {path} has {source.count(text)} times: {text}")
            (folder / path).write_text(source.replace(text, fault))
            lives = run(folder, [tests]).returncode == 0
            (folder / path).write_text(source)
            alive += lives
            verdict = "SURVIVES" if lives else "caught"
            print(f"{verdict:8s} {time.perf_counter() - begin:5.0f} s  {name}", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))

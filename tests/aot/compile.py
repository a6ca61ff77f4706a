"""Compiles the Triton kernels for cards that are not here, and shows what they use.

    python tests/aot/compile.py                  every card, a process each
    python tests/aot/compile.py --target H200    one
    python tests/aot/compile.py --table FILE     also writes the table of docs/backends.md

Fails if a call does not compile, if a kernel spills registers or asks for more shared memory than
the card has, or if the program around the kernels holds an array of T x T elements.
"""

import argparse
import concurrent.futures
import dataclasses
import logging
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from unittest import mock

import calls
import executables
import jax
import targets

import pallas_kernels.triton

PREFIX = "jflash_"
KERNELS = ("forward", "dkv", "dq", "dbias")
TILES = {"dbias": "dq"}  # whose tiles a kernel has that has none of its own
HEAD = [
    "| card | calls | D | forward | dk, dv | dq | dbias |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", choices=targets.TARGETS)
    parser.add_argument("--brief", action="store_true", help="the calls of calls.BRIEF only")
    parser.add_argument("--calls", default="", metavar="TEXT", help='those with this text, "D 128, bfloat16"')
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    rows = of_one(options) if options.target else of_all(options)
    if options.table:
        options.table.write_text("".join(f"{row}\n" for row in [*HEAD, *rows]))


def of_all(options) -> list[str]:
    """The table's rows of all cards, two processes at a time; each prints its report when it is done."""

    def run(target):
        command = [sys.executable, __file__, "--target", target, "--calls", options.calls]
        command += ["--brief"] * options.brief
        return subprocess.run(command, capture_output=True, text=True)

    rows, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for target, done in zip(targets.TARGETS, pool.map(run, targets.TARGETS)):
            print(done.stdout, end="", flush=True)
            rows += [line for line in done.stdout.splitlines() if line.startswith("|")][len(HEAD) :]
            if done.returncode:
                failed.append(target)
                print(done.stderr[-4000:], file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    return rows


def of_one(options) -> list[str]:
    """The table's rows of one card; exits with an error where something is wrong."""
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # that it finds no card
    target = targets.TARGETS[options.target]
    mesh = targets.mesh(target)
    uses, wrong = [], []
    chosen = calls.BRIEF if options.brief else calls.CALLS
    for call in (call for call in chosen if options.calls in str(call)):
        start = time.monotonic()
        found, failures = compiled(target, mesh, call)
        print(f"{options.target}, JAX {jax.__version__}: {call} ({time.monotonic() - start:.1f} s)")
        for use in found:
            print(f"  {use}")
        for failure in failures:
            print(f"  WRONG: {failure}")
        sys.stdout.flush()
        uses += found
        wrong += failures
    rows = list(table(options.target, uses))
    print(*HEAD, *rows, sep="\n", flush=True)
    if wrong:
        sys.exit(f"{options.target}: {len(wrong)} failures")
    return rows


@dataclasses.dataclass(frozen=True)
class Use:
    """What one kernel of a call uses on a card."""

    call: calls.Call
    kernel: executables.Kernel
    block: pallas_kernels.triton.Block
    target: targets.Target

    @property
    def warps(self) -> int:
        k = self.kernel
        return targets.warps(self.target, k.threads, k.registers, k.shared_memory)

    def __str__(self) -> str:
        k, b = self.kernel, self.block
        return (
            f"{k.name:14} {b.block_q:3} x {b.block_k:3}, {b.num_warps} warps, {b.num_stages} stages:"
            f" {k.registers:3} registers, {k.spilled} bytes spilled, {k.shared_memory / 1024:.0f} KiB,"
            f" {self.warps} warps {'a SM' if self.target.platform == 'cuda' else 'a SIMD'}"
        )


def compiled(target: targets.Target, mesh, call: calls.Call) -> tuple[list[Use], list[str]]:
    """(what its kernels use, what is wrong with them)."""
    configs = []
    default = pallas_kernels.triton.default_config
    spy = lambda problem: configs.append(default(problem)) or configs[-1]
    try:
        with mock.patch.object(pallas_kernels.triton, "default_config", spy):
            run, shapes = calls.program(call)
            program = targets.compile_for(mesh, run, *shapes)
        kernels = executables.kernels(program, PREFIX)
    except Exception as error:  # of any kind: the compiler's, Pallas's, a bug
        return [], [f"{type(error).__name__}: {str(error)[:2000]}"]
    blocks = {PREFIX + name: getattr(configs[0], TILES.get(name, name)) for name in KERNELS}
    uses = [Use(call, kernel, blocks[kernel.name], target) for kernel in kernels]
    wrong = [f"{use.kernel.name} spills" for use in uses if use.kernel.spilled]
    wrong += [
        f"{use.kernel.name} has more shared memory than the card"
        for use in uses
        if use.kernel.shared_memory > target.shared_memory
    ]
    missing = set(KERNELS[: 4 if call.bias else 3]) - {k.name.removeprefix(PREFIX) for k in kernels}
    wrong += [f"no kernel {name} was found" for name in sorted(missing)]
    temporary = program.memory_analysis().temp_size_in_bytes
    if not call.bias and temporary >= call.T**2:  # the gradient of a bias of pairs has T x T elements
        wrong.append(f"{temporary} bytes beside operands and results, where T x T is {call.T**2}")
    return uses, wrong


def table(name: str, uses: list[Use]) -> Iterator[str]:
    """Markdown: by kind of call and head size, for each kernel the most that a call uses."""
    for kind in dict.fromkeys(use.call.kind for use in uses):
        of_kind = [use for use in uses if use.call.kind == kind]
        for D in sorted({use.call.D for use in of_kind}):
            cells = []
            for kernel in KERNELS:
                own = [u for u in of_kind if u.call.D == D and u.kernel.name == PREFIX + kernel]
                cells.append(_cell(own) if own else "")
            yield f"| {name} | {kind} | {D} | {' | '.join(cells)} |"


def _cell(uses: list[Use]) -> str:
    most = lambda get: max(map(get, uses))
    block = uses[0].block
    spilled = most(lambda use: use.kernel.spilled)
    return (
        f"{block.block_q} x {block.block_k}, {block.num_warps}: {most(lambda use: use.kernel.registers)}, "
        f"{spilled}, {most(lambda use: use.kernel.shared_memory) / 1024:.0f}, "
        f"{min(use.warps for use in uses)}"
    )


if __name__ == "__main__":
    main()

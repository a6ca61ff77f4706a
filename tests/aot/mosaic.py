"""Compiles the Hopper kernels on a machine without a GPU, and shows what ptxas says of them.

    python tests/aot/mosaic.py [--calls TEXT]     those with this text, "D 128, bfloat16"

Fails if a call does not compile, if ptxas makes the tensor cores' products wait for each other (its
warnings C7510 to C7519), if a kernel spills more than `SPILLED`, or if the program around the kernels holds
an array of T x T elements.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import time

# Bytes. What is spilled are numbers that a tile needs once, outside the loop over blocks, in calls with three
# warpgroups or heads of 256 channels, whose accumulators fill the registers.
SPILLED = 160
ENTRY = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", default="", metavar="TEXT")
    parser.add_argument("--here", action="store_true", help="compile in this process")
    options = parser.parse_args()
    if options.here:
        return compile_all(options.calls)
    # ptxas reports to the process's own streams, from under Python.
    command = [sys.executable, __file__, "--here", "--calls", options.calls]
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wrong = read(done.stdout)
    if done.returncode or wrong:
        print(done.stdout[-6000:] if done.returncode else "", *wrong, sep="\n", file=sys.stderr)
        sys.exit(f"{len(wrong)} failures, status {done.returncode}")


def compile_all(text: str) -> None:
    """Compiles each call and prints its name first, so that the reports that follow are known to be its."""
    import calls
    import jax
    import targets

    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # that it finds no card
    mesh = targets.mesh(targets.TARGETS["H200"])
    for call in (call for call in calls.HOPPER if text in str(call)):
        print(f"CALL JAX {jax.__version__}: {call}, T {call.T}", flush=True)
        start = time.monotonic()
        run, shapes = calls.program(call)
        program = targets.compile_for(mesh, run, *shapes)
        temporary = program.memory_analysis().temp_size_in_bytes
        print(f"DONE {time.monotonic() - start:.1f} s", flush=True)
        if call.T >= 8000 and not call.bias and temporary >= 2 * call.T**2:
            print(f"WRONG {temporary} bytes beside operands and results", flush=True)


def read(report: str) -> list[str]:
    """Prints a line a kernel; returns what is wrong."""
    wrong, call, kernel, spilled = [], "", "", 0
    for line in report.splitlines():
        if line.startswith("CALL "):
            call = line.removeprefix("CALL ")
            print(call)
        elif line.startswith("DONE "):
            print(f"  compiled in {line.removeprefix('DONE ')}")
        elif line.startswith("WRONG ") or re.search(r"C751\d", line):
            wrong.append(f"{call}: {line}")
        elif found := ENTRY.search(line):
            kernel = found[1]
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(found[1])
            if spilled > SPILLED and "warning" not in line:
                wrong.append(f"{call}: {kernel} spills {spilled} bytes")
        elif (found := re.search(r"Used (\d+) registers", line)) and kernel.startswith("jflash"):
            print(f"  {kernel}: {found[1]} registers when it starts, {spilled} bytes spilled")
    return wrong


if __name__ == "__main__":
    main()

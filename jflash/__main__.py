"""`python -m jflash bench`: timing on this machine."""

import argparse
import sys

import jax
import jax.numpy as jnp

from . import benchmark


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m jflash")
    commands = parser.add_subparsers(required=True)
    bench = commands.add_parser("bench", help="time attention against what else is installed")
    bench.add_argument("--cpu", action="store_true", required=True, help="the XLA path on the CPU")
    bench.add_argument("--check", action="store_true", help="fail where a ratio is below its floor")
    bench.add_argument("--bf16", action="store_true", help="bfloat16 as well")
    bench.add_argument("--seconds", type=float, default=4.0, help="time for each row (default 4)")
    args = parser.parse_args(argv)

    jax.config.update("jax_platforms", "cpu")
    dtypes = (jnp.float32, jnp.bfloat16) if args.bf16 else (jnp.float32,)
    return 0 if benchmark.cpu(args.check, dtypes, args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())

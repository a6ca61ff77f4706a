"""Which calls the kernels take, and with which tiles."""

import dataclasses

import jax.numpy as jnp

from ..problem import Problem


@dataclasses.dataclass(frozen=True)
class Block:
    """One kernel's tile, in rows of queries and of keys, and what the compiler is told."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_q", "block_k", "num_warps"):
            n, least = getattr(self, name), 1 if name == "num_warps" else 16
            if n < least or n & (n - 1):
                raise ValueError(f"{name} must be a power of 2 of at least {least}. Got {self}.")


@dataclasses.dataclass(frozen=True)
class Config:
    """The tiles of the three kernels: forward, dk and dv, dq."""

    forward: Block
    dkv: Block
    dq: Block
    frozen_maximum: bool = False  # of the forward kernel's: see its docstring


# By the largest head size that they serve: measured on an H200 (T 16384, bfloat16; docs/backends.md).
HOPPER = {
    64: Config(Block(128, 64, 4, 3), Block(32, 128, 4, 3), Block(128, 64, 4, 3), frozen_maximum=True),
    128: Config(Block(128, 64, 8, 3), Block(64, 64, 4, 2), Block(128, 64, 8, 3), frozen_maximum=True),
    256: Config(Block(128, 64, 8, 2), Block(64, 64, 8, 2), Block(128, 64, 8, 1)),
}


def unsupported(problem: Problem) -> str | None:
    if problem.platform not in ("cuda", "rocm") and not problem.interpret:
        return (
            f"it runs on NVIDIA and AMD GPUs, and this call is traced for {problem.platform} "
            "(`with jflash.interpret():` runs it there, slowly)"
        )
    if problem.dtype == jnp.float64:
        return "it computes in float32, and the inputs are float64"
    if max(problem.D, problem.d) > 256:
        return f"its tiles hold head sizes up to 256, and D={problem.D}, d={problem.d}"
    sizes = (*problem.batch, problem.T, problem.t, problem.H)
    if not all(isinstance(n, int) for n in sizes):
        return "its grid needs sizes that are known when it is compiled (jax.export left some open)"
    return None


def default_config(problem: Problem) -> Config:
    return HOPPER[next(size for size in HOPPER if max(problem.D, problem.d) <= size)]


def candidates(problem: Problem) -> list[Config]:
    return [default_config(problem)]

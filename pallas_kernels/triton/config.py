"""Which calls the kernels take, and with which tiles."""

import dataclasses
import itertools

import jax.numpy as jnp

from ..problem import Problem, unfit_for_tiles


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


def _tiles(forward: tuple, dkv: tuple, dq: tuple, frozen_maximum: bool = False) -> Config:
    return Config(Block(*forward), Block(*dkv), Block(*dq), frozen_maximum)


# Tiles by the largest head size that they serve. No kernel spills registers or lacks shared memory:
# `make test-aot` compiles calls of each kind for each card, and docs/backends.md has its table. Of
# those that pass, the H200's were measured (T 16384, bfloat16); of the others the largest were taken.

# Scores are q·k times a number, and masks compute with positions alone; FULL: there is no mask.
HOPPER = {
    64: _tiles((128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 4, 3), frozen_maximum=True),
    128: _tiles((64, 64, 4, 3), (32, 64, 4, 3), (128, 64, 8, 3), frozen_maximum=True),
    256: _tiles((128, 32, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), frozen_maximum=True),
}
HOPPER_FULL = {
    64: _tiles((128, 64, 4, 3), (32, 128, 4, 3), (128, 64, 4, 3), frozen_maximum=True),
    128: _tiles((128, 64, 8, 3), (32, 64, 4, 3), (128, 64, 8, 3), frozen_maximum=True),
    256: _tiles((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3)),
}
AMPERE = {
    64: _tiles((128, 64, 8, 3), (32, 64, 8, 2), (128, 64, 8, 2), frozen_maximum=True),
    128: _tiles((128, 64, 8, 2), (32, 64, 8, 2), (64, 64, 8, 2)),
    256: _tiles((64, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 1)),
}
CDNA = {
    64: _tiles((128, 64, 4, 1), (32, 64, 4, 1), (128, 64, 4, 1), frozen_maximum=True),
    128: _tiles((128, 64, 4, 1), (32, 64, 4, 1), (64, 64, 4, 1), frozen_maximum=True),
    256: _tiles((64, 32, 4, 1), (16, 32, 4, 1), (64, 32, 4, 1), frozen_maximum=True),
}
# Masks, positions or dropout bring arrays.
HOPPER_MASKED = {
    64: _tiles((128, 64, 8, 3), (64, 64, 8, 2), (64, 64, 4, 3), frozen_maximum=True),
    128: _tiles((128, 64, 8, 3), (32, 64, 8, 2), (64, 64, 4, 2), frozen_maximum=True),
    256: _tiles((64, 64, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
}
AMPERE_MASKED = {
    64: _tiles((64, 32, 4, 3), (32, 64, 8, 2), (64, 64, 8, 2)),
    128: _tiles((64, 32, 4, 3), (32, 64, 8, 2), (64, 64, 8, 2)),
    256: _tiles((64, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 1)),
}
# There is a bias, or scores are modified.
NVIDIA_SCORES = {
    64: _tiles((64, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 2)),
    128: _tiles((64, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    256: _tiles((64, 32, 8, 2), (32, 32, 8, 1), (16, 32, 8, 1)),
}
CDNA_SCORES = {
    64: _tiles((64, 64, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1)),
    128: _tiles((64, 32, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1)),
    256: _tiles((64, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
}
# Products in float32, without tensor cores.
NVIDIA_FLOAT32 = {
    64: _tiles((16, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    128: _tiles((16, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    256: _tiles((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
CDNA_FLOAT32 = {
    64: _tiles((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    128: _tiles((32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    256: _tiles((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
# 99 KiB of shared memory instead of 163: too little for the last.
ADA = AMPERE | {256: NVIDIA_SCORES[256]}
ADA_MASKED = AMPERE_MASKED | {256: NVIDIA_SCORES[256]}
# By architecture, then by `Problem.features`.
TABLES = {
    "sm_80": dict(none=AMPERE, positions=AMPERE, window=AMPERE, data=AMPERE_MASKED, scores=NVIDIA_SCORES),
    "sm_86": dict(none=ADA, positions=ADA, window=ADA, data=ADA_MASKED, scores=NVIDIA_SCORES),
    "sm_89": dict(none=ADA, positions=ADA, window=ADA, data=ADA_MASKED, scores=NVIDIA_SCORES),
    "sm_90": dict(
        none=HOPPER_FULL, positions=HOPPER, window=HOPPER, data=HOPPER_MASKED, scores=NVIDIA_SCORES
    ),
    "gfx90a": dict(none=CDNA, positions=CDNA, window=CDNA, data=CDNA, scores=CDNA_SCORES),
    "gfx942": dict(none=CDNA, positions=CDNA, window=CDNA, data=CDNA, scores=CDNA_SCORES),
}


def unsupported(problem: Problem) -> str | None:
    if problem.dtype == jnp.float64:
        return "it computes in float32, and the inputs are float64"
    return unfit_for_tiles(problem)


def default_config(problem: Problem) -> Config:
    if problem.architecture in TABLES and problem.dtype != jnp.float32:
        table = TABLES[problem.architecture][problem.features]
    else:  # what fits in float32 does in 16 bits, on most cards
        table = CDNA_FLOAT32 if problem.platform == "rocm" else NVIDIA_FLOAT32
    return table[next(size for size in table if max(problem.D, problem.d) <= size)]


def candidates(problem: Problem) -> list[Config]:
    """The default, then it with other tiles of one kernel: their times add up, so each may be chosen alone.

    Some do not compile, or spill.
    """
    default = default_config(problem)
    tried = [default]
    for name in ("forward", "dkv", "dq"):
        stages = getattr(default, name).num_stages
        for block_q, block_k, num_warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8)):
            block = Block(block_q, block_k, num_warps, stages)
            tried.append(dataclasses.replace(default, **{name: block}))
    return list(dict.fromkeys(tried))

"""Which calls the kernels take, and with which tiles."""

import dataclasses
import itertools

import jax.numpy as jnp

from ..problem import Problem, unfit_for_tiles


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward kernel: `warpgroups` of 64 queries, `block_k` keys a step, a ring of `stages` of them."""

    warpgroups: int
    block_k: int
    stages: int
    turns: bool = True  # the warpgroups issue their products in turn
    persistent: bool = False  # a block of threads for each multiprocessor, not for each tile
    frozen_maximum: bool = True

    @property
    def block_q(self) -> int:
        return 64 * self.warpgroups


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward kernel: a block of threads for `block_k` keys, 64 a warpgroup, `block_q` queries a step.

    `q_stages` and `do_stages` blocks of queries and of cotangents are in shared memory.
    """

    block_q: int = 64
    block_k: int = 128
    q_stages: int = 2
    do_stages: int = 2
    mode: str = "step"  # the warpgroups meet once a step; "defer": each may run a step ahead

    def __post_init__(self):
        pair = self.block_q == 128 or self.mode == "defer"  # these are made for two warpgroups
        if self.block_q not in (64, 128) or self.block_k not in ((128,) if pair else (64, 128, 192)):
            raise ValueError(f"no such tiles: {self}")

    @property
    def warpgroups(self) -> int:
        return self.block_k // 64


@dataclasses.dataclass(frozen=True)
class Config:
    forward: Forward
    backward: Backward = Backward()


# By `Problem.features`, then by the largest head size and the largest number of keys that the tiles serve.
# Measured on an H200, those of DATA and SCORES for packed documents only; `forward` has the ladder.
ANY = 2**31
D64, D128 = Forward(3, 128, 3, persistent=True), Forward(2, 128, 2, persistent=True)
DATA = {
    64: {ANY: Forward(2, 128, 3)},
    128: {ANY: Forward(2, 128, 2)},
    192: {ANY: Forward(2, 64, 2, turns=False)},
    256: {ANY: Forward(2, 32, 2, turns=False)},
}
TABLE = {
    "none": {
        64: {1024: Forward(3, 128, 2, persistent=True), ANY: D64},
        128: {1024: Forward(2, 64, 3, persistent=True), 4096: D128, ANY: Forward(2, 160, 2)},
        192: {ANY: Forward(2, 96, 2, turns=False)},
        256: {ANY: Forward(2, 64, 2, turns=False)},
    },
    "positions": {
        64: {1024: Forward(2, 128, 2, persistent=True), ANY: D64},
        128: {8192: D128, ANY: Forward(2, 160, 2)},
        192: {ANY: Forward(2, 96, 2, turns=False)},
        256: {ANY: Forward(2, 80, 2, turns=False)},
    },
    "window": {
        64: {ANY: D64},
        128: {ANY: D128},
        192: {ANY: Forward(2, 96, 2, turns=False)},
        256: {ANY: Forward(2, 64, 2, turns=False)},
    },
    "data": DATA,
    "scores": {
        64: {ANY: Forward(2, 64, 3)},
        128: {ANY: Forward(2, 64, 3)},
        192: {ANY: Forward(2, 64, 2, turns=False)},
        256: {ANY: Forward(2, 32, 2, turns=False)},
    },
}
# The bits of dropout take registers, too.
DROPOUT = TABLE["scores"]

# Of the backward kernel, which knows no larger heads: plain scores with masks that compute; all else.
BACKWARD = {64: Backward(128, mode="defer"), 128: Backward(64), 256: Backward()}
BACKWARD_DATA = {64: Backward(64), 128: Backward(64), 256: Backward()}
# To step through the heads of a group takes registers: in "step" ptxas would serialise the products.
BACKWARD_GROUPED = BACKWARD_DATA | {128: Backward(64, mode="defer")}


def unsupported(problem: Problem) -> str | None:
    if problem.architecture != "sm_90":
        return (
            f"its instructions are those of Hopper (sm_90), and this is {problem.architecture or 'not known'}"
        )
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"the tensor cores take bfloat16 and float16, and the inputs are {jnp.dtype(problem.dtype).name}"
        )
    return unfit_for_tiles(problem)


def default_config(problem: Problem) -> Config:
    fitting = lambda table: table[next(size for size in table if max(problem.D, problem.d) <= size)]
    by_length = fitting(DROPOUT if problem.dropout_rate else TABLE[problem.features])
    forward = by_length[next(limit for limit in by_length if problem.t <= limit)]
    with_data = BACKWARD_DATA if problem.group == 1 else BACKWARD_GROUPED
    return Config(forward, fitting(with_data if problem.features in ("data", "scores") else BACKWARD))


def candidates(problem: Problem) -> list[Config]:
    """The default, then others. Some do not compile, or spill."""
    default = default_config(problem)
    tried = [default]
    for warpgroups, block_k, stages in itertools.product((2, 3), (64, 80, 96, 128, 160, 176), (2, 3, 4)):
        for persistent in (False, True):
            forward = Forward(warpgroups, block_k, stages, persistent=persistent)
            tried.append(dataclasses.replace(default, forward=forward))
    for block_q, mode in itertools.product((64, 128), ("step", "defer")):
        tried.append(dataclasses.replace(default, backward=Backward(block_q, mode=mode)))
    return list(dict.fromkeys(tried))

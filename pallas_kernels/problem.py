"""One attention call as an implementation sees it: static facts, and arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of one call; hashable, the same for forward and backward.

    Axes: upper case is the query side, lower case the key side. `q [*batch, T, H, D]`,
    `k [*batch, t, h, D]`, `v [*batch, t, h, d]`.
    """

    batch: tuple
    T: int
    t: int
    H: int
    h: int
    D: int
    d: int
    dtype: Any
    scale: float | None  # None: a traced scale, in Operands
    dropout_rate: float
    precision: Any
    deterministic: bool
    platform: str  # "cpu", "cuda", "rocm" or "tpu": what the call is traced for
    architecture: str  # of the GPU: "sm_90", "gfx942"; "" if not known or none
    interpret: bool  # whether kernels run in Pallas's interpret mode
    masked: bool  # whether there is a mask
    # What a tile needs beside q·k: "none", "positions" (a mask computes with them), "window" (so it does,
    # and a query sees few keys), "data" (a mask, positions or dropout bring arrays), "scores" (a bias or
    # modifiers).
    features: str
    default_positions: bool  # query row i stands at i + t - T, key row j at j

    @property
    def accumulator(self) -> Any:
        """The dtype of scores, sums and lse."""
        return jnp.float64 if self.dtype == jnp.float64 else jnp.float32

    @property
    def group(self) -> int:
        """Query heads a key head serves (grouped-query attention)."""
        return self.H // self.h

    def of(self, operands: "Operands") -> "Problem":
        """The same call on other (local, batched) operands."""
        *batch, T, H, D = operands.q.shape
        *_, t, h, d = operands.v.shape
        return dataclasses.replace(self, batch=tuple(batch), T=T, t=t, H=H, h=h, D=D, d=d)


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """The arrays of one call, a pytree; what the call lacks is None.

    A mask and score modifiers are objects with data on a side (per query, per key, ...): see
    `jflash.fields`. Leading axes are `*batch`, each of its full size or 1.
    """

    q: Any  # [*batch, T, H, D]
    k: Any  # [*batch, t, h, D]
    v: Any  # [*batch, t, h, d]
    scale: Any = None  # [], when traced
    bias: Any = None  # [*batch or 1, H or 1, T or 1, t or 1]
    mods: tuple = ()  # score modifiers, applied left to right
    sinks: Any = None  # [H]
    mask: Any = None
    q_positions: Any = None  # [*batch or 1, T]
    k_positions: Any = None  # [*batch or 1, t]
    dropout: Any = None  # uint32 [2]: the words of the key
    row_offsets: Any = None  # (q, k), added to the rows for dropout
    b: Any = None  # int32 [*batch]: index of each batch entry; None: counted row-major
    h: Any = None  # int32 [H]: index of each query head; None: counted


jax.tree_util.register_dataclass(Operands, [f.name for f in dataclasses.fields(Operands)], [])


def unfit_for_tiles(problem: Problem) -> str | None:
    """Why no kernel takes a problem, whatever it is made for."""
    if max(problem.D, problem.d) > 256:
        return f"its tiles hold head sizes up to 256, and D={problem.D}, d={problem.d}"
    sizes = (*problem.batch, problem.T, problem.t, problem.H)
    if not all(isinstance(n, int) for n in sizes):
        return "its grid needs sizes that are known when it is compiled (jax.export left some open)"
    return None


def batch_index(problem: Problem, operands: Operands) -> jax.Array:
    """int32 [*batch]: the index of each batch entry, row-major over several batch axes."""
    if operands.b is not None:
        return operands.b
    index = jnp.zeros(problem.batch, jnp.int32)
    stride = 1
    for axis in reversed(range(len(problem.batch))):
        index += jax.lax.broadcasted_iota(jnp.int32, problem.batch, axis) * stride
        stride = stride * problem.batch[axis]
    return index


def head_index(problem: Problem, operands: Operands) -> jax.Array:
    """int32 [H]: the index of each query head."""
    return jnp.arange(problem.H, dtype=jnp.int32) if operands.h is None else operands.h


def unravel(n: Any, sizes: tuple) -> tuple:
    """The index of the n-th element, row-major, along axes of these sizes."""
    index = []
    for size in reversed(sizes):
        index.append(lax.rem(n, jnp.int32(size)) if size != 1 else 0)
        n = lax.div(n, jnp.int32(size)) if size != 1 else n
    return tuple(reversed(index))

"""From a mask, the blocks of pairs to visit: which are empty, partial or full.

Empty blocks are never loaded, full ones never masked. For a block of queries (forward) or of keys
(backward) the schedule names the blocks of the other side that must be visited, in one of three
forms; an implementation takes the one that the mask needs:

- "arithmetic": the mask is an interval over default positions (causal, windows, no mask): bounds
  are a few integer operations on the block's index, no array exists at run time;
- "ranges": run-time data whose visible blocks lie side by side (sorted segments, lengths, given
  positions): four bounds a block, in an array;
- "lists": visible blocks may be far apart (`|`, `~`, `Dense`): for each block the indices of the
  partial ones, then of the full ones.

Soundness is the masks' own: `Mask.blocks` and `Mask.interval` in `masks.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pairs import Pairs
from pallas_kernels.problem import Operands, Problem

from .masks import Blocks, Interval, Mask


class Visits(NamedTuple):
    """The blocks to visit from one block: `masked(n)` for n < n_masked, `full(n)` for n < n_full."""

    n_masked: Any
    masked: Any
    n_full: Any
    full: Any


class Geometry(NamedTuple):
    """Which blocks a schedule is about: those of one side (`of`), and what they visit on the other."""

    T: int
    t: int
    block_q: int
    block_k: int
    of: str  # "query" or "key"

    @property
    def outer(self) -> int:
        """Blocks on the side that the schedule is asked for."""
        return -(-self.T // self.block_q) if self.of == "query" else -(-self.t // self.block_k)

    @property
    def inner(self) -> int:
        """Blocks on the other side."""
        return -(-self.t // self.block_k) if self.of == "query" else -(-self.T // self.block_q)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What `make` returns: the visits of each block of one side.

    A pytree, so that a kernel can be handed it with references in place of arrays.
    """

    form: str
    geometry: Geometry
    has_masked: bool  # False: no visited block needs the mask
    hides_keys: bool  # False: every key takes part in some pair
    mask: Any = None  # for arithmetic
    ranges: Any = None  # int32 [*batch or 1, outer, 4]
    order: Any = None  # int32 [*batch or 1, outer, inner]
    counts: Any = None  # int32 [*batch or 1, outer, 2]: partial, full

    @property
    def outer(self) -> int:
        return self.geometry.outer

    @property
    def inner(self) -> int:
        return self.geometry.inner

    @property
    def has_full(self) -> bool:
        """False: every visited block is treated as partial."""
        return not self.has_masked or self.inner > 1

    @property
    def per_batch(self) -> bool:
        """Whether batch entries differ in what they visit."""
        table = self.ranges if self.ranges is not None else self.counts
        return table is not None and any(n != 1 for n in table.shape[:-2])

    def _pick(self, table: Any, i: Any, batch: tuple) -> Callable:
        # Number by number: in a kernel a table is a reference.
        sizes = table.shape[:-2]
        entry = tuple(0 if n == 1 else b for n, b in zip(sizes, batch or (0,) * len(sizes)))
        return lambda n: table[(*entry, i, n)]

    def bounds(self, i: Any, batch: tuple = ()) -> tuple:
        """(lo, full_lo, full_hi, hi) of block `i`, not of lists: see `_ranges`."""
        if self.form == "ranges":
            return tuple(map(self._pick(self.ranges, i, batch), range(4)))
        return _bounds(self.geometry, self.mask, i)

    def visits(self, i: Any, batch: tuple = ()) -> Visits:
        """What block `i` visits in the batch entry with index `batch`; () where all are alike."""
        if self.form == "lists":
            order, counts = self._pick(self.order, i, batch), self._pick(self.counts, i, batch)
            partial, full = counts(0), counts(1)
            if not self.has_full:
                return Visits(partial + full, order, 0, lambda n: n)
            return Visits(partial, order, full, lambda n: order(partial + n))
        lo, full_lo, full_hi, hi = self.bounds(i, batch)
        if not self.has_full:
            return Visits(hi - lo, lambda n: lo + n, 0, lambda n: n)
        before = full_lo - lo
        return Visits(
            before + (hi - full_hi),
            lambda n: jnp.where(n < before, lo + n, full_hi + (n - before)),
            full_hi - full_lo,
            lambda n: full_lo + n,
        )

    def nth(self, visits: Visits, n: Any) -> Any:
        """The n-th of all blocks to visit, partial ones first."""
        if not self.has_full:
            return visits.masked(n)
        full = visits.full(n - visits.n_masked)
        return jnp.where(n < visits.n_masked, visits.masked(n), full) if self.has_masked else full


jax.tree_util.register_dataclass(
    Schedule, ["mask", "ranges", "order", "counts"], ["form", "geometry", "has_masked", "hides_keys"]
)


def make(problem: Problem, operands: Operands, block_q: int, block_k: int, of: str) -> Schedule:
    """The visits of each block of queries (of="query") or of keys (of="key")."""
    mask = operands.mask
    schedule = functools.partial(
        Schedule,
        geometry=Geometry(problem.T, problem.t, block_q, block_k, of),
        has_masked=mask is not None or problem.t % block_k != 0,
        hides_keys=hides(problem, mask)[1],
    )
    if is_arithmetic(problem, mask):
        return schedule("arithmetic", mask=mask)
    some, every = classify(problem, operands, block_q, block_k)
    if of == "key":
        some, every = some.mT, every.mT
    if mask is None or mask.contiguous:
        return schedule("ranges", ranges=_ranges(some, every))
    # A stable sort: within its kind, every block keeps its place.
    kind = jnp.where(every, 1, jnp.where(some, 0, 2))
    order = jnp.argsort(kind, -1, stable=True).astype(jnp.int32)
    counts = jnp.stack([(kind == 0).sum(-1), (kind == 1).sum(-1)], -1).astype(jnp.int32)
    return schedule("lists", order=order, counts=counts)


def is_arithmetic(problem: Problem, mask: Mask | None) -> bool:
    """Whether the bounds of every block follow from its index."""
    return problem.default_positions and _interval(mask, 0, "query") is not None


def hides(problem: Problem, mask: Mask | None) -> tuple[bool, bool]:
    """Whether some (query, key) may take part in no pair; then what it holds must be kept out.

    False only where it is certain from static facts; a key-less or query-less call has no pairs.
    """
    first, last = problem.t - problem.T, problem.t - 1
    if mask is None:
        return False, False
    if not is_arithmetic(problem, mask):
        return True, True
    seen = lambda x, y: all(e is None or isinstance(e, int) for e in (*x, *y))
    top, bottom = _interval(mask, first, "query"), _interval(mask, last, "query")
    left, right = _interval(mask, 0, "key"), _interval(mask, last, "key")
    if not (seen(top, bottom) and seen(left, right)):
        return True, True
    meets = lambda e, lo, hi: (e.lo is None or e.lo <= hi) and (e.hi is None or e.hi >= lo)
    # Intervals move with the position and are not empty, so the ends decide for all between.
    return (
        not (meets(top, 0, last) and meets(bottom, 0, last)),
        not (meets(left, first, last) and meets(right, first, last)),
    )


def _interval(mask: Mask | None, position: Any, of: str) -> Any:
    return Interval(None, None) if mask is None else mask.interval(position, of)


def _bounds(geometry: Geometry, mask: Mask | None, i: Any) -> tuple:
    """(lo, full_lo, full_hi, hi) of block `i`, by arithmetic: see `_ranges`."""
    T, t, block_q, block_k, of = geometry
    if of == "query":
        here, there, size, other, shift, to_row = block_q, block_k, T, t, t - T, 0
    else:
        here, there, size, other, shift, to_row = block_k, block_q, t, T, 0, T - t
    n = geometry.inner
    first = i * here + shift
    last = jnp.minimum((i + 1) * here, size) - 1 + shift
    a, b = _interval(mask, first, of), _interval(mask, last, of)
    row = lambda x, default: default if x is None else x + to_row
    lo = jnp.clip(row(a.lo, 0) // there, 0, n)
    if a.lo is not None:  # it may lie behind the last row, within the last block
        lo = jnp.where(a.lo + to_row < other, lo, n)
    hi = jnp.clip(row(b.hi, other - 1) // there + 1, lo, n)
    full_lo = jnp.clip((row(b.lo, 0) + there - 1) // there, lo, hi)
    full_hi = jnp.clip((row(a.hi, n * there - 1) + 1) // there, full_lo, hi)
    if t % block_k:  # the last block of keys holds rows that do not exist
        if of == "query":
            full_hi = jnp.clip(full_hi, full_lo, jnp.maximum(full_lo, t // block_k))
        else:
            full_hi = jnp.where(i == geometry.outer - 1, full_lo, full_hi)
    return lo, full_lo, full_hi, hi


def classify(problem: Problem, operands: Operands, block_q: int, block_k: int) -> tuple:
    """(some, every): boolean [*batch or 1, query blocks, key blocks]; may any, must every pair be visible."""
    q = lambda x: Blocks(_blocked(x, block_q), -2)
    k = lambda x: Blocks(_blocked(x, block_k), -1)
    lead = (1,) * len(problem.batch)
    row = lambda n, offset=0: jnp.arange(n, dtype=jnp.int32).reshape(*lead, n) + offset
    q_row, k_row = q(row(problem.T)), k(row(problem.t))
    q_positions, k_positions = operands.q_positions, operands.k_positions
    at = Pairs(
        None,
        None,
        q(row(problem.T, problem.t - problem.T) if q_positions is None else q_positions),
        k(row(problem.t) if k_positions is None else k_positions),
        q_row,
        k_row,
    )
    n_q, n_k = -(-problem.T // block_q), -(-problem.t // block_k)
    if operands.mask is None:
        some, every = jnp.bool_(True), jnp.bool_(True)
    else:
        pair = lambda x: _any_and_all(x, block_q, block_k, problem)
        some, every = operands.mask.map(query=q, key=k, pair=pair).blocks(at)
    whole = ((jnp.arange(n_k) + 1) * block_k <= problem.t).reshape(*lead, 1, n_k)
    shape = jnp.broadcast_shapes(some.shape, every.shape, (*lead, n_q, n_k))
    return jnp.broadcast_to(some, shape), jnp.broadcast_to(every & whole, shape)


def _blocked(x: jax.Array, block: int) -> jax.Array:
    """[..., n] -> [..., blocks, block]; the last value fills up the last block."""
    if x.shape[-1] == 1:
        return x[..., None]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)]
    return jnp.pad(x, pad, mode="edge").reshape(*x.shape[:-1], -1, block)


def _any_and_all(x: jax.Array, block_q: int, block_k: int, problem: Problem) -> tuple:
    """Over each block of pairs and all heads: [..., H, T, t] -> two of [..., blocks, blocks]."""

    def reduce(fn, fill):
        y = fn(x, axis=-3)
        for axis, block, n in ((-2, block_q, problem.T), (-1, block_k, problem.t)):
            if y.shape[axis] == 1 and n != 1:
                continue
            y = jnp.moveaxis(y, axis, -1)
            pad = [(0, 0)] * (y.ndim - 1) + [(0, -y.shape[-1] % block)]
            y = jnp.pad(y, pad, constant_values=fill)
            y = jnp.moveaxis(fn(y.reshape(*y.shape[:-1], -1, block), axis=-1), -1, axis)
        return y

    return reduce(jnp.any, False), reduce(jnp.all, True)


def _ranges(some: jax.Array, every: jax.Array) -> jax.Array:
    """[..., outer, inner] -> int32 [..., outer, 4]: (lo, full_lo, full_hi, hi).

    [lo, hi) covers every block with a visible pair, [full_lo, full_hi) is one unbroken run of
    full blocks; what [lo, hi) holds beside it is visited as partial.
    """
    n = some.shape[-1]
    i = jax.lax.broadcasted_iota(jnp.int32, some.shape, some.ndim - 1)
    first = lambda x: jnp.where(x.any(-1), jnp.argmax(x, -1), n)
    lo = first(some)
    hi = jnp.max(jnp.where(some, i + 1, 0), -1, initial=0)
    lo = jnp.minimum(lo, hi)
    full_lo = jnp.clip(first(every), lo, hi)
    full_hi = jnp.clip(first((i >= full_lo[..., None]) & (every ^ True)), full_lo, hi)
    return jnp.stack([lo, full_lo, full_hi, hi], -1).astype(jnp.int32)

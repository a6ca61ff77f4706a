"""Masks: which keys a query may see. One predicate over token pairs, written once.

The predicate serves the dense reference, every kernel's tiles and, over the extents of blocks,
the scheduler that decides which blocks are never loaded. `&`, `|` and `~` combine masks and keep
that knowledge sound. Fields that are arrays are run-time operands (new documents do not retrace),
everything else keys the trace.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pairs import Pairs

from .fields import Fields, elementwise, part, per_head, per_key, per_pair, per_query, scalar, static


class Blocks(NamedTuple):
    """A per-token quantity in blocks: [*batch, blocks, block], as the scheduler sees it."""

    x: jax.Array
    axis: int  # where the block axis goes: -2 for queries, -1 for keys

    @property
    def min(self) -> jax.Array:
        return jnp.expand_dims(self.x.min(-1), -1 if self.axis == -2 else -2)

    @property
    def max(self) -> jax.Array:
        return jnp.expand_dims(self.x.max(-1), -1 if self.axis == -2 else -2)

    def map(self, fn: Callable) -> "Blocks":
        return Blocks(fn(self.x), self.axis)


class Interval(NamedTuple):
    """The positions from `lo` to `hi`, both inclusive; None leaves a side open."""

    lo: Any
    hi: Any


class Mask(Fields):
    """Base of all masks. Combine with `&`, `|`, `~`; a boolean array counts as `Dense`."""

    __array_ufunc__ = None  # so that `numpy_array & mask` reaches __rand__

    # Whether the blocks that a block of queries (or of keys) sees lie side by side, but for few.
    contiguous = True

    def __call__(self, at: Pairs) -> jax.Array:
        """True where the pair is visible."""
        raise NotImplementedError

    def blocks(self, at: Pairs) -> tuple[jax.Array, jax.Array]:
        """(may any, must every) pair of a block of queries and a block of keys be visible.

        `at.q`, `at.k` and the per-query and per-key fields are `Blocks`, a per-pair field is a
        pair (any, all) of arrays. The default is right for every mask: nothing is skipped.
        """
        return jnp.bool_(True), jnp.bool_(False)

    def interval(self, position: Any, of: str) -> Interval | None:
        """The positions visible from one position of a query (of="query") or a key (of="key").

        None where they are not one interval whose ends never decrease as `position` grows.
        """
        return None

    def __and__(self, other) -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other) -> "Mask":
        return Or(self, as_mask(other))

    def __rand__(self, other) -> "Mask":
        return And(as_mask(other), self)

    def __ror__(self, other) -> "Mask":
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)


class Causal(Mask):
    """A query sees the keys at its own position and before.

    Positions are bottom-right aligned unless given: with T queries over t keys, row i stands at
    i + t - T, so a single new query sees a whole cache.
    """

    def __call__(self, at):
        return at.k <= at.q

    def blocks(self, at):
        return at.k.min <= at.q.max, at.k.max <= at.q.min

    def interval(self, position, of):
        return Interval(None, position) if of == "query" else Interval(position, None)


class Window(Mask):
    """A query at position i sees the keys j with i - left <= j <= i + right, both inclusive.

    `None` leaves a side open; 0 is a real bound, `Window(0, 0)` shows a query its own position
    only. Negative bounds are refused. A bound may be a traced integer (layers that alternate
    windows under `scan`); it must not be negative, which a trace cannot check.
    """

    left: Any = scalar(default=None)
    right: Any = scalar(default=None)

    def __call__(self, at):
        return self._within(at.q - at.k, at.k - at.q)

    def blocks(self, at):
        q, k = at.q, at.k
        return (
            self._within(q.min - k.max, k.min - q.max),
            self._within(q.max - k.min, k.max - q.min),
        )

    def interval(self, position, of):
        # Of a key the picture is mirrored: the queries from j - right to j + left see it.
        back, ahead = (self.left, self.right) if of == "query" else (self.right, self.left)
        return Interval(
            None if back is None else position - _bound(back),
            None if ahead is None else position + _bound(ahead),
        )

    def _within(self, behind, ahead):
        left = True if self.left is None else behind <= _bound(self.left)
        right = True if self.right is None else ahead <= _bound(self.right)
        # The sum broadcasts where both sides are open.
        return jnp.logical_and(left, right) & (behind + ahead == behind + ahead)


def _bound(x):
    # Positions are int32: a bound of 2^31 - 1 must not overflow when one is added to it.
    return min(x, 2**30) if isinstance(x, int) else jnp.minimum(x, 2**30)


class Segments(Mask):
    """Packed documents: a query sees the keys of its own segment.

    `q_ids` [*batch or 1, T] and `k_ids` [*batch or 1, t] are integers, in any order; `k_ids` may
    be left out when queries and keys are the same tokens. A negative id is padding: it sees
    nothing and nothing sees it, and what stands there may be NaN. Ids that are sorted let whole
    blocks be skipped exactly.
    """

    q_ids: Any = per_query()
    k_ids: Any = per_key(default=None)
    same_tokens: bool = static(default=False)  # set where k_ids was left out

    def __call__(self, at):
        return (self.q_ids == self.k_ids) & (self.q_ids >= 0)

    def blocks(self, at):
        a, b = self.q_ids, self.k_ids
        every = (a.min == a.max) & (b.min == b.max) & (a.min == b.min) & (a.min >= 0)
        if not self.same_tokens:
            # An id that the other side lacks is as good as padding. Without such ids the ids of
            # a block of sorted ones are neighbours in the order of all ids, on both sides, and
            # two blocks whose ranges overlap do share an id: the answer is exact.
            a, b = Blocks(_held(a.x, b.x), a.axis), Blocks(_held(b.x, a.x), b.axis)
        lowest = lambda ids: jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids)
        some = (a.map(lowest).min <= b.max) & (b.map(lowest).min <= a.max)
        return some & (a.max >= 0) & (b.max >= 0), every


def _held(ids: jax.Array, others: jax.Array) -> jax.Array:
    """`ids`, with -1 for those that do not occur in `others`; both [*batch or 1, blocks, block]."""

    def one(ids, others):
        others = jnp.sort(others)
        return jnp.where(others[jnp.searchsorted(others, ids)] == ids, ids, -1)

    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    held = jnp.vectorize(one, signature="(n),(m)->(n)")(flat(ids), flat(others))
    return held.reshape(*held.shape[:-1], *ids.shape[-2:])


class Prefix(Mask):
    """Every query sees the first `n` keys: rows of k, whatever the positions.

    `n` is an int, or an array [*batch or 1], or [*batch or 1, T] with one length a query.
    """

    n: Any = per_query()

    def __call__(self, at):
        return at.k_row < self.n

    def blocks(self, at):
        return at.k_row.min < self.n.max, at.k_row.max < self.n.min


class Dense(Mask):
    """A boolean array, broadcastable to [*batch, H, T, t]; True where a query may see a key.

    The only mask that costs T·t memory, and the caller has it already.
    """

    array: Any = per_pair()
    contiguous = False

    def __call__(self, at):
        return self.array

    def blocks(self, at):
        return self.array


class Function(Mask):
    """A user's predicate: `fn(b, h, q_pos, k_pos) -> bool`, of scalars that JAX traces.

    `b` and `h` are the indices of batch entry and query head. `fn` may close over scalars and
    [H] vectors (indexed by `h`), traced or not. It masks exactly, but no block is skipped:
    combine it with a mask that skips, as in `Function(f) & Causal()`. `fn` keys the trace: define
    it once, since a fresh lambda at each call traces anew.
    """

    fn: Callable = static()
    contiguous = False


class Traced(Mask):
    """A `Function` after tracing: see `tracing`. Made by `validate`, not by users."""

    call: Any = static()
    values: tuple = per_head()
    contiguous = False

    def __call__(self, at):
        return elementwise(self.call, *self.values, at.q, at.k)


class InSequence(Mask):
    """The mask `a` within each packed sequence. Made by `packing`, not by users.

    Positions are those within the sequence, and the rows that `Prefix` counts are the sequence's.
    The scheduler sees positions moved to where the sequence's keys start: the differences within a
    sequence stay, and positions that grow along the row, instead of falling back at each start,
    keep the extents of a block over several sequences tight. Of pairs of two sequences it tells
    nothing that is true: it stands beside `Segments`, which hides them.
    """

    a: Mask = part()
    q_start: Any = per_query()  # the row of k where the sequence of the query starts
    k_start: Any = per_key()  # the row of k where the sequence of the key starts

    def __call__(self, at):
        return self.a(at._replace(k_row=at.k_row - self.k_start))

    def blocks(self, at):
        moved = lambda x, start: Blocks(x.x + start.x, x.axis)
        return self.a.blocks(
            at._replace(
                q=moved(at.q, self.q_start),
                k=moved(at.k, self.k_start),
                k_row=Blocks(at.k_row.x - self.k_start.x, at.k_row.axis),
            )
        )

    @property
    def contiguous(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.contiguous


class And(Mask):
    """Visible where both masks are."""

    a: Mask = part()
    b: Mask = part()

    def __call__(self, at):
        return self.a(at) & self.b(at)

    def blocks(self, at):
        (some_a, every_a), (some_b, every_b) = self.a.blocks(at), self.b.blocks(at)
        return some_a & some_b, every_a & every_b

    def interval(self, position, of):
        a, b = self.a.interval(position, of), self.b.interval(position, of)
        if a is None or b is None:
            return None
        return Interval(_tighter(max, jnp.maximum, a.lo, b.lo), _tighter(min, jnp.minimum, a.hi, b.hi))

    @property
    def contiguous(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.contiguous and self.b.contiguous


def _tighter(of_ints, of_arrays, x, y):
    if x is None or y is None:
        return y if x is None else x
    return of_ints(x, y) if isinstance(x, int) and isinstance(y, int) else of_arrays(x, y)


class Or(Mask):
    """Visible where either mask is."""

    a: Mask = part()
    b: Mask = part()
    contiguous = False

    def __call__(self, at):
        return self.a(at) | self.b(at)

    def blocks(self, at):
        (some_a, every_a), (some_b, every_b) = self.a.blocks(at), self.b.blocks(at)
        return some_a | some_b, every_a | every_b


class Not(Mask):
    """Visible where the mask is not."""

    a: Mask = part()
    contiguous = False

    def __call__(self, at):
        return self.a(at) ^ True  # `~` on booleans does not lower in Mosaic GPU

    def blocks(self, at):
        some, every = self.a.blocks(at)
        return every ^ True, some ^ True


class Moved(Mask):
    """`a` as seen by queries that stand `by` positions lower. Made by `dot_product_attention`, not by users.

    `by` is static, so that bounds which are arithmetic remain so.
    """

    a: Mask = part()
    by: int = static()

    def __call__(self, at):
        return self.a(at._replace(q=at.q - self.by))

    def blocks(self, at):
        return self.a.blocks(at._replace(q=at.q.map(lambda x: x - self.by)))

    def interval(self, position, of):
        if of == "query":
            return self.a.interval(position - self.by, of)
        seen = self.a.interval(position, of)
        return seen and Interval(*(None if x is None else x + self.by for x in seen))

    @property
    def contiguous(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.contiguous


def as_mask(x: Any) -> Mask:
    """`x` if it is a mask, `Dense(x)` if it is a boolean array; TypeError for anything else."""
    if isinstance(x, Mask):
        return x
    if isinstance(x, jax.Array | np.ndarray | np.bool_ | bool) and jnp.asarray(x).dtype == bool:
        return Dense(x)
    dtype = getattr(x, "dtype", None)
    kind = f"a {type(x).__name__}" if dtype is None else f"an array of {dtype}"
    raise TypeError(
        f"a mask must be a jflash mask (Causal(), Window(...), ...) or a boolean array that is True "
        f"where a query may see a key. Got {kind}. A float mask that is added to the scores is a "
        f"`bias`; a 0/1 array becomes a mask by `array != 0`."
    )

"""What every kernel does with a tile of pairs: the rows that it loads, scores, visibility, dropout.

A kernel gets the `Operands` of the call with references in place of arrays. `Place` says which
rows a tile covers, `rows` loads what depends on one side of it, and `Tile` holds the values, which
broadcast to the tile's shape. A kernel brings its own `load(ref, index)`; all else is shared.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import pairs as pair_functions
from .extras import factor, fields, is_plain, scores
from .pairs import Pairs
from .problem import Operands, Problem, batch_index, head_index

LOG2E = math.log2(math.e)


class Span(NamedTuple):
    """Rows (or columns): `size` of them from `start`, of which those from `limit` on do not exist."""

    start: Any
    size: int
    limit: int | None  # None: all exist

    @property
    def rows(self) -> jax.Array:
        """int32 [size]: their indices."""
        return self.start + lax.iota(jnp.int32, self.size)

    @property
    def existing(self) -> jax.Array | None:
        """bool [size]: which exist; None: all, since every start is a multiple of the size."""
        if self.limit is None or self.limit % self.size == 0:
            return None
        return self.rows < self.limit


def expand(x: jax.Array, axes: tuple) -> jax.Array:
    """`x`, whose axes are these of a tile, with the axes that it lacks, of size 1."""
    if len(axes) == 2:
        return x if axes == (0, 1) else x.T
    return x[:, None] if axes == (0,) else x[None, :] if axes else x


class Tools(NamedTuple):
    """How a kernel reads operands. What is said to lie along axes of the tile broadcasts to the tile."""

    load: Callable  # (ref, index): the part there, of numbers and `Span`s
    along: Callable  # (ref, index, axes): the same, which lies along these axes
    rows: Callable  # (span, axis): int32, its rows, along this axis


def expanding(load: Callable) -> Tools:
    """Tools of kernels in which axes of size 1 broadcast."""
    along = lambda ref, index, axes: expand(load(ref, index), axes)
    return Tools(load, along, lambda span, axis: expand(span.rows, (axis,)))


class Place(NamedTuple):
    """Which pairs: a batch entry, a query head, and rows of q, of k, or both."""

    entry: tuple  # an index along each batch axis
    h: Any
    q: Span | None = None
    k: Span | None = None
    q_axis: int = 0  # along which axis of the tile queries lie; 1: the tile is transposed
    pair: str = "hqk"  # the order of axes of operands that depend on both sides

    def axes(self, names: str) -> tuple:
        """The tile's axes by their names, of "qk"."""
        return tuple(self.q_axis if name == "q" else 1 - self.q_axis for name in names)


def value(ref: Any, axes: str, place: Place, tools: Tools) -> jax.Array:
    """What `ref` [*batch or 1, ...] holds at `place`; its last axes are called `axes` ("hqk")."""
    lead = len(ref.shape) - len(axes)
    entry = place.entry[len(place.entry) - lead :]
    index: list[Any] = [0 if n == 1 else i for n, i in zip(ref.shape, entry)]
    cut = ""
    for name, n in zip(axes, ref.shape[lead:]):
        index.append(0 if n == 1 else getattr(place, name))
        cut += name if n != 1 and name in "qk" else ""
    return tools.along(ref, tuple(index), place.axes(cut))


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """The operands at one tile of pairs: values that broadcast to its shape."""

    problem: Problem
    operands: Operands
    pairs: Pairs

    def scores(self, raw: jax.Array, extras: dict | None = None) -> jax.Array:
        """`extras.scores` of q·k; `extras` replaces the fields of the operands."""
        return scores(self.problem, extras or fields(self.operands), raw, self.pairs)

    def visible(self, shape: tuple) -> jax.Array:
        """Where a pair takes part; boolean of the tile's shape."""
        exists = self.pairs.k_row < self.problem.t
        if self.operands.mask is not None:
            exists = exists & self.operands.mask(self.pairs)
        return jnp.broadcast_to(exists, shape)

    def kept(self, p: jax.Array) -> jax.Array:
        """`p` where dropout keeps the pair, else 0; the division by 1 - rate is the caller's."""
        rate, o = self.problem.dropout_rate, self.operands
        if rate in (0, 1):
            return jnp.zeros_like(p) if rate else p
        return jnp.where(pair_functions.kept(rate, pair_functions.mix(*o.dropout)), p, 0)


def with_words(problem: Problem, operands: Operands) -> Operands:
    """The operands as kernels want them: the random words of rows in place of dropout's key.

    ((two of [*batch, H, T]), (two of [*batch, H, t])): 16 bytes a token and head, and no kernel that
    takes seconds to compile ten rounds of Philox.
    """
    if operands.dropout is None:
        return operands
    key = operands.dropout[0], operands.dropout[1]
    b = batch_index(problem, operands)[..., None, None]
    h = head_index(problem, operands)[:, None]
    offsets = operands.row_offsets or (0, 0)
    row = lambda n, offset: jnp.arange(n, dtype=jnp.int32) + offset
    of = lambda n, offset, side: pair_functions.words(key, b, h, row(n, offset), side)
    both = of(problem.T, offsets[0], "q"), of(problem.t, offsets[1], "k")
    return dataclasses.replace(operands, dropout=both, row_offsets=None)


def keep_scale(problem: Problem) -> float:
    """What dropout multiplies a kept probability by."""
    return 1.0 if problem.dropout_rate in (0, 1) else 1 / (1 - problem.dropout_rate)


def exponent(problem: Problem, operands: Operands, s: jax.Array, base: jax.Array) -> jax.Array:
    """What 2 is raised to: (s - base) in nats, where s and base are as `Tile.scores` gives them.

    For q·k of 16 bits as s·c - base·c, one operation a score, whose error of |base| units in the last
    place is that of q·k itself. A bias may be -1e30, and float32 has no digits to lose: there the
    difference comes first.
    """
    c = LOG2E * factor(problem, operands)
    if is_plain(problem, fields(operands)) and problem.dtype.itemsize == 2:
        return s * c - base * c
    return (s - base) * c


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """What a kernel loads once: what depends on its own rows, before it visits the other side's.

    Made by `rows`. `operands` holds values where they are known and references elsewhere.
    """

    problem: Problem
    refs: Operands
    operands: Operands
    pairs: Pairs  # with None for what the other side decides
    place: Place
    side: str  # "q" or "k": whose rows these are
    tools: Tools

    def tile(self, other: Span) -> Tile:
        """The tile of these rows and `other` ones."""
        name = "k" if self.side == "q" else "q"
        place = self.place._replace(**{name: other})
        row, position = _coordinates(self.problem, self.operands, place, name, self.tools)
        pairs = self.pairs._replace(**{name: position, f"{name}_row": row})
        late = not _bias_is_alone(self.refs, self.side, place)
        operands = _load_side(self.operands, place, name, False, late, self.tools)
        return Tile(self.problem, operands, pairs)


def rows(problem: Problem, refs: Operands, place: Place, side: str, tools: Tools) -> Rows:
    """The operands at `place`, which covers rows of one `side`."""
    row, position = _coordinates(problem, refs, place, side, tools)
    n = jnp.int32(0)
    for size, i in zip(problem.batch, place.entry):  # row-major
        n = n * size + i
    pairs = Pairs(
        b=n if refs.b is None else value(refs.b, "", place, tools),
        h=place.h if refs.h is None else tools.load(refs.h, (place.h,)),
        q=None,
        k=None,
        q_row=None,
        k_row=None,
    )._replace(**{side: position, f"{side}_row": row})
    operands = dataclasses.replace(
        _load_side(refs, place, side, True, _bias_is_alone(refs, side, place), tools),
        scale=None if refs.scale is None else tools.load(refs.scale, (0,)).astype(jnp.float32),
    )
    return Rows(problem, refs, operands, pairs, place, side, tools)


def _bias_is_alone(refs: Operands, side: str, place: Place) -> bool:
    """Whether the bias does not depend on the side other than `side`."""
    other = place.pair.index("k" if side == "q" else "q") - len(place.pair)
    return refs.bias is not None and refs.bias.shape[other] == 1


def _load_side(
    operands: Operands, place: Place, side: str, first: bool, with_bias: bool, tools: Tools
) -> Operands:
    """The operands with what belongs to `side` loaded; if it comes `first`, what belongs to neither, else
    what belongs to both."""
    at = lambda axes: lambda ref: value(ref, axes, place, tools)
    sides = dict(q=dict(query=at("q")), k=dict(key=at("k")))[side]
    sides |= (
        dict(head=at("h"), scalar=lambda ref: tools.load(ref, (0,))) if first else dict(pair=at(place.pair))
    )
    view = lambda fields: fields.map(**sides)
    bias = operands.bias
    if with_bias and bias is not None:
        bias = at(place.pair)(bias)
    mask = None if operands.mask is None else view(operands.mask)
    words = operands.dropout
    if words is not None:
        mine = tuple(map(at("h" + side), words["qk".index(side)]))
        words = (mine, words[1]) if side == "q" else (words[0], mine)
    mods = tuple(map(view, operands.mods))
    return dataclasses.replace(operands, bias=bias, mods=mods, mask=mask, dropout=words)


def _coordinates(problem: Problem, operands: Operands, place: Place, side: str, tools: Tools) -> tuple:
    """(rows, positions) of one side, as they broadcast to the tile."""
    row = tools.rows(getattr(place, side), *place.axes(side))
    positions = operands.q_positions if side == "q" else operands.k_positions
    if positions is not None:
        return row, value(positions, side, place, tools)
    return row, row + (problem.t - problem.T if side == "q" else 0)


def with_scalars(schedule: Any) -> Any:
    """The schedule with its mask's scalars, such as a window's bounds, loaded."""
    mask = schedule.mask and schedule.mask.map(scalar=lambda ref: ref[0])
    return dataclasses.replace(schedule, mask=mask)

"""Tiles of arrays by the names of their axes: how `xla` walks over attention.

Arrays are laid out as `grouped` does it: batch axes first, then axes named by letters, such as
"hgqk". A tile covers some of "h" (key heads), "q" (query rows), "k" (key rows) and, where batch
entries are walked one by one, one entry. An axis of size 1 is broadcast and never cut.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class At(NamedTuple):
    """Which tile: an index along each named axis; None takes the axis whole."""

    batch: tuple  # one index a batch axis, or () for all entries at once
    h: Any
    q: Any = None
    k: Any = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of a tile, and the counts of tiles along the axes of the outer loop."""

    batch: tuple  # tiles along each batch axis (1: the axis is taken whole)
    h: int  # key heads a tile
    q: int  # query rows a tile
    k: int  # key rows a tile

    def cut(self, x: jax.Array, axes: str, at: At) -> jax.Array:
        """The tile `at` of `x`, whose last axes are called `axes`; fewer axes broadcast."""
        start, size = self._window(x, axes, at)
        return x if size == list(x.shape) else lax.dynamic_slice(x, start, size)

    def add(self, x: jax.Array, tile: jax.Array, axes: str, at: At) -> jax.Array:
        """`x` with `tile` added at `at`."""
        start, size = self._window(x, axes, at)
        if size == list(x.shape):
            return x + tile
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, start, size) + tile, start)

    def _window(self, x, axes, at):
        start, size = [], []
        for axis, n in enumerate(x.shape):
            place = axis - (x.ndim - len(axes))
            name = axes[place] if place >= 0 else "batch"
            index, width = 0, n
            if n == 1:
                pass
            elif name == "batch":
                if at.batch:
                    index, width = at.batch[place], 1
            elif name in "hqk" and getattr(at, name) is not None:
                width = min(getattr(self, name), n)
                index = getattr(at, name) * width
            start.append(jnp.asarray(index, jnp.int32))
            size.append(width)
        return start, size


def pad(x: jax.Array, axes: str, sizes: dict[str, int], fill: Any = 0) -> jax.Array:
    """`x` with each axis named in `sizes` filled up to that size; axes of size 1 stay."""
    widths = [(0, 0)] * x.ndim
    for place, name in enumerate(axes):
        axis = x.ndim - len(axes) + place
        if axis >= 0 and name in sizes and x.shape[axis] != 1:
            widths[axis] = (0, sizes[name] - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill) if any(map(any, widths)) else x


def walk(tiling: Tiling, heads: int, over: str, count: int, body: Callable, carry: Any) -> tuple:
    """Runs `body(carry, at) -> (carry, tiles)` for each tile of the outer loop.

    Batch entries (where the tiling walks them), blocks of heads and the `count` blocks of `over`
    ("q" or "k"). Each of `tiles` is a pair (array, axes); returned joined to whole arrays.
    """
    counts = (*tiling.batch, heads // tiling.h, count)
    by_entry = any(size != 1 for size in tiling.batch)
    names = {}

    def step(carry, n):
        index = []
        for size in reversed(counts):
            index.append(0 if size == 1 else n % size)
            n = n if size == 1 else n // size
        *batch, h, block = reversed(index)
        at = At(tuple(batch) if by_entry else (), h, **{over: block})
        carry, tiles = body(carry, at)
        names.update({i: axes for i, (_, axes) in enumerate(tiles)})
        return carry, tuple(x for x, _ in tiles)

    total = math.prod(counts)
    if total == 1:
        carry, tiles = step(carry, 0)
        return carry, tiles
    carry, stacked = lax.scan(step, carry, jnp.arange(total, dtype=jnp.int32))
    return carry, tuple(_join(x, names[i], counts, over) for i, x in enumerate(stacked))


def _join(x: jax.Array, axes: str, counts: tuple, over: str) -> jax.Array:
    """[tiles, *tile] -> the array that the tiles cut up."""
    tile = x.shape[1:]
    lead = len(tile) - len(axes)
    x = x.reshape(*counts, *tile)
    targets = [*range(lead), lead + axes.index("h"), lead + axes.index(over)]
    # Every count goes in front of the axis that it counts tiles of.
    order, shape = [], []
    for axis, size in enumerate(tile):
        if axis in targets:
            which = targets.index(axis)
            order.append(which)
            size = size * counts[which]
        order.append(len(counts) + axis)
        shape.append(size)
    return x.transpose(order).reshape(shape)

"""Gradients of what scores depend on beside q and k: scale, bias and the data of score modifiers.

A kernel sums a gradient over the pairs that it visits, as far as it can alone; the rest is summed
here. Everything is seen as an array that broadcasts to [*batch, H, T, t], the frame.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .problem import Operands


class Extra(NamedTuple):
    """A leaf of `leaves` that gets a gradient."""

    place: int  # among the leaves
    frame: tuple  # its shape as it broadcasts to [*batch, H, T, t]
    shape: tuple
    dtype: Any

    @property
    def axes(self) -> str:
        """Which of "qk" it depends on."""
        return "".join(name for name, n in zip("qk", self.frame[-2:]) if n != 1)


def fields(operands: Operands) -> dict:
    return dict(scale=operands.scale, bias=operands.bias, mods=operands.mods)


def wanted(operands: Operands, names: frozenset[str]) -> list[Extra]:
    """The floating-point leaves of the fields called `names`."""
    sides = {side: lambda _, side=side: side for side in ("scalar", "head", "query", "key", "pair")}
    labels = dict(
        scale=None if operands.scale is None else "scalar",
        bias=None if operands.bias is None else "pair",
        mods=tuple(mod.map(**sides) for mod in operands.mods),
    )
    named = [
        (name, x, side)
        for name, field in sorted(fields(operands).items())
        for x, side in zip(jax.tree.leaves(field), jax.tree.leaves(labels[name]))
    ]
    return [
        Extra(place, _frame(x.shape, side), x.shape, x.dtype)
        for place, (name, x, side) in enumerate(named)
        if name in names and jnp.issubdtype(x.dtype, jnp.floating)
    ]


def _frame(shape: tuple, side: str) -> tuple:
    match side:
        case "scalar":
            return (1, 1)
        case "head":
            return (*shape, 1, 1)
        case "query":
            return (*shape[:-1], 1, shape[-1], 1)
        case "key":
            return (*shape[:-1], 1, 1, shape[-1])
    return shape


def restore(operands: Operands, totals: dict[int, jax.Array], names: frozenset[str]) -> dict[str, Any]:
    """Gradients by name, shaped as the fields, from sums by place, framed, not yet folded."""
    extras = {x.place: x for x in wanted(operands, names)}
    leaves, tree = jax.tree.flatten(fields(operands))
    grads = [_fold(totals[n], extras[n]) if n in extras else None for n in range(len(leaves))]
    restored = jax.tree.unflatten(tree, grads)
    return {name: restored[name] for name in names}


def _fold(total: jax.Array, extra: Extra) -> jax.Array:
    frame = (1,) * (total.ndim - len(extra.frame)) + extra.frame
    shared = tuple(axis for axis, (n, m) in enumerate(zip(total.shape, frame)) if m == 1 and n != 1)
    return total.sum(shared).reshape(extra.shape).astype(extra.dtype)

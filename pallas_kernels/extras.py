"""What scores depend on beside q and k: scale, bias and score modifiers; and its gradients.

A kernel sums a gradient over the pairs that it visits, as far as it can alone; the rest is summed
here. Everything is seen as an array that broadcasts to [*batch, H, T, t], the frame.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .pairs import Pairs
from .problem import Operands, Problem


class Extra(NamedTuple):
    """A leaf of `fields` that gets a gradient."""

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


def is_plain(problem: Problem, extras: dict) -> bool:
    """Whether scores are q·k times a positive static factor, which can wait for the exponential."""
    alone = extras["bias"] is None and not extras["mods"]
    return alone and problem.scale is not None and problem.scale > 0


def factor(problem: Problem, operands: Operands) -> float:
    """What a result of `scores` must be multiplied by to be in nats."""
    return problem.scale if is_plain(problem, fields(operands)) else 1.0  # pyright: ignore[reportReturnType]


def scores(problem: Problem, extras: dict, raw: jax.Array, pairs: Pairs | None) -> jax.Array:
    """Scores from q·k, before the mask; of a plain call, not scaled yet (see `factor`).

    `extras`, which are the `fields`, and `pairs`, which only modifiers need, broadcast to the tile `raw`.
    """
    if is_plain(problem, extras):
        return raw
    scale: Any = problem.scale if extras["scale"] is None else extras["scale"]
    s = raw * scale
    if extras["bias"] is not None:
        s = s + extras["bias"].astype(s.dtype)
    for mod in extras["mods"]:
        s = mod(s, pairs)
    return s


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

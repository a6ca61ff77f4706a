"""Operands laid out as [*batch, h, group, T, t], where everything about pairs broadcasts.

The two implementations in plain JAX, `reference` and `xla`, look at operands this way: scores of
grouped-query heads are one batched product, and a mask, a bias or a position is an array with
axes of size 1 where it does not depend on them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.pairs import Pairs
from pallas_kernels.problem import Operands, Problem, batch_index, head_index


def queries(x: jax.Array, problem: Problem) -> jax.Array:
    """[*batch, T, H, D] -> [*batch, h, group, T, D]; query head n has key head n // group."""
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], problem.h, problem.group, *x.shape[-2:])


def keys(x: jax.Array) -> jax.Array:
    """[*batch, t, h, D] -> [*batch, h, t, D]."""
    return jnp.moveaxis(x, -2, -3)


def rows(x: jax.Array) -> jax.Array:
    """[*batch, h, group, T, d] -> [*batch, T, H, d]: the way back from `queries`."""
    *batch, h, group, T, d = x.shape
    return jnp.moveaxis(x.reshape(*batch, h * group, T, d), -3, -2)


def pairs(problem: Problem, operands: Operands, rows: tuple[int, int] | None = None) -> Pairs:
    """The coordinates of all pairs, none of them of size T·t.

    `rows` counts the query and key rows, where there are more than T and t (padding).
    """
    T, t = rows or (problem.T, problem.t)
    # Of one rank, since users may have set jax_numpy_rank_promotion to "raise".
    lead = (1,) * (len(problem.batch) + 2)
    q_row = jnp.arange(T, dtype=jnp.int32).reshape(*lead, T, 1)
    k_row = jnp.arange(t, dtype=jnp.int32).reshape(*lead, 1, t)
    q, k = q_row + (problem.t - problem.T), k_row
    fill = lambda x, n: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n - x.shape[-1])])
    if operands.q_positions is not None:
        q = fill(operands.q_positions, T)[..., None, None, :, None]
    if operands.k_positions is not None:
        k = fill(operands.k_positions, t)[..., None, None, None, :]
    b = batch_index(problem, operands)[..., None, None, None, None]
    h = head_index(problem, operands).reshape(*lead[2:], problem.h, problem.group, 1, 1)
    return Pairs(b, h, q, k, q_row, k_row)


def by_side(problem: Problem, then: Callable = lambda x: x) -> dict:
    """How data of each side broadcasts to [*batch, h, group, T, t], for `Fields.map`.

    `then` is applied to each view.
    """

    def split_heads(x):  # [..., H or 1, rows, columns] -> [..., h, group, rows, columns]
        *lead, heads, rows, columns = x.shape
        split = (1, 1) if heads == 1 else (problem.h, problem.group)
        return then(x.reshape(*lead, *split, rows, columns))

    return dict(
        head=lambda x: split_heads(x[..., None, None]),
        query=lambda x: then(x[..., None, None, :, None]),
        key=lambda x: then(x[..., None, None, None, :]),
        pair=split_heads,
    )

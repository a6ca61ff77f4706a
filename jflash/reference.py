"""Attention as it is written on paper: dense, in plain jnp, the executable specification.

Every implementation is tested against this one in float64, and `implementation="reference"` runs
it on request. It holds the T·t matrix, so it is never chosen by itself. It has no backward pass
of its own: JAX differentiates it, in any mode and to any order.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import pairs as pair_functions
from pallas_kernels.problem import Operands, Problem

from . import grouped

NAME = "reference"
backward = None  # JAX's own differentiation


def unsupported(problem: Problem) -> str | None:
    return None


def default_config(problem: Problem) -> None:
    return None


def candidates(problem: Problem) -> list[None]:
    return [None]


def forward(
    problem: Problem, operands: Operands, config: None = None, plan: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(out [*batch, T, H, d], lse [*batch, H, T]): softmax(scores) v, and log of its denominator."""
    views = grouped.by_side(problem)
    at = grouped.pairs(problem, operands)
    dtype = problem.accumulator
    shape = (*problem.batch, problem.h, problem.group, problem.T, problem.t)

    visible = True if operands.mask is None else operands.mask.map(**views)(at)
    visible = jnp.broadcast_to(visible, shape)
    # Whatever stands in a row that takes part in nothing must not reach a product: 0 * NaN is NaN.
    some_key = visible.any(-1, keepdims=True)  # [*batch, h, group, T, 1]
    some_query = visible.any((-2, -3))[..., None]  # [*batch, h, t, 1]
    q = jnp.where(some_key, grouped.queries(operands.q, problem), 0).astype(dtype)
    k = jnp.where(some_query, grouped.keys(operands.k), 0).astype(dtype)
    v = jnp.where(some_query, grouped.keys(operands.v), 0).astype(dtype)

    scale: Any = problem.scale if operands.scale is None else operands.scale.astype(dtype)
    s = scale * jnp.einsum("...hgTD,...htD->...hgTt", q, k, precision=problem.precision)
    if operands.bias is not None:
        s = s + views["pair"](operands.bias).astype(dtype)
    for mod in operands.mods:
        s = mod.map(**views)(s, at)
    s = jnp.where(visible, s, -jnp.inf)

    m = jax.lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    empty = m == -jnp.inf
    p = jnp.exp(s - jnp.where(empty, 0, m))
    l = jnp.where(empty, 1, p.sum(-1, keepdims=True))
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    total = l
    if operands.sinks is not None:
        lead = (1,) * len(problem.batch)
        sink = operands.sinks.astype(dtype).reshape(*lead, problem.h, problem.group, 1, 1)
        top = jnp.where(empty, sink, jnp.maximum(m, jax.lax.stop_gradient(sink)))
        # With top as the maximum, so that neither exponential overflows.
        shrink = jnp.exp(jnp.where(empty, 0, m - top))
        p, total = p * shrink, l * shrink + jnp.exp(sink - top)
    p = p / total
    if problem.dropout_rate > 0:
        p = dropped(problem, operands, at, p)
    out = jnp.einsum("...hgTt,...htd->...hgTd", p, v, precision=problem.precision)
    out = grouped.rows(jnp.where(empty, 0, out)).astype(problem.dtype)
    return out, lse[..., 0].reshape(*problem.batch, problem.H, problem.T)


def dropped(problem: Problem, operands: Operands, at, p: jax.Array) -> jax.Array:
    """`p` after dropout."""
    if problem.dropout_rate == 1:
        return jnp.zeros_like(p)
    q_offset, k_offset = operands.row_offsets or (0, 0)
    key = operands.dropout[0], operands.dropout[1]
    kept = pair_functions.keep(problem.dropout_rate, key, at, q_offset, k_offset)
    return jnp.where(kept, p / (1 - problem.dropout_rate), 0)

"""Attention forward through Pallas's Triton lowering.

FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithm 1): a program keeps a block of queries
and visits the blocks of keys that the schedule names, the partial ones first, then the full ones,
whose body knows no mask. Exponents are of base 2 with the scale folded in (section 3.1).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .. import tiles
from ..problem import Operands, Problem
from ..tiles import Place, Span
from .config import Block, Config
from .launch import launch, over_visits, unravel
from .ops import channels, dot, exp2, load, store


def forward(
    problem: Problem, operands: Operands, config: Config, plan: Callable
) -> tuple[jax.Array, jax.Array]:
    """(out [*batch, T, H, d], lse [*batch, H, T]), without sinks."""
    block = config.forward
    schedule = plan(block.block_q, block.block_k, "query")
    results = launch(
        lambda program, refs, outputs: _kernel(problem, block, program, *refs, outputs),
        problem,
        "jflash_forward",
        math.prod((*problem.batch, problem.H, schedule.outer)),
        (operands, schedule),
        dict(
            out=((*problem.batch, problem.T, problem.H, problem.d), problem.dtype),
            lse=((*problem.batch, problem.H, problem.T), jnp.float32),
        ),
        block.num_warps,
        block.num_stages,
    )
    return results["out"], results["lse"]


def _kernel(problem: Problem, block: Block, program, refs: Operands, schedule, outputs: dict) -> None:
    *entry, h, i = unravel(program, (*problem.batch, problem.H, schedule.outer))
    # Under a causal mask the last blocks of queries have the most to do: they start first.
    i = schedule.outer - 1 - i
    q_span = Span(i * block.block_q, block.block_q, problem.T)
    place = Place(tuple(entry), h, q=q_span)
    rows = tiles.rows(problem, refs, place, "q", load)
    q = load(refs.q, (*entry, q_span, h, channels(problem.D)))  # [block_q, D]

    def visit(j, carry, masked):
        acc, m, l = carry
        span = Span(j * block.block_k, block.block_k, problem.t if masked else None)
        at = (*entry, span, h // problem.group)
        tile = rows.tile(span)
        k = load(refs.k, (*at, channels(problem.D)))  # [block_k, D]
        s = tile.scores(dot(problem, q, k.T))  # [block_q, block_k]
        if masked:
            visible = tile.visible(s.shape)
            s = jnp.where(visible, s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(1))
        base = jnp.where(m_new == -jnp.inf, 0, m_new)  # a row that has seen no key yet
        p = exp2(problem, tiles.exponent(problem, refs, s, base[:, None]))
        shrink = exp2(problem, tiles.exponent(problem, refs, m, base))
        l = l * shrink + p.sum(1)
        v = load(refs.v, (*at, channels(problem.d)))  # [block_k, d]
        if masked and schedule.hides_keys:  # 0 times a hidden key's NaN
            v = jnp.where(visible.any(0)[:, None], v, 0)
        acc = acc * shrink[:, None] + dot(problem, tile.kept(p).astype(v.dtype), v)
        return acc, m_new, l

    carry = (
        jnp.zeros((block.block_q, channels(problem.d).size), jnp.float32),
        jnp.full((block.block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block.block_q,), jnp.float32),
    )
    acc, m, l = over_visits(schedule, i, tuple(entry), visit, carry)
    empty = m == -jnp.inf
    l = jnp.where(empty, 1, l)
    out = acc * (tiles.keep_scale(problem) / l)[:, None]
    store(outputs["out"], (*entry, q_span, h, channels(problem.d)), out)
    store(outputs["lse"], (*entry, h, q_span), m * tiles.factor(problem, refs) + jnp.log(l))

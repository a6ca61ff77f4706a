"""Attention forward through Pallas's Triton lowering.

FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithm 1): a program keeps a block of queries
and visits the blocks of keys that the schedule names, the partial ones first, then the full ones,
whose body knows no mask. Exponents are of base 2 with the scale folded in (section 3.1).

**The frozen maximum.** Softmax subtracts the row maximum only to keep exponentials in range, and a
float32 or bfloat16 probability may as well be 2^40. So the full blocks keep the maximum m of what came
before: no maximum, no rescaling of sums in the main loop. Where that was wrong (a row's sum reaches
2^40, or 2^15 where probabilities are rounded to float16, its m was -inf, or a sum of values overflowed)
the program starts again with a running maximum, so the result is right for any input.

Ladder, TFLOP/s on an H200, bfloat16, T 16384, 2048 channels in all heads; causal / full:

| | D 64 | D 128 | D 256 |
| --- | --- | --- | --- |
| for comparison: mha of jax.experimental.pallas.ops.gpu | 231 / 332 | 343 / 339 | 449 / 467 |
| running maximum, tiles 128 x 64, 3 stages (D 256: 2) | 375 / 421 | 474 / 483 | 491 / 498 |
| tiles 128 x 128, 3 stages (D 256: 1) | 396 / 404 | 458 / 490 | 367 / - |
| tiles 64 x 64, 4 warps | 373 / 399 | 457 / 455 | 335 / 313 |
| frozen maximum, tiles 128 x 64 | 425 / 503 | 501 / 518 | 506 / spills |
| frozen maximum, tiles 128 x 128 | 407 / spills | 462 / spills | |
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .. import extras as extra
from .. import tiles
from ..problem import Operands, Problem, unravel
from ..tiles import Place, Span
from .config import Config
from .launch import launch, over_visits, visits_of
from .ops import TOOLS, channels, dot, exp2, load, seen, store


def forward(
    problem: Problem, operands: Operands, config: Config, plan: Callable
) -> tuple[jax.Array, jax.Array]:
    """(out [*batch, T, H, d], lse [*batch, H, T]), without sinks."""
    block = config.forward
    operands = tiles.with_words(problem, operands)
    schedule = plan(block.block_q, block.block_k, "query")
    results = launch(
        lambda program, refs, outputs: _kernel(problem, config, program, refs[0], refs[1], outputs),
        problem,
        block,
        "jflash_forward",
        math.prod((*problem.batch, problem.H, schedule.outer)),
        (operands, schedule),
        dict(
            out=((*problem.batch, problem.T, problem.H, problem.d), problem.dtype),
            lse=((*problem.batch, problem.H, problem.T), jnp.float32),
        ),
    )
    return results["out"], results["lse"]


def _kernel(problem: Problem, config: Config, program, refs: Operands, schedule, outputs: dict) -> None:
    block = config.forward
    *entry, h, i = unravel(program, (*problem.batch, problem.H, schedule.outer))
    # Under a causal mask the last blocks of queries have the most to do: they start first.
    i = schedule.outer - 1 - i
    q_span = Span(i * block.block_q, block.block_q, problem.T)
    place = Place(tuple(entry), h, q=q_span)
    rows = tiles.rows(problem, refs, place, "q", TOOLS)
    q = load(refs.q, (*entry, q_span, h, channels(problem.D)))  # [block_q, D]

    def scores(j, masked):
        """(scores [block_q, block_k], the tile, where its keys and values lie)"""
        span = Span(j * block.block_k, block.block_k, problem.t if masked else None)
        at = (*entry, span, h // problem.group)
        tile = rows.tile(span)
        k = load(refs.k, (*at, channels(problem.D)))  # [block_k, D]
        return tile.scores(dot(problem, q, k.T)), tile, at

    def visit(j, carry, masked, frozen=False):
        acc, m, l = carry
        s, tile, at = scores(j, masked)
        if masked:
            visible = tile.visible(s.shape)
            s = jnp.where(visible, s, -jnp.inf)
        m_new = m if frozen else jnp.maximum(m, s.max(1))
        base = jnp.where(m_new == -jnp.inf, 0, m_new)  # a row that has seen no key yet
        if not frozen:
            shrink = exp2(problem, tiles.exponent(problem, refs, m, base))
            m, l, acc = m_new, l * shrink, acc * shrink[:, None]
        p = exp2(problem, tiles.exponent(problem, refs, s, base[:, None]))
        l = l + p.sum(1)
        v = load(refs.v, (*at, channels(problem.d)))  # [block_k, d]
        if masked and schedule.hides_keys:
            v = seen(visible, v)
        acc = acc + dot(problem, tile.kept(p).astype(v.dtype), v)
        return acc, m, l

    carry = (
        jnp.zeros((block.block_q, channels(problem.d).size), jnp.float32),
        jnp.full((block.block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block.block_q,), jnp.float32),
    )
    visits = visits_of(schedule, i, tuple(entry))
    if config.frozen_maximum and schedule.has_full:
        acc, m, l = _with_frozen_maximum(problem, schedule, visits, scores, visit, carry)
    else:
        acc, m, l = over_visits(schedule, visits, visit, carry)
    empty = m == -jnp.inf
    l = jnp.where(empty, 1, l)
    out = acc * (tiles.keep_scale(problem) / l)[:, None]
    store(outputs["out"], (*entry, q_span, h, channels(problem.d)), out)
    store(outputs["lse"], (*entry, h, q_span), m * extra.factor(problem, refs) + jnp.log(l))


def _with_frozen_maximum(problem: Problem, schedule, visits, scores, visit, carry) -> tuple:
    """(acc, m, l) after all visits: see the module's docstring."""

    def freeze(carry):
        acc, m, l = carry
        if schedule.has_masked:
            step = lambda n, c: visit(visits.masked(n), c, True)
            return lax.fori_loop(0, visits.n_masked, step, carry)
        return acc, scores(visits.full(0), False)[0].max(1), l  # the first block decides

    def again(_):
        # One body for all blocks: of a full one the mask hides nothing.
        step = lambda n, c: visit(schedule.nth(visits, n), c, schedule.has_masked)
        return lax.fori_loop(0, visits.n_masked + visits.n_full, step, carry)

    step = lambda n, c: visit(visits.full(n), c, False, frozen=True)
    acc, m, l = lax.fori_loop(0, visits.n_full, step, freeze(carry))
    limit = 2.0**15 if problem.dtype == jnp.float16 else 2.0**40
    right = (l < limit) & (m > -jnp.inf) & (jnp.abs(acc).max(1) < jnp.inf)
    wrong = jnp.where(right, 0, 1).sum() * jnp.minimum(visits.n_full, 1) > 0  # else nothing was frozen
    return lax.cond(wrong, again, lambda done: done, (acc, m, l))

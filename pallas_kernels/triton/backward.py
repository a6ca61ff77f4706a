"""Attention backward through Pallas's Triton lowering, deterministic.

FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithm 2), in two kernels instead of one with
atomic sums: dk and dv from a program a block of keys, which sums over the query heads of its group,
dq from a program a block of queries. Both compute the probabilities again from lse. What scores
depend on beside q and k gets its gradient where no sum over programs is needed: data of keys beside
dk, data of queries, heads and scalars beside dq, and a bias of pairs in a third kernel, because
batch entries and heads may share it, and T·t memory for each of them is what nobody should pay.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import extras as extra
from .. import tiles
from ..extras import Extra
from ..problem import Operands, Problem, unravel
from ..tiles import Place, Span, Tile, with_scalars
from .config import Block, Config
from .launch import launch, over_visits, visits_of
from .ops import TOOLS, channels, dot, exp2, load, seen, store


def backward(
    problem: Problem,
    operands: Operands,
    config: Config,
    plan: Callable,
    lse: jax.Array,
    delta: jax.Array,
    do: jax.Array,
    wanted: frozenset[str],
) -> dict[str, Any]:
    """Gradients by field of `operands`: q, k, v, and those of scale, bias, mods in `wanted`.

    - `lse` [*batch, H, T]: +inf in rows that see no key, so that exp(s - lse) is 0 there.
    - `delta` [*batch, H, T]: rowsum(out * do) - dlse.
    - `do` [*batch, T, H, d]: the cotangent of out.
    """
    extras = extra.wanted(operands, wanted)
    heads = (*problem.batch, problem.H)
    words = tiles.with_words(problem, operands)

    def run(name: str, kernel: Callable, block: Block, of: str, over: Callable, outputs: dict) -> dict:
        schedule = plan(block.block_q, block.block_k, of)
        return launch(
            lambda program, refs, outputs: kernel(problem, block, extras, program, *refs, outputs),
            problem,
            block,
            f"jflash_{name}",
            math.prod(over(schedule)),
            (words, do, lse, delta, schedule),
            outputs,
        )

    of_keys = {x.place: ((*heads, problem.t), jnp.float32) for x in extras if x.axes == "k"}
    dkv = run(
        "dkv",
        _dkv,
        config.dkv,
        "key",
        lambda schedule: (*problem.batch, problem.h, schedule.outer),
        dict(k=(operands.k.shape, problem.dtype), v=(operands.v.shape, problem.dtype)) | of_keys,
    )
    of_queries = {x.place: ((*heads, problem.T), jnp.float32) for x in extras if x.axes in ("", "q")}
    dq = run(
        "dq",
        _dq,
        config.dq,
        "query",
        lambda schedule: (*heads, schedule.outer),
        dict(q=(operands.q.shape, problem.dtype)) | of_queries,
    )
    totals = {place: dkv[place][..., None, :] for place in of_keys}
    totals |= {place: dq[place][..., None] for place in of_queries}
    of_pairs = [x for x in extras if x.axes == "qk"]
    if of_pairs:
        [bias] = of_pairs
        totals |= run(
            "dbias",
            _dbias,
            config.dq,
            "query",
            lambda schedule: (*bias.shape[:-2], schedule.outer, schedule.inner),
            {bias.place: (bias.shape, jnp.float32)},
        )
    return dict(q=dq["q"], k=dkv["k"], v=dkv["v"]) | extra.restore(operands, totals, wanted)


def _dkv(problem, block, extras, program, refs, do_ref, lse_ref, delta_ref, schedule, outputs) -> None:
    *entry, head, i = unravel(program, (*problem.batch, problem.h, schedule.outer))
    k_span = Span(i * block.block_k, block.block_k, problem.t)
    own = (*entry, k_span, head)
    k = load(refs.k, (*own, channels(problem.D)))  # [block_k, D]
    v = load(refs.v, (*own, channels(problem.d)))  # [block_k, d]
    mine = [x for x in extras if x.axes == "k"]

    def of_head(g, carry):
        h = head * problem.group + g
        # Transposed tiles, [block_k, block_q]: p and ds are left operands of the products below.
        rows = tiles.rows(problem, refs, Place(tuple(entry), h, k=k_span, q_axis=1), "k", TOOLS)

        def visit(j, carry, masked):
            dk, dv, sums = carry
            span = Span(j * block.block_q, block.block_q, problem.T)
            q = load(refs.q, (*entry, span, h, channels(problem.D)))  # [block_q, D]
            do = load(do_ref, (*entry, span, h, channels(problem.d)))  # [block_q, d]
            lse = load(lse_ref, (*entry, h, span), jnp.inf)[None, :]
            delta = load(delta_ref, (*entry, h, span))[None, :]
            raw, dp = dot(problem, k, q.T), dot(problem, v, do.T)  # [block_k, block_q]
            p, draw, parts = _tile_gradients(rows.tile(span), raw, dp, lse, delta, masked, mine)
            dv = dv + dot(problem, p.astype(do.dtype), do)
            dk = dk + dot(problem, draw.astype(q.dtype), q)
            return dk, dv, [x + part for x, part in zip(sums, parts)]

        sums = [jnp.zeros((block.block_k, 1), jnp.float32)] * len(mine)
        *carry, sums = over_visits(schedule, visits_of(schedule, i, tuple(entry)), visit, (*carry, sums))
        for x, total in zip(mine, sums):
            store(outputs[x.place], (*entry, h, k_span), total.reshape(-1))
        return tuple(carry)

    zeros = lambda size: jnp.zeros((block.block_k, channels(size).size), jnp.float32)
    carry = zeros(problem.D), zeros(problem.d)
    dk, dv = of_head(0, carry) if problem.group == 1 else _loop(problem.group, of_head, carry)
    store(outputs["k"], (*own, channels(problem.D)), dk * extra.factor(problem, refs))
    store(outputs["v"], (*own, channels(problem.d)), dv * tiles.keep_scale(problem))


def _dq(problem, block, extras, program, refs, do_ref, lse_ref, delta_ref, schedule, outputs) -> None:
    *entry, h, i = unravel(program, (*problem.batch, problem.H, schedule.outer))
    i = schedule.outer - 1 - i  # as in the forward kernel
    q_span = Span(i * block.block_q, block.block_q, problem.T)
    mine = [x for x in extras if x.axes in ("", "q")]
    gradients = _queries(problem, refs, do_ref, lse_ref, delta_ref, tuple(entry), h, q_span)

    def visit(j, carry, masked):
        dq, sums = carry
        span = Span(j * block.block_k, block.block_k, problem.t if masked else None)
        draw, parts, k, tile = gradients(span, masked, mine)
        if masked and schedule.hides_keys:
            k = seen(tile.visible(draw.shape), k)
        dq = dq + dot(problem, draw.astype(k.dtype), k)
        return dq, [x + part for x, part in zip(sums, parts)]

    dq = jnp.zeros((block.block_q, channels(problem.D).size), jnp.float32)
    sums = [jnp.zeros((block.block_q, 1), jnp.float32)] * len(mine)
    dq, sums = over_visits(schedule, visits_of(schedule, i, tuple(entry)), visit, (dq, sums))
    store(outputs["q"], (*entry, q_span, h, channels(problem.D)), dq * extra.factor(problem, refs))
    for x, total in zip(mine, sums):
        store(outputs[x.place], (*entry, h, q_span), total.reshape(-1))


def _dbias(problem, block, extras, program, refs, do_ref, lse_ref, delta_ref, schedule, outputs) -> None:
    [(place, output)] = outputs.items()
    [mine] = [x for x in extras if x.place == place]
    *owner, i, j = unravel(program, (*mine.shape[:-2], schedule.outer, schedule.inner))
    q_span = Span(i * block.block_q, block.block_q, problem.T)
    k_span = Span(j * block.block_k, block.block_k, problem.t)
    shared = tuple(n if m == 1 else 1 for n, m in zip((*problem.batch, problem.H), mine.shape))

    def of_one(n, total):
        *entry, h = (a + b for a, b in zip(owner, unravel(n, shared)))

        def add(total):
            gradients = _queries(problem, refs, do_ref, lse_ref, delta_ref, tuple(entry), h, q_span)
            _, [part], *_ = gradients(k_span, schedule.has_masked, [mine])
            return total + part

        if schedule.form == "lists":  # to look the block up would cost more than it saves
            return add(total)
        lo, _, _, hi = with_scalars(schedule).bounds(i, tuple(entry))
        return lax.cond((lo <= j) & (j < hi), add, lambda total: total, total)

    total = jnp.zeros((block.block_q, block.block_k), jnp.float32)
    store(output, (*owner, q_span, k_span), _loop(math.prod(shared), of_one, total))


def _loop(count: int, body: Callable, carry: Any) -> Any:
    """`body(n, carry)` for n below `count`; n is int32 whatever jax_enable_x64 says."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)


def _queries(problem, refs, do_ref, lse_ref, delta_ref, entry: tuple, h, q_span: Span) -> Callable:
    """Loads a block of queries; returns what gives the gradients of its tiles.

    `gradients(k_span, masked, extras)` is (that of q·k [block_q, block_k], those of `extras`, k, the tile).
    """
    rows = tiles.rows(problem, refs, Place(entry, h, q=q_span), "q", TOOLS)
    q = load(refs.q, (*entry, q_span, h, channels(problem.D)))  # [block_q, D]
    do = load(do_ref, (*entry, q_span, h, channels(problem.d)))  # [block_q, d]
    lse = load(lse_ref, (*entry, h, q_span), jnp.inf)[:, None]
    delta = load(delta_ref, (*entry, h, q_span))[:, None]

    def gradients(k_span: Span, masked: bool, extras: list[Extra]) -> tuple:
        at = (*entry, k_span, h // problem.group)
        k = load(refs.k, (*at, channels(problem.D)))  # [block_k, D]
        v = load(refs.v, (*at, channels(problem.d)))  # [block_k, d]
        tile = rows.tile(k_span)
        raw, dp = dot(problem, q, k.T), dot(problem, do, v.T)
        _, draw, parts = _tile_gradients(tile, raw, dp, lse, delta, masked, extras)
        return draw, parts, k, tile

    return gradients


def _tile_gradients(tile: Tile, raw, dp, lse, delta, masked: bool, extras: list[Extra]) -> tuple:
    """(p after dropout but for its factor, the gradient of `raw`, those of `extras`).

    `raw` is q·k, `dp` do·v. An extra that does not depend on a side that the kernel keeps is summed
    over the other side alone, a column of the tile: sums over whole tiles would cross warps.
    """
    problem, operands = tile.problem, tile.operands
    if masked:
        visible = tile.visible(raw.shape)
        if extras:  # 0 times a hidden key's NaN
            raw = jnp.where(visible, raw, 0)
    leaves, tree = jax.tree.flatten(extra.fields(operands))
    some = [leaves[x.place].astype(jnp.float32) for x in extras]
    some = [x if x.ndim else jnp.full((raw.shape[0], 1), x) for x in some]

    def scores(raw, some):
        places = {x.place: y for x, y in zip(extras, some)}
        merged = [places.get(n, leaf) for n, leaf in enumerate(leaves)]
        return tile.scores(raw, jax.tree.unflatten(tree, merged))

    s, pull = jax.vjp(scores, raw, some)
    if masked:
        s = jnp.where(visible, s, -jnp.inf)
        dp = jnp.where(visible, dp, 0)  # whatever a hidden key holds
    p = exp2(problem, tiles.exponent(problem, operands, s, lse / extra.factor(problem, operands)))
    ds = p * (tile.kept(dp) * tiles.keep_scale(problem) - delta)
    draw, parts = pull(ds)
    if masked and operands.mods:
        draw = jnp.where(visible, draw, 0)  # 0 times a modifier's infinite slope
    return tile.kept(p), draw, parts

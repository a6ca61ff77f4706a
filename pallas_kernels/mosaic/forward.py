"""Attention forward for Hopper: warp-specialised Mosaic GPU kernel.

FlashAttention-3 (https://arxiv.org/abs/2407.08608, sections 3.1 and 3.2): one warp copies blocks of keys
and values into a ring of shared memory, two or three warpgroups of 64 queries each consume them. Of block
i a warpgroup issues

    S = Q K(i)ᵀ, O += P(i - 1) V(i - 1)        both asynchronous, in this warpgroup's turn
    wait for S;  P(i) = 2^(c S - m);  l += row sums, a thread's own;  wait for O

so that one block's exponentials run under another's products. The schedule names the blocks: partial
ones first, then full ones, whose body knows no mask.

**The frozen maximum.** P is rounded to bfloat16, which has float32's exponents, so what softmax subtracts
need not be the maximum: the full blocks keep the one of what came before, and their body has no maximum, no
shuffles, no rescaling. Where that was wrong (a row's sum reaches 2^40, or 2^15 in float16, no key came
before, a sum overflowed) the block of threads votes, once, and repeats its tiles with an ordinary online
softmax: the result is right for any input. So it does where a value is not finite, if some keys are seen by
nobody: the second pass clears the values of such keys, which may be NaN.

Ladder, on an H200, bfloat16, times of FlashAttention-3 over ours, interleaved (tiles as warpgroups x keys x
stages, P: persistent; T 16384 and 2048 channels in all heads unless said; cuDNN is 0.71 to 0.86 there):

| | D 64 causal | D 64 full | D 128 causal | D 128 full | D 256 causal | D 256 full |
| --- | --- | --- | --- | --- | --- | --- |
| 3 x 128 x 4 (D 128: 2 x 128 x 2; D 256: 2 x 64 x 2) | 1.08 | 0.96 | 1.01 | 1.04 | 0.96 | 1.02 |
| the same persistent (D 64: 3 stages) | 1.11 | 1.01 | 1.00 | 1.06 | | |
| 2 x 160 x 2 (D 256: 2 x 80 x 2) | | | 1.04 | 1.10 | 1.01 | 1.00 |
| 2 x 144 x 2 / 2 x 176 x 2 | | | 0.95 / 1.00 | 1.06 / 1.07 | | |
| 2 x 192 x 2 | 0.94 | 0.95 | | | | |

D 128, 8 x 2048: 2 x 128 x 2 P 1.05 causal, 1.10 full, not persistent 0.93 and 1.02. Grouped heads 32/8, T
8192: 1.10. Windows of 1024 and 4096 at T 16384: 2 x 128 x 2 P 1.07 and 1.06, 2 x 160 x 2 0.84 and 1.00. Short
rows, B·T 16384: 1.01 to 1.25, not persistent 0.80 to 1.10. Turns at D 256: -2%. No turns elsewhere, a running
maximum, polynomial exponentials, multicast of keys, a third stage: of the prototype, -9 to -16%, -10%, 0 to
-4%, 0, 0.
"""

import functools
import heapq
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import extras, tiles
from ..problem import Operands, Problem, unravel
from ..tiles import LOG2E, Place, Span, with_scalars
from . import below
from .config import Config
from .operands import channels, in_sections, launch, prepared, tools

MULTIPROCESSORS = 132  # of an H100 or H200; persistent kernels start as many blocks
L2 = 32 << 20  # bytes of keys and values that are expected to stay in L2 while their tiles run
# Named barriers: the warpgroups' turns, then the ring's slots, of keys and of values.
TURN, FREE = 5, 8
MEET = TURN + 1  # of all consumers, in the second pass, which takes no turns


def forward(
    problem: Problem, operands: Operands, config: Config, plan: Callable
) -> tuple[jax.Array, jax.Array]:
    """(out [*batch, T, H, d], lse [*batch, H, T]), without sinks."""
    cfg = config.forward
    schedule = plan(cfg.block_q, cfg.block_k, "query")
    operands = prepared(problem, tiles.with_words(problem, operands), cfg.block_q, cfg.block_k)
    order = _Order.of(problem, schedule, cfg)
    B, T, D, d = *operands.q.shape[:2], channels(problem.D), channels(problem.d)
    rows = schedule.outer * cfg.block_q
    shared = lambda *shape: plgpu.SMEM(shape, problem.dtype, transforms=below.SWIZZLED)
    ring = dict(
        q_s=shared(cfg.block_q, D),
        k_s=shared(cfg.stages, cfg.block_k, D),
        v_s=shared(cfg.stages, cfg.block_k, d),
        lse_s=plgpu.SMEM((cfg.warpgroups, 64), jnp.float32),
        q_full=plgpu.Barrier(),
        q_free=plgpu.Barrier(num_arrivals=cfg.warpgroups),
        k_full=plgpu.Barrier(num_barriers=cfg.stages),
        v_full=plgpu.Barrier(num_barriers=cfg.stages),
    )
    if cfg.persistent or D != d:
        ring["o_s"] = shared(cfg.block_q, d)  # so that the next Q can be loaded early
    if _cleans(cfg, schedule):
        ring["seen_s"] = plgpu.SMEM((cfg.warpgroups, cfg.block_k), jnp.int32)
    if problem.interpret:
        ring |= dict(
            turns=plgpu.Barrier(num_barriers=cfg.warpgroups),
            slots=plgpu.Barrier(num_arrivals=cfg.warpgroups, num_barriers=2 * cfg.stages),
            votes=plgpu.SMEM((cfg.warpgroups, 64), jnp.int32),
            voted=plgpu.Barrier(num_arrivals=cfg.warpgroups),
            met=plgpu.Barrier(num_arrivals=cfg.warpgroups),
        )
    results = launch(
        functools.partial(_kernel, problem, cfg, order),
        problem,
        "jflash_forward",
        (operands, schedule, order.table),
        dict(
            out=((B, T, problem.H, d), problem.dtype),
            lse=((B, problem.H, rows), jnp.float32),
        ),
        ring,
        order.blocks,
        cfg.warpgroups + 1,
    )
    out = results["out"][:, : problem.T, :, : problem.d]
    out = out.reshape(*problem.batch, problem.T, problem.H, problem.d)
    lse = results["lse"][..., : problem.T].reshape(*problem.batch, problem.H, problem.T)
    return out, lse


def _cleans(cfg: Any, schedule: Any) -> bool:
    """Whether a key that nobody sees may hold NaN, which 0 times a value would spread.

    Then a result that is not finite leads to the second pass, which clears such keys' values.
    """
    return cfg.frozen_maximum and schedule.hides_keys


class _Order:
    """Which tiles a block of threads computes, and which are started first.

    Tiles of a section of heads, whose keys and values fit in L2, come together; under a causal mask the
    last blocks of queries have the most to do and come first.
    """

    def __init__(self, pairs: int, tiles_each: int, section: int, blocks: int, table: Any):
        self.pairs, self.tiles, self.section, self.blocks = pairs, tiles_each, section, blocks
        self.table = table  # int32 [blocks * width] of a persistent kernel: its tiles, then their number

    @classmethod
    def of(cls, problem: Problem, schedule: Any, cfg: Any) -> "_Order":
        pairs = math.prod(problem.batch) * problem.H
        bytes_each = problem.t * (problem.D + problem.d) * problem.dtype.itemsize
        fit = max(1, L2 // bytes_each)
        section = min(pairs, problem.group << (fit.bit_length() - 1))
        blocks = pairs * schedule.outer
        if not cfg.persistent:
            return cls(pairs, schedule.outer, section, blocks, None)
        blocks = min(MULTIPROCESSORS, blocks)
        table = _deal(pairs, section, blocks, _work(schedule))
        return cls(pairs, schedule.outer, section, blocks, jnp.asarray(table.reshape(-1)))

    def started(self, n: Any) -> tuple:
        """(batch entry and head as one number, block of queries) of the n-th block of threads."""
        pair, i = in_sections(n, self.pairs, self.section, self.tiles)
        return pair, self.tiles - 1 - i


def _work(schedule: Any) -> list[int]:
    """Blocks of keys that each block of queries visits, as far as it is known now."""
    if schedule.form != "arithmetic" or jax.tree.leaves(schedule.mask):
        return [schedule.inner] * schedule.outer
    with jax.ensure_compile_time_eval():
        visits = schedule.visits(jnp.arange(schedule.outer))
        return np.broadcast_to(visits.n_masked + visits.n_full, schedule.outer).tolist()


def _deal(pairs: int, section: int, blocks: int, work: list[int]) -> np.ndarray:
    """Each tile, the longest first, to the block of threads that has the least to do so far."""
    heap, dealt = [(0, n) for n in range(blocks)], [[] for _ in range(blocks)]
    longest_first = sorted(range(len(work)), key=lambda i: -work[i])
    for first in range(0, pairs, section):
        for i in longest_first:
            for pair in range(first, min(pairs, first + section)):
                load, n = heapq.heappop(heap)
                dealt[n].append(pair * len(work) + i)
                heapq.heappush(heap, (load + work[i] + 1, n))
    table = np.zeros((blocks, max(map(len, dealt)) + 1), np.int32)
    for n, items in enumerate(dealt):
        table[n, : len(items)] = items
        table[n, -1] = len(items)
    return table


def _kernel(
    problem: Problem, cfg: Any, order: _Order, arguments: tuple, outputs: dict, **shared: Any
) -> None:
    refs, schedule, table_ref = arguments
    schedule = with_scalars(schedule)
    s = shared
    q_s, k_s, v_s, lse_s = s["q_s"], s["k_s"], s["v_s"], s["lse_s"]
    q_full, q_free, k_full, v_full = s["q_full"], s["q_free"], s["k_full"], s["v_full"]
    separate_o = "o_s" in s
    o_s = s.get("o_s", q_s)
    warpgroups, n, stages, rows = cfg.warpgroups, cfg.block_k, cfg.stages, cfg.block_q
    T, t, d = problem.T, problem.t, channels(problem.d)
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    width: Any = None if table_ref is None else table_ref.shape[0] // order.blocks
    plain = extras.is_plain(problem, extras.fields(refs))
    by_columns = schedule.form == "arithmetic"  # masks are intervals of keys
    needs_tile = not plain or refs.dropout is not None or (schedule.has_masked and not by_columns)
    c = LOG2E * extras.factor(problem, refs)
    limit = 2.0**15 if problem.dtype == jnp.float16 else 2.0**40
    producer = warpgroup == warpgroups
    across = below.across_columns

    def item(r):
        """(batch entry, head, block of queries, its visits, their number) of the r-th tile."""
        if table_ref is None:
            pair, i = order.started(block)
        else:
            e = table_ref[block * width + r]
            pair, i = lax.div(e, jnp.int32(order.tiles)), lax.rem(e, jnp.int32(order.tiles))
        b, h = lax.div(pair, jnp.int32(problem.H)), lax.rem(pair, jnp.int32(problem.H))
        visits = schedule.visits(i, unravel(b, problem.batch))
        n_masked, n_full = jnp.int32(visits.n_masked), jnp.int32(visits.n_full)

        def where(m):
            """The m-th block. A tile that visits none gets one, which the mask hides."""
            return jnp.clip(schedule.nth(visits, m), 0, schedule.inner - 1).astype(jnp.int32)

        return b, h, i, where, n_masked, jnp.maximum(n_masked + n_full, 1)

    def for_items(body, carry):
        """body(r, blocks streamed so far, carry) -> the last two."""
        if table_ref is None:
            return body(jnp.int32(0), *carry)
        return lax.fori_loop(0, table_ref[block * width + width - 1], lambda r, x: body(r, *x), carry)

    def slot(i):
        return lax.rem(i, jnp.int32(stages))

    def cell(name, i):
        return s[name].at[i] if problem.interpret else None

    def free(operation, kind, i):
        """Of a slot of the ring (kind 0: keys, 1: values): consumers arrive, the copying warp awaits them."""
        name = kind * stages + i
        operation(FREE + name, 128 * warpgroups + 32, cell("slots", name))

    def vote(flags=None):
        cells = (s["votes"], s["voted"], warpgroup) if problem.interpret else ()
        return below.any_in_block(flags, cells)

    # --------------------------------------------------------------------------------------- consumers
    @pl.when(warpgroup < warpgroups)
    def _consume():
        plgpu.set_max_registers(240 if warpgroups == 2 else 160, action="increase")
        mine = pl.ds(warpgroup * 64, 64)
        my_q, my_o = q_s.at[mine], o_s.at[mine]
        following = jnp.where(warpgroup == warpgroups - 1, 0, warpgroup + 1)
        if cfg.turns:
            start = lambda: below.arrive(TURN, 256, cell("turns", 0))
            pl.when(warpgroup == warpgroups - 1)(start)

        def meet():
            below.meet(MEET, 128 * warpgroups, s.get("met"))

        def tile_pass(r, done, votes, optimistic):
            turns, cleans = cfg.turns and optimistic, _cleans(cfg, schedule)

            def take():
                if turns:
                    below.sync(TURN + warpgroup, 256, cell("turns", warpgroup))

            def give():
                if turns:
                    below.arrive(TURN + following, 256, cell("turns", following))

            def values(vs):
                """Values of a block, once they are there; in the second pass without those of unseen keys."""
                plgpu.barrier_wait(v_full.at[vs])
                if cleans and not optimistic:
                    meet()  # every warpgroup has marked the keys that it sees
                    pl.when(warpgroup == 0)(lambda: below.clear_rows(v_s.at[vs], s["seen_s"]))
                    below.fence()
                    meet()
                return v_s.at[vs]

            b, h, i, where, n_masked, blocks = item(r)
            q0 = i * rows + warpgroup * 64
            row = lambda: below.index(64, below.ROW) + q0
            if needs_tile:
                place = Place(unravel(b, problem.batch), h, q=Span(q0, 64, T))
                of_rows = tiles.rows(problem, refs, place, "q", tools(64, n))

            def scores(raw, m, masked):
                """(scores, the tile) of the m-th block."""
                j = where(m)
                tile: Any = of_rows.tile(Span(j * n, n, t)) if needs_tile else None
                x = raw if plain else tile.scores(raw)
                if masked:
                    x = hidden(x, j, tile)
                if cleans and not optimistic:
                    below.mark_columns(s["seen_s"].at[warpgroup], x)
                return x, tile

            def hidden(x, j, tile):
                """`x` with -inf where the mask hides the pair."""
                if not by_columns:
                    return jnp.where(tile.visible(x.shape), x, -jnp.inf)
                first, last = None, None
                if schedule.mask is not None:
                    first, last = schedule.mask.interval(row() + (t - T), "query")
                if t % n:
                    last = jnp.int32(t - 1) if last is None else jnp.minimum(last, t - 1)
                relative = lambda y: None if y is None else y - j * n
                if first is None and last is None:
                    return x
                return below.hide_columns(x, relative(first), relative(last))

            def powers(x, m):
                """e^(x - m), where m [64] is finite."""
                if plain:
                    return jnp.exp2(x * c - across(m * c, n))
                return jnp.exp2((x - across(m, n)) * LOG2E)

            finite = lambda m: jnp.where(m == -jnp.inf, 0.0, m)
            kept = lambda p, tile: (p if refs.dropout is None else tile.kept(p)).astype(problem.dtype)

            plgpu.barrier_wait(q_full)
            plgpu.barrier_wait(k_full.at[slot(done)])
            take()
            x = below.mma(None, my_q, k_s.at[slot(done)], transpose_b=True)
            give()
            (x,) = below.wait(0, x)
            free(below.arrive, 0, slot(done))
            x, tile = scores(x, jnp.int32(0), schedule.has_masked)
            m = x.max(axis=1)
            p = powers(x, finite(m))
            l, p = below.partial_sums(p), kept(p, tile)
            o = below.tile_of(0, d)

            def issue(m_, o, p):
                """S of this block and O of the one before."""
                ks, vs = slot(done + m_), slot(done + m_ - 1)
                plgpu.barrier_wait(k_full.at[ks])
                take()
                x = below.mma(None, my_q, k_s.at[ks], transpose_b=True)
                o = below.mma(o, p, values(vs))
                give()
                (x,) = below.wait(1, x)
                free(below.arrive, 0, ks)
                return x, o, vs

            def step(m_, carry, masked):
                """Online softmax."""
                o, m, l, p = carry
                x, o, vs = issue(m_, o, p)
                if not optimistic:  # rare: fewer registers rather than more overlap
                    o, p = below.wait(0, o, p)
                x, tile = scores(x, m_, masked)
                new = jnp.maximum(m, x.max(axis=1))
                base = finite(new)
                shrink = jnp.exp2((m - base) * c)
                p32 = powers(x, base)
                l = l * across(shrink, 8) + below.partial_sums(p32)
                if refs.dropout is not None:
                    p32 = tile.kept(p32)
                if optimistic:
                    o, p, p32 = below.wait(0, o, p, p32)
                free(below.arrive, 1, vs)
                o = o * across(shrink, d)
                return o, new, l, p32.astype(problem.dtype)

            def frozen_step(m_, carry, base):
                o, l, p = carry
                x, o, vs = issue(m_, o, p)
                x, tile = scores(x, m_, False)
                p32 = powers(x, base)
                l, new = l + below.partial_sums(p32), kept(p32, tile)
                o, p = below.wait(0, o, p)  # p: its registers are free only now
                free(below.arrive, 1, vs)
                return o, l, new

            one = jnp.int32(1)
            carry = (o, m, l, p)
            if not optimistic:
                # One body for all blocks: of a full one the mask hides nothing.
                body = functools.partial(step, masked=schedule.has_masked)
                o, m, l, p = lax.fori_loop(one, blocks, body, carry)
            else:
                start = one
                if schedule.has_masked:
                    start = jnp.maximum(n_masked, 1)
                    o, m, l, p = lax.fori_loop(one, start, functools.partial(step, masked=True), carry)
                if cfg.frozen_maximum:
                    body = functools.partial(frozen_step, base=finite(m))
                    o, l, p = lax.fori_loop(start, blocks, body, (o, l, p))
                else:
                    body = functools.partial(step, masked=False)
                    o, m, l, p = lax.fori_loop(start, blocks, body, (o, m, l, p))
            if separate_o:
                plgpu.barrier_arrive(q_free)  # every product with this Q is done
            vs = slot(done + blocks - 1)
            o = below.mma(o, p, values(vs))
            o, p = below.wait(0, o, p)
            free(below.arrive, 1, vs)

            total = l.sum(axis=1)
            if optimistic and cfg.frozen_maximum:
                # Not the maximum, which loses a NaN on some platforms.
                finite_sums = jnp.where(jnp.abs(o).sum(axis=1) < jnp.inf, 1, 0)
                right = jnp.where(total < limit, jnp.where(m > -jnp.inf, finite_sums, 0), 0)
                frozen = jnp.where(blocks > jnp.maximum(n_masked, 1), 1, 0)  # else nothing was
                wrong = (1 - right) * frozen
                if cleans:
                    wrong = jnp.maximum(wrong, 1 - finite_sums)
                votes = jnp.maximum(votes, jnp.where(row() < T, wrong, 0))
            weight = jnp.where(total > 0, tiles.keep_scale(problem) / total, 0.0)
            if separate_o:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            my_o[...] = (o * across(weight, d)).astype(problem.dtype)
            lse_s[warpgroup] = m * extras.factor(problem, refs) + jnp.log2(total) * (1 / LOG2E)
            plgpu.commit_smem()
            inside = None if T % rows == 0 else q0 < T
            at = (b, pl.ds(q0, 64), h)
            below.store(my_o, outputs["out"].at[at], inside, commit=False)
            below.store(lse_s.at[warpgroup], outputs["lse"].at[b, h, pl.ds(q0, 64)])
            if not separate_o:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free)
            return done + blocks, votes

        nobody = below.row_numbers(0)
        carry = (jnp.int32(0), nobody)
        done, votes = for_items(functools.partial(tile_pass, optimistic=True), carry)
        if cfg.frozen_maximum:

            @pl.when(vote(votes))
            def _():
                if _cleans(cfg, schedule):
                    pl.when(warpgroup == 0)(lambda: below.clear(s["seen_s"]))
                    meet()
                for_items(functools.partial(tile_pass, optimistic=False), (done, votes))

        plgpu.wait_smem_to_gmem(0)

    # ---------------------------------------------------------------------------------------- producer
    @pl.when(producer)
    def _produce():
        plgpu.set_max_registers(24 if warpgroups == 2 else 32, action="decrease")

        def load_tile(r, done, unused, first_pass):
            b, h, i, where, _, blocks = item(r)
            head = lax.div(h, jnp.int32(problem.group)) if problem.group > 1 else h

            def copy(kind, m):
                ref, to, full = (refs.k, refs.v)[kind], (k_s, v_s)[kind], (k_full, v_full)[kind]
                at = slot(done + m)
                pl.when(done + m >= stages)(lambda: free(below.sync, kind, at))
                plgpu.copy_gmem_to_smem(ref.at[b, pl.ds(where(m) * n, n), head], to.at[at], full.at[at])

            if not first_pass:
                plgpu.barrier_wait(q_free)
            elif cfg.persistent:
                pl.when(r > 0)(lambda: plgpu.barrier_wait(q_free))
            plgpu.copy_gmem_to_smem(refs.q.at[b, pl.ds(i * rows, rows), h], q_s, q_full)
            copy(0, jnp.int32(0))

            def step(m, _):  # the order in which consumers use them
                copy(0, m)
                copy(1, m - 1)

            lax.fori_loop(jnp.int32(1), blocks, step, None)
            copy(1, blocks - 1)
            return done + blocks, unused

        def run(first_pass, done):
            body = functools.partial(load_tile, first_pass=first_pass)
            below.on_warps(lambda: for_items(body, (done(), jnp.int32(0))) and None)

        def streamed():
            """Blocks of the first pass."""
            if table_ref is None:
                return item(0)[-1]
            count = lambda r, x: x + item(r)[-1]
            return lax.fori_loop(0, table_ref[block * width + width - 1], count, jnp.int32(0))

        run(True, lambda: jnp.int32(0))
        if cfg.frozen_maximum:
            pl.when(vote())(lambda: run(False, streamed))

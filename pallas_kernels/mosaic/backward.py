"""Attention backward for Hopper: one fused Mosaic GPU kernel, five products a tile.

A block of threads owns 128 keys of one key head. Two warpgroups of 64 keys each walk the queries, of every
query head of the group; one warp of a third loads, another adds dQ to global memory. S^T and dP^T are formed
transposed, so that P^T and dS^T are already the register operands of dV += P^T dO and dK += dS^T Q. dS^T also
goes through shared memory, for dQ += dS K: each warpgroup forms a part of it and leaves it in shared memory,
whence a copy that adds brings it to a float32 array of zeros, in no fixed order: dQ is not bitwise
reproducible. XLA scales and rounds it.

Ladder (H200, bfloat16, FlashAttention-3's backward time over ours, B1 T16384; single readings, +-3%), of the
prototype, which knew causal masks only:

  step                                                        H16 D128 causal, full   H32 D64 causal, full
  S^T and dP^T issued together, dV, dQ, dK in flight                0.87  0.87              0.79  0.90
  accumulators start at -lse / scale and -delta: no
    subtraction, no registers for lse and delta                     0.91  0.88              0.84  0.93
  a copy of the code for each warpgroup: constant addresses         0.98  1.02              0.91  0.94
  own fence and one named barrier for dS                            1.00  1.00              0.91  0.95
  a producer warp issues the additions to dQ                        1.01  1.01              0.87  0.98
  the mask in the scores' starting value                            1.00  1.00              0.90  0.95
  "defer": dQ one step late, so that warpgroups drift apart           -     -               0.95  0.97

Here dS is formed from P in 16 bits, as dV is, which spares the registers of P in float32 (D64 spilled), and
the mask is a branch in the one loop (two loops, for masked blocks and for full ones, spilled). Not measured.

At B8 T2048 H16 D128 1.01 and 0.97: the passes around the kernel (delta, zeros, rounding) are a fifth of it.
No gain: dK from shared memory (-4%), left in flight over the loop's edge (-4%), S^T and dP^T a step early
(-15%), dV before dP^T is awaited (0 to -9%), "defer" at D128 (-5%), dV, dK, dQ in this order (-4%).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import extras, tiles
from ..problem import Operands, Problem, unravel
from ..tiles import LOG2E, Place, Span, with_scalars
from . import below
from .config import Config
from .operands import channels, flat, in_sections, launch, prepared, tools

L2 = 40 << 20  # bytes of queries, cotangents and sums of dQ that are expected to stay in L2
WIDEST = 128  # channels of a head
# Named barriers: of a warpgroup's part of dS, two slots each; of its part of dQ; of all consumers.
PEER, DQ_FULL, DQ_FREE, MEET = 5, 9, 12, 15


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

    `lse`, `delta` and `do` are as in the Triton kernels' `backward`. They also serve what this kernel does
    not: larger heads, gradients of `wanted` fields, and a `deterministic` dQ.
    """
    if problem.deterministic or max(problem.D, problem.d) > WIDEST or extras.wanted(operands, wanted):
        from pallas_kernels import triton

        tiles_there = triton.default_config(problem)
        return triton.backward(problem, operands, tiles_there, plan, lse, delta, do, wanted)
    cfg = config.backward
    schedule = plan(cfg.block_q, cfg.block_k, "key")
    words = tiles.with_words(problem, operands)
    kernel_operands = prepared(problem, words, cfg.block_q, cfg.block_k, transposed=True)
    B, D, d = math.prod(problem.batch), channels(problem.D), channels(problem.d)
    rows = schedule.inner * cfg.block_q
    factor = extras.factor(problem, operands)

    def of_rows(x: jax.Array, fill: float | int) -> jax.Array:
        """[B, H, rows], what accumulators start at; `fill` in rows that do not exist."""
        x = x.astype(jnp.float32).reshape(B, problem.H, problem.T)
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows - problem.T)), constant_values=fill)

    pairs = B * problem.h
    bytes_each = problem.group * problem.T * ((D + d) * problem.dtype.itemsize + 4 * D)
    section = min(pairs, 1 << (max(1, L2 // bytes_each).bit_length() - 1))
    shared = lambda *shape: plgpu.SMEM(shape, problem.dtype, transforms=below.SWIZZLED)
    numbers = lambda *shape: plgpu.SMEM(shape, jnp.float32)
    wide = (below.tiling((8, 32)), below.swizzle(128))
    warpgroups, bq, bk = cfg.warpgroups, cfg.block_q, cfg.block_k
    scratch = dict(
        k_s=shared(bk, D),
        v_s=shared(bk, d),
        q_s=shared(cfg.q_stages, bq, D),
        do_s=shared(cfg.do_stages, bq, d),
        lse_s=numbers(cfg.q_stages, bq),
        delta_s=numbers(cfg.do_stages, bq),
        ds_s=shared(2, bk, bq),
        dq_s=plgpu.SMEM((warpgroups, 64, _dq_columns(cfg, D)), jnp.float32, transforms=wide),
        kv_full=plgpu.Barrier(num_arrivals=2),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=cfg.q_stages),
        do_full=plgpu.Barrier(num_arrivals=2, num_barriers=cfg.do_stages),
        q_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=cfg.q_stages),
        do_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=cfg.do_stages),
    )
    slices = 1  # arrays of sums of dQ
    if problem.interpret:  # which cannot add
        slices = schedule.outer * (warpgroups if _dq_part(cfg, D) == "keys" else 1)
        scratch |= dict(
            met=plgpu.Barrier(num_arrivals=warpgroups),
            peers=plgpu.Barrier(num_barriers=4),
            dq_full=plgpu.Barrier(num_barriers=warpgroups),
            dq_free=plgpu.Barrier(num_barriers=warpgroups),
        )
    results = launch(
        functools.partial(_kernel, problem, cfg, section),
        problem,
        "jflash_backward",
        (kernel_operands, flat(do), of_rows(lse * (-1 / factor), -jnp.inf), of_rows(-delta, 0), schedule),
        dict(
            dq=((slices * B, rows, problem.H, D), jnp.float32),
            dk=(kernel_operands.k.shape, problem.dtype),
            dv=(kernel_operands.v.shape, problem.dtype),
        ),
        scratch,
        pairs * schedule.outer,
        warpgroups + 1,
        sums=("dq",),
    )
    dq = results["dq"].reshape(slices, B, rows, problem.H, D).sum(0) if slices > 1 else results["dq"]
    dq = (dq * factor).astype(problem.dtype)
    like = lambda x, to: x[:, : to.shape[-3], :, : to.shape[-1]].reshape(to.shape)
    o = operands
    return dict(q=like(dq, o.q), k=like(results["dk"], o.k), v=like(results["dv"], o.v))


def _dq_part(cfg: Any, D: int) -> str:
    """Which 64 rows of dQ = dS K a warpgroup forms: its "queries", its "channels", or all, of its "keys"."""
    if cfg.block_q == 128:
        return "queries"
    return "channels" if D == 128 and cfg.warpgroups == 2 else "keys"


def _dq_columns(cfg: Any, D: int) -> int:
    return D // 2 if _dq_part(cfg, D) == "channels" else D


def _kernel(problem: Problem, cfg: Any, section: int, arguments: tuple, outputs: dict, **shared: Any) -> None:
    refs, do_ref, lse_ref, delta_ref, schedule = arguments
    schedule = with_scalars(schedule)
    s = shared
    k_s, v_s, q_s, do_s, ds_s, dq_s = (s[f"{name}_s"] for name in ("k", "v", "q", "do", "ds", "dq"))
    warpgroups, bq, bk, G = cfg.warpgroups, cfg.block_q, cfg.block_k, problem.group
    T, t, D = problem.T, problem.t, channels(problem.D)
    warpgroup = lax.axis_index("warpgroup")
    pairs = math.prod(problem.batch) * problem.h
    # Under a causal mask the first blocks of keys have the most to do and come first.
    pair, i = in_sections(lax.axis_index("block"), pairs, section, schedule.outer)
    b, kv_head = lax.div(pair, jnp.int32(problem.h)), lax.rem(pair, jnp.int32(problem.h))
    entry, k0 = unravel(b, problem.batch), i * bk
    plain = extras.is_plain(problem, extras.fields(refs))
    by_columns = schedule.form == "arithmetic"  # masks are intervals of queries
    needs_tile = not plain or refs.dropout is not None
    c = LOG2E * extras.factor(problem, refs)
    part = _dq_part(cfg, D)

    visits = schedule.visits(i, entry)
    n_masked, n_full = jnp.int32(visits.n_masked), jnp.int32(visits.n_full)
    # Blocks of queries outside, heads of the group inside. One step at least, which the mask hides.
    steps = jnp.maximum((n_masked + n_full) * G, 1)
    masked_steps = steps - n_full * G

    def at(r, masked=False):
        """(block of queries, query head) of step r, which is known to be `masked`."""
        m, h = (r, kv_head) if G == 1 else (lax.div(r, jnp.int32(G)), kv_head * G + lax.rem(r, jnp.int32(G)))
        j = visits.masked(m) if masked else schedule.nth(visits, m)
        return jnp.clip(j, 0, schedule.inner - 1).astype(jnp.int32), h

    def slot(r, n):
        return lax.rem(r, jnp.int32(n))

    def cell(name, n=0):
        return s[name].at[n] if problem.interpret else None

    def dq_full(operation, w):
        """A part of dQ is in shared memory: its warpgroup arrives, the storing warp awaits it."""
        operation(DQ_FULL + w, 160, cell("dq_full", w))

    def dq_free(operation, w):
        operation(DQ_FREE + w, 160, cell("dq_free", w))

    # --------------------------------------------------------------------------------------- consumers
    def consume(w):  # w is static: every address in shared memory is a constant
        plgpu.set_max_registers(240 if warpgroups == 2 else 160, action="increase")
        own = pl.ds(w * 64, 64)
        k_w, v_w = k_s.at[own], v_s.at[own]

        def meet():
            below.meet(MEET, 128 * warpgroups, s.get("met"))

        def tile_at(r):
            j, h = at(r)
            place = Place(entry, h, k=Span(k0 + w * 64, 64, t), q_axis=1, pair="hkq")
            return tiles.rows(problem, refs, place, "k", tools(64, bq)).tile(Span(j * bq, bq, T))

        def masked(x, r, tile):
            """`x` with -inf where the mask hides the pair.

            A branch in one loop: a loop for masked blocks and another for full ones need more registers.
            """
            if not schedule.has_masked:
                return x
            if not schedule.has_full:
                return hidden(x, r, tile)
            return lax.cond(r < masked_steps, lambda x: hidden(x, r, tile), lambda x: x, x)

        def hidden(x, r, tile):
            if not by_columns:
                tile = tile_at(r) if tile is None else tile
                return jnp.where(tile.visible(x.shape), x, -jnp.inf)
            key = lambda: below.index(64, below.ROW) + (k0 + w * 64)
            lo, hi = (None, None) if schedule.mask is None else schedule.mask.interval(key(), "key")
            shift = (T - t) - at(r, masked=True)[0] * bq  # of a position to a column
            first, last = (None if x is None else x + shift for x in (lo, hi))
            if t % bk:  # keys that do not exist
                exists = (key() - (t - 1)) * bq
                first = exists if first is None else jnp.maximum(first, exists)
            if first is None and last is None:
                return x
            return below.hide_columns(x, first, last)

        def spread(ref, at):
            """Of the queries of a step: a number for each column."""
            return below.across_rows(below.load(ref.at[at], below.COLUMN, (bq,)), 64)

        def scores_start(r):
            """What S^T starts at: plain scores at -lse, and the mask then needs no registers later."""
            at = slot(r, cfg.q_stages)
            plgpu.barrier_wait(s["q_full"].at[at])
            return masked(spread(s["lse_s"], at), r, None) if plain else None

        def score_product(start, r):
            """S^T, asynchronous."""
            return below.mma(start, k_w, q_s.at[slot(r, cfg.q_stages)], transpose_b=True)

        def probabilities(x, r, tile):
            """(P^T, the same after dropout, both in 16 bits, a function from gradients of s to q·k's)."""
            pull = lambda ds: ds
            if plain:
                p = jnp.exp2(x * c)
            else:
                x, linear = jax.vjp(tile.scores, x)
                x = masked(x, r, tile)
                p = jnp.exp2((x + spread(s["lse_s"], slot(r, cfg.q_stages))) * LOG2E)
                slope = lambda ds: below.pulled(linear, ds)
                # 0 times a modifier's infinite slope is not NaN, but 0.
                pull = (lambda ds: jnp.where(ds == 0, 0.0, slope(ds))) if refs.mods else slope
            p = p.astype(problem.dtype)
            return p, p if refs.dropout is None else tile.kept(p), pull

        def dp_start(r):
            """What dP^T starts at: without dropout at -delta."""
            at = slot(r, cfg.do_stages)
            plgpu.barrier_wait(s["do_full"].at[at])
            return spread(s["delta_s"], at) if refs.dropout is None else None

        def dp_product(start, r):
            """dP^T, asynchronous."""
            return below.mma(start, v_w, do_s.at[slot(r, cfg.do_stages)], transpose_b=True)

        def score_gradients(p, kept_p, dp, pull, r):
            """dS^T in 16 bits; of plain scores but for the scale."""
            if refs.dropout is not None:
                # Where p is 0 but kept, dS is 0 all the same.
                dp = jnp.where(below.widened(kept_p) != 0, dp * tiles.keep_scale(problem), 0.0)
                dp = dp + spread(s["delta_s"], slot(r, cfg.do_stages))
            return pull(below.widened(p) * dp).astype(problem.dtype)

        def dq_product(at):
            ds, k = ds_s.at[at], k_s
            if part == "queries":
                ds = ds.at[:, own]
            elif part == "channels":
                k = k_s.at[:, pl.ds(w * (D // 2), D // 2)]
            else:
                ds, k = ds.at[own], k_w
            return below.mma(None, ds, k, transpose_a=True)

        def store_dq(dq):
            dq_free(below.sync, w)
            dq_s.at[w][...] = dq
            below.fence()
            dq_full(below.arrive, w)

        def step(r, carry):
            """S^T and, if all is plain, dP^T together; dV, dQ, dK together; the warpgroups meet once."""
            dk, dv = carry
            qs, dos, at = slot(r, cfg.q_stages), slot(r, cfg.do_stages), slot(r, 2)
            tile = tile_at(r) if needs_tile else None
            if needs_tile:
                (x,) = below.wait(0, score_product(scores_start(r), r))
                p, kept_p, pull = probabilities(x, r, tile)
                dp = dp_product(dp_start(r), r)
            else:
                x, dp = below.settled(scores_start(r), dp_start(r))
                x, dp = score_product(x, r), dp_product(dp, r)
                (x,) = below.wait(1, x)
                p, kept_p, pull = probabilities(x, r, tile)
            (dp,) = below.wait(0, dp)
            ds = score_gradients(p, kept_p, dp, pull, r)
            ds_s.at[at].at[own][...] = ds
            dv = below.mma(dv, kept_p, do_s.at[dos])
            below.fence()
            meet()  # dS^T is in shared memory
            dq = dq_product(at)
            dk = below.mma(dk, ds, q_s.at[qs])
            dv, _ = below.wait(2, dv, kept_p)
            plgpu.barrier_arrive(s["do_free"].at[dos])
            (dq,) = below.wait(1, dq)
            store_dq(dq)
            dk, _ = below.wait(0, dk, ds)
            plgpu.barrier_arrive(s["q_free"].at[qs])
            return dk, dv

        def peer(operation, who, r):
            """A warpgroup's part of dS^T of step r is in shared memory: it arrives, the other awaits it."""
            name = 2 * who + slot(r, 2)
            operation(PEER + name, 256, cell("peers", name))

        def late_dq(r):
            peer(below.sync, 1 - w, r)  # this warpgroup's part has long been there
            return dq_product(slot(r, 2))

        def deferring_step(r, carry, first=False):
            """dQ of the step before runs beside S^T: each warpgroup may be a step ahead of the other."""
            dk, dv = carry
            qs, dos, at = slot(r, cfg.q_stages), slot(r, cfg.do_stages), slot(r, 2)
            tile = tile_at(r) if needs_tile else None
            x = score_product(scores_start(r), r)
            dq = None if first else late_dq(r - 1)
            (x,) = below.wait(0 if first else 1, x)
            p, kept_p, pull = probabilities(x, r, tile)
            if dq is not None:  # before dP^T starts, whose accumulator takes these registers
                (dq,) = below.wait(0, dq)
                store_dq(dq)
            dp = dp_product(dp_start(r), r)
            dv = below.mma(dv, kept_p, do_s.at[dos])
            (dp,) = below.wait(1, dp)
            ds = score_gradients(p, kept_p, dp, pull, r)
            ds_s.at[at].at[own][...] = ds
            below.fence()
            peer(below.arrive, w, r)
            dk = below.mma(dk, ds, q_s.at[qs])
            dv, _ = below.wait(1, dv, kept_p)
            plgpu.barrier_arrive(s["do_free"].at[dos])
            dk, _ = below.wait(0, dk, ds)
            plgpu.barrier_arrive(s["q_free"].at[qs])
            return dk, dv

        plgpu.barrier_wait(s["kv_full"])
        if schedule.hides_keys:
            # What nobody sees may be NaN, which 0 times it would be too. Who sees it has an lse of NaN.
            for x_w in (k_w, v_w):
                x = x_w[...]
                x_w[...] = jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, 0)
            below.fence()
            meet()
        carry = below.tile_of(0, D), below.tile_of(0, v_s.shape[1])
        if cfg.mode == "defer":
            carry = deferring_step(jnp.int32(0), carry, first=True)
            carry = lax.fori_loop(jnp.int32(1), steps, deferring_step, carry)
            (dq,) = below.wait(0, late_dq(steps - 1))
            store_dq(dq)
        else:
            carry = lax.fori_loop(jnp.int32(0), steps, step, carry)
        dk, dv = carry
        meet()  # the other warpgroup's products have read these keys
        k_w[...] = (dk * extras.factor(problem, refs)).astype(problem.dtype)
        v_w[...] = (dv * tiles.keep_scale(problem)).astype(problem.dtype)
        plgpu.commit_smem()
        first = k0 + w * 64
        inside = None if t % bk == 0 else first < t
        below.store(k_w, outputs["dk"].at[b, pl.ds(first, 64), kv_head], inside)
        below.store(v_w, outputs["dv"].at[b, pl.ds(first, 64), kv_head], inside)
        plgpu.wait_smem_to_gmem(0)

    for w in range(warpgroups):
        pl.when(warpgroup == w)(functools.partial(consume, w))

    # ---------------------------------------------------------------------------------------- producer
    def load_keys():
        plgpu.copy_gmem_to_smem(refs.k.at[b, pl.ds(k0, bk), kv_head], k_s, s["kv_full"])
        plgpu.copy_gmem_to_smem(refs.v.at[b, pl.ds(k0, bk), kv_head], v_s, s["kv_full"])

    def load(r):
        j, h = at(r)
        rows = pl.ds(j * bq, bq)
        for x_ref, x_s, y_ref, y_s, name, stages in (
            (refs.q, q_s, lse_ref, s["lse_s"], "q", cfg.q_stages),
            (do_ref, do_s, delta_ref, s["delta_s"], "do", cfg.do_stages),
        ):
            to, full = slot(r, stages), s[f"{name}_full"]
            pl.when(r >= stages)(functools.partial(plgpu.barrier_wait, s[f"{name}_free"].at[to]))
            plgpu.copy_gmem_to_smem(x_ref.at[b, rows, h], x_s.at[to], full.at[to])
            plgpu.copy_gmem_to_smem(y_ref.at[b, h, rows], y_s.at[to], full.at[to])

    def add(r):
        """dQ of a step to global memory."""
        j, h = at(r)
        for w in range(warpgroups):
            dq_full(below.sync, w)
            first, columns = j * bq, pl.ds(0, D)
            if part == "queries":
                first = first + w * 64
            elif part == "channels":
                columns = pl.ds(w * (D // 2), D // 2)
            array = b
            if problem.interpret:  # an array for each block of keys, or part of it
                array = b + math.prod(problem.batch) * (i * warpgroups + w if part == "keys" else i)
            below.add(dq_s.at[w], outputs["dq"].at[array, pl.ds(first, 64), h, columns])
        for w in range(warpgroups):
            plgpu.wait_smem_to_gmem(warpgroups - 1 - w, wait_read_only=True)
            pl.when(r + 1 < steps)(functools.partial(dq_free, below.arrive, w))

    def over_steps(body, more=0):
        lax.fori_loop(jnp.int32(0), steps + more, lambda r, _: body(r), None)

    def loads():
        load_keys()
        over_steps(load)

    def adds(body=add, more=0):
        for w in range(warpgroups):
            dq_free(below.arrive, w)
        over_steps(body, more)
        plgpu.wait_smem_to_gmem(0)

    def both():
        """Loads and additions by one thread, which must not wait with one for the other."""

        def step(r):
            pl.when(r < steps)(lambda: load(r))
            pl.when(r > 0)(lambda: add(r - 1))

        load_keys()
        adds(step, 1)

    @pl.when(warpgroup == warpgroups)
    def _produce():
        plgpu.set_max_registers(24 if warpgroups == 2 else 32, action="decrease")
        if problem.interpret:
            both()
        else:
            below.on_warps(loads, adds)

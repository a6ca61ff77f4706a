"""Attention in linear memory from jax.lax: what runs on CPU and TPU, and wherever no kernel does.

FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithms 1 and 2) in loops over tiles of
[heads, block_q, block_k]: an online softmax forward, a backward that computes the probabilities
again from `lse`. Tiles that the schedule calls empty are not visited, full ones are not masked.

What made it fast on a CPU (figures: `python -m jflash bench --cpu`):

- Products in their natural order only. XLA's CPU product of a transposed left operand (Pᵀ·dO,
  dSᵀ·Q) reaches a half (float32) to an eighth (bfloat16) of the rate of the plain one, so the
  backward accumulates dVᵀ = dOᵀ·P and dKᵀ = Qᵀ·dS, from Q and dO transposed once.
- A polynomial for 2^x, which XLA vectorises: half the time of its own `exp` and `exp2`.
- Tiles of a size that stays in the cache: few heads at a time rather than small blocks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import extras as extra
from pallas_kernels import pairs as pair_functions
from pallas_kernels.compat import varying_axes
from pallas_kernels.pairs import Pairs
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiles import LOG2E

from . import grouped
from .exp2 import exp2_by_polynomial
from .tiling import At, Tiling, pad, walk

NAME = "xla"


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a tile: rows of queries and of keys, and at most about this many scores."""

    block_q: int
    block_k: int
    scores: int = 2**20

    def __post_init__(self):
        if min(self.block_q, self.block_k, self.scores) < 1:
            raise ValueError(f"block_q, block_k and scores must be positive. Got {self}.")


def unsupported(problem: Problem) -> str | None:
    return None


def default_config(problem: Problem) -> Config:
    # Larger blocks make faster products, smaller ones follow the border of a mask more closely.
    block = 512 if problem.masked or max(problem.T, problem.t) <= 512 else 1024
    if problem.platform != "cpu":
        scores = 2**25  # there is no cache to stay in, but a launch to pay for each operation
    else:
        scores = 2**21 if block == 512 else 2**20
    return Config(_even(problem.T, block), _even(problem.t, block), scores)


def candidates(problem: Problem) -> list[Config]:
    sizes = (128, 256, 512, 1024)
    return [Config(_even(problem.T, q), _even(problem.t, k)) for q in sizes for k in sizes]


def _even(length: int, block: int) -> int:
    """A block size of at most about `block` that cuts `length` into blocks of nearly one size."""
    count = -(-length // block)
    return max(1, length) if count <= 1 else _up(-(-length // count), 16)


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def forward(
    problem: Problem, operands: Operands, config: Config, plan: Callable
) -> tuple[jax.Array, jax.Array]:
    """(out [*batch, T, H, d], lse [*batch, H, T]), without sinks."""
    x = _lay_out(problem, operands, config, plan(config.block_q, config.block_k, "query"))

    def block_of_queries(carry, at):
        q = x.cut(x.q, "hgqD", at)

        def visit(at, carry, masked):
            acc, m, l = carry
            v = x.cut(x.v, "hkd", at)
            s = x.scores(x.product("...gqD,...Dk->...gqk", q, x.cut(x.k_t, "hDk", at)), at)
            if masked:
                visible = x.visible(at)
                s = jnp.where(visible, s, -jnp.inf)
                v = x.seen(v, visible)
            # Its derivative cancels: forward mode need not carry it along.
            m_new = lax.stop_gradient(jnp.maximum(m, s.max(-1, keepdims=True)))
            base = jnp.where(m_new == -jnp.inf, 0, m_new)  # a row that has seen no key yet
            p = x.exp(s - base)
            shrink = jnp.exp(x.unit * (m - base))
            l = l * shrink + x.product("...gqk,ko->...gqo", p, jnp.ones((p.shape[-1], 1), p.dtype))
            p = x.dropped(p, at).astype(v.dtype)
            acc = acc * shrink + x.product("...gqk,...kd->...gqd", p, v)
            return acc, m_new, l

        rows = q.shape[:-1]
        acc, m, l = x.over_visits(
            at,
            "k",
            visit,
            (x.full((*rows, problem.d)), x.full((*rows, 1), -jnp.inf), x.full((*rows, 1))),
        )
        empty = m == -jnp.inf
        l = jnp.where(empty, 1, l)
        out = jnp.where(empty, 0, acc / l).astype(problem.dtype)
        return carry, ((out, "hgqd"), (x.unit * m + jnp.log(l), "hgq1"))

    _, (out, lse) = x.outer("q", block_of_queries, ())
    lse = lse[..., : problem.T, 0].reshape(*problem.batch, problem.H, problem.T)
    return grouped.rows(out[..., : problem.T, :]), lse


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
    x = _lay_out(problem, operands, config, plan(config.block_q, config.block_k, "key"))
    heads = (*problem.batch, problem.h, problem.group, problem.T, 1)
    lse, delta = x.fill(lse.reshape(heads), "hgq1", jnp.inf), x.fill(delta.reshape(heads), "hgq1")
    do = x.fill(grouped.queries(do, problem).astype(x.q.dtype), "hgqd")
    # Operands of the products that sum over queries, and over d, in their natural order.
    q_t, do_t, v_t = jnp.moveaxis(x.q, -1, -3), jnp.moveaxis(do, -1, -3), x.v.mT
    diff = [x.wants(name, leaf, wanted) for name, leaf in x.named_extras()]

    def block_of_keys(carry, at):
        k, k_t, v_t_ = x.cut(x.k, "hkD", at), x.cut(x.k_t, "hDk", at), x.cut(v_t, "hdk", at)

        def visit(at, carry, masked):
            (dq_sum, extras_sum), dk, dv = carry
            do_, lse_ = x.cut(do, "hgqd", at), x.cut(lse, "hgq1", at)
            raw = x.product("...gqD,...Dk->...gqk", x.cut(x.q, "hgqD", at), k_t)
            extras = x.cut_extras(at)
            if masked:
                visible = x.visible(at)
                if any(diff):  # 0 times a hidden key's NaN
                    raw = jnp.where(visible, raw, 0)
            s, pull = jax.vjp(
                lambda raw, some: x.scores(raw, at, _merge(diff, some, extras)),
                raw,
                [leaf for leaf, yes in zip(extras, diff) if yes],
            )
            if masked:
                s = jnp.where(visible, s, -jnp.inf)
            p = x.exp(s, lse_)
            dp = x.product("...gqd,...dk->...gqk", do_, v_t_)
            if masked:
                dp = jnp.where(visible, dp, 0)  # whatever a hidden key holds
            ds = p * (x.dropped(dp, at) - x.cut(delta, "hgq1", at))
            draw, dextras = pull(ds)
            if masked and operands.mods:
                draw = jnp.where(visible, draw, 0)  # 0 times a modifier's infinite slope
            p, draw = x.dropped(p, at).astype(do.dtype), (x.unit * draw).astype(k.dtype)
            k_ = x.seen(k, visible) if masked else k
            dv = dv + x.product("...dgq,...gqk->...dk", x.cut(do_t, "hdgq", at), p)
            dk = dk + x.product("...Dgq,...gqk->...Dk", x.cut(q_t, "hDgq", at), draw)
            dq = x.product("...gqk,...kD->...gqD", draw, k_)
            dq_sum = x.tiling.add(dq_sum, dq, "hgqD", at)
            return (dq_sum, x.add_extras(extras_sum, dextras, diff, at)), dk, dv

        *lead, block_k, _ = k.shape
        dk, dv = x.full((*lead, problem.D, block_k)), x.full((*lead, problem.d, block_k))
        carry, dk, dv = x.over_visits(at, "q", visit, (carry, dk, dv))
        return carry, ((dk.astype(problem.dtype), "hDk"), (dv.astype(problem.dtype), "hdk"))

    extras_sum = [x.full(leaf.shape) for (_, leaf), yes in zip(x.named_extras(), diff) if yes]
    (dq, dextras), (dk, dv) = x.outer("k", block_of_keys, (x.full(x.q.shape), extras_sum))
    dk, dv = (jnp.moveaxis(y[..., : problem.t], (-1, -2), (-3, -1)) for y in (dk, dv))
    dq = grouped.rows(dq[..., : problem.T, :]).astype(problem.dtype)
    return dict(q=dq, k=dk, v=dv) | x.restore_extras(operands, dextras, diff, wanted)


def _merge(diff: list[bool], some: list, others: list) -> list:
    given = iter(some)
    return [next(given) if yes else other for yes, other in zip(diff, others)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """The operands as the loops over tiles want them, and what both loops do with a tile."""

    problem: Problem
    tiling: Tiling
    schedule: Any
    sizes: dict  # rows of queries ("q") and keys ("k"), filled up to whole blocks
    q: jax.Array  # [*batch, h, group, T, D]
    k: jax.Array  # [*batch, h, t, D]
    k_t: jax.Array  # [*batch, h, D, t]
    v: jax.Array  # [*batch, h, t, d]
    unit: float  # what a score must be multiplied by to be in nats
    pairs: Pairs
    mask: Any
    extras: dict  # what scores depend on beside q and k: scale, bias, mods
    sides: dict  # for each leaf of `extras`: "hgqk" if it is cut with the tile, "" if it is whole
    dropout: Any  # (the key's two words, the offsets of the rows), where 0 < rate < 1
    hides_keys: bool

    def fill(self, x: jax.Array, axes: str, fill: float = 0) -> jax.Array:
        return pad(x, axes, self.sizes, fill)

    def cut(self, x: jax.Array, axes: str, at: At) -> jax.Array:
        return self.tiling.cut(x, axes, at)

    def full(self, shape: tuple, fill: float = 0) -> jax.Array:
        """The start of a carry. Inside `shard_map` it must vary over devices as the results do."""
        x = jnp.full(shape, fill, self.problem.accumulator)
        axes = tuple(varying_axes(self.q))
        return lax.pcast(x, axes, to="varying") if axes else x

    def product(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            spec, a, b, precision=self.problem.precision, preferred_element_type=self.problem.accumulator
        )

    def exp(self, s: jax.Array, lse: Any = 0) -> jax.Array:
        """exp(unit * s - lse), computed once however many products use it."""
        if self.problem.platform == "cpu" and s.dtype == jnp.float32:
            p = exp2_by_polynomial((s * self.unit - lse) * LOG2E)
        else:
            p = jnp.exp(self.unit * s - lse)
        return lax.optimization_barrier(p)

    def pairs_at(self, at: At) -> Pairs:
        return Pairs(*(self.cut(x, "hgqk", at) for x in self.pairs))

    def scores(self, raw: jax.Array, at: At, leaves: list | None = None) -> jax.Array:
        """Scores from q·k, in `unit`; `leaves` replaces `cut_extras(at)`."""
        leaves = self.cut_extras(at) if leaves is None else leaves
        extras = jax.tree.unflatten(jax.tree.structure(self.extras), leaves)
        return extra.scores(self.problem, extras, raw, self.pairs_at(at) if extras["mods"] else None)

    def visible(self, at: At) -> jax.Array:
        """Where a pair takes part; broadcasts to [*batch, h, group, block_q, block_k]."""
        pairs = self.pairs_at(at)
        visible = pairs.k_row < self.problem.t
        if self.mask is not None:
            cut = lambda y: self.cut(y, "hgqk", at)
            visible &= self.mask.map(head=cut, query=cut, key=cut, pair=cut)(pairs)
        return visible

    def seen(self, x: jax.Array, visible: jax.Array) -> jax.Array:
        """Rows [*batch, h, block_k, D] of k or v, but 0 where no query of the tile sees them."""
        return jnp.where(visible.any((-2, -3))[..., None], x, 0) if self.hides_keys else x

    def dropped(self, p: jax.Array, at: At) -> jax.Array:
        """`p` after dropout, which is its own transpose."""
        rate = self.problem.dropout_rate
        if rate in (0, 1):
            return jnp.zeros_like(p) if rate else p
        words, offsets = self.dropout
        kept = pair_functions.keep(rate, words, self.pairs_at(at), *offsets)
        return jnp.where(kept, p * (1 / (1 - rate)), 0)

    def over_visits(self, at: At, inner: str, body: Callable, carry: Any) -> Any:
        """`body(at, carry, masked)` over the blocks along `inner` ("q" or "k") that `at` visits."""
        plan = self.schedule
        if plan.inner == 1:
            return body(at._replace(**{inner: 0}), carry, plan.has_masked)
        visits = plan.visits(at.k if inner == "q" else at.q, at.batch)

        def run(count, index, masked, carry):
            step = lambda n, c: body(at._replace(**{inner: index(n)}), c, masked)
            return lax.fori_loop(0, count, step, carry)

        if plan.has_masked:
            carry = run(visits.n_masked, visits.masked, True, carry)
        if plan.has_full:
            carry = run(visits.n_full, visits.full, False, carry)
        return carry

    def outer(self, over: str, body: Callable, carry: Any) -> tuple:
        return walk(self.tiling, self.problem.h, over, self.schedule.outer, body, carry)

    def named_extras(self) -> list[tuple[str, jax.Array]]:
        return [(name, x) for name in sorted(self.extras) for x in jax.tree.leaves(self.extras[name])]

    def cut_extras(self, at: At) -> list[jax.Array]:
        sides = jax.tree.leaves(self.sides)
        return [self.cut(x, y, at) if y else x for (_, x), y in zip(self.named_extras(), sides)]

    def wants(self, name: str, leaf: jax.Array, wanted: frozenset[str]) -> bool:
        return name in wanted and jnp.issubdtype(leaf.dtype, jnp.floating)

    def add_extras(self, sums: list, tiles: list, diff: list[bool], at: At) -> list:
        sides = [y for y, yes in zip(jax.tree.leaves(self.sides), diff) if yes]
        add = lambda x, tile, y: self.tiling.add(x, tile, y, at) if y else x + tile
        return [add(x, tile.astype(x.dtype), y) for x, tile, y in zip(sums, tiles, sides)]

    def restore_extras(self, operands: Operands, sums: list, diff: list[bool], wanted) -> dict:
        """Gradients in the shapes and dtypes of `operands`, from those of the laid out ones."""
        leaves, tree = jax.tree.flatten(extra.fields(operands))
        unfilled = jax.tree.leaves(_view_extras(self.problem, operands, lambda x: x))

        def restore(original, like, total):
            inside = tuple(slice(n) for n in like.shape)
            return total[inside].reshape(original.shape).astype(original.dtype)

        totals = iter(sums)
        grads = [
            restore(x, like, next(totals)) if yes else None for x, like, yes in zip(leaves, unfilled, diff)
        ]
        grads = jax.tree.unflatten(tree, grads)
        return {name: grads[name] for name in wanted}


def _view_extras(problem: Problem, operands: Operands, fill: Callable) -> dict:
    views = grouped.by_side(problem, fill)
    scale, bias = operands.scale, operands.bias
    return dict(
        scale=None if scale is None else scale.astype(problem.accumulator),
        bias=None if bias is None else views["pair"](bias),
        mods=tuple(mod.map(**views) for mod in operands.mods),
    )


def _lay_out(problem: Problem, operands: Operands, config: Config, plan: Any) -> _Layout:
    sizes = {"q": _up(problem.T, config.block_q), "k": _up(problem.t, config.block_k)}
    fill = lambda y, axes="hgqk": pad(y, axes, sizes)
    views = grouped.by_side(problem, fill)
    # float16 products are no faster than float32 ones on a CPU, and dS may exceed its range.
    wide = jnp.float32 if problem.dtype == jnp.float16 else problem.dtype
    cut, whole = {side: lambda _: "hgqk" for side in views}, lambda _: ""
    dropout = None
    if 0 < problem.dropout_rate < 1:
        dropout = (operands.dropout[0], operands.dropout[1]), operands.row_offsets or (0, 0)
    k = fill(grouped.keys(operands.k).astype(wide), "hkD")
    return _Layout(
        problem=problem,
        tiling=_tiling(problem, config, plan),
        schedule=plan,
        sizes=sizes,
        q=fill(grouped.queries(operands.q, problem).astype(wide), "hgqD"),
        k=k,
        k_t=k.mT,
        v=fill(grouped.keys(operands.v).astype(wide), "hkd"),
        unit=extra.factor(problem, operands),  # it waits for the exponential: a pass less
        pairs=grouped.pairs(problem, operands, (sizes["q"], sizes["k"])),
        mask=None if operands.mask is None else operands.mask.map(**views),
        extras=_view_extras(problem, operands, fill),
        sides=dict(
            scale=None if operands.scale is None else "",
            bias=None if operands.bias is None else "hgqk",
            mods=tuple(mod.map(**cut, scalar=whole) for mod in operands.mods),
        ),
        dropout=dropout,
        hides_keys=plan.hides_keys,
    )


def _tiling(problem: Problem, config: Config, plan: Any) -> Tiling:
    """As many heads a tile as its budget of scores allows, then whole batches, else entry by entry."""
    a_head = problem.group * config.block_q * config.block_k
    fits = [n for n in range(1, problem.h + 1) if problem.h % n == 0 and n * a_head <= config.scores]
    heads = max(fits, default=1)
    known = all(isinstance(n, int) for n in problem.batch)  # jax.export may leave sizes open
    small = not known or math.prod(problem.batch) * problem.h * a_head <= config.scores
    together = small and not plan.per_batch
    batch = tuple(1 if together else n for n in problem.batch)
    return Tiling(batch, heads, config.block_q, config.block_k)

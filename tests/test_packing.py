"""Packed sequences: against dense attention under a matrix by NumPy, and a loop over the sequences."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import assert_as_accurate, plain_attention
from arrays import numpy_normal as normal
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import QUICK, tiled
from refusals import refuses

import jflash
from jflash import (
    Alibi,
    Causal,
    Dropout,
    Function,
    Prefix,
    SoftCap,
    Window,
    attention,
    packing,
    schedule,
    validate,
    varlen_attention,
    varlen_attention_with_lse,
)
from jflash.api import DEFAULTS

N, M = 40, 52  # rows of queries and keys


def offsets(*lengths):
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


class Dense:
    """Ids, positions [N], [M] and the pairs of one sequence [N, M], by loops."""

    def __init__(self, cu_q, cu_k, rows_q, rows_k):
        self.q_ids, self.k_ids = np.full(rows_q, -1), np.full(rows_k, -1)
        self.q, self.k = np.zeros(rows_q, int), np.zeros(rows_k, int)
        for n in range(len(cu_q) - 1):
            T, t = cu_q[n + 1] - cu_q[n], cu_k[n + 1] - cu_k[n]
            for i in range(T):
                self.q_ids[cu_q[n] + i], self.q[cu_q[n] + i] = n, i + t - T
            for j in range(t):
                self.k_ids[cu_k[n] + j], self.k[cu_k[n] + j] = n, j
        self.same = (self.q_ids[:, None] == self.k_ids) & (self.q_ids >= 0)[:, None]
        self.q, self.k = self.q[:, None], self.k[None, :]


LENGTHS = {
    "self": ((7, 1, 19, 8), None),
    "full": ((11, 29), None),
    "empty anywhere": ((0, 9, 0, 0, 14, 0), None),
    "one": ((33,), None),
    "none": ((), None),
    "only empty": ((0, 0, 0), None),
    "cached": ((1, 6, 3, 12), (9, 20, 3, 15)),
    "more queries": ((18, 2, 20), (5, 30, 9)),
    "empty on either side": ((0, 12, 0, 7, 5), (4, 0, 0, 31, 6)),
}


def both_offsets(name):
    q, k = LENGTHS[name]
    return offsets(*q), offsets(*(q if k is None else k))


# name -> (mask, matrix from `Dense`, settings of `attention`, score modifiers in plain JAX)
SLOPES = jnp.array([0.3, 0.1, 0.05, -0.02])
EVERY_THIRD = Function(lambda b, h, q, k: k % 3 == 0)
CASES = {
    "causal": (Causal(), lambda d: d.k <= d.q, {}, None),
    "window": (Window(3, 2), lambda d: (d.q - d.k <= 3) & (d.k - d.q <= 2), {}, None),
    "several": (
        Causal() & (Prefix(2) | ~EVERY_THIRD),
        lambda d: (d.k <= d.q) & ((d.k < 2) | (d.k % 3 != 0)),
        {},
        None,
    ),
    "alibi": (
        Causal(),
        lambda d: d.k <= d.q,
        dict(score_mod=Alibi(SLOPES)),
        lambda s, d: s - SLOPES[:, None, None] * abs(d.q - d.k),
    ),
    "cap and positions": (
        None,
        lambda d: d.same,
        dict(score_mod=(SoftCap(2.0), lambda s, b, h, q, k: s + 0.2 * (q - 2 * k))),
        lambda s, d: 2.0 * jnp.tanh(s / 2.0) + 0.2 * (d.q - 2 * d.k),
    ),
}
MASKS = {
    "none": (None, CASES["cap and positions"][1]),
    "causal": CASES["causal"][:2],
    "window": CASES["window"][:2],
    "causal window": (Causal() & Window(4, None), lambda d: (d.k <= d.q) & (d.q - d.k <= 4)),
}


def quick(f):
    return jax.jit(f, compiler_options=QUICK)


class At(NamedTuple):
    q: Any
    k: Any


@functools.cache
def program(case, plain=False):
    """A compiled function of q, k, v, offsets, cotangents: out, lse and gradients by name."""
    mask, _, more, mod = CASES[case]

    def ours(q, k, v, cu_q, cu_k):
        return varlen_attention_with_lse(q, k, v, cu_q, cu_k, mask, **more)

    def dense(q, k, v, visible, at):
        mods = () if mod is None else (lambda s: mod(s, at),)
        return plain_attention(q, k, v, visible, scale=q.shape[-1] ** -0.5, mods=mods)

    def run(q, k, v, where, cotangents):
        with tiled("xla"):
            (out, lse), pull = jax.vjp(lambda *x: (dense if plain else ours)(*x, *where), q, k, v)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *pull(cotangents))))

    compiled = quick(run)
    return lambda *args: jax.tree.map(np.asarray, compiled(*args))


@pytest.mark.parametrize("lengths", ["self", "empty anywhere", "cached", "more queries"])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(case, lengths):
    cu = both_offsets(lengths)
    d, got, plain, truth = Dense(*cu, N, M), [], [], []
    where = d.same & CASES[case][1](d), At(d.q, d.k)
    for seed in range(2):
        x = lambda *shape, n, seed=seed: normal(*shape, seed=10 * n + seed)
        args = x(N, 4, 8, n=1), x(M, 2, 8, n=2), x(M, 2, 6, n=3)
        cotangents = x(N, 4, 6, n=4), x(4, N, n=5)
        got.append(program(case)(*args, cu, cotangents))
        plain.append(program(case, plain=True)(*args, where, cotangents))
        with jax.enable_x64(True):
            args, cotangents = jax.tree.map(lambda y: y.astype(np.float64), (args, cotangents))
            truth.append(program(case, plain=True)(*args, where, cotangents))
    stack = lambda each: {name: np.stack([x[name] for x in each]) for name in each[0]}
    assert_as_accurate(stack(got), [stack(plain)], stack(truth), np.float32)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_a_loop_over_the_sequences(lengths):
    cu_q, cu_k = both_offsets(lengths)
    q, k, v = normal(N, 4, 8), normal(M, 2, 8, seed=1), normal(M, 2, 6, seed=2)
    no_cotangents = np.zeros((N, 4, 6), np.float32), np.zeros((4, N), np.float32)
    got = program("causal")(q, k, v, (cu_q, cu_k), no_cotangents)
    out, lse = np.zeros((N, 4, 6)), np.full((4, N), -np.inf)
    for n in range(len(cu_q) - 1):
        for i in range(cu_q[n], cu_q[n + 1]):
            keys = slice(cu_k[n], max(cu_k[n], cu_k[n + 1] - (cu_q[n + 1] - 1 - i)))
            if keys.start == keys.stop:
                continue
            s = np.einsum("hD,thD->ht", q[i], k[keys].repeat(2, 1)) / np.sqrt(8)
            lse[:, i] = np.log(np.exp(s).sum(-1))
            out[i] = np.einsum("ht,thd->hd", np.exp(s - lse[:, i, None]), v[keys].repeat(2, 1))
    np.testing.assert_allclose(got["out"], out, atol=1e-6)
    np.testing.assert_allclose(got["lse"], lse, atol=1e-6)


# What is visited


def plans(cu_q, cu_k, mask, rows_q, rows_k, block_q, block_k):
    """The schedules of the blocks of queries and of keys."""
    q, k = jnp.zeros((rows_q, 1, 4)), jnp.zeros((rows_k, 1, 4))
    arguments = packing.in_one_row("test", q, k, cu_q, cu_k, mask, None, None)
    problem, operands = validate.attention("test", v=k, **DEFAULTS | arguments)
    return [schedule.make(problem, operands, block_q, block_k, of) for of in ("query", "key")]


def visits(plan):
    """[queries' blocks, keys' blocks] (or the other way) that a schedule of ranges visits; full ones."""
    lo, full_lo, full_hi, hi = (np.asarray(plan.ranges)[:, n, None] for n in range(4))
    j = np.arange(plan.inner)
    return (lo <= j) & (j < hi), (full_lo <= j) & (j < full_hi)


def in_blocks(matrix, block_q, block_k):
    """(any, all) over each block of pairs; no block with a key that does not exist has all."""
    T, t = matrix.shape
    cut = lambda x: x.reshape(-1, block_q, x.shape[1] // block_k, block_k)
    rows, columns = [(0, -T % block_q), (0, 0)], [(0, 0), (0, -t % block_k)]
    fill = lambda x, queries: cut(np.pad(np.pad(x, columns), rows, constant_values=queries))
    return fill(matrix, False).any((1, 3)), fill(matrix, True).all((1, 3))


def lengths(total):
    """Six lengths, some of them 0, that add up to at most `total`."""
    cuts = st.lists(st.integers(0, total), min_size=6, max_size=6).map(sorted)
    return cuts.map(lambda x: np.diff([0, *x]))


masks = st.sampled_from([*MASKS])


@settings(max_examples=40, derandomize=True)
@given(lengths=lengths(61), case=masks)
def test_self_attention_visits_what_has_a_visible_pair(lengths, case):
    """Exactly: whatever the lengths, though the positions start anew in each sequence."""
    cu = offsets(*lengths)
    d = Dense(cu, cu, 61, 61)
    some, _ = in_blocks(d.same & MASKS[case][1](d), 8, 4)
    by_query, by_key = plans(cu, None, MASKS[case][0], 61, 61, 8, 4)
    assert by_query.form == by_key.form == "ranges"
    np.testing.assert_array_equal(visits(by_query)[0], some)
    np.testing.assert_array_equal(visits(by_key)[0], some.T)


@settings(max_examples=40, derandomize=True)
@given(lengths_q=lengths(45), lengths_k=lengths(61), case=masks, caches=st.booleans())
def test_every_visible_pair_is_visited_and_full_blocks_are_full(lengths_q, lengths_k, case, caches):
    lengths_q = np.minimum(lengths_q, lengths_k) if caches else lengths_q
    cu_q, cu_k = offsets(*lengths_q), offsets(*lengths_k)
    d = Dense(cu_q, cu_k, 45, 61)
    some, every = in_blocks(d.same & MASKS[case][1](d), 8, 4)
    by_query, by_key = plans(cu_q, cu_k, MASKS[case][0], 45, 61, 8, 4)
    for plan, must, may in ((by_query, some, every), (by_key, some.T, every.T)):
        visited, full = visits(plan)
        assert (visited | ~must).all() and (may | ~full).all()
        if case == "causal" and caches:  # every query sees a key: from the first to the last, no more
            seen = must.any(1)
            ends = lambda x: np.stack([x.argmax(1), x.shape[1] - x[:, ::-1].argmax(1)])
            np.testing.assert_array_equal(ends(visited)[:, seen], ends(must)[:, seen])
            assert not visited[~seen].any()


def test_a_thousand_documents_cost_what_their_pairs_cost():
    rng = np.random.default_rng(0)
    cu = offsets(*rng.integers(0, 49, 1000))
    rows = int(cu[-1])
    count = lambda cu, mask: [
        int(visits(plan)[0].sum()) for plan in plans(cu, None, mask, rows, rows, 128, 128)
    ]
    blocks = -(-rows // 128)
    whole = blocks * (blocks + 1) // 2
    assert count([0, rows], Causal()) == [whole, whole]
    for of in count(cu, Causal()):
        assert of < 2 * blocks and 40 * of < whole  # 2 x 194 of 18915


def test_new_lengths_do_not_compile_anew():  # H13
    q, k, v = normal(64, 1, 4), normal(64, 1, 4, seed=1), normal(64, 1, 4, seed=2)
    step = quick(lambda cu: varlen_attention(q, k, v, cu, mask=Causal()))
    rng = np.random.default_rng(0)
    for _ in range(20):
        cu = np.array([0, *np.sort(rng.integers(0, 65, 3)), 64])
        out = step(cu)
    assert step._cache_size() == 1
    d = Dense(cu, cu, 64, 64)
    want, _ = plain_attention(q, k, v, d.same & (d.k <= d.q), scale=0.5)
    np.testing.assert_allclose(out, want, atol=1e-6)


# What padding holds


def test_nan_in_the_tail_reaches_nothing():  # H04
    cu = offsets(5, 7)
    clean = [normal(20, 2, 8, seed=n) for n in range(4)]
    dirty = [np.where(np.arange(20)[:, None, None] < 12, x, np.nan) for x in clean]

    @quick
    def run(q, k, v, do):
        out, pull = jax.vjp(lambda *x: varlen_attention(*x, cu, mask=Causal()), q, k, v)
        return out, *pull(do)

    results = run(*dirty)
    for x, y in zip(run(*clean), results):
        np.testing.assert_array_equal(x, y)
        assert (y[12:] == 0).all() and (np.abs(y[1:5]).max((-1, -2)) > 0).all()


@pytest.mark.parametrize(
    "lengths_q, lengths_k, H, h, D",
    [
        ((1, 0, 1), (3, 0, 2), 9, 3, 64),  # H02
        ((0, 0, 0, 1), (0, 0, 0, 1), 21, 7, 120),  # H03
        ((0,), (0,), 2, 1, 8),
        ((), (), 2, 1, 8),
        ((1, 0, 0), (1, 0, 0), 2, 1, 8),
        ((2, 2), (0, 3), 2, 2, 8),  # H05
        ((2, 2), (0, 0), 2, 2, 8),
        ((0, 0), (3, 1), 2, 2, 8),  # H06
    ],
)
def test_empty_sequences(lengths_q, lengths_k, H, h, D):
    cu_q, cu_k = offsets(*lengths_q), offsets(*lengths_k)
    q, k, v = normal(cu_q[-1], H, D), normal(cu_k[-1], h, D, seed=1), normal(cu_k[-1], h, D, seed=2)
    do, d = normal(*q.shape, seed=3), Dense(cu_q, cu_k, len(q), len(k))

    def run(f):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(do)

    got = quick(lambda: run(lambda *x: varlen_attention(*x, cu_q, cu_k, Causal())))()
    assert got[0].shape == q.shape and [g.shape for g in got[1:]] == [x.shape for x in (q, k, v)]
    if min(q.shape[0], k.shape[0]) == 0:
        assert all((x == 0).all() for x in got)
        return
    want = quick(lambda: run(lambda *x: plain_attention(*x, d.same & (d.k <= d.q), scale=D**-0.5)[0]))()
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_decoding_over_caches_of_three_lengths():  # B06
    cu_q, cu_k = offsets(1, 1, 1), offsets(5, 64, 200)
    q, k, v = normal(3, 2, 8), normal(269, 2, 8, seed=1), normal(269, 2, 8, seed=2)
    d = Dense(cu_q, cu_k, 3, 269)
    for mask, visible in ((Causal(), d.same), (Window(16, 0), d.same & (d.q - d.k <= 16))):
        want, _ = plain_attention(q, k, v, visible, scale=8**-0.5)
        with tiled("xla"):
            out = quick(lambda *x, mask=mask: varlen_attention(*x, mask))(q, k, v, cu_q, cu_k)
        np.testing.assert_allclose(out, want, atol=1e-6)


def test_another_sequence_does_not_change_a_row():  # P02
    cu = offsets(9, 6, 12)
    x = [normal(30, 2, 8, seed=n) for n in range(4)]
    other = [np.concatenate([y[:9], 1e4 * y[9:15], y[15:]]) for y in x[:3]]

    @quick
    def run(q, k, v, do):
        with tiled("xla"):
            out, pull = jax.vjp(lambda *x: varlen_attention(*x, cu, mask=Causal()), q, k, v)
        return out, *pull(do)

    apart = np.r_[0:9, 15:30]
    for a, b in zip(run(*x), run(*other, x[3])):
        np.testing.assert_array_equal(a[apart], b[apart])


def test_seventy_thousand_sequences_of_one_token():  # R03
    n = 70_000
    v = normal(n, 1, 1)
    out = quick(varlen_attention)(v, v, v, jnp.arange(n + 1))
    np.testing.assert_allclose(out, v, rtol=1e-6)


# Under transformations, and other arguments


def test_vmap_over_rows_of_other_lengths():
    q, k, v = (normal(3, 24, 2, 8, seed=n) for n in range(3))
    cu = np.array([[0, 5, 24], [0, 0, 20], [0, 12, 13]])
    one = lambda *x: varlen_attention(*x, mask=Causal())
    each = [quick(one)(q[n], k[n], v[n], cu[n]) for n in range(3)]
    np.testing.assert_allclose(quick(jax.vmap(one))(q, k, v, cu), np.stack(each), atol=1e-6)


def test_heads_over_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = [normal(24, 4, 8, seed=n) for n in range(3)]
    cu = offsets(5, 0, 14)
    run = lambda *x: varlen_attention(*x, cu, mask=Causal(), score_mod=Alibi(SLOPES))
    want = quick(run)(*x)
    with jax.set_mesh(mesh):
        spec = jax.P(None, "heads", None)
        parts = [jax.device_put(y, jax.NamedSharding(mesh, spec)) for y in x]
        got = quick(run)(*parts)
        assert jax.typeof(got).sharding.spec == spec
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_bias_sinks_and_dropout():
    cu = offsets(5, 0, 14)
    q, k, v = (normal(24, 2, 8, seed=n) for n in range(3))
    bias, sinks = normal(2, 24, 24, seed=3), normal(2, seed=4)
    d, dropout = Dense(cu, cu, 24, 24), Dropout(0.4, jax.random.key(0))
    more = dict(bias=bias, sinks=sinks, dropout=dropout)
    dense = lambda q: attention(q, k, v, d.same & (d.k <= d.q), implementation="reference", **more)
    got = quick(lambda q: varlen_attention(q, k, v, cu, mask=Causal(), **more))(q)
    np.testing.assert_allclose(got, quick(dense)(q), atol=1e-6)


def test_positions_that_are_given_take_the_place_of_those_within_the_sequence():
    cu = offsets(9, 11)
    q, k, v = (normal(20, 2, 8, seed=n) for n in range(3))
    rng = np.random.default_rng(0)
    q_pos, k_pos = rng.integers(-5, 30, 20), rng.permutation(20)
    visible = Dense(cu, cu, 20, 20).same & (k_pos <= q_pos[:, None])
    more = dict(mask=Causal(), q_positions=q_pos, k_positions=k_pos)
    with tiled("xla"):
        got = quick(lambda q: varlen_attention(q, k, v, cu, **more))(q)
    want, _ = plain_attention(q, k, v, visible, scale=8**-0.5)
    np.testing.assert_allclose(got, want, atol=1e-6)


# Ids and positions


@pytest.mark.parametrize("lengths", LENGTHS)
def test_ids_and_positions(lengths):
    cu, _ = both_offsets(lengths)
    d = Dense(cu, cu, N, N)
    np.testing.assert_array_equal(jflash.segment_ids(cu, N), d.q_ids)
    np.testing.assert_array_equal(jflash.segment_positions(cu, N), d.k[0])


# Errors


Q, K = jnp.ones((12, 4, 8)), jnp.ones((9, 2, 8))
CU, CU_K = [0, 5, 12], [0, 4, 9]
call = functools.partial(varlen_attention, Q, K, K)


@pytest.mark.parametrize(
    "run, error, words",
    [
        (
            lambda: call([5, 7], CU_K),
            ValueError,
            "(cu_seqlens_q=...)` must be integers ... 0, then ... Got [5, 7]",
        ),
        (lambda: call([0, 7, 5], CU_K), ValueError, "(cu_seqlens_q=...)` must never decrease. Got [0, 7, 5]"),
        (lambda: call(CU, [0, 4, 10]), ValueError, "(cu_seqlens_k=...)` must end within the 9 rows. Got"),
        (lambda: call([], CU_K), ValueError, "(cu_seqlens_q=...)` must be integers [sequences + 1]"),
        (
            lambda: call([CU], CU_K),
            ValueError,
            "(cu_seqlens_q=...)` ... Got an array of int32 and shape (1, 3)",
        ),
        (lambda: call([0.0, 12.0], CU_K), TypeError, "(cu_seqlens_q=...)` must be integers"),
        (
            lambda: call(CU, [0, 9]),
            ValueError,
            "must hold as many sequences ... Got 2 of queries and 1 of keys",
        ),
        (lambda: call(CU), ValueError, "(cu_seqlens_k=...)` is needed ... Got 12 rows in q, 9 in k"),
        (lambda: varlen_attention(Q[None], K[None], K[None], CU), ValueError, "(q, k, v)` ... vmap"),
        (lambda: varlen_attention("q", K, K, CU), TypeError, "(q=...)` must be an array"),
        (lambda: call(CU, CU_K, 3), TypeError, "(mask=...)`: a mask must be ... Got"),
        (lambda: call(CU, CU_K, Window(-1, 0)), ValueError, "(mask=Window(...))` left must be"),
        (lambda: call(CU, CU_K, scale="x"), TypeError, "(scale=...)`"),
    ],
)
def test_refusals_of_varlen_attention(as_users_run_it, run, error, words):
    refuses("varlen_attention", run, error, words)


def test_offsets_inside_jit_are_not_checked():
    out = jax.jit(call)(jnp.array([0, 7, 12]), jnp.array([0, 7, 20]))
    assert out.shape == Q.shape


def test_rank_promotion_may_be_an_error():
    masks = Causal(), Window(2, 0) & ~Prefix(1), Prefix(3) | EVERY_THIRD, np.ones((12, 9), bool)
    with jax.numpy_rank_promotion("raise"):
        for mask in masks:
            grad = jax.grad(
                lambda q, mask=mask: varlen_attention(q, K, K, *map(np.array, (CU, CU_K)), mask).sum()
            )
            jax.eval_shape(grad, Q)
        packed, cu = jflash.pack(np.ones((2, 4, 3)), np.array([2, 3]))
        jflash.unpack(packed, cu, 4), jflash.segment_ids(cu, 8), jflash.segment_positions(cu, 8)

"""Masks against a matrix of NumPy's own, and what the schedule makes of them: sound, complete, exact."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import IMPLEMENTATIONS, ON_GPU, QUICK, TILES, widest

from jflash import (
    Causal,
    Dense,
    Function,
    Prefix,
    Segments,
    Window,
    backends,
    grouped,
    schedule,
    validate,
)
from jflash.api import DEFAULTS
from jflash.masks import Moved

B, H = 2, 2


def problem_of(mask, T, t, **more):
    """(problem, operands) of a call with this mask."""
    x = lambda n: jnp.zeros((B, n, H, 4))
    return validate.attention("test", x(T), x(t), x(t), **DEFAULTS | dict(mask=mask) | more)


def dense_by_jflash(problem, operands):
    """The mask as the reference sees it; bool [B, H, T, t]."""
    at = grouped.pairs(problem, operands)
    visible = operands.mask.map(**grouped.by_side(problem))(at)
    return np.broadcast_to(visible, (B, H, 1, problem.T, problem.t))[:, :, 0]


def ids(rng, n, kind):
    x = rng.integers(-1, 4, (B, n))
    return np.sort(x) if kind == "sorted" else x


# name -> (T, t, rng) -> (mask, its matrix [B, H, T, t] by NumPy)
def _matrix(fn):
    def build(T, t, rng):
        i, j = np.arange(T)[:, None] + t - T, np.arange(t)
        mask, matrix = fn(i, j, rng)
        return mask, np.broadcast_to(matrix, (B, H, T, t))

    return build


def _segments(kind):
    def fn(i, j, rng):
        q, k = ids(rng, i.size, kind), ids(rng, j.size, kind)
        same = (q[:, None, :, None] == k[:, None, None, :]) & (q >= 0)[:, None, :, None]
        return Segments(jnp.asarray(q), jnp.asarray(k)), same

    return fn


def _dense(i, j, rng):
    x = rng.random((B, H, i.size, j.size)) < 0.05
    return Dense(jnp.asarray(x)), x


def _prefix(i, j, rng):
    n = rng.integers(0, j.size + 1, B)
    return Prefix(jnp.asarray(n)), (j < n[:, None])[:, None, None, :]


def _moved(mask, matrix):
    """Top-left aligned: the first query and the first key stand at the same position."""

    def fn(i, j, rng):
        by = j.size - i.size
        return Moved(mask, by), matrix(i - by, j)

    return fn


def _combined(i, j, rng):
    segments, same = _segments("sorted")(i, j, rng)
    mask = (Causal() & segments & ~Window(2, 0)) | Prefix(3)
    return mask, ((j <= i) & same & ~((i - j <= 2) & (j <= i))) | (j < 3)


MASKS = {
    "causal": _matrix(lambda i, j, _: (Causal(), j <= i)),
    "window": _matrix(lambda i, j, _: (Window(5, 3), (i - j <= 5) & (j - i <= 3))),
    "window of itself": _matrix(lambda i, j, _: (Window(0, 0), i == j)),
    "window left": _matrix(lambda i, j, _: (Window(4, None), i - j <= 4)),
    "window right": _matrix(lambda i, j, _: (Window(None, 2), j - i <= 2)),
    "window traced": _matrix(lambda i, j, _: (Window(jnp.int32(6), 0), (i - j <= 6) & (j <= i))),
    "window of all": _matrix(lambda i, j, _: (Window(2**31 - 1, 2**31 - 1), j == j)),
    "causal & window": _matrix(lambda i, j, _: (Causal() & Window(7, 9), (j <= i) & (i - j <= 7))),
    "moved causal": _matrix(_moved(Causal(), lambda i, j: j <= i)),
    "moved window": _matrix(_moved(Window(5, 3) & Window(None, 2), lambda i, j: (i - j <= 5) & (j - i <= 2))),
    "segments sorted": _matrix(_segments("sorted")),
    "segments": _matrix(_segments("any order")),
    "prefix": _matrix(_prefix),
    "dense": _matrix(_dense),
    "function": _matrix(
        lambda i, j, _: (
            Function(lambda b, h, q, k: (q + k) % 3 == 0) & Causal(),
            ((i + j) % 3 == 0) & (j <= i),
        )
    ),
    "not": _matrix(lambda i, j, _: (~Causal(), j > i)),
    "array & causal": _matrix(
        lambda i, j, _: ((np.arange(j.size) % 5 != 0) & Causal(), (j % 5 != 0) & (j <= i))
    ),
    "global or local": _matrix(
        lambda i, j, _: (Causal() & (Window(3, 0) | Prefix(2)), (j <= i) & ((i - j <= 3) | (j < 2)))
    ),
    "combined": _matrix(_combined),
}
LENGTHS = [(37, 37), (20, 45), (45, 20)]
BLOCKS = [(16, 4), (5, 16)]


def visited(plan, i, entry):
    """[(block, masked)] that block `i` visits, in order."""
    tables = {name: getattr(plan, name) for name in ("ranges", "order", "counts")}
    plan = dataclasses.replace(plan, **{k: x if x is None else np.asarray(x) for k, x in tables.items()})
    n_masked, masked, n_full, full = plan.visits(i, entry if plan.per_batch else ())
    return [(int(masked(n)), True) for n in range(int(n_masked))] + [
        (int(full(n)), False) for n in range(int(n_full))
    ]


def assert_sound(plan, matrix, block_q, block_k, of):
    """Each visible pair is visited once, each full block is full, no block is visited twice."""
    T, t = matrix.shape[-2:]
    for entry in range(B):
        seen = matrix[entry].any(0)
        every = matrix[entry].all(0)
        for i in range(plan.outer):
            visits = visited(plan, i, (entry,))
            blocks = [j for j, _ in visits]
            assert len(blocks) == len(set(blocks)) and all(0 <= j < plan.inner for j in blocks)
            for j in range(plan.inner):
                q, k = (i, j) if of == "query" else (j, i)
                rows = slice(q * block_q, min((q + 1) * block_q, T))
                columns = slice(k * block_k, min((k + 1) * block_k, t))
                if seen[rows, columns].any():
                    assert j in blocks, (of, i, j)
                if (j, False) in visits:
                    assert every[rows, columns].all() and (k + 1) * block_k <= t, (of, i, j)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_schedules(name, lengths):
    mask, matrix = MASKS[name](*lengths, np.random.default_rng(0))
    problem, operands = problem_of(mask, *lengths)
    np.testing.assert_array_equal(dense_by_jflash(problem, operands), matrix)
    for (block_q, block_k), of in itertools.product(BLOCKS, ("query", "key")):
        plan = schedule.make(problem, operands, block_q, block_k, of)
        assert_sound(plan, matrix, block_q, block_k, of)


@pytest.mark.parametrize(
    "name, form", [("causal", "arithmetic"), ("window traced", "arithmetic"), ("moved window", "arithmetic")]
)
def test_forms_of_masks_over_default_positions(name, form):
    mask, _ = MASKS[name](37, 37, np.random.default_rng(0))
    assert schedule.make(*problem_of(mask, 37, 37), 8, 8, "query").form == form


@pytest.mark.parametrize(
    "name, form",
    [
        ("segments sorted", "ranges"),
        ("prefix", "ranges"),
        ("not", "lists"),
        ("dense", "lists"),
        ("combined", "lists"),
    ],
)
def test_forms_of_other_masks(name, form):
    mask, _ = MASKS[name](37, 37, np.random.default_rng(0))
    assert schedule.make(*problem_of(mask, 37, 37), 8, 8, "query").form == form


def test_positions_that_are_given_have_ranges():
    more = dict(q_positions=jnp.arange(37)[::-1], k_positions=jnp.arange(37) * 2)
    problem, operands = problem_of(Causal(), 37, 37, **more)
    matrix = np.broadcast_to((np.arange(37) * 2) <= np.arange(37)[::-1][:, None], (B, H, 37, 37))
    np.testing.assert_array_equal(dense_by_jflash(problem, operands), matrix)
    for of in ("query", "key"):
        plan = schedule.make(problem, operands, 8, 4, of)
        assert plan.form == "ranges"
        assert_sound(plan, matrix, 8, 4, of)


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "window left", "window right", "causal & window", "moved causal", "moved window"],
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_arithmetic_is_exact(name, lengths):
    """No block without a visible pair is visited, and every full block is known to be one."""
    mask, matrix = MASKS[name](*lengths, np.random.default_rng(0))
    for of in ("query", "key"):
        plan = schedule.make(*problem_of(mask, *lengths), 8, 4, of)
        seen, every = matrix[0, 0], matrix[0, 0]
        for i in range(plan.outer):
            for j, masked in visited(plan, i, (0,)):
                q, k = (i, j) if of == "query" else (j, i)
                rows, columns = slice(8 * q, 8 * q + 8), slice(4 * k, 4 * k + 4)
                assert seen[rows, columns].any()
                ragged = 4 * k + 4 > lengths[1] or 8 * q + 8 > lengths[0]
                assert ragged or plan.inner == 1 or masked == (not every[rows, columns].all())


sorted_ids = lambda n: st.lists(st.integers(0, 9), min_size=n, max_size=n).map(sorted)


@settings(max_examples=60, derandomize=True)
@given(q=sorted_ids(24), k=st.one_of(st.none(), sorted_ids(24)), padding=st.integers(0, 9))
def test_sorted_segments_are_exact(q, k, padding):
    """A block is called empty exactly where it has no visible pair: gaps, padding, two sets of ids."""
    q = np.array([q, q])
    q[:, q.shape[1] - padding :] = -1
    k_ids = q if k is None else np.array([k, k])
    mask = Segments(jnp.asarray(q), None if k is None else jnp.asarray(k_ids))
    problem, operands = problem_of(mask, 24, 24)
    some, _ = schedule.classify(problem, operands, 4, 6)
    matrix = (q[0][:, None] == k_ids[0]) & (q[0] >= 0)[:, None]
    np.testing.assert_array_equal(some[0], matrix.reshape(6, 4, 4, 6).any((1, 3)))


leaves = st.sampled_from(["causal", "window", "segments", "prefix", "dense", "not", "window of itself"])
trees = st.recursive(leaves, lambda x: st.tuples(st.sampled_from("&|~"), x, x), max_leaves=4)


def build(tree, T, t, rng):
    if isinstance(tree, str):
        return MASKS[tree](T, t, rng)
    operator, left, right = tree
    (a, x), (b, y) = build(left, T, t, rng), build(right, T, t, rng)
    return {"&": (a & b, x & y), "|": (a | b, x | y), "~": (~a, ~x)}[operator]


# Few shapes: an operation is compiled for each, and its second example costs nothing.
@settings(max_examples=30, derandomize=True)
@given(tree=trees, lengths=st.sampled_from([(9, 21), (16, 3), (1, 16)]), seed=st.integers(0, 99))
def test_any_combination_is_sound(tree, lengths, seed):
    mask, matrix = build(tree, *lengths, np.random.default_rng(seed))
    problem, operands = problem_of(mask, *lengths)
    np.testing.assert_array_equal(dense_by_jflash(problem, operands), matrix)
    for of in ("query", "key"):
        assert_sound(schedule.make(problem, operands, 4, 8, of), matrix, 4, 8, of)


def poisoned(arrays, entry, blocks, size):
    """Copies with NaN in these blocks of rows of a batch entry."""
    arrays = [x.copy() for x in arrays]
    for x in arrays:
        for j in blocks:
            x[entry, size * j : size * (j + 1)] = np.nan
    return arrays


# Of the first tiles of `TILES`: (length, queries and keys of a tile forward, the same backward).
LAID_OUT = dict(
    xla=(96, (16, 16), (16, 16)), triton=(96, (16, 16), (16, 16)), mosaic=(512, (128, 64), (64, 128))
)


@pytest.mark.parametrize("name", ["window", "segments sorted", "combined", "prefix"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_blocks_are_never_loaded(implementation, name):
    """NaN in every block that a block of the other side does not visit has no effect on it.

    Forward in k and v, backward in q and the cotangent of out.
    """
    [row] = [row for row in backends.TABLE if row.name == implementation]
    module, config = row.load(), TILES[implementation][0]
    T, *sizes = LAID_OUT[implementation]
    mask, _ = MASKS[name](T, T, np.random.default_rng(3))
    problem, operands = problem_of(mask, T, T)
    dtype = jnp.dtype(widest(implementation))
    problem = dataclasses.replace(problem, interpret=not ON_GPU, dtype=dtype)
    rng = np.random.default_rng(4)
    q, k, v, do = (rng.standard_normal((B, T, H, 4)).astype(dtype) for _ in range(4))
    plan = functools.partial(schedule.make, problem, operands)
    with_ = lambda q, k, v: dataclasses.replace(operands, q=q, k=k, v=v)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def forward(q, k, v, do):
        return module.forward(problem, with_(q, k, v), config, plan)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def backward(q, k, v, do):
        lse = jnp.where(lse_of_rows == -jnp.inf, jnp.inf, lse_of_rows)
        grads = module.backward(problem, with_(q, k, v), config, plan, lse, delta, do, frozenset())
        return grads["k"], grads["v"]

    out, lse_of_rows = map(np.asarray, forward(q, k, v, do))
    delta = jnp.einsum("bTHd,bTHd->bHT", out, do)
    holes = 0
    for run, of, (block_q, block_k) in zip((forward, backward), ("query", "key"), sizes):
        blocks = plan(block_q, block_k, of)
        here, there = (block_q, block_k) if of == "query" else (block_k, block_q)
        clean = list(map(np.asarray, run(q, k, v, do)))
        for i, entry in itertools.product((0, 2, blocks.outer - 1), range(B)):
            unvisited = set(range(blocks.inner)) - {j for j, _ in visited(blocks, i, (entry,))}
            holes += len(unvisited)
            if of == "query":
                got = run(q, *poisoned((k, v), entry, unvisited, there), do)
            else:
                bad_q, bad_do = poisoned((q, do), entry, unvisited, there)
                got = run(bad_q, k, v, bad_do)
            for x, y in zip(clean, map(np.asarray, got)):
                x, y = (z[entry].T if z.ndim == 3 else z[entry] for z in (x, y))  # lse is [B, H, T]
                rows = slice(here * i, here * (i + 1))
                np.testing.assert_array_equal(y[rows], x[rows])
    assert holes > 0

"""`jflash.dot_product_attention` beside `jax.nn`'s: where that is right, and where it is not."""

import inspect
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import assert_as_accurate
from arrays import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import Alibi, Causal, Dropout, Function, Segments, Window, grouped, schedule

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

B, N, K, H = 2, 4, 2, 8
SAMPLES = 8
ours, theirs = jflash.dot_product_attention, jax.nn.dot_product_attention


def qkv(T=21, S=21, K=K, dtype=jnp.float32, seed=0):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes))


def lengths(*n):
    return jnp.array(n, jnp.int32)


def test_the_signature_begins_as_that_of_jax():
    parameters = lambda f: [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
    jaxs = parameters(theirs)
    assert parameters(ours)[: len(jaxs)] == jaxs


# The same numbers


def program(function, wanted, **settings):
    """A compiled function of (floats, cotangent): out, then the gradients of the floats, by name."""

    def run(floats, W):
        out, pull = jax.vjp(lambda x: function(**x, **settings), floats)
        grads = pull(W)[0]
        return dict(out=out) | {f"d_{name}": grads[name] for name in wanted}

    # Compiled for a CPU, `jax.nn` refuses float16.
    return run if function is theirs and wanted == () else jax.jit(run)


def drawn(T, S, K, bias, dtype, seed=0):
    shapes = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, H))
    shapes |= {} if bias is None else dict(bias=bias)
    floats = {
        name: normal(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())
    }
    return floats, normal(B, T, N, H, seed=seed + 9, dtype=dtype)


MASK = np.random.default_rng(9).random((B, N, 21, 21)) < 0.6
MASK |= np.eye(21, dtype=bool)  # every row sees a key
# name: (T, S, key heads, shape of the bias, settings)
CASES = {
    "plain": (21, 21, 4, None, dict()),
    "grouped": (21, 21, 2, None, dict(scale=0.2)),
    "one key head": (21, 21, 1, None, dict(is_causal=True)),
    "causal, more keys": (19, 37, 2, (1, 1, 1, 37), dict(is_causal=True)),
    "causal, more queries": (37, 19, 2, (N, 37, 19), dict(is_causal=True)),
    "window": (37, 37, 2, None, dict(local_window_size=(3, 2))),
    "window back": (21, 37, 2, (21, 37), dict(local_window_size=(20, 0))),
    "window, causal": (37, 37, 2, None, dict(local_window_size=5, is_causal=True)),
    "mask of heads": (21, 21, 2, (B, N, 21, 21), dict(mask=MASK)),
    "mask of keys": (21, 21, 2, (B, 1, 21, 1), dict(mask=MASK[:, :1, :1], is_causal=True)),
    "lengths of keys": (21, 21, 2, (B, N, 1, 21), dict(key_value_seq_lengths=lengths(21, 4))),
    "lengths of queries": (19, 37, 2, None, dict(query_seq_lengths=lengths(7, 40), is_causal=True)),
    "lengths": (
        21,
        21,
        2,
        (1, N, 21, 21),
        dict(query_seq_lengths=lengths(10, 21), key_value_seq_lengths=lengths(5, 21)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    *shape, settings = CASES[name]
    floats, W = drawn(*shape, jnp.float32)
    got, wanted = (program(f, tuple(floats), **settings)(floats, W) for f in (ours, theirs))
    for name, x in got.items():
        assert x.dtype == jnp.float32 and x.shape == wanted[name].shape
        np.testing.assert_allclose(x, wanted[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["grouped", "causal, more keys", "lengths"])
def test_bfloat16(name):
    """As accurate as `jax.nn`; the truth is the reference in float64."""
    *shape, settings = CASES[name]
    samples = [drawn(*shape, jnp.bfloat16, 10 * seed) for seed in range(16)]
    wanted = tuple(samples[0][0])

    def stacked(call, samples):
        each = [jax.device_get(call(*x)) for x in samples]
        return {key: np.stack([x[key] for x in each]) for key in each[0]}

    got = stacked(program(ours, wanted, **settings), samples)
    same = stacked(program(theirs, wanted, **settings), samples)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), samples)
        truth = stacked(program(ours, wanted, implementation="reference", **settings), wide)
    assert all(x.dtype == jnp.bfloat16 for x in got.values())
    assert_as_accurate(got, [same], truth, jnp.bfloat16)


def test_float16():
    floats, W = drawn(21, 21, 1, None, jnp.float16)
    got, wanted = (program(f, (), is_causal=True)(floats, W) for f in (ours, theirs))
    assert got["out"].dtype == jnp.float16
    np.testing.assert_allclose(got["out"].astype(np.float32), wanted["out"].astype(np.float32), atol=2e-3)


def visible(T, S, **settings):
    """The pairs that the call shows, [B, N, T, S], without computing attention."""
    calls = []

    def attend(call, operands):
        calls.append((call.problem, operands))
        return jnp.zeros((B, T, N, H)), jnp.zeros((B, N, T))

    with mock.patch.object(jflash.rules, "attend", attend):
        ours(jnp.zeros((B, T, N, H)), *[jnp.zeros((B, S, K, H))] * 2, **settings)
    problem, operands = calls[0]
    shown = operands.mask.map(**grouped.by_side(problem))(grouped.pairs(problem, operands))
    return np.broadcast_to(shown, (B, K, N // K, T, S)).reshape(B, N, T, S)


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (0, 3), (40, 1), 0, np.int64(2), (None, 1)], ids=str)
@pytest.mark.parametrize("T, S", [(13, 29), (29, 13), (21, 21)])
def test_windows_are_top_left(T, S, window):  # F02, F06, F13
    left, right = window if isinstance(window, tuple) else (window, window)
    i, j = np.arange(T)[:, None], np.arange(S)
    near = (i - (99 if left is None else left) <= j) & (j <= i + right)
    n, m = np.array([[7], [T]]), np.array([[S], [4]])
    within = (i < n[..., None, None]) & (j < m[..., None, None])
    sizes = dict(query_seq_lengths=n[:, 0], key_value_seq_lengths=m[:, 0])
    for causal, lengths in itertools.product((False, True), (None, sizes)):
        wanted = near & (j <= i if causal else True) & (within if lengths else True)
        got = visible(T, S, local_window_size=window, is_causal=causal, **lengths or {})
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


def test_traced_settings():
    q, k, v = qkv(13, 29)
    call = lambda f: jax.jit(lambda s, l, r: f(q, k, v, scale=s, local_window_size=(l, r), is_causal=True))
    mine, jaxs = call(ours), call(theirs)
    for window in ((3, 0), (1, 5)):
        np.testing.assert_allclose(mine(0.3, *window), jaxs(0.3, *window), atol=1e-5)


@pytest.mark.parametrize("which", [(0, 0, 0), (1, 0, 0), (0, 1, 1)])
def test_one_sequence_has_no_batch_axis(which):
    """Arrays of three axes count as one batch entry, in any mixture; what comes out follows the query."""
    q, k, v = (x[:1] if four else x[0] for x, four in zip(qkv(13, 29), which))
    bias, mask = normal(N, 13, 29, seed=5), (MASK[0, :1, :13, :1]) | (np.arange(29) > 3)
    settings = dict(is_causal=True, query_seq_lengths=lengths(9), return_residual=True)
    run = lambda f: jax.jit(lambda *x: f(*x, **settings))(q, k, v, bias, mask)
    (a, lse_a), (b, lse_b) = run(ours), run(theirs)
    assert a.shape == b.shape and lse_a.shape == lse_b.shape == q.shape[:-1]
    seen = np.asarray(lse_b).reshape(13, N) > -1e30  # rows that see a key
    assert (np.asarray(lse_a).reshape(13, N) == -np.inf)[~seen].all() and 0 < seen.sum() < seen.size
    np.testing.assert_allclose(a.reshape(13, N, H)[seen], b.reshape(13, N, H)[seen], atol=1e-5)
    np.testing.assert_allclose(lse_a.reshape(13, N)[seen], lse_b.reshape(13, N)[seen], atol=1e-5)


# Where jax.nn gives something else


def test_the_residual_is_float32_and_differentiable():
    q, k, v = qkv(dtype=jnp.bfloat16)

    def run(f):
        total = lambda q: (lambda out, lse: (lse.astype(jnp.float32).sum(), (out, lse)))(
            *f(q, k, v, is_causal=True, return_residual=True)
        )
        return jax.jit(jax.grad(total, has_aux=True))(q)

    (dq, (out, lse)), (no_dq, (_, coarse)) = run(ours), run(theirs)
    assert out.dtype == coarse.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert lse.shape == coarse.shape == (B, 21, N)
    np.testing.assert_allclose(lse, coarse.astype(np.float32), atol=0.03)
    assert np.abs(dq.astype(np.float32)).max() > 0 and (no_dq == 0).all()


def test_rows_without_keys_are_zero():  # A10
    """`jax.nn` gives them the mean of all values, and values a gradient."""
    T, S = 29, 13
    q, k, v = qkv(T, S)
    settings = dict(local_window_size=(2, 0), key_value_seq_lengths=lengths(S, 5))
    empty = np.stack([np.arange(T) - 2 >= n for n in (S, 5)])
    W = jnp.where(empty[..., None, None], normal(*q.shape, seed=4), 0)
    call = jax.jit(lambda *x: ours(*x, return_residual=True, **settings))
    (out, lse), pull = jax.vjp(call, q, k, v)
    assert (out[empty] == 0).all() and (lse[empty] == -np.inf).all() and np.isfinite(lse[~empty]).all()
    assert all((g == 0).all() for g in pull((W, jnp.zeros_like(lse))))
    mean, pull = jax.vjp(jax.jit(lambda v: theirs(q, k, v, **settings)), v)
    np.testing.assert_allclose(mean[1, -1, 0], v[1, :, 0].mean(0), atol=1e-5)
    assert np.abs(pull(W)[0]).max() > 0


def test_padding_may_hold_nan():  # A06, H09
    q, k, v = qkv()
    n, m = lengths(12, 21), lengths(21, 4)
    past = lambda n: np.arange(21)[:, None, None] >= np.asarray(n)[:, None, None, None]
    W = normal(*q.shape, seed=4)

    @jax.jit
    def run(fill):
        filled = [jnp.where(past(x), fill, y) for x, y in zip((n, m, m, n), (q, k, v, W))]
        call = lambda *x: ours(*x, query_seq_lengths=n, key_value_seq_lengths=m)
        out, pull = jax.vjp(call, *filled[:3])
        return out, *pull(filled[3])

    clean = run(0.0)
    for fill in (np.nan, np.inf, 3e38):
        for x, y in zip(run(fill), clean):
            np.testing.assert_array_equal(x, y)


def test_keys_after_all_queries_may_hold_nan():
    """Top-left causal attention of 13 queries sees 13 keys, whatever follows."""
    q, k, v = qkv(13, 29)
    poisoned = [x.at[:, 13:].set(np.nan) for x in (k, v)]
    W = normal(*q.shape, seed=4)

    @jax.jit
    def run(k, v):
        out, pull = jax.vjp(lambda *x: ours(*x, is_causal=True), q, k, v)
        return out, *pull(W)

    for x, y in zip(run(*poisoned), run(k, v)):
        np.testing.assert_array_equal(x, y)


def test_values_of_another_head_size_and_several_batch_axes():
    q, k, v = qkv(13, 29)
    assert ours(q, k, v[..., :3]).shape == (B, 13, N, 3)
    lead = [x.reshape(1, B, *x.shape[1:]) for x in (q, k, v)]
    n = lengths(20, 4)
    got = ours(*lead, is_causal=True, key_value_seq_lengths=n[None])
    np.testing.assert_allclose(got[0], ours(q, k, v, is_causal=True, key_value_seq_lengths=n), atol=1e-6)


# Blocks are skipped


@pytest.mark.parametrize("T, S", [(40, 40), (24, 48), (48, 24)])
@pytest.mark.parametrize(
    "settings, form",
    [
        (dict(is_causal=True), "arithmetic"),
        (dict(local_window_size=(4, 0)), "arithmetic"),
        (dict(is_causal=True, local_window_size=3), "arithmetic"),
        (dict(is_causal=True, key_value_seq_lengths=lengths(20, 9)), "ranges"),
        (dict(query_seq_lengths=lengths(20, 9)), "ranges"),
        (dict(is_causal=True, score_mod=Alibi(np.ones(N, np.float32))), None),
    ],
    ids=lambda x: "" if x is None or isinstance(x, str) else " ".join(x),
)
def test_what_is_static_stays_static(T, S, settings, form):
    if form is None:  # positions are given where a score modifier asks for them
        form = "arithmetic" if T == S else "ranges"
    forms = []
    make = schedule.make

    def recorded(*args):
        forms.append(make(*args).form)
        return make(*args)

    with mock.patch.object(schedule, "make", recorded):
        jax.eval_shape(lambda q, k, v: ours(q, k, v, **settings), *qkv(T, S))
    assert set(forms) == {form}


def test_equal_lengths_make_the_program_of_attention():
    q, k, v = qkv()
    text = lambda f: jax.jit(f).lower(q, k, v).as_text()
    by_flag, by_mask = (lambda *x: ours(*x, is_causal=True)), (lambda *x: jflash.attention(*x, Causal()))
    by_flag.__name__ = by_mask.__name__ = "call"
    assert text(by_flag) == text(by_mask)


# Transformations


@pytest.mark.parametrize("axes", [(0, 0, 0, None, None), (0, None, None, 0, 0)])
def test_vmap(axes):
    """Over entries without a batch axis of their own, as `jax.nn` is mapped."""
    q, k, v = qkv()
    arrays = [q, k, v, normal(B, N, 1, 21, seed=5), jnp.asarray(MASK[:, :1])]
    arrays = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes)]
    W = normal(B, 21, N, H, seed=6)

    def run(f):
        out, pull = jax.vjp(lambda *x: jax.vmap(f, in_axes=axes)(*x, arrays[4]), *arrays[:4])
        return out, *pull(W)

    run = jax.jit(run, static_argnums=0)
    for x, y in zip(run(ours), run(theirs)):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_sharded_over_batch_and_heads(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    arrays = (*qkv(13, 29), normal(1, N, 13, 29, seed=5))
    W = normal(B, 13, N, H, seed=6)

    @jax.jit
    def run(W, *arrays):
        call = lambda *x: ours(*x, is_causal=True, local_window_size=(9, 0))
        out, pull = jax.vjp(call, *arrays)
        return out, *pull(W)

    specs = P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P("x", None, "y"), P(None, "y")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((W, *arrays), specs)]
    with jax.set_mesh(mesh):
        sharded = run(*placed)
    for x, y in zip(sharded, run(W, *arrays)):
        np.testing.assert_allclose(x, y, atol=1e-5)
    if kind == AxisType.Explicit:
        assert sharded[0].sharding.spec == P("x", None, "y", None)


def test_rank_promotion_may_be_an_error():
    """JAX's own tests run under this setting, so `jax.nn` works under it."""
    n = lengths(5, 9)
    settings = dict(is_causal=True, local_window_size=3, query_seq_lengths=n, key_value_seq_lengths=n)
    mask, bias = jnp.asarray(MASK[0, 0]), normal(21)
    call = lambda f: jax.grad(lambda *x: f(*x, bias, mask, **settings).sum(), (0, 1, 2))
    with jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(call(ours), *qkv()) == jax.eval_shape(call(theirs), *qkv())


# What is our own


@pytest.mark.parametrize("T, S", [(13, 29), (29, 13)])
def test_score_modifiers_see_top_left_positions(T, S):
    q, k, v = qkv(T, S)
    slopes = jnp.array([0.5, 0.2, 0.1, 0.7])
    far = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S))
    got = jax.jit(lambda s: ours(q, k, v, is_causal=True, score_mod=Alibi(s)))(slopes)
    bias = -slopes[:, None, None] * far
    wanted = jax.jit(lambda b: theirs(q, k, v, b, is_causal=True))(bias)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("T, S", [(21, 21), (13, 29)])
def test_masks_of_jflash_see_top_left_positions(T, S):
    i, j = np.arange(T)[:, None], np.arange(S)
    for mask, wanted in [
        (Window(4, 1), (i - j <= 4) & (j - i <= 1)),
        (Function(every_third) & Causal(), ((i - j) % 3 == 0) & (j <= i)),
        (Segments(np.arange(T) // 6, np.arange(S) // 6) & ~Window(1, 0), near_segments(i, j)),
    ]:
        np.testing.assert_array_equal(visible(T, S, mask=mask), np.broadcast_to(wanted, (B, N, T, S)))


def every_third(b, h, q, k):
    return (q - k) % 3 == 0


def near_segments(i, j):
    return (i // 6 == j // 6) & ~((i - j <= 1) & (j <= i))


def test_positions_that_are_given_replace_the_default():
    i, j = np.arange(13)[:, None], np.arange(29)
    got = visible(13, 29, is_causal=True, local_window_size=(5, 0), q_positions=np.arange(16, 29))
    np.testing.assert_array_equal(got[0, 0], (j <= i + 16) & (j >= i + 11))
    got = visible(13, 29, is_causal=True, k_positions=np.arange(29) - 3)
    np.testing.assert_array_equal(got[0, 0], j - 3 <= i)


def test_other_extras_are_those_of_attention():
    q, k, v = qkv()
    extras = dict(sinks=normal(N, seed=3), dropout=Dropout(0.4, jax.random.key(1)), precision="highest")
    extras |= dict(deterministic=True)
    got = ours(q, k, v, is_causal=True, **extras)
    np.testing.assert_array_equal(got, jflash.attention(q, k, v, Causal(), **extras))
    assert np.abs(got - ours(q, k, v, is_causal=True)).max() > 0.1


# Errors


@pytest.mark.parametrize(
    "settings, error, words",
    [
        (dict(implementation="cudnn"), ValueError, "(implementation=...)` must be None ... cuDNN is behind"),
        (dict(is_causal=1), TypeError, "(is_causal=...)` must be a Python bool ... Got 1"),
        (dict(return_residual=None), TypeError, "(return_residual=...)` must be a Python bool"),
        (dict(local_window_size=(-1, 0)), ValueError, "(local_window_size=...)` left must be None (open)"),
        (dict(local_window_size=-1), ValueError, "None opens a side; -1 does not."),
        (dict(local_window_size=(1, 2, 3)), ValueError, "must be a pair (left, right). Got 3 values"),
        (dict(local_window_size=1.5), TypeError, "(local_window_size=...)` left must be"),
        (
            dict(query_seq_lengths=lengths(1, 2, 3)),
            ValueError,
            "(query_seq_lengths=...)` must be integers [*batch] ... batch=(2,). Got ... (3,)",
        ),
        (dict(query_seq_lengths=3), ValueError, "(query_seq_lengths=...)` must be integers [*batch]"),
        (
            dict(key_value_seq_lengths=jnp.ones(B)),
            ValueError,
            "(key_value_seq_lengths=...)` must be integers ... float32",
        ),
        (dict(mask=jnp.ones((21, 21))), TypeError, "(mask=...)`: a mask must be ... 0/1 array"),
        (dict(mask=jnp.ones((B, K, 21, 21), bool)), ValueError, "(mask=Dense(...))` must broadcast to"),
        (dict(bias=jnp.ones((21, 21), int)), TypeError, "(bias=...)` is added to the scores"),
        (dict(query=jnp.ones((21, 8))), ValueError, "(q, k, v)` must have the same number of axes"),
        (dict(value="v"), TypeError, "(value=...)` must be an array. Got 'v'"),
        (dict(key=jnp.ones((B, 21, 3, H))), ValueError, "dot_product_attention(k, v)` must agree"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_errors(as_users_run_it, settings, error, words):
    pattern = "(?s)^`dot_product_attention\\(.*" if words.startswith("(") else "(?s)"
    pattern += ".*".join(re.escape(word) for word in words.removeprefix("(").split(" ... "))
    with pytest.raises(error, match=pattern):
        ours(**dict(zip(("query", "key", "value"), qkv())) | settings)

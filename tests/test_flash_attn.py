"""`jflash.flash_attn` against what PyTorch's attention gave once (golden/flash_attn.npz), and its own rules.

Tests of public bug reports are named by their ids, as in test_failure_cases_*.py.
"""

import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from golden.flash_attn import read

import jflash
from jflash import Alibi, Causal, Dropout, SoftCap, Window
from jflash.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

B, H, h, D, S = 2, 4, 2, 8, 12


FUNCTION, STEP = read("function"), read("step")


def qkv(T, t, dtype=jnp.float32):
    return normal(B, T, H, D, dtype=dtype), *(normal(B, t, h, D, seed=i, dtype=dtype) for i in (1, 2))


def step(T=1, n=1, dtype=jnp.float32):
    """q, k_cache, v_cache and with `n` k and v."""
    shapes = (B, T, H, D), (B, S, h, D), (B, S, h, D), (B, n, h, D), (B, n, h, D)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes[: 5 if n else 3])]


# PyTorch's numbers


@pytest.mark.parametrize("name", FUNCTION)
def test_the_numbers_of_pytorch(name):
    case = FUNCTION[name]
    settings = case["settings"]

    @jax.jit
    def run(q, k, v, do):
        call = lambda *x: flash_attn_func(*x, return_attn_probs=True, **settings)
        (out, lse, none), pull = jax.vjp(call, q, k, v)
        assert none is None
        return dict(out=out, lse=lse) | dict(zip(("dq", "dk", "dv"), pull((do, jnp.zeros_like(lse), None))))

    got = run(*(case[name] for name in ("q", "k", "v", "do")))
    for key, x in got.items():
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, case[key], atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", STEP)
def test_the_numbers_of_a_step_over_a_cache(name):
    case = STEP[name]
    settings = case["settings"]
    outputs = ("settings", "out", "lse", "new_k_cache", "new_v_cache")
    arrays = {key: x for key, x in case.items() if key not in outputs}
    call = lambda arrays: flash_attn_with_kvcache(**arrays, **settings, return_softmax_lse=True)
    got = jax.jit(call)(arrays)
    assert len(got) == (4 if "k" in arrays else 2)
    for key, x in zip(outputs[1:], got):
        np.testing.assert_allclose(x, case[key], atol=1e-5, err_msg=key)


# The functions


def test_packed_arrays():
    q, k, v = qkv(9, 9)
    settings = dict(causal=True, window_size=(4, -1), softcap=2.0)
    wanted = flash_attn_func(q, k, v, **settings)
    np.testing.assert_array_equal(flash_attn_kvpacked_func(q, jnp.stack([k, v], 2), **settings), wanted)
    qkv_ = jnp.stack([q, q + 1, q - 1], 2)
    wanted = flash_attn_func(q, q + 1, q - 1, **settings)
    np.testing.assert_array_equal(flash_attn_qkvpacked_func(qkv_, **settings), wanted)
    W = normal(*q.shape, seed=5)
    grad = lambda f, *x: jax.grad(lambda *x: (f(*x, **settings) * W).sum(), range(len(x)))(*x)
    packed = grad(flash_attn_qkvpacked_func, qkv_)[0]
    for x, y in zip(jnp.moveaxis(packed, 2, 0), grad(flash_attn_func, q, q + 1, q - 1)):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_each_argument_becomes_one_of_attention():
    q, k, v = qkv(5, 9)
    slopes, key = normal(H, seed=4), jax.random.key(3)
    got = flash_attn_func(q, k, v, 0.3, 0.4, True, (3, 9), 1.5, slopes, True, dropout_key=key)
    mask = Causal() & Window(3, 9)
    settings = dict(scale=0.4, score_mod=(SoftCap(1.5), Alibi(slopes)), dropout=Dropout(0.3, key))
    np.testing.assert_array_equal(got, jflash.attention(q, k, v, mask, deterministic=True, **settings))


def test_positional_arguments_are_those_of_the_package():
    names = lambda f: [p.name for p in inspect.signature(f).parameters.values() if p.kind != p.KEYWORD_ONLY]
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    assert names(flash_attn_func) == ["q", "k", "v", *common.split()]
    assert names(flash_attn_kvpacked_func) == ["q", "kv", *common.split()]
    assert names(flash_attn_qkvpacked_func) == ["qkv", *common.split()]
    cached = """q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad
    block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits
    return_softmax_lse"""
    assert names(flash_attn_with_kvcache) == cached.split()


def test_A10_rows_without_keys_are_zero():
    """The package's own example: five queries over two keys, aligned bottom-right."""
    q, k = jnp.zeros((1, 5, 1, 8)), jnp.zeros((1, 2, 1, 8))
    v = jnp.array([[1.0, 10.0], [3.0, 30.0]])[None, :, None]
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    np.testing.assert_allclose(out[0, :, 0], [[0, 0]] * 3 + [[1, 10], [2, 20]], atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [-np.inf] * 3 + [0, np.log(2)], atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (None, None), [-1, None], (np.int64(-1), -1)], ids=str)
def test_F12_minus_one_opens_a_side(window):
    q, k, v = qkv(5, 9)
    text = lambda **settings: (
        jax.jit(lambda q, k, v: flash_attn_func(q, k, v, **settings)).lower(q, k, v).as_text()
    )
    assert text(window_size=window) == text()
    assert text(window_size=window, causal=True) == text(causal=True) != text()


@pytest.mark.parametrize("softcap", [0, 0.0, None])
def test_J06_a_cap_of_zero_is_none(softcap):
    q, k, v = qkv(5, 9)
    np.testing.assert_array_equal(flash_attn_func(q, k, v, softcap=softcap), flash_attn_func(q, k, v))


def test_slopes_and_a_traced_cap_have_gradients():
    q, k, v = qkv(5, 9)
    total = lambda slopes, cap: flash_attn_func(q, k, v, alibi_slopes=slopes, softcap=cap)[..., 0].sum()
    slopes, cap = jax.grad(total, (0, 1))(normal(B, H), jnp.float32(2.0))
    assert slopes.shape == (B, H) and (slopes != 0).all() and cap != 0


def test_I05_dropout_needs_a_key():
    q, k, v = qkv(5, 9)
    with pytest.raises(ValueError, match=r"(?s)`flash_attn_func\(dropout_p=.*needs a key.*dropout_key=jax"):
        flash_attn_func(q, k, v, 0.1)
    np.testing.assert_array_equal(flash_attn_func(q, k, v, 0), flash_attn_func(q, k, v))
    one, two = (flash_attn_func(q, k, v, 0.5, dropout_key=jax.random.key(i)) for i in (0, 1))
    assert np.abs(one - two).max() > 0.1


# The cache


def test_B02_a_step_of_two_tokens_is_two_steps_of_one():
    q, k_cache, v_cache, k, v = step(T=2, n=2)
    used = jnp.array([3, 7])
    both, *caches = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)
    one = []
    for i in range(2):
        row = lambda x, i=i: x[:, i : i + 1]
        new = dict(k=row(k), v=row(v), cache_seqlens=used + i, causal=True)
        out, k_cache, v_cache = flash_attn_with_kvcache(row(q), k_cache, v_cache, **new)
        one.append(out)
    np.testing.assert_allclose(jnp.concatenate(one, 1), both, atol=1e-6)
    for x, y in zip(caches, (k_cache, v_cache)):
        np.testing.assert_array_equal(x, y)


def test_a_whole_cache_needs_no_lengths():
    """Nothing is known only at run time then, so blocks are skipped by arithmetic."""
    q, k_cache, v_cache = step(T=3, n=0)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, causal=True, window_size=(4, 0))
    wanted = flash_attn_func(q, k_cache, v_cache, causal=True, window_size=(4, 0))
    np.testing.assert_array_equal(got, wanted)
    full = flash_attn_with_kvcache(q, k_cache, v_cache, causal=True, window_size=(4, 0), cache_seqlens=S)
    np.testing.assert_allclose(full, wanted, atol=1e-6)


def test_N03_rows_outside_of_the_length_may_hold_nan():
    q, k_cache, v_cache, k, v = step(T=2, n=2)
    used, left = jnp.array([3, 8]), jnp.array([0, 2])
    row = np.arange(S)[:, None, None]
    unused = (row < np.asarray(left)[:, None, None, None]) | (row >= np.asarray(used)[:, None, None, None])

    def run(fill):
        caches = [jnp.where(unused, fill, x) for x in (k_cache, v_cache)]
        settings = dict(cache_seqlens=used, cache_leftpad=left, causal=True, return_softmax_lse=True)
        return flash_attn_with_kvcache(q, *caches, k, v, **settings)[:2]

    for x, y in zip(run(np.nan), run(0.0)):
        np.testing.assert_array_equal(x, y)


def test_N07_appending_beyond_the_cache():
    """What is in it stays, what does not fit is dropped; an int is checked."""
    q, k_cache, v_cache, k, v = step(T=1, n=3)
    used = jnp.array([S - 1, S])
    _, *caches = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used)
    for old, new, x in zip((k_cache, v_cache), caches, (k, v)):
        np.testing.assert_array_equal(new[0, : S - 1], old[0, : S - 1])
        np.testing.assert_array_equal(new[0, S - 1], x[0, 0])
        np.testing.assert_array_equal(new[1], old[1])
    rule = r"`flash_attn_with_kvcache\(cache_seqlens=...\)` must be between 0 and 9: the cache has 12 rows"
    for n in (10, -1, np.int32(12)):
        with pytest.raises(ValueError, match=rule):
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=n)


def test_N10_caches_of_length_zero():
    q, k_cache, v_cache = step(T=2, n=0)
    used = jnp.array([0, 4])
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, causal=True, return_softmax_lse=True
    )
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all() and np.isfinite(lse[1]).all()
    np.testing.assert_allclose(
        out[1:], flash_attn_func(q[1:], k_cache[1:, :4], v_cache[1:, :4], causal=True), atol=1e-6
    )


@pytest.mark.parametrize("splits", [1, 3, 64])
def test_N12_the_number_of_splits_changes_nothing(splits):
    arrays = step(n=0)
    got = flash_attn_with_kvcache(*arrays, cache_seqlens=7, num_splits=splits)
    np.testing.assert_array_equal(got, flash_attn_with_kvcache(*arrays, cache_seqlens=7))


def test_N13_a_cache_of_another_dtype_is_refused():
    q, *others = step()
    with pytest.raises(
        TypeError, match=r"(?s)`flash_attn_with_kvcache\(q, k_cache.*must have one dtype.*bfloat16"
    ):
        flash_attn_with_kvcache(q.astype(jnp.bfloat16), *others, cache_seqlens=3)


def test_N15_every_argument_of_the_cache_has_an_effect():
    q, k_cache, v_cache, k, v = step(T=2, n=2)
    angles = np.arange(S)[:, None] * 10.0 ** -np.arange(4)
    tables = dict(rotary_cos=np.cos(angles), rotary_sin=np.sin(angles))
    used = dict(cache_seqlens=jnp.array([5, 8]))
    call = lambda **settings: flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **(used | settings))[0]
    plain, turned = call(), call(**tables)
    changed = dict(
        cache_seqlens=call(cache_seqlens=6),
        cache_batch_idx=call(cache_batch_idx=jnp.array([1, 0])),
        cache_leftpad=call(cache_leftpad=jnp.array([1, 2])),
        softmax_scale=call(softmax_scale=1.0),
        causal=call(causal=True),
        window_size=call(window_size=(3, 0)),
        softcap=call(softcap=0.5),
        alibi_slopes=call(alibi_slopes=jnp.ones(H)),
        rotary=turned,
    )
    for name, x in changed.items():
        assert np.abs(x - plain).max(initial=0, axis=(1, 2, 3)).min() > 1e-4, name
    assert np.abs(call(**tables, rotary_interleaved=False) - turned).max() > 1e-3


def test_O04_rotary_goes_on_where_the_cache_ends():
    """Prefill and then single steps are the whole at once, turned by `apply_rotary`."""
    T = 6
    q, k, v = qkv(T, T)
    angles = np.arange(S)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    tables = dict(rotary_cos=np.cos(angles), rotary_sin=np.sin(angles), rotary_interleaved=False)
    rotary = lambda x: jflash.apply_rotary(x, jnp.arange(T))
    wanted = jflash.attention(rotary(q), rotary(k), v, Causal())
    caches, outs = [jnp.zeros((B, S, h, D))] * 2, []
    for rows in (slice(0, 4), slice(4, 5), slice(5, 6)):
        new = dict(k=k[:, rows], v=v[:, rows], cache_seqlens=rows.start, causal=True)
        out, *caches = flash_attn_with_kvcache(q[:, rows], *caches, **new, **tables)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), wanted, atol=1e-5)


def test_L18_a_donated_cache_is_updated_in_place():
    arrays = step(dtype=jnp.bfloat16)
    call = lambda q, k_cache, v_cache, k, v, used: flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True
    )
    used = jnp.array([3, 7])
    wanted = jax.jit(call)(*arrays, used)
    copies = [jnp.copy(x) for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of buffers that were not usable
        got = jax.jit(call, donate_argnums=(1, 2))(*copies, used)
    assert [x.is_deleted() for x in copies] == [False, True, True, False, False]
    for x, y in zip(got, wanted):
        np.testing.assert_array_equal(x, y)
    rest = np.arange(S) != np.asarray(used)[:, None]
    np.testing.assert_array_equal(got[1][rest], arrays[1][rest])


def test_R06_new_lengths_do_not_compile_anew():
    run = jax.jit(lambda x, used: flash_attn_with_kvcache(*x, cache_seqlens=used, causal=True))
    for used in (0, 3, 9):
        run(step(), jnp.full(B, used))
    assert run._cache_size() == 1


def test_rank_promotion_may_be_an_error():
    q, *others = step(T=2, n=2)
    tables = dict(rotary_cos=jnp.ones((S, 2)), rotary_sin=jnp.ones((S, 2)))
    n = jnp.array([3, 8])
    settings = dict(cache_seqlens=n, cache_batch_idx=n - n, cache_leftpad=n // 2, window_size=(3, 0))
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda: flash_attn_with_kvcache(q, *others, **tables, **settings, softcap=1.0))
        jax.eval_shape(lambda: flash_attn_func(q, q, q, 0.1, causal=True, dropout_key=jax.random.key(0)))
        jax.eval_shape(lambda: jflash.apply_rotary(q, jnp.arange(2)))


# Errors


CACHE = dict(zip(("q", "k_cache", "v_cache", "k", "v"), step()))
ONES = jnp.ones((S, 4))


@pytest.mark.parametrize(
    "call, arguments, error, words",
    [
        (flash_attn_func, dict(causal=1), TypeError, "(causal=...)` must be a Python bool"),
        (
            flash_attn_func,
            dict(window_size=4),
            ValueError,
            "(window_size=...)` must be a pair (left, right). Got 4",
        ),
        (
            flash_attn_func,
            dict(window_size=(-2, 0)),
            ValueError,
            "(window_size=...)` left must be None (open)",
        ),
        (flash_attn_func, dict(softcap=-1.0), ValueError, "(softcap=...)` must be at least 0"),
        (flash_attn_func, dict(alibi_slopes=jnp.ones(h)), ValueError, "(score_mod=Alibi)` must be [H]"),
        (flash_attn_func, dict(dropout_p="0.1"), TypeError, "(dropout_p=...)` must be a Python float"),
        (flash_attn_func, dict(dropout_p=1.5, dropout_key=1), ValueError, "(dropout=...)` needs a rate"),
        (flash_attn_func, dict(k=jnp.ones((B, 9, 3, D))), ValueError, "(k, v)` must agree in batch"),
        (flash_attn_func, dict(return_attn_probs=None), TypeError, "(return_attn_probs=...)` must be a"),
        (
            flash_attn_qkvpacked_func,
            dict(qkv=jnp.ones((B, 3, 5, H, D))),
            ValueError,
            "(qkv=...)` must be [B, T, 3, H, D]. Got shape (2, 3, 5, 4, 8)",
        ),
        (
            flash_attn_kvpacked_func,
            dict(q=jnp.ones((B, 3, H, D)), kv=jnp.ones((B, 5, 3, h, D))),
            ValueError,
            "(kv=...)` must be [B, t, 2, h, D]",
        ),
        (flash_attn_with_kvcache, dict(), ValueError, "(cache_seqlens=...)` must be given with k and v"),
        (
            flash_attn_with_kvcache,
            dict(block_table=ONES),
            ValueError,
            "(block_table=...)` must be None: pages come with jflash's paged caches",
        ),
        (flash_attn_with_kvcache, dict(v=None), ValueError, "(k, v)` must be given together. Got v=None"),
        (
            flash_attn_with_kvcache,
            dict(k_cache=jnp.ones((3, S, h, D))),
            ValueError,
            "(q, k_cache, v_cache)` must agree",
        ),
        (
            flash_attn_with_kvcache,
            dict(k_cache=jnp.ones((B, 10, h, D))),
            ValueError,
            "must agree in batch, both caches also in length",
        ),
        (
            flash_attn_with_kvcache,
            dict(k=jnp.ones((B, 1, H, D))),
            ValueError,
            "(k, v)` must be rows of the caches",
        ),
        (
            flash_attn_with_kvcache,
            dict(k=jnp.ones((1, h, D))),
            ValueError,
            "must have the axes (batch, length, heads",
        ),
        (
            flash_attn_with_kvcache,
            dict(cache_seqlens=jnp.ones(3, int)),
            ValueError,
            "(cache_seqlens=...)` must be integers",
        ),
        (
            flash_attn_with_kvcache,
            dict(cache_seqlens=2, cache_leftpad=1),
            ValueError,
            "(cache_leftpad=...)` must be integers",
        ),
        (
            flash_attn_with_kvcache,
            dict(cache_seqlens=2, rotary_cos=ONES),
            ValueError,
            "(rotary_cos, rotary_sin)` must be given together. Got rotary_sin=None",
        ),
        (
            flash_attn_with_kvcache,
            dict(k=None, v=None, rotary_cos=ONES, rotary_sin=ONES),
            ValueError,
            "turn q beside new keys",
        ),
        (
            flash_attn_with_kvcache,
            dict(cache_seqlens=2, rotary_cos=ONES[1:], rotary_sin=ONES[1:]),
            ValueError,
            "must be [at least S, r / 2] ... S=12",
        ),
        (
            flash_attn_with_kvcache,
            dict(cache_seqlens=2, rotary_interleaved=0),
            TypeError,
            "(rotary_interleaved=...)` must be a",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", " ".join(x) if isinstance(x, dict) else ""),
)
def test_errors(as_users_run_it, call, arguments, error, words):
    given = {
        flash_attn_func: dict(zip("qkv", qkv(5, 9))),
        flash_attn_with_kvcache: CACHE,
    }.get(call, {})
    pattern = f"(?s)^`{call.__name__}\\(.*" + ".*".join(
        re.escape(x) for x in words.lstrip("(").split(" ... ")
    )
    with pytest.raises(error, match=pattern):
        call(**given | arguments)


def test_a_larger_cache_gets_a_hint():
    caches = dict(k_cache=jnp.ones((3, S, h, D)), v_cache=jnp.ones((3, S, h, D)))
    with pytest.raises(ValueError, match="cache_batch_idx tells which entries"):
        flash_attn_with_kvcache(**CACHE | caches, cache_seqlens=2)

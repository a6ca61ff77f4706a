"""Public bug reports of other attention kernels, each as a small test that is named by its id.

The table of all of them is in README.md. What is right is `oracle`: dense attention in NumPy and
float64, with gradients by hand, which knows nothing of jflash. A masked pair is excluded; a row
that sees no key is 0, has an lse of -inf and takes part in no gradient. Cotangents are random: a
uniform one hides gradients that are permuted or summed too often.
"""

import contextlib
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
import jflash.xla
from jflash import Alibi, Causal, Dense, Dropout, Prefix, Segments, SoftCap, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")

BOTH = pytest.mark.parametrize("implementation", [None, "reference"])


@contextlib.contextmanager
def optimised():
    """For tests of what XLA makes of a program: its memory, its collectives."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def qkv(B, T, H, D, t=None, h=None, d=None, dtype=jnp.float32, seed=0):
    t, h, d = t or T, h or H, d or D
    return (
        normal(B, T, H, D, seed=seed, dtype=dtype),
        normal(B, t, h, D, seed=seed + 1, dtype=dtype),
        normal(B, t, h, d, seed=seed + 2, dtype=dtype),
    )


def cotangents(q, v, seed=100):
    B, T, H, _ = q.shape
    return normal(B, T, H, v.shape[-1], seed=seed, dtype=q.dtype), normal(B, H, T, seed=seed + 1)


def causal(T, t, left=None, right=0):
    i, j = np.arange(T)[:, None] + t - T, np.arange(t)
    seen = np.ones((T, t), bool) if right is None else j <= i + right
    return seen if left is None else seen & (j >= i - left)


# The oracle


def oracle(q, k, v, visible=None, bias=0.0, scale=None, cap=None, sinks=None, do=None, dlse=None):
    """out, lse and gradients by name: float64, each formula as it is written on paper."""
    q, k, v, bias = (np.asarray(x, np.float64) for x in (q, k, v, bias))
    B, _, H, D = q.shape
    t, h = k.shape[1:3]
    repeat = lambda x: np.repeat(x, H // h, 2)
    scale = float(D) ** -0.5 if scale is None else float(scale)
    raw = np.einsum("bthd,bshd->bhts", q, repeat(k))
    s, slope = scale * raw + bias, 1.0
    if cap is not None:
        s, slope = cap * np.tanh(s / cap), 1 - np.tanh(s / cap) ** 2
    seen = np.broadcast_to(True if visible is None else np.asarray(visible), s.shape) & (s > -np.inf)
    m = np.where(seen, s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, 0)
    e = np.exp(np.where(seen, s - m, -np.inf))
    l = e.sum(-1, keepdims=True)
    some = l > 0
    sink = np.exp(np.asarray(sinks, np.float64)[:, None, None] - m) if sinks is not None else 0
    p, p_sink = e / np.where(some, l + sink, 1), sink / np.where(some, l + sink, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(some, m + np.log(l), -np.inf)[..., 0]
    out = np.einsum("bhts,bshd->bthd", p, repeat(v))
    if do is None:
        return out, lse
    do, dlse = np.asarray(do, np.float64), np.asarray(dlse, np.float64)[..., None]
    dp = np.einsum("bthd,bshd->bhts", do, repeat(v))
    delta = (p * dp).sum(-1, keepdims=True)
    ds = (p * (dp - delta) + e / np.where(some, l, 1) * dlse) * slope
    group = lambda x: x.reshape(B, t, h, H // h, x.shape[-1]).sum(3)
    shape = (1,) * (4 - bias.ndim) + bias.shape
    over = tuple(i for i, n in enumerate(shape) if n == 1)
    return (
        out,
        lse,
        dict(
            q=scale * np.einsum("bhts,bshd->bthd", ds, repeat(k)),
            k=group(scale * np.einsum("bhts,bthd->bshd", ds, q)),
            v=group(np.einsum("bhts,bthd->bshd", p, do)),
            bias=ds.sum(over, keepdims=True).reshape(bias.shape),
            scale=(ds * raw).sum(),
            sinks=-(np.where(some, p_sink, 0) * delta).sum((0, 2, 3)),
        ),
    )


# jflash, forward and backward in one program

TRACED = ("q", "k", "v", "bias", "scale", "sinks")


@contextlib.contextmanager
def blocks_of(n):
    """Blocks of at most n rows, so that short arrays are walked as long ones are; None: the default."""
    default = jflash.xla.default_config

    def small(problem):
        q, k = (max(1, min(n, length)) for length in (problem.T, problem.t))
        return dataclasses.replace(default(problem), block_q=q, block_k=k)

    with pytest.MonkeyPatch.context() as patch:
        if n is not None:
            patch.setattr(jflash.xla, "default_config", small)
        yield


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _run(x, others, W, statics, wanted, blocks):
    def call(floats):
        settings = x | floats | others | dict(statics)
        arrays = [settings.pop(name) for name in "qkv"]
        return jflash.attention_with_lse(*arrays, **settings)

    with blocks_of(blocks):
        if not wanted:
            return call({})
        y, pull = jax.vjp(call, {name: x[name] for name in wanted})
        return *y, pull(W)[0]


def run(q, k, v, mask=None, *, implementation=None, wanted=None, W=None, blocks=None, **settings):
    """(out, lse, gradients by name) as NumPy; shapes and static settings alone decide about compiling.

    - `wanted`: what to differentiate; by default every float array. () for (out, lse) alone.
    - `W`: the cotangents of out and lse, by default random ones.
    """
    x = dict(q=q, k=k, v=v)
    for name in ("bias", "scale", "sinks"):
        if hasattr(settings.get(name), "shape"):
            x[name] = settings.pop(name)
    pytrees = ("score_mod", "dropout", "q_positions", "k_positions")
    others = {name: settings.pop(name) for name in pytrees if name in settings}
    statics = tuple(settings.items()) + (("implementation", implementation),)
    wanted = tuple(x) if wanted is None else wanted
    W = cotangents(q, v) if W is None else W
    return jax.device_get(_run(x, others | dict(mask=mask), W, statics, wanted, blocks))


def assert_close(got, wanted, atol, name=""):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, name
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=name)


def assert_right(got, wanted, atol=2e-5):
    """`run` against `oracle`."""
    for name, x, y in zip(("out", "lse"), got, wanted):
        assert_close(x, y, atol, name)
    for name, x in got[2].items() if len(got) == 3 else ():
        assert_close(x, wanted[2][name], atol * max(1, np.abs(wanted[2][name]).max()), name)


def check(q, k, v, mask=None, visible=None, *, atol=2e-5, cap=None, W=None, **settings):
    """Runs jflash and the oracle and compares; returns what jflash gave."""
    W = cotangents(q, v) if W is None else W
    of_oracle = {name: settings[name] for name in ("bias", "scale", "sinks") if name in settings}
    if cap is not None:
        settings["score_mod"] = SoftCap(cap)
    got = run(q, k, v, mask, W=W, **settings)
    wanted = oracle(q, k, v, visible, cap=cap, do=W[0], dlse=W[1], **of_oracle)
    assert_right(got, wanted, atol)
    return got


@functools.partial(jax.jit, static_argnums=6)
def _naive(q, k, v, visible, bias, W, scale):
    """What a careful user writes: products in the dtype of the inputs, softmax in float32."""

    def call(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * scale + bias
        p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1).astype(v.dtype)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    out, pull = jax.vjp(call, q, k, v)
    return out, dict(zip("qkv", pull(W)))


def check_low_precision(q, k, v, mask=None, visible=True, bias=0.0, blocks=None, gradients=True):
    """The largest errors of out and of the gradients are at most 3 times those of `_naive`."""
    W = cotangents(q, v)[0]
    W = W, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
    with_bias = dict(bias=bias) if hasattr(bias, "shape") else {}
    out, _, grads = run(q, k, v, mask, W=W, wanted=("q", "k", "v"), blocks=blocks, **with_bias)
    exact_out, _, exact = oracle(q, k, v, visible, bias=bias, do=W[0], dlse=W[1])
    naive_out, naive = _naive(q, k, v, visible, bias, W[0], q.shape[-1] ** -0.5)
    pairs = [("out", out, naive_out, exact_out)]
    pairs += [(name, grads[name], naive[name], exact[name]) for name in "qkv" if gradients]
    eps = float(jnp.finfo(q.dtype).eps)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads.values())
    for name, got, same, truth in pairs:
        assert got.dtype == q.dtype, name
        error = lambda x, truth=truth: np.abs(np.asarray(x, np.float64) - truth).max()
        assert error(got) <= 3 * error(same) + eps * np.abs(truth).max(), name


# A: rows that see nothing, NaN


@BOTH
def test_A02_one_row_without_keys_poisons_no_gradient(implementation):
    """pytorch/pytorch#41508: NaN in that row and, through the gradients, in everything."""
    q, k, v = qkv(2, 6, 2, 8)
    visible = np.ones((2, 1, 6, 6), bool)
    visible[0, :, 2] = False
    W = cotangents(q, v)
    out, lse, grads = check(q, k, v, visible, visible, W=W, implementation=implementation)
    assert (out[0, 2] == 0).all() and (lse[0, :, 2] == -np.inf).all() and (grads["q"][0, 2] == 0).all()
    rest = np.array([0, 1, 3, 4, 5])
    some = q[:1, rest], k[:1], v[:1], None
    got = run(*some, W=(W[0][:1, rest], W[1][:1, :, rest]), implementation=implementation)
    assert_close(grads["q"][:1, rest], got[2]["q"], 1e-6)
    assert_close(grads["k"][:1], got[2]["k"], 1e-6)
    assert_close(grads["v"][:1], got[2]["v"], 1e-6)


def test_A03_a_finite_minus_infinity_over_whole_leading_tiles():
    """pytorch/pytorch#109517: finfo.min on the first columns gave NaN."""
    q, k, v = qkv(1, 150, 2, 8)
    hidden = 128
    bias = jnp.where(jnp.arange(150) < hidden, jnp.finfo(jnp.float32).min, 0.0)
    W = cotangents(q, v)
    out, lse, grads = run(q, k, v, bias=bias, W=W, wanted=("q", "k", "v"), blocks=32)
    wanted = oracle(q, k[:, hidden:], v[:, hidden:], do=W[0], dlse=W[1])
    assert_right((out, lse), wanted)
    assert_close(grads["q"], wanted[2]["q"], 2e-5)
    for name in "kv":
        assert_close(grads[name][:, hidden:], wanted[2][name], 1e-4)
        assert (grads[name][:, :hidden] == 0).all()


@pytest.mark.parametrize("first", [0, 13, 26], ids=["start", "middle", "end"])
def test_A04_a_block_of_rows_without_keys_anywhere(first):
    """ikawrakow/ik_llama.cpp#2344: NaN if the 14 masked rows came first."""
    q, k, v = qkv(1, 40, 2, 8)
    visible = np.ones((40, 40), bool)
    visible[first : first + 14] = False
    out, lse, _ = check(q, k, v, visible, visible)
    assert (out[:, first : first + 14] == 0).all() and (lse == -np.inf).sum() == 2 * 14


@BOTH
def test_A05_causal_softcap_random_mask_and_bias(implementation):
    """antimora/burn-flex#16: NaN on the rows that the random mask empties."""
    q, k, v = qkv(2, 24, 2, 8)
    random = np.random.default_rng(0).random((2, 2, 24, 24)) < 0.3
    visible = random & causal(24, 24)
    assert not visible.any(-1).all()
    bias = normal(2, 2, 24, 24, seed=9)
    check(q, k, v, Causal() & random, visible, bias=bias, cap=30.0, implementation=implementation)


@BOTH
def test_A06_what_a_masked_key_holds_has_no_effect(implementation):
    """pytorch/pytorch#101967: NaN at a masked key reached the output."""
    q, k, v = qkv(2, 3, 2, 4)
    visible = np.array([True, False, True])
    fill = lambda x, y: x.at[:, 1].set(y)
    results = [
        run(q, fill(k, y), fill(v, y), jnp.asarray(visible)[None], implementation=implementation)
        for y in (0, 1e10, np.inf, np.nan)
    ]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    for grads in (r[2] for r in results):
        assert (grads["k"][:, 1] == 0).all() and (grads["v"][:, 1] == 0).all()
    assert_right(results[0], oracle(q, k, v, visible, do=cotangents(q, v)[0], dlse=cotangents(q, v)[1]))


@BOTH
def test_A07_a_zero_cotangent_gives_zero_gradients(implementation):
    """erfanzar/jax-flash-attn2#1: not with finfo.min as a bias."""
    q, k, v = qkv(1, 16, 2, 8, dtype=jnp.float16)
    bias = jnp.where(jnp.arange(16) % 3 == 0, jnp.finfo(jnp.float16).min, 0).astype(jnp.float16)
    W = jax.tree.map(jnp.zeros_like, cotangents(q, v))
    for visible in (np.ones((16, 16), bool), np.arange(16)[:, None] * np.ones(16) > 4):
        _, _, grads = run(q, k, v, visible, bias=bias, W=W, implementation=implementation)
        assert all((g == 0).all() for g in grads.values())


def test_A08_a_bias_beyond_the_range_of_the_inputs():
    """google/flax#982: -1e10 in float16, -1e308 in float32: inf - inf."""
    q, k, v = qkv(2, 8, 2, 8)
    hidden = jnp.arange(8) > 4
    W = cotangents(q, v)
    wanted = oracle(q, k, v, np.arange(8) <= 4, do=W[0], dlse=W[1])
    halves = [x.astype(jnp.float16) for x in (q, k, v)]
    with jax.debug_nans(True):
        out, lse, grads = run(*halves, bias=jnp.where(hidden, -1e10, 0.0), W=(W[0].astype(jnp.float16), W[1]))
        assert_close(out, wanted[0], 5e-3)
        assert all(np.isfinite(g).all() for g in grads.values())
        with jax.enable_x64(True):
            bias = jnp.where(hidden, -1e308, jnp.float64(0))
            got = run(q, k, v, bias=bias, W=W, wanted=("q", "k", "v"))
    assert bias.dtype == jnp.float64
    assert_right(got, wanted)


def test_A09_scores_far_below_zero_beside_empty_rows():
    """NVIDIA/cudnn-frontend#262: wrong gradients where every score was negative."""
    q, k, v = qkv(2, 12, 2, 8)
    ids = jnp.arange(12) % 3 - 1  # a third sees nothing
    seen = np.asarray((ids[:, None] == ids) & (ids[:, None] >= 0))
    bias = jnp.float32(-75.0)
    got = check(q, k, v, Segments(ids), seen, bias=bias, atol=4e-5)
    lse = got[1][..., np.asarray(ids) >= 0]
    assert (-80 < lse).all() and (lse < -65).all()


@BOTH
def test_A10_more_queries_than_keys_leave_the_first_rows_empty(implementation):
    """Dao-AILab/flash-attention#1778: causal is aligned bottom-right."""
    v = jnp.array([[1.0, 10.0], [3.0, 30.0]])[None, :, None]
    q, k = jnp.zeros((1, 5, 1, 2)), jnp.zeros((1, 2, 1, 2))
    out, lse = run(q, k, v, Causal(), wanted=(), implementation=implementation)
    assert_close(out[0, :, 0], [[0, 0], [0, 0], [0, 0], [1, 10], [2, 20]], 1e-6)
    assert_close(lse[0, 0], [-np.inf, -np.inf, -np.inf, 0, np.log(2)], 1e-6)


@BOTH
def test_A11_causal_and_a_mask_that_leave_a_row_nothing(implementation):
    """onnx/onnx PR#8068: the intersection counts, and it may be empty."""
    q, k, v = qkv(2, 6, 2, 8)
    array = np.ones((6, 6), bool)
    array[2] = np.arange(6) > 2
    for mask in (Causal() & array, Dense(array) & Causal()):
        out, *_ = check(q, k, v, mask, array & causal(6, 6), implementation=implementation)
        assert (out[:, 2] == 0).all()


# B: causal alignment, decoding


def test_B02_two_tokens_at_once_are_two_steps_of_one():
    """hyprstream/hyprstream PR#1521: the mask of a step on a filled cache started at 0."""
    q, k, v = qkv(2, 2, 2, 8, t=9)
    out, lse = run(q, k, v, Causal(), wanted=())
    for i, t in enumerate((8, 9)):
        one = run(q[:, i : i + 1], k[:, :t], v[:, :t], Causal(), wanted=())
        assert_close(out[:, i : i + 1], one[0], 1e-6)
        assert_close(lse[..., i : i + 1], one[1], 1e-6)


def test_B03_one_query_sees_all_keys():
    """NVIDIA-NeMo/Megatron-Bridge PR#5259: it saw only the first."""
    v = jnp.arange(4.0).reshape(1, 4, 1, 1)
    q, k = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 4, 1, 1))
    W = jnp.ones((1, 1, 1, 1)), jnp.zeros((1, 1, 1))
    out, lse, grads = run(q, k, v, Causal(), W=W)
    assert_close(out.ravel(), [1.5], 1e-6)
    assert_close(grads["v"].ravel(), [0.25] * 4, 1e-6)
    assert_close(lse.ravel(), [np.log(4)], 1e-6)


@pytest.mark.parametrize("T, t", [(33, 130), (130, 33), (1, 257), (257, 1)])
def test_B04_lengths_of_queries_and_keys_differ(T, t):
    """jax-ml/jax#24491: wrong numbers for 512 queries over 2048 keys."""
    q, k, v = qkv(2, T, 2, 8, t=t)
    check(q, k, v, Causal(), causal(T, t), blocks=64)
    assert_right(run(q, k, v, wanted=()), oracle(q, k, v))


@pytest.mark.parametrize("t", [1, 127, 129, 257])
def test_B05_one_query_over_keys_just_past_a_block(t):
    """Dao-AILab/flash-attention#1076: an illegal access for 257 keys."""
    q, k, v = qkv(2, 1, 1, 32, t=t, dtype=jnp.bfloat16)
    out, lse = run(q, k, v, wanted=(), blocks=128)
    wanted = oracle(q, k, v)
    assert_close(out, wanted[0], 2e-2)
    assert_close(lse, wanted[1], 1e-4)


def test_B06_one_query_each_over_lengths_of_their_own_within_a_window():
    """ROCm/aiter#2229: 127 keys too many were masked in decoding with a window."""
    lengths = jnp.array([5, 64, 200])
    q, k, v = qkv(3, 1, 2, 8, t=200)
    mask = Prefix(lengths) & Causal()
    at = np.asarray(lengths)[:, None, None, None] - 1
    seen = np.arange(200) <= at
    got = run(q, k, v, mask, wanted=(), q_positions=lengths[:, None] - 1, blocks=64)
    assert_right(got, oracle(q, k, v, seen))
    within = seen & (np.arange(200) >= at - 16)
    check(q, k, v, mask & Window(16, 0), within, q_positions=lengths[:, None] - 1, blocks=64)


def test_B07_fewer_keys_than_a_tile():
    """flashinfer-ai/flashinfer PR#3106: 9 keys, 14 query heads, 2 key heads."""
    check(*qkv(2, 8, 14, 16, t=9, h=2), Causal(), causal(8, 9))


def test_B08_causal_has_an_effect_and_its_absence_too():
    """jax-ml/jax#19237: the flag was ignored; elsewhere the backward pass was always causal."""
    q, k, v = qkv(1, 40, 2, 8)
    with_mask = check(q, k, v, Causal(), causal(40, 40))
    without = check(q, k, v)
    assert np.abs(with_mask[0] - without[0]).max() > 0.1
    moved = run(q, k.at[:, 39].add(1.0), v)
    assert np.abs(moved[2]["q"][:, 0] - without[2]["q"][:, 0]).max() > 1e-3
    moved = run(q, k.at[:, 39].add(1.0), v, Causal())
    np.testing.assert_array_equal(moved[2]["q"][:, :39], with_mask[2]["q"][:, :39])


def test_B09_a_mask_of_ones_is_no_mask():
    """huggingface/transformers PR#41966: a padding mask turned causal off."""
    q, k, v = qkv(2, 12, 2, 8)
    ones = jnp.ones((2, 1, 1, 12), bool)
    same = lambda x, y: jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), x, y)
    run_ = functools.partial(run, wanted=())
    same(run_(q, k, v, Causal() & ones), run_(q, k, v, Causal()))
    q, k, v = qkv(2, 20, 2, 32, t=10)
    same(run_(q, k, v, jnp.ones((2, 1, 1, 10), bool)), run_(q, k, v))


def test_B10_a_mask_of_another_length_is_refused():
    """google-deepmind/gemma#407: a mask of 5234 keys met a cache of 4096."""
    q, k, v = qkv(1, 4, 2, 8, t=16)
    with pytest.raises(ValueError, match=r"\(1, 2, 4, 16\).*shape \(1, 1, 4, 20\)"):
        jflash.attention(q, k, v, jnp.ones((1, 1, 4, 20), bool))


# C: block boundaries, head sizes


@pytest.mark.parametrize("T, block", [(1, None), (33, 16), (96, 64), (129, 64)])
def test_C02_lengths_that_no_block_divides(T, block):
    """jax-ml/jax#27224: T=192 in blocks of 128; T=4092 wrong on the first call only."""
    q, k, v = qkv(2, T, 2, 8)
    first = check(q, k, v, blocks=block)
    jax.tree.map(np.testing.assert_array_equal, first, run(q, k, v, blocks=block))


def test_C03_one_more_than_a_power_of_two_with_bias_in_bfloat16():
    """lucidrains/flash-attention-jax#14: an error, elsewhere NaN gradients, at T=2^n+1."""
    q, k, v = qkv(1, 257, 2, 8, dtype=jnp.bfloat16)
    bias = normal(1, 2, 257, 257, seed=8)
    check_low_precision(q, k, v, Causal(), causal(257, 257), bias=bias, blocks=128)


@pytest.mark.parametrize("t", [33, 65])
def test_C04_broadcast_keys_and_values(t):
    """pytorch/pytorch#191937: silently wrong for expanded k and v where t mod 32 is 1."""
    q, k, v = qkv(2, 8, 4, 16, t=t, dtype=jnp.bfloat16)
    k, v = k[:1, :, :1], v[:1, :, :1]
    mask = jnp.arange(t) % 5 != 0
    full = lambda x: jnp.broadcast_to(x, (2, t, 4, 16))
    inside = jax.jit(lambda q, k, v: jflash.attention(q, full(k), full(v), mask))(q, k, v)
    whole = np.broadcast_to(k, (2, t, 4, 16)), np.broadcast_to(v, (2, t, 4, 16))
    np.testing.assert_array_equal(inside, run(q, *whole, mask, wanted=())[0])
    assert_close(inside, oracle(q, *whole, np.asarray(mask))[0], 2e-2)


@pytest.mark.parametrize("kind", ["last quarter", "one dominant key"])
def test_C05_the_whole_head_takes_part(kind):
    """triton-lang/triton#621: of D=128 the first 64; D=256 with grouped heads: dq five times too large."""
    q, k, v = qkv(2, 64, 4, 256, h=2)
    if kind == "last quarter":
        q, k, v = (jnp.where(jnp.arange(256) < 192, 0, x) for x in (q, k, v))
    else:
        k = k.at[:, 5].mul(8.0)
    W = cotangents(q, v)
    _, _, grads = check(q, k, v, Causal(), causal(64, 64), W=W, atol=1e-4)
    exact = oracle(q, k, v, causal(64, 64), do=W[0], dlse=W[1])[2]["q"]
    cosine = (grads["q"] * exact).sum() / np.linalg.norm(grads["q"]) / np.linalg.norm(exact)
    assert cosine > 0.999


@pytest.mark.parametrize("D", [24, 192])
def test_C06_head_sizes_that_are_no_power_of_two(D):
    """AI-Hypercomputer/maxtext#1047: 64 and 192 were refused; anything else may not be wrong."""
    check(*qkv(1, 20, 2, D), Causal(), causal(20, 20))


@pytest.mark.parametrize("D, d", [(8, 16), (192, 128), (16, 1)])
def test_C07_values_of_another_head_size(D, d):
    """Dao-AILab/flash-attention#753: k and v of different head sizes were rejected."""
    q, k, v = qkv(2, 9, 4, D, t=12, h=1, d=d)
    out, *_ = check(q, k, v)
    assert out.shape == (2, 9, 4, d)
    assert_close(run(q[:, :1], k, v, wanted=())[0], oracle(q[:, :1], k, v)[0], 2e-5)


@pytest.mark.parametrize("scale", [None, 0.5])
@BOTH
def test_C08_a_head_of_size_zero(scale, implementation):
    """pytorch/pytorch#184330: all scores are 0, so the mean of v is right; it was 0."""
    q, k, v = jnp.zeros((1, 2, 1, 0)), jnp.zeros((1, 5, 1, 0)), jnp.arange(5.0).reshape(1, 5, 1, 1)
    out, lse, grads = run(q, k, v, scale=scale, implementation=implementation)
    assert_close(out.ravel(), [2, 2], 1e-6)
    assert_close(lse.ravel(), [np.log(5)] * 2, 1e-6)
    assert grads["q"].shape == q.shape and grads["k"].shape == k.shape


@pytest.mark.parametrize("D", [1, 6])
def test_C09_tiny_heads(D):
    """pytorch/pytorch#127523: NaN for heads of 1 and 6."""
    check(*qkv(1, 17, 2, D))


def test_C10_most_rows_empty():
    """ROCm/aotriton#183: NaN in lse with 256 queries over 32 keys, causal, D=80."""
    out, lse, _ = check(*qkv(1, 64, 2, 80, t=8), Causal(), causal(64, 8))
    assert (lse[..., :56] == -np.inf).all() and np.isfinite(lse[..., 56:]).all() and (out[:, :56] == 0).all()


@pytest.mark.parametrize("D", [32, 80])
def test_C11_no_part_of_the_loop_is_skipped(D):
    """tenstorrent/tt-metal#33434: with v = 1 the output is 1, whatever the weights."""
    q, k, v = qkv(1, 5, 2, D, t=9)
    assert_close(run(q, k, jnp.ones_like(v), wanted=(), blocks=4)[0], np.ones(v[:, :5].shape), 1e-6)


def test_C12_a_head_of_512_and_its_memory():
    """huggingface/transformers PR#46960: at D=512 a quadratic path was taken in silence."""
    check(*qkv(1, 32, 4, 512, h=1), Causal(), causal(32, 32), atol=1e-4)
    T, H = 1024, 4
    x = jax.ShapeDtypeStruct((1, T, H, 512), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((1, T, 1, 512), jnp.bfloat16)
    with optimised():
        forward = jax.jit(lambda q, k, v: jflash.attention(q, k, v, Causal())).lower(x, y, y).compile()
    inputs_in_float32 = 3 * T * H * 512 * 4
    assert forward.memory_analysis().temp_size_in_bytes < T * T * H * 4 + inputs_in_float32


# D: large scores


@pytest.mark.parametrize("factor", [3, 30])
def test_D02_large_float16_inputs(factor):
    """Dao-AILab/flash-attention#334: NaN gradients for inputs times 3."""
    q, k, v = (factor * x for x in qkv(2, 34, 2, 32, t=1, dtype=jnp.float16))
    W = cotangents(q, v)
    out, _, grads = run(q, k, v, W=(W[0], jnp.zeros_like(W[1])))
    # One key has the weight 1 and its score no gradient, up to the rounding of do·v in float32.
    assert max(np.abs(grads[name]).max() for name in "qk") < 1e-6 * factor**2 * 32
    np.testing.assert_array_equal(out, np.broadcast_to(v, out.shape))
    assert_close(grads["v"], np.asarray(W[0], np.float64).sum(1, keepdims=True), 0.02)
    q, k, v = (factor * x for x in qkv(1, 40, 2, 32, dtype=jnp.float16))
    got = run(q, k, v, Causal())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert_close(got[0], oracle(q, k, v, causal(40, 40))[0], 0.02 * factor)


@pytest.mark.parametrize("T", [1, 32])
def test_D03_scores_where_a_rounding_is_larger_than_one(T):
    """ROCm/aotriton#54: bf16 inputs of 133120: maximum and score were rounded differently."""
    q = jnp.full((1, T, 1, 16), 133120, jnp.bfloat16)
    v = normal(1, T, 1, 16, dtype=jnp.bfloat16)
    out, lse, grads = run(q, q, v)
    assert_close(out, np.broadcast_to(np.asarray(v, np.float64).mean(1, keepdims=True), out.shape), 5e-3)
    assert (out <= np.asarray(v).max()).all()
    assert np.isfinite(lse).all() and all(np.isfinite(g).all() for g in grads.values())
    # No weight is above 1, so no gradient of v is above the sum of the cotangents.
    assert np.abs(grads["v"]).max() <= 1.01 * np.abs(np.asarray(cotangents(q, v)[0], np.float64)).sum(1).max()


@BOTH
def test_D04_near_ties_far_from_zero(implementation):
    """triton-lang/triton#5971: the difference of 38 and 38.12309 was lost."""
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([38.0, 38.12309]).reshape(1, 2, 1, 1)
    v = jnp.eye(2).reshape(1, 2, 1, 2)
    out, _ = run(q, k, v, scale=1.0, wanted=(), implementation=implementation)
    assert_close(out.ravel(), [0.46927, 0.53073], 1e-5)
    half = [x.astype(jnp.float16) for x in (q, jnp.array([38.0, 38.125]).reshape(k.shape), v)]
    assert_close(
        run(*half, scale=1.0, wanted=(), implementation=implementation)[0].ravel(), [0.46879, 0.53121], 4e-4
    )


def test_D05_a_large_random_bias_with_bfloat16_inputs():
    """Dao-AILab/flash-attention#442: a bias that acts as a mask."""
    q, k, v = qkv(1, 32, 2, 16, dtype=jnp.bfloat16)
    bias = 1e3 * normal(1, 2, 32, 32, seed=7)
    check_low_precision(q, k, v, bias=bias, gradients=False)


def test_D06_sums_beyond_the_range_of_float16():
    """ikawrakow/ik_llama.cpp PR#1196: 4096 values of 60 sum to more than 65504."""
    q, k = jnp.zeros((1, 2, 1, 8), jnp.float16), jnp.ones((1, 4096, 1, 8), jnp.float16)
    v = jnp.full((1, 4096, 1, 8), 60, jnp.float16)
    assert (run(q, k, v, wanted=())[0] == 60).all()
    assert (run(q, k, v, wanted=(), implementation="reference")[0] == 60).all()


def test_D07_weights_sum_to_one():
    """tile-ai/TileLang and others, FlyDSL PR#1020: v = 1 gives 1, and 0 in empty rows."""
    q, k, v = qkv(2, 12, 4, 8, t=10, h=2)
    v = jnp.ones_like(v)
    capped = dict(score_mod=SoftCap(jnp.float32(5.0)), bias=normal(1, 4, 12, 10))
    ids = jnp.arange(12) // 5, jnp.arange(10) // 5 + 1
    cases = [(Window(2, 1), capped), (Segments(*ids), {}), (Causal() | Prefix(jnp.array([0, 7])), {})]
    for mask, extra in cases:
        out, lse = run(q, k, v, mask, wanted=(), blocks=5, **extra)
        seen = np.moveaxis(lse > -np.inf, 1, 2)[..., None]
        assert_close(out, np.broadcast_to(seen, out.shape), 1e-6)


@pytest.mark.parametrize("tiles", [(100, 0, -100), (-100, 0, 100)], ids=["falling", "rising"])
def test_D08_the_running_maximum_is_kept(tiles):
    """tile-ai/tilelang PR#1148: the new tile's maximum replaced the old one."""
    q, k, v = qkv(1, 24, 1, 8)
    bias = jnp.repeat(jnp.array(tiles, jnp.float32), 8)
    check(q, k, v, bias=bias, blocks=8, atol=5e-5)


def test_D09_a_row_does_not_depend_on_the_size_of_the_batch():
    """Dao-AILab/flash-attention#47: a batch of 32 and of 1 differed."""
    q, k, v = qkv(3, 5, 2, 8, t=256)
    together, _ = run(q, k, v, wanted=(), blocks=64)
    for i in range(3):  # XLA's own products differ in the last bit between batches of 3 and of 1
        alone, _ = run(*(x[i : i + 1] for x in (q, k, v)), wanted=(), blocks=64)
        assert_close(together[i : i + 1], alone, 2e-7)
    assert_close(together, oracle(q, k, v)[0], 1e-5)


@BOTH
def test_D10_the_order_of_scale_bias_and_cap(implementation):
    """AI-Hypercomputer/maxtext#1370: softmax(cap(scale * q·k + bias)); the bias is not scaled."""
    q, k, v = qkv(2, 7, 2, 8)
    bias = 3 * normal(1, 2, 7, 7, seed=5)
    for scale in (jnp.float32(0.1), jnp.float32(-0.7), jnp.float32(0.0)):
        out, *_ = check(q, k, v, bias=bias, scale=scale, cap=2.0, implementation=implementation)
    static = run(q, k, v, bias=bias, scale=-0.7, score_mod=SoftCap(2.0), implementation=implementation)
    assert_close(static[0], oracle(q, k, v, bias=bias, scale=-0.7, cap=2.0)[0], 2e-5)


# E: bias and masks that broadcast

BIASES = ["BHTt", "1HTt", "B1Tt", "B11t", "11T1", "Tt", ""]


@pytest.mark.parametrize("shape", BIASES)
def test_E02_the_gradient_of_a_broadcast_bias_sums_over_all_its_axes(shape):
    """jax-ml/jax#30593: only over the first batch entry. NVIDIA/TransformerEngine PR#2537 (E10)."""
    sizes = dict(zip("BHTt1", (2, 4, 5, 6, 1)))
    q, k, v = qkv(2, 5, 4, 8, t=6, h=2)
    bias = normal(*(sizes[axis] for axis in shape), seed=6)
    check(q, k, v, bias=bias, atol=5e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_E03_every_implementation_has_a_gradient_of_bias(implementation):
    """jax-ml/jax#27184: none, in silence."""
    q, k, v = qkv(1, 6, 2, 8)
    bias, W = normal(1, 2, 6, 6, seed=6), cotangents(q, v)
    *_, grads = run(q, k, v, bias=bias, W=W, wanted=("bias",), implementation=implementation)
    assert np.abs(grads["bias"]).max() > 1e-2
    assert_close(grads["bias"], oracle(q, k, v, bias=bias, do=W[0], dlse=W[1])[2]["bias"], 2e-5)


def test_E04_only_the_bias_is_differentiated():
    """pytorch/pytorch#148476: a crash."""
    q, k, v = qkv(1, 64, 1, 16)
    bias, W = normal(1, 1, 64, 64, seed=6), cotangents(q, v)
    loss = lambda bias: (jflash.attention(q, k, v, bias=bias) * W[0]).sum()
    got = jax.jit(jax.grad(loss))(bias)
    zero = jnp.zeros_like(W[1])
    assert_close(got, oracle(q, k, v, bias=bias, do=W[0], dlse=zero)[2]["bias"], 2e-5)


def test_E05_masks_of_every_broadcast_shape():
    """jax-ml/jax#28974: (B, 1, 1, t) was rejected."""
    q, k, v = qkv(4, 8, 2, 8)
    random = lambda *shape: np.random.default_rng(3).random(shape) < 0.6
    for shape in ((4, 1, 1, 8), (4, 2, 8, 8), (2, 1, 8)):
        mask = random(*shape)
        assert_right(run(q, k, v, mask, wanted=()), oracle(q, k, v, mask))
    with pytest.raises(ValueError, match=r"must broadcast to .* shape \(4, 8\)"):
        jflash.attention(q, k, v, random(4, 8))  # (B, t) would be read as (T, t)


@BOTH
def test_E06_a_mask_of_each_batch_entry_with_as_many_entries_as_key_heads(implementation):
    """ml-explore/mlx-lm PR#1903: batch and key heads were mixed up where both are 2."""
    q, k, v = qkv(2, 6, 4, 8, h=2)
    random = np.random.default_rng(2).random((2, 1, 6, 6)) < 0.6
    bias = normal(2, 1, 6, 6, seed=4)
    check(q, k, v, random, random, bias=bias, implementation=implementation)


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (2, 1, 5, 10), (2, 1, 9, 5)], ids=str)
def test_E07_a_mask_of_the_wrong_length_is_refused(shape):
    """harvard-edge/cs249r_book PR#1875: a longer mask was accepted."""
    q, k, v = qkv(2, 5, 2, 8, t=9)
    with pytest.raises(ValueError, match=re.escape(f"shape {shape}")):
        jflash.attention(q, k, v, jnp.ones(shape, bool))


@pytest.mark.parametrize("t", [1, 9])
def test_E08_a_bias_per_head_in_decoding(t):
    """ml-explore/mlx#2096: NaN for one query."""
    q, k, v = qkv(2, 1, 4, 8, t=t)
    check(q, k, v, bias=normal(1, 4, 1, t, seed=5))


def test_E08_a_bias_that_is_part_of_a_larger_array():
    """facebookresearch/xformers#813: refused unless the last axis was aligned."""
    T = 43
    q, k, v = qkv(1, T, 2, 8)
    large = normal(T + 3, T + 1, 2, 1, seed=5)
    W = cotangents(q, v)
    part = lambda large: large[3:, 1:].transpose(3, 2, 1, 0)
    loss = lambda large: (jflash.attention(q, k, v, bias=part(large)) * W[0]).sum()
    out, grad = jax.jit(jax.value_and_grad(loss))(large)
    exact = oracle(q, k, v, bias=part(large), do=W[0], dlse=jnp.zeros_like(W[1]))
    assert_close(out, (exact[0] * np.asarray(W[0])).sum(), 1e-3)
    assert_close(grad[3:, 1:], exact[2]["bias"].transpose(3, 2, 1, 0), 2e-5)
    assert (grad[:3] == 0).all() and (grad[:, :1] == 0).all()


def test_E09_blocks_of_minus_infinity_separate():
    """facebookresearch/xformers#722: -inf as a bias between two documents."""
    q, k, v = qkv(1, 8, 2, 8)
    first = np.arange(8) < 3
    same = first[:, None] == first
    bias = jnp.where(same, normal(8, 8, seed=6), -jnp.inf)
    _, _, grads = check(q, k, v, None, same, bias=bias)
    assert (grads["bias"][~same] == 0).all()
    for rows in (slice(0, 3), slice(3, 8)):
        out, _ = oracle(q[:, rows], k[:, rows], v[:, rows], bias=bias[rows, rows])
        assert_close(run(q, k, v, bias=bias, wanted=())[0][:, rows], out, 2e-5)


@BOTH
def test_E10_the_gradient_of_bias_is_zero_where_masked(implementation):
    """NVIDIA/TransformerEngine PR#2537: shapes of dbias; here causal and grouped heads."""
    q, k, v = qkv(2, 7, 4, 8, h=2)
    bias = normal(1, 4, 7, 7, seed=6)
    _, _, grads = check(q, k, v, Causal(), causal(7, 7), bias=bias, implementation=implementation)
    assert (grads["bias"][..., ~causal(7, 7)] == 0).all()


# F: windows


def test_F02_a_window_without_a_mask():
    """jax-ml/jax#32300: ignored unless a mask was given, too."""
    q, k, v = qkv(1, 20, 2, 8, t=26)
    got = check(q, k, v, Window(3, 3), causal(20, 26, 3, 3))
    with_ones = run(q, k, v, Window(3, 3) & np.ones((20, 26), bool), wanted=())
    assert_right(with_ones, got, 1e-6)
    assert np.abs(got[0] - run(q, k, v, wanted=())[0]).max() > 0.1


def test_F03_wide_windows_are_causal_or_full():
    """Dao-AILab/flash-attention#1133: (S-1, 0) must equal causal; no bound may overflow."""
    q, k, v = qkv(1, 17, 2, 8)
    huge = 2**31 - 1
    cases = [
        ((16, 0), Causal()),
        ((huge, 0), Causal()),
        ((16, 16), None),
        ((10**6, 10**6), None),
        ((huge, huge), None),
    ]
    for bounds, mask in cases:
        wanted = run(q, k, v, mask, wanted=())
        traced = [jnp.int32(x) for x in bounds]
        assert_right(run(q, k, v, Window(*traced), wanted=()), wanted, 1e-6)
    out = run(q, k, v, Window(huge, huge), wanted=(), blocks=8)[0]
    assert_close(out, oracle(q, k, v)[0], 1e-5)


def test_F04_a_right_bound_larger_than_the_number_of_keys():
    """Dao-AILab/flash-attention#895: clamped to 4, rows saw 1, 2, 3, 4, 4, ... of 4 keys."""
    q, k, v = qkv(1, 8, 1, 8, t=4)
    for right in (7, 100):
        _, lse = run(0 * q, k, v, Window(None, right), wanted=())
        assert_close(np.exp(lse).ravel(), [4] * 8, 1e-5)


@pytest.mark.parametrize("bounds", [(-2, 0), (-1, -3), (3, -5), (-1, -1)], ids=str)
def test_F05_negative_bounds_are_refused(bounds):
    """Dao-AILab/flash-attention#1116: (-1, -3) was taken as unlimited. F12 is PyTorch's PR#173469."""
    q, k, v = qkv(1, 4, 1, 8)
    with pytest.raises(ValueError, match="must be None .open. or an integer of at least 0"):
        jflash.attention(q, k, v, Window(*bounds))


def test_F06_a_bound_of_zero_is_a_bound():
    """Dao-AILab/flash-attention#2574: 0 was taken as off; (0, 0) shows each row itself."""
    q, k, v = qkv(1, 9, 2, 8)
    zero = 0
    W = cotangents(q, v)
    out, _, grads = run(q, k, v, Window(zero, zero), W=(W[0], 0 * W[1]))
    np.testing.assert_allclose(out, v, rtol=1e-6)
    assert np.abs(grads["q"]).max() < 1e-6 and np.abs(grads["k"]).max() < 1e-6
    for bounds, seen in (((zero, None), causal(9, 9, 0, None)), ((None, np.int64(0)), causal(9, 9))):
        got = run(q, k, v, Window(*bounds), wanted=())
        assert_right(got, oracle(q, k, v, seen))


@pytest.mark.parametrize("t", [33, 129])
def test_F07_more_queries_than_keys_and_a_window(t):
    """Dao-AILab/flash-attention#2199: rows that see nothing."""
    q, k, v = qkv(1, 129, 2, 8, t=t)
    i, j = np.arange(129)[:, None] + t - 129, np.arange(t)
    seen = (i - 32 <= j) & (j <= i + 64)
    out, lse, _ = check(q, k, v, Window(32, 64), seen, blocks=32)
    assert (lse[0, 0] == -np.inf).sum() == (32 if t == 33 else 0)


@BOTH
def test_F08_both_ends_of_a_window_are_in_it(implementation):
    """AI-Hypercomputer/maxtext PR#4289: off by one. left=3 shows four keys."""
    q, v = jnp.zeros((1, 10, 1, 4)), jnp.arange(10.0).reshape(1, 10, 1, 1)
    out, _ = run(q, q, v, Causal() & Window(3, 0), wanted=(), implementation=implementation)
    assert_close(out.ravel(), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], 1e-6)


@pytest.mark.parametrize("chunk", [4, 8])
def test_F10_prefill_in_chunks_with_a_window(chunk):
    """pytorch/executorch PR#20346: a chunk of twice the window lost keys, longer ones stranded rows."""
    q, k, v = qkv(1, 11, 2, 8)
    mask = Causal() & Window(4, None)
    wanted, _ = oracle(q, k, v, causal(11, 11, 4))
    for start in range(0, 11, chunk):
        stop = min(start + chunk, 11)
        out, _ = run(q[:, start:stop], k[:, :stop], v[:, :stop], mask, wanted=())
        assert_close(out, wanted[:, start:stop], 1e-5)


def test_F11_the_last_rows_of_windowed_attention():
    """flashinfer-ai/flashinfer#3864: 8 queries over a cache, with a window."""
    q, k, v = qkv(1, 40, 2, 8)
    whole = run(q, k, v, Causal() & Window(15, None), wanted=())
    last = run(q[:, 32:], k, v, Causal() & Window(15, None), wanted=(), blocks=8)
    assert_close(last[0], whole[0][:, 32:], 1e-6)
    assert_close(whole[0], oracle(q, k, v, causal(40, 40, 15))[0], 1e-5)


def test_F12_a_window_open_on_both_sides_is_none():
    """pytorch/pytorch PR#173469: (-1, -1) was understood as a bound; ours is (None, None)."""
    q, k, v = qkv(1, 6, 2, 8)
    jax.tree.map(np.testing.assert_array_equal, run(q, k, v, Window(None, None)), run(q, k, v, Window()))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), run(q, k, v, Window()), run(q, k, v))


@BOTH
@pytest.mark.parametrize("T, t, wanted", [(6, 3, [0, 0, 0, 1, 1.5, 2.5]), (3, 6, [3.5, 4.5, 5.5])])
def test_F13_a_window_where_lengths_differ(T, t, wanted, implementation):
    """Derived from F04 and F07: causal (1, 0), q = 0, v = 1, 2, 3, ..."""
    q, k = jnp.zeros((1, T, 1, 4)), jnp.zeros((1, t, 1, 4))
    v = jnp.arange(1.0, t + 1).reshape(1, t, 1, 1)
    out, _ = run(q, k, v, Window(1, 0), wanted=(), implementation=implementation)
    assert_close(out.ravel(), wanted, 1e-6)


# G: grouped-query attention


@BOTH
def test_G01_key_heads_are_repeated_and_not_tiled(implementation):
    """ekzhang/jax-js PR#180: query heads 0 and 1 use key head 0."""
    q, k = jnp.zeros((1, 3, 4, 2)), jnp.zeros((1, 3, 2, 2))
    v = jnp.broadcast_to(jnp.array([1.0, 2.0])[:, None], (1, 3, 2, 2))
    out, _ = run(q, k, v, wanted=(), implementation=implementation)
    assert_close(out[0, 0, :, 0], [1, 1, 2, 2], 1e-6)


@pytest.mark.parametrize("heads, key_heads", [(6, 4), (3, 2), (2, 4), (4, 0)])
def test_G02_heads_that_do_not_divide(heads, key_heads):
    """fla-org/flash-linear-attention#1029: accepted, and wrong."""
    q, k = jnp.ones((1, 3, heads, 4)), jnp.ones((1, 3, key_heads, 4))
    with pytest.raises(ValueError, match=f"q has {heads} heads and k has {key_heads}"):
        jflash.attention(q, k, k)


@pytest.mark.parametrize("H, h", [(6, 2), (4, 1)])
def test_G03_gradients_sum_over_the_group(H, h):
    """stanford-crfm/levanter#443: they did not."""
    q, k, v = qkv(2, 6, H, 8, h=h)
    _, _, grads = check(q, k, v, Causal(), causal(6, 6))
    assert grads["k"].shape == k.shape and grads["v"].shape == v.shape


def test_G03_the_sum_over_the_group_is_in_float32():
    """stanford-crfm/levanter#443: in bfloat16, sixteen heads would lose bits."""
    q, k, v = qkv(1, 24, 16, 8, h=1, dtype=jnp.bfloat16)
    check_low_precision(q, k, v)


def test_G04_keys_and_values_of_different_head_counts():
    """ROCm/rocm-libraries#5888: 8 heads in k, 4 in v."""
    q, k, v = jnp.ones((1, 3, 8, 4)), jnp.ones((1, 3, 8, 4)), jnp.ones((1, 3, 4, 4))
    with pytest.raises(ValueError, match="must agree in batch, length and heads"):
        jflash.attention(q, k, v)


def test_G05_vmap_over_grouped_heads():
    """ml-explore/mlx#3383: it hung."""
    q, k, v = normal(3, 2, 5, 4, 8), normal(3, 2, 5, 2, 8, seed=1), normal(3, 2, 5, 2, 8, seed=2)
    out = jax.jit(jax.vmap(lambda q, k, v: jflash.attention(q, k, v, Causal())))(q, k, v)
    for i in range(3):
        assert_close(out[i], oracle(q[i], k[i], v[i], causal(5, 5))[0], 1e-5)


def test_G06_grouped_heads_are_not_materialised():
    """xlite-dev/ffpa-attn#301: k and v were repeated 16 times."""
    q = jax.ShapeDtypeStruct((1, 16, 16, 128), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.float32)
    with optimised():
        compiled = jax.jit(jflash.attention).lower(q, k, k).compile()
    size_of_k = 8192 * 128 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * size_of_k


# H: segments, lengths, nothing at all


def test_H04_the_tail_of_a_buffer_of_packed_tokens():
    """Dao-AILab/flash-attention#1661: NaN in the gradients of a tail that belongs to nobody."""
    ids = jnp.array([0] * 5 + [1] * 7 + [-1] * 8)
    q, k, v = qkv(1, 20, 2, 8)
    W = cotangents(q, v)
    clean = run(q, k, v, Segments(ids), W=W)
    nan = [jnp.where(jnp.arange(20)[:, None, None] < 12, x, jnp.nan) for x in (q, k, v, W[0])]
    dirty = run(*nan[:3], Segments(ids), W=(nan[3], jnp.where(jnp.arange(20) < 12, W[1], jnp.nan)))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert (dirty[0][:, 12:] == 0).all() and all((g[:, 12:] == 0).all() for g in dirty[2].values())
    seen = np.asarray((ids[:, None] == ids) & (ids[:, None] >= 0))
    assert_right(clean, oracle(q, k, v, seen, do=W[0], dlse=W[1]))


@BOTH
def test_H05_no_keys(implementation):
    """Dao-AILab/flash-attention PR#1155: one sequence, or all, without keys."""
    q, k, v = jnp.ones((2, 4, 2, 8)), jnp.ones((2, 0, 2, 8)), jnp.ones((2, 0, 2, 3))
    for mask in (None, Causal()):
        out, lse, grads = run(q, k, v, mask, implementation=implementation)
        assert (out == 0).all() and out.shape == (2, 4, 2, 3) and (lse == -np.inf).all()
        assert (grads["q"] == 0).all() and grads["k"].shape == k.shape and grads["v"].shape == v.shape
    q, k, v = qkv(2, 2, 2, 8, t=3)
    seen = np.arange(3) < np.array([0, 3])[:, None, None, None]
    check(q, k, v, Prefix(jnp.array([0, 3])), seen, implementation=implementation)


@BOTH
@pytest.mark.parametrize("B, T, t", [(0, 3, 3), (1, 0, 5), (1, 0, 0)], ids=str)
def test_H06_no_batch_and_no_queries(B, T, t, implementation):
    """Dao-AILab/flash-attention PR#2515: a division by zero."""
    q, k, v = jnp.ones((B, T, 2, 4)), jnp.ones((B, t, 1, 4)), jnp.ones((B, t, 1, 3))
    extras = dict(bias=jnp.ones((2, T, t)), dropout=Dropout(0.5, jax.random.key(0)))
    for settings in ({}, extras):
        out, lse, grads = run(q, k, v, Causal(), implementation=implementation, **settings)
        assert out.shape == (B, T, 2, 3) and lse.shape == (B, 2, T)
        assert (grads["k"] == 0).all() and grads["k"].shape == k.shape and grads["q"].shape == q.shape
        if "bias" in settings:
            assert (grads["bias"] == 0).all() and grads["bias"].shape == (2, T, t)


@BOTH
@pytest.mark.parametrize("padding, last", [(0, [5, 5.5]), (-1, [0, 0])], ids=["equality", "padding"])
def test_H08_padding_is_what_a_negative_id_marks(padding, last, implementation):
    """AI-Hypercomputer/maxtext PR#4908: padding saw padding. Here it does not, if its id is negative."""
    ids = jnp.array([1, 1, 2, 2, 2, padding, padding])
    q, v = jnp.zeros((1, 7, 1, 2)), jnp.arange(7.0).reshape(1, 7, 1, 1)
    mask = Causal() & Segments(ids)
    out, _ = run(q, q, v, mask, wanted=(), implementation=implementation)
    assert_close(out.ravel(), [0, 0.5, 2, 2.5, 3, *last], 1e-6)
    if padding < 0:  # then it may hold anything
        out, _ = run(q, q, v.at[:, 5:].set(jnp.nan), mask, wanted=(), implementation=implementation)
        assert_close(out.ravel(), [0, 0.5, 2, 2.5, 3, *last], 1e-6)


@BOTH
def test_H09_lengths_of_keys(implementation):
    """jax-ml/jax#23349: key_value_seq_lengths had no effect."""
    q, k, v = qkv(3, 4, 2, 8, t=16)
    lengths = jnp.array([0, 1, 9])
    seen = np.arange(16) < np.asarray(lengths)[:, None, None, None]
    clean = check(q, k, v, Prefix(lengths), seen, implementation=implementation)
    beyond = jnp.arange(16)[None, :, None, None] >= lengths[:, None, None, None]
    k, v = jnp.where(beyond, jnp.nan, k), jnp.where(beyond, jnp.nan, v)
    dirty = run(q, k, v, Prefix(lengths), implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    too_long = run(q, *qkv(3, 4, 2, 8, t=16)[1:], Prefix(lengths + 99), implementation=implementation)
    assert_right(too_long, run(q, *qkv(3, 4, 2, 8, t=16)[1:], implementation=implementation), 1e-6)


@pytest.mark.parametrize("fill", [np.nan, 1e4])
def test_H10_gaps_between_packed_sequences(fill):
    """NVIDIA/TransformerEngine#2186: huge dk and dv where padded offsets differ from real ones."""
    real, padded = [0, 9, 17, 25, 37, 45, 57], [0, 12, 20, 28, 40, 48, 60]
    ids = np.full(60, -1)
    for i, start in enumerate(padded[:-1]):
        ids[start : start + real[i + 1] - real[i]] = i
    q, k, v = qkv(1, 60, 2, 8)
    W = cotangents(q, v)
    gap = (ids < 0)[:, None, None]
    q, k, v, do = (jnp.where(gap, fill, x) for x in (q, k, v, W[0]))
    got = run(q, k, v, Segments(jnp.asarray(ids)), W=(do, W[1]), blocks=16)
    seen = (ids[:, None] == ids) & (ids[:, None] >= 0)
    q, k, v, do = (jnp.where(gap, 0, x) for x in (q, k, v, W[0]))
    assert_right(got, oracle(q, k, v, seen, do=do, dlse=W[1]))
    assert all((g[:, ids < 0] == 0).all() for g in got[2].values())


def test_H13_new_documents_do_not_compile_anew():
    """pytorch/xla#8731: a compilation for each set of lengths."""
    q, k, v = qkv(1, 64, 1, 4)
    step = jax.jit(lambda ids: jflash.attention(q, k, v, Causal() & Segments(ids)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, 64), 3, replace=False))
        ids = np.searchsorted(cuts, np.arange(64), side="right")
        out = step(ids)
    assert step._cache_size() == 1
    assert_close(out, oracle(q, k, v, causal(64, 64) & (ids[:, None] == ids))[0], 1e-5)


# I: dropout


def test_I03_forward_and_backward_drop_the_same():
    """Dao-AILab/flash-attention#1251: the gradient was that of another mask. Finite differences."""
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in qkv(1, 8, 1, 4))
        W = normal(1, 8, 1, 4, seed=9, dtype=jnp.float64)
        dropout = Dropout(0.5, jax.random.key(0))
        both = lambda q, k, v: (jflash.attention(q, k, v, dropout=dropout) * W).sum()
        both = jax.jit(jax.value_and_grad(both, (0, 1, 2)))
        loss, (_, grads) = lambda *x: both(*x)[0], both(q, k, v)
        for n, (x, g) in enumerate(zip((q, k, v), grads)):
            step = normal(*x.shape, seed=20 + n, dtype=jnp.float64)
            args = lambda e, n=n, step=step: [y + e * step * (i == n) for i, y in enumerate((q, k, v))]
            difference = (loss(*args(1e-5)) - loss(*args(-1e-5))) / 2e-5
            np.testing.assert_allclose((g * step).sum(), difference, rtol=1e-7)


@BOTH
def test_I05_rates_of_zero_and_one(implementation):
    """google/flax#5497: rates at and beyond the ends; the refusals are in test_validate.py."""
    q, k, v = qkv(1, 6, 2, 8)
    plain = run(q, k, v, Causal(), wanted=(), implementation=implementation)
    none = run(q, k, v, Causal(), wanted=(), dropout=Dropout(0.0), implementation=implementation)
    jax.tree.map(np.testing.assert_array_equal, none, plain)
    W = cotangents(q, v)
    settings = dict(dropout=Dropout(1.0), W=(W[0], 0 * W[1]), implementation=implementation)
    out, lse, grads = run(q, k, v, Causal(), **settings)
    assert (out == 0).all() and all((g == 0).all() for g in grads.values())
    assert_close(lse, plain[1], 1e-6)


def test_I08_the_rate_and_the_independence_of_the_mask():
    """Derived: 0.1 of all pairs, and no two tiles, heads, batch entries or keys alike."""
    B, T, H, rate = 2, 128, 8, 0.1
    x = jnp.zeros((B, T, H, 1))
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
    draw = lambda seed: run(x, x, v, dropout=Dropout(rate, jax.random.key(seed)), wanted=(), blocks=32)[0]
    weights = np.moveaxis(draw(0), 2, 1)  # [B, H, T, t]
    dropped = weights == 0
    np.testing.assert_allclose(weights[~dropped], 1 / T / (1 - rate), rtol=1e-5)
    assert abs(dropped.mean() - rate) < 0.005
    assert (
        abs(dropped.mean((0, 1, 3)) - rate).max() < 0.04 and abs(dropped.mean((0, 1, 2)) - rate).max() < 0.04
    )
    apart = lambda a, b: abs(((a - rate) * (b - rate)).mean()) / (rate * (1 - rate))
    flat = dropped.reshape(B * H, T, T)
    assert max(apart(a, b) for a, b in itertools.combinations(flat, 2)) < 0.05
    tiles = flat.reshape(B * H, 4, 32, 4, 32).transpose(1, 3, 0, 2, 4).reshape(16, -1)
    assert max(apart(a, b) for a, b in itertools.combinations(tiles, 2)) < 0.05
    assert apart(flat[:, 1:], flat[:, :-1]) < 0.02 and apart(flat[..., 1:], flat[..., :-1]) < 0.02
    assert apart(flat, (np.moveaxis(draw(1), 2, 1) == 0).reshape(flat.shape)) < 0.02


# J: soft cap


@BOTH
def test_J01_the_formula_of_the_cap(implementation):
    """Dao-AILab/flash-attention#2396: score * tanh(score) instead of cap * tanh(score / cap)."""
    q = jnp.array([-60.0, -3, 0, 3, 60]).reshape(5, 1, 1, 1)
    one = jnp.ones((5, 1, 1, 1))
    _, lse = run(q, one, one, scale=1.0, score_mod=SoftCap(30.0), wanted=(), implementation=implementation)
    assert_close(lse.ravel(), [-28.92083, -2.99004, 0, 2.99004, 28.92083], 1e-5)


def test_J02_the_mask_comes_after_the_cap():
    """microsoft/onnxruntime PR#21683: a masked score of -inf must not become -cap."""
    q, k, v = qkv(1, 6, 2, 8)
    bias = normal(1, 2, 6, 6, seed=5)
    check(q, k, v, Causal(), causal(6, 6), bias=bias, cap=1.0)


def test_J03_cap_with_packed_sequences():
    """Dao-AILab/flash-attention PR#2544: dq wrong with lengths and a cap."""
    q, k, v = qkv(1, 21, 2, 8, t=34)
    q = 4 * q
    q_ids, k_ids = (
        jnp.repeat(jnp.arange(2), jnp.array([12, 9])),
        jnp.repeat(jnp.arange(2), jnp.array([21, 13])),
    )
    seen = np.asarray(q_ids[:, None] == k_ids)
    check(q, k, v, Segments(q_ids, k_ids), seen, cap=15.0, atol=5e-5)


def test_J04_cap_of_ten():
    """Dao-AILab/flash-attention#2466: the backward pass hung with a cap of 10."""
    check(*qkv(2, 64, 4, 32), cap=10.0)


@BOTH
def test_J05_saturated_scores(implementation):
    """Derived from J01: at 1e4 the cap is reached and the slope is 0, not NaN."""
    q, k, v = (
        jnp.full((1, 2, 1, 1), 100.0),
        jnp.array([100.0, -100.0]).reshape(1, 2, 1, 1),
        normal(1, 2, 1, 3),
    )
    cap = jnp.float32(30.0)
    out, lse, grads = run(q, k, v, scale=1.0, score_mod=SoftCap(cap), implementation=implementation)
    assert_close(lse.ravel(), [30, 30], 1e-5)
    assert (grads["q"] == 0).all() and (grads["k"] == 0).all()
    wide = run(
        q / 100, k / 100, v, scale=1.0, score_mod=SoftCap(jnp.float32(1e6)), implementation=implementation
    )
    assert_right(
        wide, oracle(q / 100, k / 100, v, scale=1.0, do=cotangents(q, v)[0], dlse=cotangents(q, v)[1])
    )
    # The slope at a score of 60: 1 - tanh(2)^2 = 0.07065.
    W = jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1))
    q, k = jnp.full((1, 1, 1, 1), 60.0), jnp.ones((1, 1, 1, 1))
    *_, grads = run(q, k, k, scale=1.0, score_mod=SoftCap(cap), W=W, implementation=implementation)
    assert_close(grads["q"].ravel(), [0.07065], 1e-5)


def test_J06_no_cap_and_a_traced_cap():
    """stanford-crfm/levanter PR#1057: None and 0. Ours: leave it out; 0 is refused (test_validate.py)."""
    q, k, v = qkv(1, 6, 2, 8)
    jax.tree.map(np.testing.assert_array_equal, run(q, k, v, score_mod=()), run(q, k, v))
    W = cotangents(q, v)[0]
    loss = lambda cap: (jflash.attention(q, k, v, score_mod=SoftCap(cap)) * W).sum()
    got = jax.jit(jax.grad(loss))(jnp.float32(0.7))
    exact = lambda cap: (oracle(q, k, v, cap=cap)[0] * np.asarray(W, np.float64)).sum()
    assert_close(got, (exact(0.7 + 1e-5) - exact(0.7 - 1e-5)) / 2e-5, 1e-3)


# K: lse


def test_K02_a_loss_of_out_times_exp_of_lse():
    """pytorch/pytorch#136232: NaN gradients."""
    q, k, v = qkv(1, 20, 2, 8)
    W = cotangents(q, v)[0]

    def loss(x):
        out, lse = jflash.attention_with_lse(*x, Causal())
        return (out * jnp.exp(lse - jax.lax.stop_gradient(lse)).mT[..., None] * W).sum()

    got = jax.jit(jax.grad(loss))((q, k, v))
    out, _ = oracle(q, k, v, causal(20, 20))
    dlse = np.moveaxis((out * np.asarray(W, np.float64)).sum(-1), 1, 2)  # of exp(0) * out·W
    exact = oracle(q, k, v, causal(20, 20), do=W, dlse=dlse)[2]
    for name, g in zip("qkv", got):
        assert_close(g, exact[name], 5e-5, name)


@BOTH
@pytest.mark.parametrize(
    "mask, empty",
    [
        (Causal(), [0, 1]),
        (Dense(jnp.arange(6)[:, None] * jnp.ones(4) > 2), [0, 1, 2]),
        (Segments(jnp.array([0, 0, 7, 1, 1, -1]), jnp.array([0, 0, 1, 1])), [2, 5]),
        (Prefix(jnp.array([0])), [0, 1, 2, 3, 4, 5]),
        (Window(0, 0), [0, 1]),
        (jflash.Function(lambda b, h, i, j: i > 2), [0, 1, 2, 3, 4]),
    ],
    ids=["causal", "dense", "segments", "prefix", "window", "function"],
)
def test_K03_the_lse_of_an_empty_row_is_minus_infinity(mask, empty, implementation):
    """flashinfer-ai/flashinfer#4452: -49993, elsewhere +inf."""
    q, k, v = qkv(1, 6, 2, 8, t=4)
    out, lse = run(q, k, v, mask, wanted=(), implementation=implementation)
    rows = np.isin(np.arange(6), empty)
    assert (lse[..., rows] == -np.inf).all() and np.isfinite(lse[..., ~rows]).all()
    assert (out[:, rows] == 0).all()


@pytest.mark.parametrize("cut", [1, 5, 10])
def test_K04_parts_of_the_keys_merge_by_lse(cut):
    """flashinfer-ai/flashinfer#4051: NaN for two empty parts; gradients through the merge."""
    q, k, v = qkv(1, 4, 2, 8, t=10)
    W = cotangents(q, v)

    def merged(q, k, v):
        parts = [
            jflash.attention_with_lse(q, x, y)
            for x, y in ((k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:]))
        ]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        out = sum(jnp.exp(y - lse).mT[..., None] * x for x, y in parts)
        return out, lse

    def both(q, k, v):
        y, pull = jax.vjp(merged, q, k, v)
        return *y, dict(zip("qkv", pull(W)))

    assert_right(jax.jit(both)(q, k, v), oracle(q, k, v, do=W[0], dlse=W[1]))


@BOTH
def test_K05_the_gradient_of_lse(implementation):
    """NVIDIA/cuEquivariance PR#122: cotangents of the auxiliary output were dropped."""
    q, k, v = qkv(2, 6, 4, 8, h=2)
    W = jnp.zeros_like(q), cotangents(q, v)[1]
    _, _, grads = check(q, k, v, Causal(), causal(6, 6), W=W, implementation=implementation)
    assert np.abs(grads["q"]).max() > 1e-2 and np.abs(grads["k"]).max() > 1e-2 and (grads["v"] == 0).all()


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_K06_lse_is_in_nats_and_float32(dtype, implementation):
    """flashinfer-ai/flashinfer#4485: log2 or ln, depending on the backend."""
    q = jnp.zeros((1, 4, 1, 8), dtype)
    _, lse = run(q, q, q, Causal(), wanted=(), implementation=implementation)
    assert lse.dtype == np.float32
    assert_close(lse.ravel(), np.log([1, 2, 3, 4]), 1e-6)


# L: JAX. Transformations are in test_rules.py.


def test_L03_checkpoint_of_odd_shapes():
    """lucidrains/flash-attention-jax#7: jax.checkpoint failed."""
    q, k, v = qkv(3, 16, 5, 19, t=17)
    W = cotangents(q, v)[0]
    loss = lambda x, f: (f(*x) * W).sum()
    got = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(lambda *x: jflash.attention(*x)))))((q, k, v))
    exact = oracle(q, k, v, do=W, dlse=jnp.zeros((3, 5, 16)))[2]
    for name, g in zip("qkv", got):
        assert_close(g, exact[name], 5e-5, name)


def test_L05_jacobian():
    """jax-ml/jax#38495: the Jacobian failed."""
    q, k, v = qkv(1, 3, 1, 2)
    jacobian = jax.jit(jax.jacrev(lambda q: jflash.attention(q, k, v)))(q)
    assert jacobian.shape == (1, 3, 1, 2, 1, 3, 1, 2)
    for index in np.ndindex(3, 2):
        step = np.zeros((1, 3, 1, 2))
        step[0, index[0], 0, index[1]] = 1e-5
        x = np.asarray(q, np.float64)
        column = (oracle(x + step, k, v)[0] - oracle(x - step, k, v)[0]) / 2e-5
        assert_close(jacobian[..., 0, index[0], 0, index[1]], column, 1e-5)


def test_L07_mask_scale_and_bounds_from_a_loop():
    """keras-team/keras#21808: a traced mask was hashed."""
    q, k, v = qkv(1, 5, 1, 4)

    def body(carry):
        n, left, mask, scale, total = carry
        out = jflash.attention(q, k, v, Dense(mask) & Window(left), scale=scale)
        return n + 1, left - 1, mask.at[:, n].set(False), scale * 2, total + out

    start = 0, jnp.int32(4), jnp.ones((5, 5), bool), jnp.float32(0.3), jnp.zeros_like(v)
    *_, total = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] < 3, body, x))(start)
    wanted = 0
    for n in range(3):
        seen = causal(5, 5, 4 - n, None) & (np.arange(5) >= n)
        wanted = wanted + oracle(q, k, v, seen, scale=0.3 * 2**n)[0]
    assert_close(total, wanted, 2e-5)


def test_L07_numpy_scalars():
    """keras-team/keras#21808: Python numbers were expected."""
    q, k, v = qkv(1, 5, 1, 4)
    settings = dict(scale=np.float32(0.3), score_mod=SoftCap(np.float64(2.0)))
    out = jflash.attention(q, k, v, Window(np.int64(2), np.int32(0)), **settings)
    assert_close(out, oracle(q, k, v, causal(5, 5, 2), scale=0.3, cap=2.0)[0], 2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_L13_dtypes_of_results_and_gradients(dtype):
    """huggingface/transformers#35945: mixed dtypes are refused (test_validate.py); each gets its own back."""
    q, k, v = qkv(1, 4, 2, 8, dtype=dtype)
    bias, sinks = normal(2, 4, 4, dtype=jnp.bfloat16), normal(2)
    out, lse, grads = run(q, k, v, bias=bias, sinks=sinks, scale=jnp.float16(0.3))
    assert out.dtype == dtype and lse.dtype == np.float32
    kinds = {name: g.dtype for name, g in grads.items()}
    same = jnp.dtype(dtype)
    assert kinds == dict(q=same, k=same, v=same, bias=jnp.bfloat16, sinks=np.float32, scale=np.float16)


def test_L14_a_cotangent_of_another_dtype_is_refused():
    """jax-ml/jax#24047: dtypes in the backward pass. Strict promotion is in test_rules.py."""
    q, k, v = qkv(1, 4, 1, 8, dtype=jnp.bfloat16)
    _, pull = jax.vjp(jflash.attention, q, k, v)
    with pytest.raises((TypeError, ValueError), match="float32"):
        pull(jnp.ones((1, 4, 1, 8), jnp.float32))


def test_L15_cotangents_that_are_views():
    """Dao-AILab/flash-attention#355: an expanded or transposed cotangent was read wrongly."""
    q, k, v = qkv(2, 5, 3, 4)
    losses = {
        "sum": (lambda out: out.sum(), jnp.ones_like(q)),
        "mean": (lambda out: out.mean(), jnp.ones_like(q) / q.size),
        "transpose": (lambda out: (out.transpose(3, 1, 0, 2) * normal(4, 5, 2, 3, seed=3)).sum(), None),
        "slice": (lambda out: (out[:, 1::2] * normal(2, 2, 3, 4, seed=4)).sum(), None),
    }
    for name, (loss, do) in losses.items():
        do = jax.grad(loss)(jnp.zeros_like(q)) if do is None else do
        got = jax.jit(jax.grad(lambda q, loss=loss: loss(jflash.attention(q, k, v))))(q)
        assert_close(got, oracle(q, k, v, do=do, dlse=jnp.zeros((2, 3, 5)))[2]["q"], 2e-5, name)


def test_L16_matmul_precision():
    """Derived: float32 stays float32 unless JAX or the call says otherwise; the call wins."""
    q, k, v = qkv(1, 6, 2, 16)
    exact = oracle(q, k, v, causal(6, 6))[0]
    for name in ("default", "bfloat16", "tensorfloat32", "highest", "float32"):
        with jax.default_matmul_precision(name):
            out = jax.jit(lambda q: jflash.attention(q, k, v, Causal()))(q)
        assert_close(out, exact, 2e-6 if name in ("highest", "float32") else 2e-2)

    def precisions(**settings):
        text = str(jax.make_jaxpr(lambda q: jflash.attention(q, k, v, **settings))(q))
        return set(re.findall(r"precision=(\S+)", text))

    highest = precisions()
    assert len(highest) == 1 and "HIGHEST" in next(iter(highest))
    with jax.default_matmul_precision("bfloat16"):
        assert precisions() != highest
        assert precisions(precision="highest") == highest
    assert precisions(precision="default") != highest


# M: sharding. Values and gradients on meshes are in test_rules.py.


def collectives(f, *args):
    with optimised():
        text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(
        r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
    )


def pulled(call):
    def gradients(q, k, v, W):
        return jax.vjp(call, q, k, v)[1](W)

    return gradients


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_M02_sharded_attention_communicates_nothing(spec, kind):
    """jax-ml/jax#21855: an all-reduce in the backward pass."""
    axis_type = AxisType.Auto if kind == "shard_map" else AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("x", "unused"), axis_types=(axis_type, axis_type))
    mod = lambda s, b, h, i, j: s * (b + h)
    call = lambda q, k, v: jflash.attention(q, k, v, Causal(), score_mod=mod)
    if kind == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jnp.ones((4, 6, 4, 8))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, spec))
        assert collectives(pulled(call), x, x, x, x) == []


def test_M02_a_replicated_key_head_costs_one_sum():
    """jax-ml/jax#21855: exactly one for dk and dv, and none in the forward pass."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    spec = P(None, None, "x")
    call = jax.shard_map(
        lambda q, k, v: jflash.attention(q, k, v, Causal()),
        mesh=mesh,
        in_specs=(spec, P(), P()),
        out_specs=spec,
    )
    q = jax.device_put(jnp.ones((1, 6, 4, 8)), NamedSharding(mesh, spec))
    k = jax.device_put(jnp.ones((1, 6, 1, 8)), NamedSharding(mesh, P()))
    assert collectives(call, q, k, k) == []
    names = collectives(pulled(call), q, k, k, q)
    assert set(names) == {"all-reduce"} and len(names) <= 2


def test_M03_dk_and_dv_of_replicated_heads_without_check_vma():
    """jax-ml/jax#36886: 1/n or n times. With check_vma=False shard_map itself sums over the devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = qkv(1, 6, 4, 8, h=1)
    W = cotangents(q, v)
    spec = P(None, None, "x")
    for check_vma in (True, False):
        call = jax.shard_map(
            lambda q, k, v: jflash.attention_with_lse(q, k, v, Causal()),
            mesh=mesh,
            in_specs=(spec, P(), P()),
            out_specs=(spec, P(None, "x")),
            check_vma=check_vma,
        )
        got = jax.jit(pulled(call))(q, k, v, W)
        exact = oracle(q, k, v, causal(6, 6), do=W[0], dlse=W[1])[2]
        for name, g in zip("qkv", got):
            assert_close(g, exact[name], 5e-5, name)


def test_M06_arrays_that_are_sharded_over_the_sequence():
    """jax-ml/jax PR#36169: a wrong stride in the backward pass."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = (jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in qkv(2, 16, 2, 8))
    check(q, k, v, Causal(), causal(16, 16))


@pytest.mark.parametrize("shape", [(1, 2, 6, 6), (4, 1, 1, 6)], ids=str)
def test_M07_a_bias_beside_a_sharded_batch(shape):
    """apple/axlearn PR#538: a bias of batch 1 was to be sharded over four devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("x") if x.shape[0] == 4 else P()))
    q, k, v = (put(x) for x in qkv(4, 6, 2, 8))
    check(q, k, v, Causal(), causal(6, 6), bias=put(normal(*shape, seed=5)))


# N: caches wait; what concerns masks and arguments


def test_N03_nan_in_slots_that_a_boolean_mask_hides():
    """vllm-project/vllm#641: NaN + (-inf) is NaN, so a bias of -inf does not protect; a mask does."""
    q, k, v = qkv(1, 3, 2, 8, t=6)
    used = jnp.arange(6) < 4
    nan = lambda x: jnp.where(used[:, None, None], x, jnp.nan)
    bias = jnp.where(used, 0.0, -jnp.inf)
    got = run(q, nan(k), nan(v), used, bias=bias)
    assert_right(got[:2], oracle(q, k, v, np.asarray(used)))
    assert all(np.isfinite(g).all() for g in got[2].values())


def test_N15_every_argument_has_an_effect():
    """Dao-AILab/flash-attention#1788: cache_leftpad was accepted and ignored."""
    q, k, v = qkv(1, 6, 2, 8)
    base, _ = run(q, k, v, Causal(), wanted=())
    positions = jnp.arange(6)[None]
    settings = [
        dict(mask=Causal() & Window(1)),
        dict(bias=normal(6, 6)),
        dict(scale=2.0),
        dict(score_mod=SoftCap(0.5)),
        dict(score_mod=Alibi(jnp.ones(2))),
        dict(sinks=jnp.ones(2)),
        dict(dropout=Dropout(0.5, jax.random.key(0))),
        dict(q_positions=positions + 2),
        dict(k_positions=positions - 2),
    ]
    for changed in settings:
        out, _ = run(q, k, v, wanted=(), **dict(mask=Causal()) | changed)
        assert np.abs(out - base).max() > 1e-2, changed


# O: ALiBi. Rotary embeddings are in test_rotary.py.


def test_O05_alibi_in_training_and_in_decoding():
    """Dao-AILab/flash-attention#907: distances must count from i + t - T."""
    q, k, v = qkv(1, 7, 2, 8)
    mod = Alibi(jnp.array([0.5, 2.0]))
    run_ = functools.partial(run, score_mod=mod, wanted=())
    whole, _ = run_(q, k, v, Causal())
    for rows, t in ((slice(4, 5), 5), (slice(4, 7), 7)):
        assert_close(run_(q[:, rows], k[:, :t], v[:, :t], Causal())[0], whole[:, rows], 1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=str)
def test_O06_alibi_is_a_bias_of_the_distance(shape):
    """Dao-AILab/flash-attention PR#540: -slope * |i - j| without a causal mask, too."""
    q, k, v = qkv(2, 5, 6, 8)
    slopes = jnp.abs(normal(*shape, seed=4))
    distance = np.abs(np.arange(5)[:, None] - np.arange(5))
    bias = -np.asarray(slopes, np.float64)[..., None, None] * distance
    W = cotangents(q, v)
    got = run(q, k, v, score_mod=Alibi(slopes))
    assert_right(got, oracle(q, k, v, bias=bias, do=W[0], dlse=W[1]))
    loss = lambda slopes: (jflash.attention(q, k, v, score_mod=Alibi(slopes)) * W[0]).sum()
    without_lse = oracle(q, k, v, bias=bias, do=W[0], dlse=jnp.zeros((2, 6, 5)))[2]["bias"]
    dslopes = -(without_lse * distance).sum((-1, -2))
    assert_close(jax.jit(jax.grad(loss))(slopes), dslopes.reshape(shape), 1e-4)


# P: the same bits


def test_P01_gradients_are_the_same_from_run_to_run():
    """Dao-AILab/flash-attention#2244: dq differed in 29 of 30 runs, deterministic flag or not."""
    q, k, v = qkv(1, 130, 4, 16, h=1, dtype=jnp.bfloat16)
    again = functools.partial(run, q, k, v, Causal(), deterministic=True, blocks=64)
    first = again()
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, again())


def test_P02_another_sequence_does_not_change_a_row():
    """vllm-project/vllm#51902: an unrelated length altered a row, by its bits."""
    q, k, v = qkv(2, 12, 2, 8)
    results = []
    for other in (9, 10):
        ids = jnp.stack([jnp.repeat(jnp.arange(2), 6), jnp.where(jnp.arange(12) < other, 0, -1)])
        results.append(run(q, k, v, Causal() & Segments(ids), blocks=4))
        unused = (jnp.arange(2)[:, None] == 1) & (jnp.arange(12) >= 6)
        dirty = [jnp.where(unused[..., None, None], jnp.nan, x) for x in (q, k, v)]
        ids = ids.at[1, 6:].set(-1)
        results.append(run(*dirty, Causal() & Segments(ids), blocks=4))
    for other in results[1:]:
        np.testing.assert_array_equal(other[0][0], results[0][0][0])
        for name in "qkv":
            np.testing.assert_array_equal(other[2][name][0], results[0][2][name][0])


def test_P03_twenty_calls_give_the_same():
    """jax-ml/jax#23819: the first call differed."""
    x = qkv(2, 96, 2, 8)
    call = jax.jit(lambda q, k, v: jflash.attention(q, k, v, Causal()))
    first = call(*x)
    assert_close(first, oracle(*x, causal(96, 96))[0], 1e-5)
    for _ in range(20):
        np.testing.assert_array_equal(call(*x), first)


# R: sizes, memory, accuracy, sinks


def sizes(jaxpr):
    """The sizes of all arrays in a jaxpr and in those within it."""
    for eqn in jaxpr.eqns:
        yield from (x.aval.size for x in eqn.outvars if hasattr(x.aval, "size"))
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda y: hasattr(y, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


def test_R02_more_than_two_to_the_31_elements():
    """Dao-AILab/flash-attention#2611: offsets overflowed 32 bits. Here it must at least be traced."""
    x = jax.ShapeDtypeStruct((1, 2**22, 32, 128), jnp.bfloat16)
    loss = lambda q, k, v: jflash.attention(q, k, v, Causal()).astype(jnp.float32).sum()
    grads = jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, x, x)
    assert all(g.shape == x.shape and g.dtype == x.dtype for g in grads)


def test_R03_more_batch_entries_than_a_grid_has():
    """Dao-AILab/flash-attention PR#1500: 65535 blocks along an axis."""
    q, k, v = qkv(70000, 1, 1, 1)
    np.testing.assert_array_equal(run(q, k, v, wanted=())[0], v)


@pytest.mark.parametrize(
    "mask",
    [None, Causal(), Window(64), Segments(jnp.arange(4096) // 100), Causal() | Prefix(10)],
    ids=["none", "causal", "window", "segments", "or"],
)
def test_R05_no_mask_is_materialised(mask):
    """pytorch/pytorch#150054: a mask of 49999^2 elements, forward or backward."""
    x = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    loss = lambda q, k, v: jflash.attention(q, k, v, mask).sum()
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    assert 0 < max(sizes(traced.jaxpr)) <= 4096 * 4096 // 8


def test_R06_nothing_grows_from_call_to_call():
    """jax-ml/jax#2072: caches that keep arrays. Compilations are counted in test_rules.py."""
    q, k, v = qkv(1, 8, 1, 4)
    step = jax.jit(lambda scale, ids: jflash.attention(q, k, v, Causal() & Segments(ids), scale=scale))
    live = []
    for i in range(50):
        step(jnp.float32(i), jnp.arange(8) // (i % 3 + 1)).block_until_ready()
        live.append(len(jax.live_arrays()))
    assert step._cache_size() == 1 and live[-1] <= live[5]


@pytest.mark.parametrize("D, kind", [(320, "normal"), (64, "one dominant key")])
def test_R08_gradients_in_bfloat16(D, kind):
    """Dao-AILab/flash-attention#385: errors of 1.43 in dv."""
    q, k, v = qkv(1, 100, 2, D, dtype=jnp.bfloat16)
    if kind == "one dominant key":
        k = k.at[:, 3].mul(6)
    check_low_precision(q, k, v, Causal(), causal(100, 100), blocks=64)


def test_R08_one_key_gives_no_gradient_of_the_scores():
    """Dao-AILab/flash-attention#1138: dq and dk were not 0."""
    q, k, v = qkv(2, 5, 2, 64, t=1, dtype=jnp.bfloat16)
    W = cotangents(q, v)
    *_, grads = run(q, k, v, W=(W[0], 0 * W[1]))
    assert max(np.abs(grads[name]).max() for name in "qk") < 1e-5  # the rounding of do·v in float32


@BOTH
@pytest.mark.parametrize("sink", [-100.0, 0.0, 100.0])
def test_R09_sinks(sink, implementation):
    """Dao-AILab/flash-attention PR#2752: NaN without keys, inf at 100, no gradient."""
    q, k, v = qkv(3, 6, 2, 8, t=5)
    sinks = sink + normal(2, seed=6)
    lengths = jnp.array([5, 0, 3])
    seen = np.arange(5) < np.asarray(lengths)[:, None, None, None]
    mask = Causal() & Prefix(lengths)
    out, lse, grads = check(q, k, v, mask, seen & causal(6, 5), sinks=sinks, implementation=implementation)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()  # ours leaves the sink out of lse
    if sink == 0:
        assert np.abs(grads["sinks"]).max() > 1e-2


def test_R10_an_implementation_that_cannot_run_is_not_replaced():
    """Derived: asked for by name, it runs or raises. With reasons: test_rules.py."""
    q, k, v = qkv(1, 4, 1, 8)
    with pytest.raises((ValueError, NotImplementedError), match="mosaic"):
        jflash.attention(q, k, v, implementation="mosaic")
    assert jflash.explain(q, k, v).implementation == "xla"

"""Public bug reports of other attention kernels, each as a small test that is named by its id.

I to L: dropout, soft cap, lse, JAX.
The table of all reports is in README.md.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from failures import BOTH, assert_close, assert_right, causal, check, cotangents, oracle, qkv, run

import jflash
from jflash import Causal, Dense, Dropout, Prefix, Segments, SoftCap, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

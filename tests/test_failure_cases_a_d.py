"""Public bug reports of other attention kernels, each as a small test that is named by its id.

A to D: rows that see nothing and NaN, alignment, block boundaries, large scores.
The table of all reports is in README.md.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from failures import (
    BOTH,
    assert_close,
    assert_right,
    causal,
    check,
    check_low_precision,
    cotangents,
    optimised,
    oracle,
    qkv,
    run,
)

import jflash
from jflash import Causal, Dense, Prefix, Segments, SoftCap, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

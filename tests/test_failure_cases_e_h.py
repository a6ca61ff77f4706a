"""Public bug reports of other attention kernels, each as a small test that is named by its id.

E to H: bias, windows, grouped queries, lengths.
The table of all reports is in README.md.
"""

import re

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
from jflash import Causal, Dropout, Prefix, Segments, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

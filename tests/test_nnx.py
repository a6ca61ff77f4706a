import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflash
import jflash.heads as heads
from jflash import Causal, Segments, Window
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def turned(x, positions, rotary):
    """Returns x with half pairs (or interleaved ones) rotated, by a matrix for each pair."""
    r = x.shape[-1] if rotary.dim is None else rotary.dim
    out = x
    for i in range(r // 2):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + r // 2)
        angle = positions[..., None] * rotary.base ** (-2 * i / r)
        c, s = jnp.cos(angle), jnp.sin(angle)
        out = out.at[..., a].set(x[..., a] * c - x[..., b] * s)
        out = out.at[..., b].set(x[..., a] * s + x[..., b] * c)
    return out


def plain(params, x_q, x_kv, visible=None, bias=None, rotary=None, q_pos=None, k_pos=None):
    """Returns what the layer should: einsum and softmax over parameters {name: {kernel, bias}}."""
    project = lambda name, x: (
        jnp.einsum("...tf,fhd->...thd", x, params[name]["kernel"]) + params[name].get("bias", 0)
    )
    q, k, v = project("query", x_q), project("key", x_kv), project("value", x_kv)
    T, t = q.shape[-3], k.shape[-3]
    if rotary is not None:
        q = turned(q, jnp.arange(T) + t - T if q_pos is None else q_pos, rotary)
        k = turned(k, jnp.arange(t) if k_pos is None else k_pos, rotary)
    group = q.shape[-2] // k.shape[-2]
    k, v = (jnp.stack([x[..., i // group, :] for i in range(q.shape[-2])], -2) for x in (k, v))
    s = jnp.einsum("...thd,...shd->...hts", q, k) / math.sqrt(q.shape[-1])
    s = s if bias is None else s + bias
    s = s if visible is None else jnp.where(visible, s, -jnp.inf)
    out = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(s, axis=-1), v)
    out = jnp.einsum("...thd,hdo->...to", out, params["out"]["kernel"])
    return out + params["out"].get("bias", 0)


def call(layer, *inputs, **settings):
    """Returns `layer(*inputs, **settings)` compiled at once: eagerly it would take dozens."""
    return nnx.jit(lambda layer: layer(*inputs, **settings))(layer)


def expected(layer, *args):
    """Returns `plain` with the parameters and the rotary of `layer`."""
    x_q, x_kv, visible, q_pos, k_pos = (*args, None, None)[:5]
    f = lambda params: plain(params, x_q, x_kv, visible, None, layer.rotary, q_pos, k_pos)
    return jax.jit(f)(parameters(layer))


def parameters(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def causal(T, t):
    return np.tril(np.ones((T, t), bool), t - T)


# Name: (arguments of the layer, shape of x_q, of x_kv, mask, visible pairs, more for the call)
CASES = {
    "self": (dict(), (2, 7, 24), None, None, None, {}),
    "causal": (dict(use_bias=True), (2, 7, 24), None, Causal(), causal(7, 7), {}),
    "gqa": (dict(num_kv_heads=2), (2, 7, 24), None, Causal(), causal(7, 7), {}),
    "mqa": (dict(num_kv_heads=1, head_dim=8), (2, 5, 24), None, None, None, {}),
    "cross": (dict(kv_features=10, out_features=6), (2, 3, 24), (2, 8, 10), None, None, {}),
    "cross causal rotary": (
        dict(kv_features=10, num_kv_heads=2, rotary=Rotary(base=50.0)),
        (2, 3, 24),
        (2, 8, 10),
        Causal(),
        causal(3, 8),
        {},
    ),
    "rotary": (dict(rotary=Rotary()), (2, 7, 24), None, Causal(), causal(7, 7), {}),
    "partial rotary": (
        dict(rotary=Rotary(base=100.0, dim=2, interleaved=True)),
        (2, 7, 24),
        None,
        Causal(),
        causal(7, 7),
        {},
    ),
    "window": (
        dict(rotary=Rotary()),
        (2, 9, 24),
        None,
        Causal() & Window(3, None),
        causal(9, 9) & ~np.tril(np.ones((9, 9), bool), -4),
        {},
    ),
    "array mask": (dict(), (2, 7, 24), None, jnp.asarray(causal(7, 7)), causal(7, 7), {}),
    "bias": (dict(), (2, 7, 24), None, None, None, dict(bias=normal(1, 4, 7, 7, seed=9))),
    "no batch": (dict(rotary=Rotary()), (7, 24), None, Causal(), causal(7, 7), {}),
    "two batch axes": (dict(rotary=Rotary()), (2, 3, 5, 24), None, Causal(), causal(5, 5), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_einsum_attention(case):
    arguments, q_shape, kv_shape, mask, visible, extra = CASES[case]
    if case == "array mask":
        mask = mask[None, None]
    layer = FlashMultiHeadAttention(24, 4, **arguments, rngs=nnx.Rngs(0))
    if arguments.get("use_bias"):  # zeros would hide a bias that is left out
        for i, linear in enumerate((layer.query, layer.key, layer.value, layer.out)):
            linear.bias[...] = normal(*linear.bias.shape, seed=20 + i)
    x_q = normal(*q_shape)
    inputs = (x_q,) if kv_shape is None else (x_q, normal(*kv_shape, seed=1))
    graph, params = nnx.split(layer)
    w = normal(*x_q.shape[:-1], layer.out.out_features[0], seed=2)

    def got(params, inputs):
        out = nnx.merge(graph, params)(*inputs, mask=mask, **extra)
        return jnp.sum(out * w), out

    def wanted(params, inputs):
        out = plain(params, inputs[0], inputs[-1], visible, rotary=layer.rotary, **extra)
        return jnp.sum(out * w), out

    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
    (_, out), (d_params, d_inputs) = run(got)(params, inputs)
    with jax.enable_x64(True):
        as_f64 = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        exact = run(wanted)(as_f64(nnx.to_pure_dict(params)), as_f64(inputs))
        (_, out64), (d_params64, d_inputs64) = jax.tree.map(np.asarray, exact)
    assert out.shape == out64.shape
    d_params = nnx.to_pure_dict(d_params)
    assert jax.tree.structure(d_params) == jax.tree.structure(d_params64)
    for x, exact in zip(
        jax.tree.leaves((out, d_params, d_inputs)),
        jax.tree.leaves((out64, d_params64, d_inputs64)),
    ):
        np.testing.assert_allclose(x, exact, atol=1e-5 * max(1, np.abs(exact).max()))


@pytest.mark.parametrize("use_bias", [False, True])
def test_parameters_are_those_of_flax_multi_head_attention(use_bias):
    flax = nnx.MultiHeadAttention(4, 24, use_bias=use_bias, num_kv_heads=2, decode=False, rngs=nnx.Rngs(3))
    layer = FlashMultiHeadAttention(24, 4, num_kv_heads=2, use_bias=use_bias, rngs=nnx.Rngs(4))
    nnx.update(layer, nnx.state(flax, nnx.Param))
    x = normal(2, 7, 24)
    np.testing.assert_allclose(
        nnx.jit(lambda m: m(x, mask=Causal()))(layer),
        nnx.jit(lambda m: m(x, is_causal=True))(flax),
        atol=1e-5,
    )


def test_initialisation_is_that_of_flax():
    same = FlashMultiHeadAttention(24, 4, rngs=nnx.Rngs(5))
    flax = nnx.MultiHeadAttention(4, 24, use_bias=False, rngs=nnx.Rngs(5))
    jax.tree.map(np.testing.assert_array_equal, parameters(same), parameters(flax))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5)])
def test_positions_feed_rotary_and_mask(shape):
    layer = FlashMultiHeadAttention(16, 2, rotary=Rotary(base=20.0), rngs=nnx.Rngs(0))
    x = normal(2, 5, 16)
    positions = jnp.asarray(np.random.default_rng(0).permuted(np.full(shape, np.arange(5)), axis=-1))
    assert (np.diff(positions) < 0).any()
    rows = np.broadcast_to(positions, (2, 5))
    visible = (rows[:, None, :] <= rows[:, :, None])[:, None]
    np.testing.assert_allclose(
        call(layer, x, mask=Causal(), positions=positions),
        expected(layer, x, x, visible, rows, rows),
        atol=1e-5,
    )


def test_key_positions_are_apart_in_cross_attention():
    layer = FlashMultiHeadAttention(16, 2, kv_features=8, rotary=Rotary(), rngs=nnx.Rngs(0))
    x_q, x_kv = normal(2, 3, 16), normal(2, 6, 8, seed=1)
    q_pos, k_pos = jnp.array([4, 0, 9]), jnp.array([0, 7, 3, 9, 1, 0])
    visible = np.asarray(k_pos)[None, :] <= np.asarray(q_pos)[:, None]
    np.testing.assert_allclose(
        call(layer, x_q, x_kv, Causal(), positions=q_pos, k_positions=k_pos),
        expected(layer, x_q, x_kv, visible, q_pos, k_pos),
        atol=1e-5,
    )
    q_only = np.arange(6)[None, :] <= np.asarray(q_pos)[:, None]
    np.testing.assert_allclose(
        call(layer, x_q, x_kv, Causal(), positions=q_pos),
        expected(layer, x_q, x_kv, q_only, q_pos),
        atol=1e-5,
    )


def test_a_prefix_and_then_the_rest_equal_the_whole():
    layer = FlashMultiHeadAttention(16, 2, rotary=Rotary(), rngs=nnx.Rngs(0))
    x = normal(2, 8, 16)
    whole = call(layer, x, mask=Causal())
    np.testing.assert_allclose(call(layer, x[:, 6:], x, Causal()), whole[:, 6:], atol=1e-5)


def test_a_shift_of_all_positions_changes_nothing():  # H12
    layer = FlashMultiHeadAttention(16, 2, rotary=Rotary(), rngs=nnx.Rngs(0))
    x, rows = normal(2, 6, 16), jnp.arange(6)
    np.testing.assert_allclose(
        call(layer, x, mask=Causal(), positions=rows + 40), call(layer, x, mask=Causal()), atol=1e-4
    )


def test_positions_that_restart_separate_nothing():  # H12
    restart = jnp.array([0, 1, 2, 0, 1, 2])
    x = normal(1, 6, 16)
    bare = FlashMultiHeadAttention(16, 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(call(bare, x, positions=restart), call(bare, x))
    # Under rotary and Causal they mean what they say: row 3 stands at 0 and sees both rows at 0.
    layer = FlashMultiHeadAttention(16, 2, rotary=Rotary(), rngs=nnx.Rngs(0))
    visible = np.asarray(restart)[None, :] <= np.asarray(restart)[:, None]
    assert visible[3].tolist() == [True, False, False, True, False, False]
    np.testing.assert_allclose(
        call(layer, x, mask=Causal(), positions=restart),
        expected(layer, x, x, visible, restart, restart),
        atol=1e-5,
    )


def test_positions_of_three_kinds_are_refused():  # H12: 3-D position ids of multimodal models
    layer = FlashMultiHeadAttention(16, 2, rotary=Rotary(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"positions must be one number per row"):
        call(layer, normal(2, 6, 16), positions=jnp.zeros((3, 2, 6), jnp.int32))


IDS = jnp.array([[1] * 5 + [2] * 7] * 2)


@pytest.mark.parametrize("restart", [False, True], ids=["running positions", "restarting positions"])
def test_packed_equals_separate(restart):  # H07, H12
    layer = FlashMultiHeadAttention(16, 4, num_kv_heads=2, rotary=Rotary(), rngs=nnx.Rngs(0))
    x = normal(2, 12, 16)
    positions = jnp.array([*range(5), *range(7)]) if restart else None
    packed = call(layer, x, mask=Causal() & Segments(IDS), positions=positions)
    separate = [call(layer, part, mask=Causal()) for part in (x[:, :5], x[:, 5:])]
    np.testing.assert_allclose(packed, jnp.concatenate(separate, 1), atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_segment_is_bitwise_blind_to_its_neighbour(rate):  # H07
    layer = FlashMultiHeadAttention(16, 4, rotary=Rotary(), dropout_rate=rate, rngs=nnx.Rngs(0))
    layer.train()
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    w = normal(2, 7, 16, seed=1)

    @jax.jit
    def run(params, x):
        def loss(params, x):
            layer, key = nnx.merge(graph, params, rest), jax.random.key(1)
            out = layer(x, mask=Causal() & Segments(IDS), rngs=key)
            return jnp.sum(out[:, 5:] * w), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return out, *grads

    x = normal(2, 12, 16)
    out, d_params, dx = run(params, x)
    changed = x.at[:, :5].set(normal(2, 5, 16, seed=7) * 3)
    other, other_d_params, other_dx = run(params, changed)
    assert np.abs(out[:, :5] - other[:, :5]).max() > 0.1
    np.testing.assert_array_equal(out[:, 5:], other[:, 5:])
    np.testing.assert_array_equal(dx, other_dx)
    np.testing.assert_array_equal(dx[:, :5], 0)
    assert np.abs(dx[:, 5:]).min(axis=-1).max() > 0
    jax.tree.map(np.testing.assert_array_equal, d_params, other_d_params)


def test_dropout_in_training_only():  # I06
    x = normal(2, 9, 16)
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))
    rate_0 = call(FlashMultiHeadAttention(16, 2, rngs=nnx.Rngs(params=0)), x, mask=Causal())
    layer.eval()
    for _ in range(2):
        np.testing.assert_array_equal(call(layer, x, mask=Causal()), rate_0)
    layer.train()
    first, second = call(layer, x, mask=Causal()), call(layer, x, mask=Causal())
    assert np.abs(first - second).max() > 0.1  # the stream moves on
    assert np.abs(first - rate_0).max() > 0.1
    overridden = call(layer, x, mask=Causal(), deterministic=True)
    np.testing.assert_array_equal(overridden, rate_0)
    view = nnx.view(layer, deterministic=True)
    np.testing.assert_array_equal(call(view, x, mask=Causal()), rate_0)
    assert not layer.deterministic


def test_dropout_follows_its_key():  # I06
    x = normal(2, 9, 16)
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=0.5, rngs=nnx.Rngs(0), keep_rngs=False)
    out = layer(x, rngs=nnx.Rngs(dropout=3))
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(dropout=3)), out)
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(dropout=3).dropout), out)
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(dropout=3).dropout()), out)
    assert np.abs(layer(x, rngs=nnx.Rngs(dropout=4)) - out).max() > 0.1


def test_dropout_is_that_of_attention():
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=0.4, rngs=nnx.Rngs(0))
    x, key = normal(2, 9, 16), jax.random.key(5)
    dropout = jflash.Dropout(0.4, key)
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    expected = layer.out(jflash.attention(q, k, v, Causal(), dropout=dropout))
    np.testing.assert_allclose(call(layer, x, mask=Causal(), rngs=key), expected, atol=1e-5)


def test_dropout_of_everything_leaves_nothing():  # I05
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=1.0, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(call(layer, normal(1, 4, 16)), 0)


def test_dropout_keeps_the_mean():
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=0.3, rngs=nnx.Rngs(0), keep_rngs=False)
    x = normal(1, 6, 16)
    keys = jax.random.split(jax.random.key(0), 2000)
    outs = jax.jit(lambda keys: jax.lax.map(lambda key: layer(x, rngs=key), keys))(keys)
    error = np.abs(outs.mean(0) - call(layer, x, deterministic=True))
    assert (error <= 5 * np.std(outs, axis=0) / math.sqrt(2000) + 1e-6).all()
    assert np.std(outs, axis=0).min() > 1e-3


def test_dropout_without_a_key():  # I05
    x = normal(1, 4, 16)
    layer = FlashMultiHeadAttention(16, 2, dropout_rate=0.1, rngs=nnx.Rngs(0), keep_rngs=False)
    with pytest.raises(ValueError, match=r"dropout_rate=0.1 .* need a key.*Pass rngs=nnx.Rngs"):
        call(layer, x)
    call(layer, x, deterministic=True)
    FlashMultiHeadAttention(16, 2, rngs=nnx.Rngs(params=0))(x)  # rate 0 needs no dropout stream


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_rates_that_are_no_probability(rate):  # I05
    with pytest.raises(ValueError, match=r"dropout_rate is a probability.* Got (-0.1|1.5|nan)"):
        FlashMultiHeadAttention(16, 2, dropout_rate=rate, rngs=nnx.Rngs(0))


def test_mixed_precision(monkeypatch):
    seen = []

    def attention(q, k, v, *args, **kwargs):
        seen.extend([q.dtype, k.dtype, v.dtype])
        return jflash.attention(q, k, v, *args, **kwargs)

    monkeypatch.setattr(heads, "attention", attention)
    settings = dict(use_bias=True, rotary=Rotary(), rngs=nnx.Rngs(0))
    mixed = FlashMultiHeadAttention(32, 4, dtype=jnp.bfloat16, **settings)
    full = FlashMultiHeadAttention(32, 4, **settings)
    nnx.update(full, nnx.state(mixed))
    x, w = normal(2, 9, 32), normal(2, 9, 32, seed=1)
    loss = lambda m: jnp.sum(m(x, mask=Causal()).astype(jnp.float32) * w)
    out = call(mixed, x, mask=Causal())
    assert out.dtype == jnp.bfloat16 and seen == [jnp.bfloat16] * 3
    params = jax.tree.leaves(nnx.state(mixed))
    grads, exact = jax.tree.leaves(nnx.grad(loss)(mixed)), jax.tree.leaves(nnx.grad(loss)(full))
    assert len(params) == len(grads) == 8
    assert all(x.dtype == jnp.float32 for x in params + grads)
    np.testing.assert_allclose(out.astype(jnp.float32), call(full, x, mask=Causal()), atol=0.03, rtol=0.02)
    for grad, true in zip(grads, exact):
        np.testing.assert_allclose(grad, true, atol=0.03 * max(1e-3, np.abs(true).max()))


def test_param_dtype():
    layer = FlashMultiHeadAttention(16, 2, param_dtype=jnp.bfloat16, use_bias=True, rngs=nnx.Rngs(0))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("bfloat16")}
    assert call(layer, normal(1, 3, 16)).dtype == jnp.float32  # promoted with the input


def test_precision_and_implementation_reach_attention(monkeypatch):
    seen = {}
    monkeypatch.setattr(heads, "attention", lambda q, *_, **kwargs: seen.update(kwargs) or q)
    FlashMultiHeadAttention(16, 2, precision="highest", implementation="reference", rngs=nnx.Rngs(0))(
        normal(1, 3, 16)
    )
    assert seen["precision"] == "highest" and seen["implementation"] == "reference"


class Stack(nnx.Module):
    """Applies `depth` residual layers in a scan, each of them rematerialised if asked."""

    def __init__(self, depth, rate, rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return FlashMultiHeadAttention(
                16, 4, num_kv_heads=2, rotary=Rotary(), dropout_rate=rate, rngs=rngs
            )

        self.layers = make(rngs)

    def __call__(self, x, remat=False):
        apply = lambda x, layer: x + layer(x, mask=Causal())
        apply = nnx.remat(apply) if remat else apply
        return nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_scan_over_layers_equals_a_loop():
    stack, x = Stack(3, 0.0, nnx.Rngs(0)), normal(2, 6, 16)
    assert stack.layers.query.kernel.shape == (3, 16, 4, 4)
    graph, params = nnx.split(stack.layers)
    y = x
    for i in range(3):
        y = y + nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], params))(y, mask=Causal())
    np.testing.assert_allclose(nnx.jit(lambda m: m(x))(stack), y, atol=1e-5)


def test_scanned_layers_draw_different_dropout():  # I07
    stack, x = Stack(2, 0.5, nnx.Rngs(0)), normal(1, 6, 16)
    graph, params, rest = nnx.split(stack.layers, nnx.Param, ...)
    alike = jax.tree.map(lambda p: jnp.stack([p[0], p[0]]), params)
    outs = [nnx.merge(graph, *jax.tree.map(lambda p, i=i: p[i], (alike, rest)))(x) for i in range(2)]
    assert np.abs(outs[0] - outs[1]).max() > 0.1


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_remat_in_scan_changes_neither_value_nor_gradient(rate):  # I02
    x, w = normal(2, 6, 16), normal(2, 6, 16, seed=1)

    def value_and_grad(remat):
        stack = Stack(2, rate, nnx.Rngs(0))
        run = nnx.value_and_grad(lambda m: jnp.sum(m(x, remat) * w))
        return jax.tree.leaves(nnx.jit(run)(stack))

    plain, remat = value_and_grad(False), value_and_grad(True)
    assert len(plain) == 5
    for a, b in zip(plain, remat):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-6)
        assert np.abs(a).max() > 0


def test_remat_really_recomputes():
    """Without this, a `Stack` that forgets its remat would pass the test above."""
    stack, x = Stack(2, 0.0, nnx.Rngs(0)), normal(2, 6, 16)
    graph, params = nnx.split(stack)
    text = lambda remat: str(
        jax.make_jaxpr(jax.grad(lambda p: jnp.sum(nnx.merge(graph, p)(x, remat))))(params)
    )
    assert "remat" in text(True) or "checkpoint" in text(True)


def test_eval_shape_initialises_without_arrays():
    make = lambda: FlashMultiHeadAttention(
        24, 4, num_kv_heads=2, use_bias=True, dropout_rate=0.1, rngs=nnx.Rngs(0)
    )
    abstract = nnx.eval_shape(make)
    shapes = lambda layer: jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(layer))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(abstract)))
    assert shapes(abstract) == shapes(make())
    filled, made, x = nnx.merge(nnx.graphdef(abstract), nnx.state(make())), make(), normal(2, 5, 24)
    np.testing.assert_array_equal(call(filled, x), call(made, x))


def test_jit_and_vmap():
    layer, x = FlashMultiHeadAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0)), normal(3, 5, 16)
    out = layer(x, mask=Causal())
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x, mask=Causal()))(layer, x), out, atol=1e-5)
    one = jax.jit(jax.vmap(lambda x: layer(x, mask=Causal())))(x)
    np.testing.assert_allclose(one, out, atol=1e-5)


def test_jit_does_not_retrace_for_new_segments():
    layer, x = FlashMultiHeadAttention(16, 2, rngs=nnx.Rngs(0)), normal(1, 12, 16)
    f = jax.jit(lambda ids: layer(x, mask=Causal() & Segments(ids)))
    for cut in (3, 5, 9):
        f(jnp.arange(12)[None] // cut)
    assert f._cache_size() == 1


@pytest.mark.parametrize("heads, kv_heads", [(6, 4), (3, 2), (2, 4), (4, 0)])
def test_heads_that_do_not_divide(heads, kv_heads):  # G02
    with pytest.raises(ValueError, match=f"num_heads={heads} and num_kv_heads={kv_heads}"):
        FlashMultiHeadAttention(24, heads, num_kv_heads=kv_heads, rngs=nnx.Rngs(0))


def test_features_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="in_features=10 and num_heads=4; pass head_dim"):
        FlashMultiHeadAttention(10, 4, rngs=nnx.Rngs(0))
    assert FlashMultiHeadAttention(10, 4, head_dim=3, rngs=nnx.Rngs(0))(normal(1, 2, 10)).shape == (
        1,
        2,
        10,
    )


def test_inputs_of_other_features():
    layer = FlashMultiHeadAttention(16, 2, kv_features=8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x_q must have 16 channels.*in_features=12"):
        call(layer, normal(1, 3, 12), normal(1, 3, 8))
    with pytest.raises(ValueError, match=r"x_kv must have 8 channels.*Without x_kv"):
        call(layer, normal(1, 3, 16))

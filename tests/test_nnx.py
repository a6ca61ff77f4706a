import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx

import jflash
import jflash.heads as heads
from jflash import Causal, Segments, Window
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


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


def settings_of(qk_norm):
    return dict(
        num_kv_heads=2, rotary=Rotary(dim=2), alibi=True, softcap=2.0, use_sinks=True, qk_norm=qk_norm
    )


def with_random_parameters(layer):
    params = nnx.state(layer, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    random = [x + normal(*x.shape, seed=50 + n) / 4 for n, x in enumerate(leaves)]
    nnx.update(layer, jax.tree.unflatten(tree, random))
    return layer


@pytest.mark.parametrize("qk_norm", ["layer", "rms"])
def test_norms_slopes_cap_and_sinks(qk_norm):
    layer = with_random_parameters(
        FlashMultiHeadAttention(24, 4, **settings_of(qk_norm), use_bias=True, rngs=nnx.Rngs(0))
    )
    x, params, T = normal(2, 7, 24), parameters(layer), np.arange(7)

    def normed(x, scale):
        x = x - x.mean(-1, keepdims=True) if qk_norm == "layer" else x
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def by_hand(params, x):
        q, k, v = (
            jnp.einsum("btf,fhd->bthd", x, params[name]["kernel"]) + params[name]["bias"]
            for name in ("query", "key", "value")
        )
        q, k = normed(q, params["query_ln"]["scale"]), normed(k, params["key_ln"]["scale"])
        q, k = (turned(y, T, layer.rotary) for y in (q, k))
        s = jnp.einsum("bthd,bshd->bhts", q, k.repeat(2, 2)) / math.sqrt(6)
        slopes = jnp.array([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0])[:, None, None]
        s = 2 * jnp.tanh((s - slopes * abs(T[:, None] - T)) / 2)
        s = jnp.where(causal(7, 7), s, -jnp.inf)
        sinks = jnp.broadcast_to(params["sinks"][:, None, None], (2, 4, 7, 1))
        p = jax.nn.softmax(jnp.concatenate([s, sinks], -1))[..., :-1]
        out = jnp.einsum("bhts,bshd->bthd", p, v.repeat(2, 2))
        return jnp.einsum("bthd,hdo->bto", out, params["out"]["kernel"]) + params["out"]["bias"]

    graph, state = nnx.split(layer)
    w = normal(2, 7, 24, seed=1)

    def run(forward, params):
        value = lambda params, x: (forward(params, x) * w).sum()
        return jax.jit(jax.value_and_grad(value, (0, 1)))(params, x)

    value, (d_params, dx) = run(lambda p, x: nnx.merge(graph, p)(x, mask=Causal()), state)
    want, (d_want, dx_want) = run(by_hand, params)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    np.testing.assert_allclose(dx, dx_want, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), nnx.to_pure_dict(d_params), d_want)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(d_want))


def test_normalised_queries_and_keys_are_those_of_flax():
    settings = dict(use_bias=False, rngs=nnx.Rngs(3))
    flax = with_random_parameters(nnx.MultiHeadAttention(4, 24, normalize_qk=True, decode=False, **settings))
    layer = FlashMultiHeadAttention(24, 4, qk_norm="layer", rngs=nnx.Rngs(4))
    nnx.update(layer, nnx.state(flax, nnx.Param))
    x = normal(2, 7, 24)
    np.testing.assert_allclose(call(layer, x), call(flax, x), atol=1e-5)


@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 3), (7,)], ids=str)
@pytest.mark.parametrize("mask", [None, Window(2, None)], ids=["causal", "window"])
def test_decoding_equals_the_whole(chunks, mask):  # L11, F10
    layer = FlashMultiHeadAttention(16, 4, **settings_of("rms"), rngs=nnx.Rngs(0))
    x = normal(2, 7, 16)
    whole = call(layer, x, mask=Causal() if mask is None else Causal() & mask)
    layer.init_cache((2, 9, 16))
    step = nnx.jit(lambda layer, x: layer(x, mask=mask, decode=True))
    ends = np.cumsum(chunks)
    outs = [step(layer, x[:, end - n : end]) for n, end in zip(chunks, ends)]
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=1e-5)
    assert layer.cache_index[...] == 7 and layer.cache_index.dtype == jnp.int32
    assert layer.cached_key.shape == (2, 9, 2, 4) and (layer.cached_value[:, 7:] == 0).all()


def test_what_the_unused_part_of_a_cache_holds_has_no_effect():  # N03
    layer, x = FlashMultiHeadAttention(16, 4, rotary=Rotary(), rngs=nnx.Rngs(0)), normal(2, 4, 16)
    whole = call(layer, x, mask=Causal())
    layer.init_cache((2, 6, 16))
    layer.cached_key[...] = layer.cached_value[...] = jnp.full((2, 6, 4, 4), jnp.nan)
    np.testing.assert_allclose(layer(x, decode=True), whole, atol=1e-5)


def test_decoding_under_x64():  # L11
    layer, x = FlashMultiHeadAttention(16, 4, rotary=Rotary(), rngs=nnx.Rngs(0)), normal(2, 3, 16)
    whole = call(layer, x, mask=Causal())
    layer.init_cache((2, 3, 16))
    graph, state = nnx.split(layer)
    with jax.enable_x64(True):

        def step(state, x):
            layer = nnx.merge(graph, state)
            out = layer(x[:, None], decode=True)
            return nnx.state(layer), out[:, 0]

        _, outs = jax.jit(lambda state, x: jax.lax.scan(step, state, x))(state, x.swapaxes(0, 1))
        np.testing.assert_allclose(outs.swapaxes(0, 1), whole, atol=1e-5)


def test_a_full_cache_raises_or_gives_nan():  # N07
    layer, x = FlashMultiHeadAttention(16, 2, rngs=nnx.Rngs(0)), normal(1, 3, 16)
    layer.init_cache((1, 4, 16))
    layer(x, decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    with pytest.raises(ValueError, match="the cache is full. Got 3 tokens for a cache of 4 that holds 3"):
        layer(x, decode=True)
    assert np.isfinite(step(layer, x[:, :1])).all()
    assert np.isnan(step(layer, x[:, :1])).all()


def test_views_make_and_use_a_cache():
    layer, x = FlashMultiHeadAttention(16, 2, dropout_rate=0.5, rngs=nnx.Rngs(0)), normal(2, 4, 16)
    view = nnx.view(layer, deterministic=True, decode=True, batch_size=2, max_length=4)
    np.testing.assert_allclose(view(x), call(layer, x, mask=Causal(), deterministic=True), atol=1e-5)
    assert view.cached_key.shape == (2, 4, 2, 8) and not layer.decode and layer.cached_key is None


def test_refusals_of_decoding():
    layer, x = FlashMultiHeadAttention(16, 2, decode=True, rngs=nnx.Rngs(0)), normal(1, 3, 16)
    with pytest.raises(
        ValueError, match=r"decode=True needs a cache. Got none; make one by layer.init_cache"
    ):
        layer(x)
    layer.init_cache((1, 2, 16))
    with pytest.raises(ValueError, match=r"must fit into the cache.*\(1, 3, 2, 8\).*\(1, 2, 2, 8\)"):
        layer(x)
    with pytest.raises(ValueError, match="must fit into the cache"):
        layer(normal(2, 1, 16))
    for name, value in dict(x_kv=x, positions=jnp.arange(3), k_positions=jnp.arange(3)).items():
        with pytest.raises(ValueError, match=f"with decode=True there is no {name}"):
            layer(x, **{name: value})
    assert call(layer, x, decode=False).shape == x.shape


def test_parameters_are_sharded_by_the_names_of_their_axes():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    make = lambda: FlashMultiHeadAttention(
        16,
        4,
        sharding=("data", "model", None),
        use_bias=True,
        use_sinks=True,
        qk_norm="rms",
        rngs=nnx.Rngs(0),
    )
    with jax.set_mesh(mesh):
        layer = make()
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
        placed = jax.tree.map(lambda x: x.sharding.spec, parameters(layer))
        abstract = nnx.eval_shape(make)
    P = jax.P
    assert specs["query"] == specs["value"] == dict(kernel=P("data", "model", None), bias=P("model", None))
    assert specs["out"] == dict(kernel=P("model", None, "data"), bias=P("data"))
    assert specs["sinks"] == P("model") and specs["key_ln"]["scale"] in (P(None), P())
    assert placed["key"]["kernel"][:2] == ("data", "model") and placed["out"]["kernel"][0] == "model"
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(abstract))) == specs


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(qk_norm="batch"), r"qk_norm=...\)`: must be None, 'layer' .* Got 'batch'"),
        (dict(sharding=("model",)), r"sharding=...\)`: needs one name or None .* Got \('model',\)"),
        (dict(sharding="abc"), r"sharding=...\)`: .* Got 'abc'"),
    ],
)
def test_settings_that_are_none(as_users_run_it, settings, words):
    with pytest.raises(ValueError, match=words):
        FlashMultiHeadAttention(16, 2, **settings, rngs=nnx.Rngs(0))


def test_slopes_of_any_number_of_heads():
    assert jflash.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    of_16 = 2.0 ** (-0.5 * np.arange(1, 17))
    np.testing.assert_allclose(jflash.alibi_slopes(12), [*2.0 ** -np.arange(1.0, 9), *of_16[:8:2]], rtol=1e-6)
    assert jflash.alibi_slopes(1).tolist() == [2.0**-8]

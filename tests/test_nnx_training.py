"""The NNX layer in training: dropout, and under scan, remat, jit and vmap."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx
from layers import call

import jflash
from jflash import Causal, Segments
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

"""The NNX layer with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx
from layers import call, settings_of

from jflash import Causal, Window
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

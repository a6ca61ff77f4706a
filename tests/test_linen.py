"""The Linen layer against the NNX one, which test_nnx.py holds to einsum, and against Flax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import linen as nn
from flax import nnx

import jflash.nnx
from jflash import Causal, Segments, Window
from jflash.linen import FlashMultiHeadAttention
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


def initial(layer, *inputs, seed=0, **settings):
    """Parameters of all kinds, none of them 0 or 1."""
    params = jax.jit(lambda: layer.init(jax.random.key(seed), *inputs, **settings))()["params"]
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [x + normal(*x.shape, seed=50 + n) / 4 for n, x in enumerate(leaves)])


def apply(layer, params, *inputs, rngs=None, **settings):
    """The layer's output, compiled at once: eagerly it would take dozens."""
    return jax.jit(lambda p, *x: layer.apply({"params": p}, *x, rngs=rngs, **settings))(params, *inputs)


# name -> (settings of both layers, shapes of x_q and x_kv, arguments of the call)
EVERYTHING = dict(
    num_kv_heads=2,
    rotary=Rotary(dim=2, interleaved=True),
    alibi=True,
    softcap=2.0,
    use_sinks=True,
    qk_norm="rms",
    use_bias=True,
)
CASES = {
    "everything": (EVERYTHING, (2, 7, 24), None, dict(mask=Causal() & Window(3, None))),
    "cross": (
        dict(head_dim=5, out_features=6, qk_norm="layer"),
        (2, 3, 24),
        (2, 8, 10),
        dict(bias=normal(1, 4, 3, 8, seed=9)),
    ),
    "positions": (
        dict(rotary=Rotary(base=20.0), dtype=jnp.float32),
        (2, 5, 24),
        None,
        dict(mask=Causal(), positions=jnp.array([4, 0, 9, 2, 2])),
    ),
    "packed, no batch": (
        dict(num_kv_heads=1),
        (12, 24),
        None,
        dict(mask=Causal() & Segments(jnp.array([1] * 5 + [2] * 7))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_nnx_layer(case):
    settings, q_shape, kv_shape, arguments = CASES[case]
    inputs = (normal(*q_shape),) if kv_shape is None else (normal(*q_shape), normal(*kv_shape, seed=1))
    layer = FlashMultiHeadAttention(4, **settings)
    params = initial(layer, *inputs, **arguments)
    other = jflash.nnx.FlashMultiHeadAttention(
        24, 4, **settings, kv_features=None if kv_shape is None else kv_shape[-1], rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(other)
    nnx.replace_by_pure_dict(state, params)

    def by_nnx(params, inputs):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*inputs, **arguments)

    def run(forward):
        @jax.jit
        def both(params, inputs):
            out, pull = jax.vjp(forward, params, inputs)
            return out, pull(normal(*out.shape, seed=2))

        return both(params, inputs)

    got = run(lambda params, inputs: layer.apply({"params": params}, *inputs, **arguments))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, run(by_nnx))


@pytest.mark.parametrize("use_bias", [False, True])
def test_parameters_are_those_of_flax_multi_head_attention(use_bias):
    x = normal(2, 7, 24)
    flax = nn.MultiHeadDotProductAttention(4, use_bias=use_bias, normalize_qk=True)
    params = initial(flax, x)
    layer = FlashMultiHeadAttention(4, use_bias=use_bias, qk_norm="layer")
    mask = nn.make_causal_mask(jnp.ones((2, 7)))
    np.testing.assert_allclose(
        apply(layer, params, x, mask=Causal()), apply(flax, params, x, mask=mask), atol=1e-5
    )


def test_initialisation_is_that_of_flax():
    x = normal(2, 7, 24)
    made = [
        layer.init(jax.random.key(1), x)
        for layer in (FlashMultiHeadAttention(4), nn.MultiHeadDotProductAttention(4, use_bias=False))
    ]
    jax.tree.map(np.testing.assert_array_equal, *made)


def test_eval_shape_initialises_without_arrays():
    layer, x = FlashMultiHeadAttention(4, **EVERYTHING), normal(2, 7, 24)
    init = lambda: layer.init(jax.random.key(0), x)
    abstract = jax.eval_shape(init)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(abstract) == shapes(jax.jit(init)())


def test_dtypes():
    x = normal(2, 7, 24)
    layer = FlashMultiHeadAttention(4, **EVERYTHING, dtype=jnp.bfloat16)
    params = initial(layer, x)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    out = apply(layer, params, x, mask=Causal())
    full = apply(FlashMultiHeadAttention(4, **EVERYTHING), params, x, mask=Causal())
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), full, atol=0.2, rtol=0.05)
    stored = FlashMultiHeadAttention(4, **EVERYTHING, param_dtype=jnp.bfloat16)
    assert {p.dtype for p in jax.tree.leaves(jax.eval_shape(stored.init, jax.random.key(0), x))} == {
        jnp.dtype("bfloat16")
    }


def test_parameters_are_boxed_with_the_names_of_their_axes():
    layer, x = FlashMultiHeadAttention(4, **EVERYTHING, sharding=("data", "model", None)), normal(2, 7, 24)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs, P = nn.get_partition_spec(boxed)["params"], jax.P
    assert specs["query"] == specs["value"] == dict(kernel=P("data", "model", None), bias=P("model", None))
    assert specs["out"] == dict(kernel=P("model", None, "data"), bias=P("data"))
    assert specs["sinks"] == P("model") and specs["key_ln"] == dict(scale=P(None))
    params = initial(FlashMultiHeadAttention(4, **EVERYTHING), x)
    boxes = jax.tree.map(lambda p: nn.Partitioned(p, (None,) * p.ndim), params)
    np.testing.assert_array_equal(apply(layer, boxes, x), apply(layer, params, x))


# Dropout


def test_dropout_is_that_of_the_nnx_layer():
    x, key = normal(2, 9, 16), jax.random.key(5)
    layer = FlashMultiHeadAttention(2, dropout_rate=0.4)
    params = initial(layer, x, deterministic=True)
    other = jflash.nnx.FlashMultiHeadAttention(16, 2, dropout_rate=0.4, rngs=nnx.Rngs(0))
    state = nnx.state(other, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(other, state)
    want = nnx.jit(lambda layer: layer(x, mask=Causal(), rngs=key))(other)
    np.testing.assert_allclose(apply(layer, params, x, mask=Causal(), dropout_rng=key), want, atol=1e-5)


def test_dropout_in_training_only():  # I06
    x, layer = normal(2, 9, 16), FlashMultiHeadAttention(2, dropout_rate=0.5)
    params = initial(layer, x, deterministic=True)
    draw = lambda seed: apply(layer, params, x, rngs={"dropout": jax.random.key(seed)})
    np.testing.assert_array_equal(draw(0), draw(0))
    assert np.abs(draw(0) - draw(1)).max() > 0.1
    without = apply(FlashMultiHeadAttention(2), params, x)
    np.testing.assert_array_equal(apply(layer, params, x, deterministic=True), without)
    quiet = FlashMultiHeadAttention(2, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(apply(quiet, params, x), without)


class Stack(nn.Module):
    """Residual layers in a scan, each of them rematerialised."""

    @nn.compact
    def __call__(self, x):
        def layer(module, x, _):
            return x + FlashMultiHeadAttention(4, num_kv_heads=2, rotary=Rotary(), dropout_rate=0.3)(x), None

        rngs = dict(params=True, dropout=True)
        return nn.scan(nn.remat(layer), variable_axes={"params": 0}, split_rngs=rngs, length=3)(
            self, x, None
        )[0]


def test_remat_in_scan():  # I02, I07, L19
    stack, x, w = Stack(), normal(2, 6, 16), normal(2, 6, 16, seed=1)
    keys = dict(params=jax.random.key(0), dropout=jax.random.key(1))
    params = jax.jit(lambda: stack.init(keys, x))()["params"]
    loss = lambda p: (stack.apply({"params": p}, x, rngs={"dropout": keys["dropout"]}) * w).sum()
    loss = jax.jit(jax.value_and_grad(loss))
    _, grads = loss(params)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    moved = lambda e: loss(jax.tree.map(lambda p, g: p + e * g / norm, params, grads))[0]
    # Were other bits drawn again in the backward pass, the slope would be another.
    np.testing.assert_allclose((moved(0.02) - moved(-0.02)) / 0.04, norm, rtol=0.02)


# The cache


@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 3), (7,)], ids=str)
def test_decoding_equals_the_whole(chunks):
    x = normal(2, 7, 24)
    layer, cached = (
        FlashMultiHeadAttention(4, **EVERYTHING),
        FlashMultiHeadAttention(4, **EVERYTHING, decode=True),
    )
    params, window = initial(layer, x), Window(4, None)
    whole = apply(layer, params, x, mask=Causal() & window)
    cache = jax.jit(lambda: cached.init(jax.random.key(0), jnp.zeros((2, 9, 24))))()["cache"]
    assert cache["cached_key"].shape == (2, 9, 2, 6) and cache["cache_index"].dtype == jnp.int32

    @jax.jit
    def step(cache, x):
        return cached.apply({"params": params, "cache": cache}, x, mask=window, mutable=["cache"])

    outs, end = [], 0
    for n in chunks:
        out, new = step(cache, x[:, end : end + n])
        outs, end, cache = [*outs, out], end + n, new["cache"]
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=1e-5)
    assert cache["cache_index"] == 7 and (cache["cached_value"][:, 7:] == 0).all()


def test_refusals():
    x = normal(1, 3, 16)
    cached = FlashMultiHeadAttention(2, decode=True)
    variables = cached.init(jax.random.key(0), x)
    run = lambda *inputs, **more: cached.apply(variables, *inputs, mutable=["cache"], **more)
    with pytest.raises(ValueError, match=r"with decode=True there is no x_kv, since .* Got x_kv"):
        run(x, x)
    with pytest.raises(ValueError, match="must fit into the cache"):
        run(normal(2, 1, 16))
    _, new = run(x)
    with pytest.raises(ValueError, match="the cache is full. Got 3 tokens for a cache of 3 that holds 3"):
        cached.apply(variables | new, x, mutable=["cache"])
    with pytest.raises(ValueError, match="decode=True needs a cache. Got none; pass the collection"):
        cached.apply({"params": variables["params"]}, x, mutable=["cache"])
    with pytest.raises(ValueError, match="num_heads=3 and num_kv_heads=2"):  # G02
        FlashMultiHeadAttention(3, num_kv_heads=2).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"dropout_rate is a probability.* Got 1.5"):
        FlashMultiHeadAttention(2, dropout_rate=1.5).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="in_features=16 and num_heads=3; pass head_dim"):
        FlashMultiHeadAttention(3).init(jax.random.key(0), x)

"""`attention_fn` inside Flax's own layers, NNX and Linen, against Flax's own attention."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import linen, nnx

import jflash
import jflash.linen
import jflash.nnx
from jflash import Alibi, Causal, Function, Segments, SoftCap
from jflash.nnx import attention_fn
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


IN_LINEN = linen.dot_product_attention


def close(got, want, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), got, want)


def results(run, *inputs):
    """Output and gradients of `run(*inputs)`, under random cotangents."""

    @jax.jit
    def both(*inputs):
        out, pull = jax.vjp(run, *inputs)
        w = np.random.default_rng(99).standard_normal(out.shape)
        return out, pull(jnp.asarray(w, out.dtype))

    return both(*inputs)


def padding(batch, T, t, seed=0):
    """A mask of numbers by Flax: queries and keys that are padding; every row sees a key."""
    rng = np.random.default_rng(seed)
    tokens = lambda n: jnp.asarray(np.arange(n) < rng.integers(2, n + 1, batch)[..., None])
    queries = jnp.ones((*batch, T))
    return linen.make_attention_mask(queries, tokens(t), dtype=jnp.float32)


def nnx_layer(fn, decode=False, **settings):
    settings = dict(num_heads=4, in_features=16, rngs=nnx.Rngs(0)) | settings
    return nnx.MultiHeadAttention(**settings, attention_fn=fn, decode=decode)


# name -> (settings of the layer, shape of the inputs, arguments of the call)
NNX = {
    "boolean mask and causal": (
        dict(normalize_qk=True),
        (2, 7, 16),
        dict(mask=jnp.broadcast_to(padding((2,), 7, 7) > 0, (2, 4, 7, 7)), is_causal=True),
    ),
    "grouped": (dict(num_kv_heads=2), (2, 7, 16), dict(mask=linen.make_causal_mask(jnp.ones((2, 7))))),
    "two batch axes": ({}, (2, 3, 5, 16), dict(mask=padding((2, 3), 5, 5))),
    "no batch": (dict(precision="highest", dtype=jnp.float32), (7, 16), dict(is_causal=True)),
}


@pytest.mark.parametrize("case", NNX)
def test_nnx_equals_flax(case):
    settings, shape, arguments = NNX[case]

    def run(fn):
        graph, params = nnx.split(nnx_layer(fn, **settings))
        forward = lambda params, x: nnx.merge(graph, params)(x, **arguments)
        out, grads = results(forward, params, normal(*shape))
        return out, jax.tree.map(np.asarray, nnx.to_pure_dict(grads[0])), grads[1]

    close(run(attention_fn), run(nnx.dot_product_attention))


def test_nnx_cross_attention_is_aligned_as_in_flax():
    x_q, x_kv = normal(2, 3, 16), normal(2, 7, 16, seed=1)
    run = lambda fn: jax.jit(lambda q, k: nnx_layer(fn)(q, k, is_causal=True))(x_q, x_kv)
    close(run(attention_fn), run(nnx.dot_product_attention))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nnx_decoding_equals_flax_and_the_whole(kv_heads):
    x = normal(2, 6, 16)

    def run(fn):
        layer = nnx_layer(fn, decode=True, num_kv_heads=kv_heads)
        layer.init_cache(x.shape)
        step = nnx.jit(lambda layer, x: layer(x))
        return np.concatenate([step(layer, x[:, i : i + 1]) for i in range(6)], 1)

    got = run(attention_fn)
    close(got, run(nnx.dot_product_attention))
    whole = nnx_layer(attention_fn, num_kv_heads=kv_heads)
    close(got, jax.jit(lambda x: whole(x, mask=Causal()))(x))


def linen_layer(fn, **settings):
    return linen.MultiHeadDotProductAttention(**dict(num_heads=4) | settings, attention_fn=fn)


LINEN = {
    "two batch axes": ({}, (2, 3, 5, 16), dict(mask=padding((2, 3), 5, 5))),
    "causal": (
        dict(normalize_qk=True, force_fp32_for_softmax=True, precision="highest"),
        (2, 7, 16),
        dict(mask=linen.make_causal_mask(jnp.ones((2, 7)))),
    ),
    "boolean mask": ({}, (2, 7, 16), dict(mask=linen.make_causal_mask(jnp.ones((2, 7)), dtype=bool))),
}


@pytest.mark.parametrize("case", LINEN)
def test_linen_equals_flax(case):
    settings, shape, arguments = LINEN[case]
    x = normal(*shape)
    params = linen_layer(IN_LINEN, **settings).init(jax.random.key(0), x)
    run = lambda fn: results(
        lambda params, x: linen_layer(fn, **settings).apply(params, x, **arguments), params, x
    )
    close(run(jflash.linen.attention_fn), run(IN_LINEN))


def test_linen_decoding_equals_flax_and_the_whole():
    x = normal(2, 6, 16)

    def run(fn):
        layer = linen_layer(fn, decode=True)
        variables = layer.init(jax.random.key(0), x)
        step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
        outs = []
        for i in range(6):
            out, new = step(variables, x[:, i : i + 1])
            variables = variables | new
            outs.append(out)
        return variables["params"], np.concatenate(outs, 1)

    params, got = run(attention_fn)
    close(got, run(IN_LINEN)[1])
    close(got, linen_layer(attention_fn).apply({"params": params}, x, mask=Causal()))


def test_linen_hands_over_every_argument_that_it_has():
    """It filters by the names in the signature: a mask that is not named is dropped in silence."""
    names = inspect.signature(attention_fn).parameters
    flax = [*inspect.signature(IN_LINEN).parameters]
    assert not {*flax} - {*names} - {"einsum_dot_general"}  # never passed by a layer
    assert flax[:5] == [*names][:5]
    assert not {*inspect.signature(nnx.dot_product_attention).parameters} - {*names} - {"promote_dtype"}


def test_bias_has_a_gradient():
    q, k, v, bias = *(normal(2, 7, 4, 8, seed=n) for n in range(3)), normal(1, 4, 7, 7, seed=3)
    run = lambda fn: results(lambda *x: fn(*x[:3], bias=x[3]), q, k, v, bias)
    close(run(attention_fn), run(IN_LINEN))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_dtypes_are_promoted(dtype):
    q, k, v = normal(2, 5, 2, 8), normal(2, 5, 2, 8, seed=1).astype(jnp.bfloat16), normal(2, 5, 2, 8, seed=2)
    run = lambda fn: jax.jit(functools.partial(fn, dtype=dtype))(q, k, v)
    assert run(attention_fn).dtype == run(nnx.dot_product_attention).dtype == (dtype or jnp.float32)
    close(*(run(f).astype(np.float32) for f in (attention_fn, nnx.dot_product_attention)), 2e-2)


def test_masks_of_jflash_pass_through_the_layers():
    x, ids = normal(2, 7, 16), jnp.array([[0, 0, 0, 1, 1, 1, -1]])
    mask = Causal() & Segments(ids)
    dense = np.tril(np.ones((7, 7), bool)) & np.asarray((ids[0][:, None] == ids[0]) & (ids[0] >= 0))
    dense = jnp.asarray(dense)[None, None]
    run = lambda fn, mask: jax.jit(lambda x: nnx_layer(fn)(x, mask=mask))(x)
    close(run(attention_fn, mask)[:, :6], run(nnx.dot_product_attention, dense)[:, :6])
    params = linen_layer(attention_fn).init(jax.random.key(0), x)
    run = lambda fn, mask: jax.jit(lambda x: linen_layer(fn).apply(params, x, mask=mask))(x)
    close(run(attention_fn, mask)[:, :6], run(IN_LINEN, dense)[:, :6])


def test_more_arguments_by_partial():
    q = normal(2, 5, 4, 8)
    mods = (SoftCap(2.0), Alibi(jnp.arange(4) / 10))
    fn = functools.partial(attention_fn, score_mod=mods, implementation="xla", scale=0.3, sinks=jnp.ones(4))
    got = jax.jit(lambda q: fn(q, q, q, is_causal=True, some_day=None))(q)
    want = lambda q: jflash.attention(q, q, q, Causal(), score_mod=mods, scale=0.3, sinks=jnp.ones(4))
    np.testing.assert_array_equal(got, jax.jit(want)(q))


# Rotary


def test_rotary_equals_that_of_flax():
    x = normal(2, 5, 16)
    run = lambda fn: jax.jit(lambda x: nnx_layer(fn)(x, is_causal=True))(x)
    flax = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    close(run(functools.partial(attention_fn, rotary=Rotary())), run(flax))


def test_positions_turn_and_do_not_mask():
    positions, q = jnp.array([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]]), normal(2, 5, 4, 8)
    fn = functools.partial(attention_fn, rotary=Rotary(), is_causal=True)
    turned = jflash.apply_rotary(q, positions)
    close(
        jax.jit(fn)(q, q, q, input_positions=positions),
        jax.jit(jflash.attention)(turned, turned, q, Causal()),
    )


def test_rotary_in_decoding():
    x, fn = normal(2, 6, 16), functools.partial(attention_fn, rotary=Rotary())
    layer = nnx_layer(fn, decode=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x, at: layer(x, input_positions=at))
    outs = [step(layer, x[:, i : i + 1], jnp.full((2, 1), i)) for i in range(6)]
    close(np.concatenate(outs, 1), nnx_layer(fn)(x, is_causal=True))


# Dropout


def dropped(rate=0.5, broadcast=True, T=64, seed=0, **more):
    """Weights after dropout, [2, T, 3, T], of uniform attention in two entries and three heads."""
    q = jnp.zeros((2, T, 3, 4))
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (2, T, 3, T))
    more = dict(dropout_rng=jax.random.key(seed), dropout_rate=rate, broadcast_dropout=broadcast) | more
    return np.asarray(jax.jit(lambda q, v: attention_fn(q, q, v, **more))(q, v))


def test_broadcast_dropout_drops_alike_in_all_entries_and_heads():
    out = dropped()
    assert (out == out[:1, :, :1]).all()
    assert abs((out == 0).mean() - 0.5) < 0.03 and np.allclose(out[out > 0], 2 / 64)
    assert (dropped(seed=1) != out).any()
    apart = dropped(broadcast=False)
    share = [(apart[0, :, 0] == apart[b, :, h]).mean() for b, h in ((0, 1), (1, 0), (1, 2))]
    assert np.abs(np.subtract(share, 0.5)).max() < 0.05
    np.testing.assert_array_equal(dropped(deterministic=True), np.float32(1 / 64))


def test_broadcast_dropout_has_the_gradient_of_what_it_dropped():
    q, k, v = (normal(2, 6, 2, 4, seed=n) for n in range(3))
    more = dict(dropout_rng=jax.random.key(0), dropout_rate=0.4)
    eye = jnp.broadcast_to(jnp.eye(6)[None, :, None], (2, 6, 2, 6))
    weights_of = lambda more: jnp.swapaxes(attention_fn(q, k, eye, **more), 1, 2)
    factor = jax.jit(lambda: weights_of(more) / weights_of(dict(deterministic=True)))()  # 0 or 1 / 0.6

    def plain(q, k, v):
        s = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        return jnp.einsum("bhts,bshd->bthd", s * factor, v)

    close(results(lambda *x: attention_fn(*x, **more), q, k, v), results(plain, q, k, v))


def test_dropout_of_the_layers():
    x = normal(2, 7, 16)
    layer = nnx_layer(attention_fn, dropout_rate=0.5, deterministic=False)
    a, b = layer(x), layer(x)
    assert np.abs(a - b).max() > 0.1  # the stream moves on
    close(layer(x, deterministic=True), nnx_layer(attention_fn)(x))
    layer = linen_layer(attention_fn, dropout_rate=0.5, deterministic=False)
    params = layer.init(jax.random.key(0), x)
    draw = lambda seed: layer.apply(params, x, rngs={"dropout": jax.random.key(seed)})
    np.testing.assert_array_equal(draw(0), draw(0))
    assert np.abs(draw(0) - draw(1)).max() > 0.1
    layer = linen_layer(attention_fn, dropout_rate=0.5)
    close(layer.apply(params, x, deterministic=True), linen_layer(attention_fn).apply(params, x))


# Refusals


X = jnp.ones((2, 5, 4, 8))
LIVELY = dict(dropout_rng=jax.random.key(0), dropout_rate=0.1)
FN = Function(lambda b, h, q, k: q >= k)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(module=object()), ValueError, "(module=...)` ... never in memory"),
        (dict(qk_attn_weights_einsum=jnp.einsum), ValueError, "einsum)` must be None"),
        (dict(colour="red"), TypeError, "(colour=...)` would have no effect ... Got colour."),
        (dict(input_positions=jnp.arange(5)), ValueError, "(input_positions=...)` ... rotary=None"),
        (dict(dropout_rate=0.1), ValueError, "(dropout_rng=...)` is needed ... Got dropout_rate=0.1"),
        (
            LIVELY | dict(score_mod=lambda s, b, h, q, k: s),
            ValueError,
            "(broadcast_dropout=True)` ... Got score",
        ),
        (LIVELY | dict(mask=~FN & Causal()), ValueError, "broadcast_dropout=True ... mask=Function"),
        (dict(mask="mask"), TypeError, "(mask=...)` must be an array"),
        (dict(query="q"), TypeError, "(query=...)` must be an array"),
    ],
)
def test_refusals(as_users_run_it, arguments, error, words):
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words.split(" ... ")))) as caught:
        attention_fn(**dict(query=X, key=X, value=X) | arguments)
    text = str(caught.value)
    assert text.startswith("`attention_fn(") and "Got " in text and text.endswith("."), text


def test_rotary_without_positions_over_a_cache():
    with pytest.raises(
        ValueError, match=r"`attention_fn\(rotary=...\)` needs input_positions.*2 queries, 5 keys"
    ):
        attention_fn(X[:, :2], X, X, rotary=Rotary())


def test_weights_cannot_be_sown():
    with pytest.raises(ValueError, match="never in memory"):
        nnx_layer(attention_fn)(normal(2, 7, 16), sow_weights=True)
    layer = linen_layer(attention_fn)
    params = layer.init(jax.random.key(0), normal(2, 7, 16))
    with pytest.raises(ValueError, match="never in memory"):
        layer.apply(params, normal(2, 7, 16), sow_weights=True, mutable=["intermediates"])


def test_functions_of_users_where_dropout_is_not_broadcast():
    out = attention_fn(X, X, X, mask=FN, broadcast_dropout=False, **LIVELY)
    assert out.shape == X.shape

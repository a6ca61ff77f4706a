"""The NNX layer against einsum, and against Flax's own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx
from layers import call, causal, expected, parameters, plain, settings_of, turned, with_random_parameters

import jflash
import jflash.heads as heads
from jflash import Causal, Segments, Window
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")


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

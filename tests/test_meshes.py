"""Calls inside `shard_map` and on meshes against the call on one device."""

import jax
import jax.numpy as jnp
import pytest
from answers import answer, answer_jit, assert_same, attention, cotangents, operands
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import Dropout
from jflash import attention_with_lse as attend

pytestmark = pytest.mark.usefixtures("quick_compilation")


EIGHT = dict(B=8, H=8, h=4)


def mesh(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


BY_BATCH = dict(q=P("x"), k=P("x"), v=P("x"), ids=P("x"), prefix=P("x"))
BY_HEADS = dict(
    q=P(None, None, "y"),
    k=P(None, None, "y"),
    v=P(None, None, "y"),
    bias=P(None, "y"),
    sinks=P("y"),
    slopes=P("y"),
)
BY_BOTH = dict(
    q=P("x", None, "y"), k=P("x", None, "y"), v=P("x", None, "y"), ids=P("x"), bias=P(None, "y"), sinks=P("y")
)
# Only queries are sharded; every device holds all keys and values.
BY_QUERIES = dict(q=P(None, "x"), bias=P(None, None, "x"), q_positions=P(None, "x"))
SHARDED = {
    # name: (mesh, specs, operands, spec of out, spec of lse, offsets of a shard for dropout)
    "batch": (((8,), ("x",)), BY_BATCH, ("bias", "ids", "sinks"), P("x"), P("x"), None),
    "heads": (((4,), ("y",)), BY_HEADS, ("bias", "slopes"), P(None, None, "y"), P(None, "y"), None),
    "both and dropout": (
        ((2, 4), ("x", "y")),
        BY_BOTH,
        ("sinks", "key"),
        P("x", None, "y"),
        P("x", "y"),
        ("x", "y", None),
    ),
    "queries": (
        ((2,), ("x",)),
        BY_QUERIES,
        ("bias", "q_positions", "scale"),
        P(None, "x"),
        P(None, None, "x"),
        None,
    ),
    "queries and dropout": (
        ((2,), ("x",)),
        BY_QUERIES,
        ("q_positions", "key"),
        P(None, "x"),
        P(None, None, "x"),
        (None, None, "x"),
    ),
}


def sharded_call(case):
    """(operands, shard_map of attention over the local shards)."""
    of_mesh, specs, names, *out_specs, offset_axes = SHARDED[case]
    x = operands(*names, **EIGHT)

    def local(x):
        b, heads, rows = offset_axes or (None, None, None)
        start = lambda axis, n: lax.axis_index(axis) * n if axis else 0
        B, T, H, _ = x["q"].shape
        return attention(x, offsets=(start(b, B), start(heads, H), start(rows, T), 0))

    in_specs = ({name: specs.get(name, P()) for name in x},)
    return x, jax.shard_map(local, mesh=mesh(*of_mesh), in_specs=in_specs, out_specs=tuple(out_specs))


@pytest.mark.parametrize("case", SHARDED)
def test_shard_map_equals_the_whole(case):
    x, call = sharded_call(case)
    W = cotangents(x)
    assert_same(answer_jit(x, W, call=call), answer_jit(x, W), atol=5e-5)


def test_parts_with_offsets_draw_what_the_whole_draws():
    """A batch entry, some heads, some queries; the keys in two parts that are merged by their lse."""
    x, key = operands(), jax.random.key(1)

    @jax.jit
    def call(q, k, v, offsets):
        return attend(q, k, v, score_mod=sharper, dropout=Dropout(0.5, key, offsets))

    whole, whole_lse = call(*map(x.get, "qkv"), (0, 0, 0, 0))
    q = x["q"][1:, 3:, 2:]
    parts = []
    for start in (0, 3):
        k, v = (x[name][1:, start : start + 3, 1:] for name in "kv")
        parts.append(call(q, k, v, (1, 2, 3, start)))
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    out = sum(jnp.exp(y - lse).mT[..., None] * part for part, y in parts)
    assert_same((out, lse), (whole[1:, 3:, 2:], whole_lse[1:, 2:, 3:]))


def sharper(s, b, h, q_pos, k_pos):
    """A score modifier that is another one in each batch entry and head."""
    return s * (1 + 0.5 * b + 0.25 * h)


def test_functions_in_shard_map():
    """What they close over is replicated or sharded as the heads are; `h` counts the device's own."""
    x = operands("slopes", "scale", **EIGHT)
    W = cotangents(x)

    def local(x):
        mask = jflash.Function(lambda b, h, i, j: (i - j) * x["scale"] > -1)
        mod = lambda s, b, h, i, j: jnp.where(s > 0, s, x["scale"] * s) + x["slopes"][h] * (i - j)
        return attend(*map(x.get, "qkv"), mask, score_mod=mod)

    specs = ({name: BY_HEADS.get(name, P()) for name in x},)
    out_specs = (P(None, None, "y"), P(None, "y"))
    call = jax.shard_map(local, mesh=mesh((4,), ("y",)), in_specs=specs, out_specs=out_specs)
    assert_same(answer_jit(x, W, call=call), answer_jit(x, W, call=local), atol=5e-5)


def test_shard_map_over_loops(tiny_blocks):
    x, call = sharded_call("batch")
    W = cotangents(x)
    assert_same(answer_jit(x, W, call=call), answer_jit(x, W), atol=5e-5)


def test_replicated_key_and_value_of_one_head(tiny_blocks):
    """Each device holds some query heads and the one key head: dk and dv sum over the devices."""
    x = operands(B=2, H=8, h=1)
    specs = (dict(q=P(None, None, "y"), k=P(), v=P()),)
    out_specs = (P(None, None, "y"), P(None, "y"))
    call = jax.shard_map(attention, mesh=mesh((8,), ("y",)), in_specs=specs, out_specs=out_specs)
    W = cotangents(x)
    assert_same(answer_jit(x, W, call=call), answer_jit(x, W), atol=5e-5)


def test_gradient_inside_shard_map():
    """Of a sharded operand it is the shard's; of a replicated one the sum, after one psum."""
    x = operands("bias", B=8)
    W = cotangents(x)

    def local(x, W):
        _, grads = answer(x, W)
        return grads

    by_batch = {name: P("x") if name != "bias" else P() for name in x}
    call = jax.shard_map(
        local, mesh=mesh((8,), ("x",)), in_specs=(by_batch, (P("x"), P("x"))), out_specs=by_batch
    )
    assert_same(jax.jit(call)(x, W), answer_jit(x, W)[1], atol=5e-5)


MESHES = {
    "batch": dict(q=P("x"), k=P("x"), v=P("x"), ids=P("x")),
    "heads": dict(q=P(None, None, "y"), k=P(None, None, "y"), v=P(None, None, "y"), bias=P(None, "y")),
    "both": dict(
        q=P("x", None, "y"),
        k=P("x", None, "y"),
        v=P("x", None, "y"),
        ids=P("x"),
        bias=P(None, "y"),
        sinks=P("y"),
    ),
}
FORMS = {
    # `|` takes the lists of blocks, segments the ranges, causal alone arithmetic.
    "arithmetic": ("bias",),
    "ranges": ("bias", "sinks", "ids", "slopes"),
    "lists": ("prefix", "bias"),
}


def placed(x, specs, of_mesh):
    return {name: jax.device_put(y, NamedSharding(of_mesh, specs.get(name, P()))) for name, y in x.items()}


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
@pytest.mark.parametrize("form, specs", [("arithmetic", "batch"), ("ranges", "both"), ("lists", "heads")])
def test_meshes_equal_one_device(kind, form, specs):
    x = operands(*FORMS[form], **EIGHT)
    W = cotangents(x)
    wanted = answer_jit(x, W)
    # Explicit is what jax.make_mesh makes by default.
    over = jax.make_mesh((2, 4), ("x", "y")) if kind == "explicit" else mesh((2, 4), ("x", "y"))
    by = MESHES[specs]
    out_spec = P(*(*by["q"], None, None, None, None)[:4])
    of_lse = P(out_spec[0], out_spec[2], out_spec[1])
    with jax.set_mesh(over):
        W = tuple(jax.device_put(w, NamedSharding(over, s)) for w, s in zip(W, (out_spec, of_lse)))
        got = answer_jit(placed(x, by, over), W)
    assert_same(jax.device_get(got), jax.device_get(wanted), atol=5e-5)
    if kind == "explicit":  # on an automatic one XLA decides
        (out, lse), grads = got
        assert out.sharding.is_equivalent_to(NamedSharding(over, out_spec), 4)
        assert lse.sharding.is_equivalent_to(NamedSharding(over, of_lse), 3)
        for name in "qkv":
            assert grads[name].sharding.is_equivalent_to(NamedSharding(over, by[name]), 4), name


def test_explicit_mesh_with_dropout_draws_what_one_device_draws():
    x = operands("key", **EIGHT)
    wanted = jax.jit(attention)(x)
    over = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(over):
        got = attention(placed(x, MESHES["both"], over))  # without jit, for once
    assert_same(jax.device_get(got), jax.device_get(wanted))


def test_explicit_mesh_hands_functions_the_indices_of_the_whole():
    x = operands("slopes", **EIGHT)
    W = cotangents(x)

    def call(x):
        mask = jflash.Function(lambda b, h, i, j: (i + j + b + h) % 3 > 0)
        return attend(*map(x.get, "qkv"), mask, score_mod=lambda *at: sharper(*at) * x["slopes"][at[2]])

    wanted = answer_jit(x, W, call=call)
    over = jax.make_mesh((2, 4), ("x", "y"))
    by = MESHES["both"] | dict(slopes=P("y"))
    with jax.set_mesh(over):
        W = tuple(jax.device_put(w, NamedSharding(over, s)) for w, s in zip(W, (by["q"], P("x", "y"))))
        got = answer_jit(placed(x, by, over), W, call=call)
    assert_same(jax.device_get(got), jax.device_get(wanted), atol=5e-5)


def test_a_device_that_is_not_the_first():
    x = operands("slopes", "ids")
    third = jax.devices()[3]
    got = jax.jit(attention)(jax.device_put(x, third))
    assert all(y.devices() == {third} for y in got)
    assert_same(jax.device_get(got), jax.device_get(jax.jit(attention)(x)))

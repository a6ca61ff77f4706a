"""Every transformation of JAX against a Python loop, the unsharded call or the reference."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import (
    FLOATS,
    B,
    D,
    H,
    T,
    answer,
    answer_jit,
    assert_same,
    attention,
    cotangents,
    d,
    h,
    operands,
    total,
)
from arrays import normal
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
import jflash.xla
from jflash import Causal, Dropout, Prefix, Segments, Window
from jflash import attention_with_lse as attend

pytestmark = pytest.mark.usefixtures("quick_compilation")

policies = jax.checkpoint_policies
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "names": policies.save_only_these_names(*jflash.CHECKPOINT_NAMES),
}


# jit


def test_eager_and_jit_equal_the_reference():
    x = operands("bias", "ids", "sinks")
    W = cotangents(x)
    reference = functools.partial(attention, implementation="reference")
    wanted = answer_jit(x, W, call=reference)
    assert_same(answer(x, W), wanted)
    assert_same(answer_jit(x, W), wanted)


# vmap


def stacked(x, names, n=3):
    """`x` with another leading axis on `names`, along which the values differ."""

    def several(name, value):
        if name == "key":
            return jax.random.split(value, n)
        if name in ("ids", "prefix", "left", "q_positions"):
            return jnp.stack([value, jnp.maximum(value - 1, 0), value + 1])
        return jnp.stack([value * (1 + 0.3 * i) + 0.1 * i for i in range(n)])

    return {name: several(name, value) if name in names else value for name, value in x.items()}


def entry(x, names, i):
    return {name: value[i] if name in names else value for name, value in x.items()}


def axes(x, names):
    return {name: 0 if name in names else None for name in x}


def assert_vmap_is_a_loop(x, names):
    xs, W = stacked(x, names), cotangents(x)
    got = jax.jit(jax.vmap(answer, in_axes=(axes(x, names), None)))(xs, W)
    loop = [answer_jit(entry(xs, names, i), W) for i in range(3)]
    assert_same(got, jax.tree.map(lambda *y: jnp.stack(y), *loop))
    out = got[0][0]
    assert not np.allclose(out[0], out[1]) and not np.allclose(out[1], out[2])


FIRST = ("bias", "ids")
SUBSETS = ["q", "v", "bias", "ids", "k bias", "q k v bias ids"]


@pytest.mark.parametrize("subset", SUBSETS)
def test_vmap_of_arrays(subset):
    assert_vmap_is_a_loop(operands(*FIRST), subset.split())


SECOND = ("scale", "sinks", "slopes", "left")


@pytest.mark.parametrize("subset", ["scale sinks", "slopes left", "q scale sinks slopes left"])
def test_vmap_of_extras(subset):
    assert_vmap_is_a_loop(operands(*SECOND), subset.split())


@pytest.mark.parametrize("subset", ["key", "q"])
def test_vmap_of_dropout(subset):
    """Without a key among the mapped, every entry draws the same bits, as in the loop."""
    assert_vmap_is_a_loop(operands("key"), subset.split())


def test_vmap_of_loops_over_listed_blocks(tiny_blocks):
    assert_vmap_is_a_loop(operands("prefix"), ["k", "prefix"])


def test_vmap_of_loops_with_traced_bounds(tiny_blocks):
    x = operands("left")
    xs, call = stacked(x, ["q", "left"]), jax.jit(attention)
    got = jax.jit(jax.vmap(attention, in_axes=(axes(x, ["q", "left"]),)))(xs)
    loop = [call(entry(xs, ["q", "left"], i)) for i in range(3)]
    assert_same(got, jax.tree.map(lambda *y: jnp.stack(y), *loop))


def test_vmap_along_inner_axes_and_with_heads_as_the_mapped_axis():
    """vmap over heads of calls with one head is attention with all heads."""
    x = operands(h=H)
    one = lambda q, k, v: attend(q[:, :, None], k[:, :, None], v[:, :, None], Causal())
    out, lse = jax.jit(jax.vmap(one, in_axes=2, out_axes=(2, 1)))(x["q"], x["k"], x["v"])
    assert_same((out[..., 0, :], lse[:, :, 0]), jax.jit(attention)(x))


def test_nested_vmap():
    x = operands("bias", "left")
    outer, inner = ("q", "left"), ("k", "q")
    W = cotangents(x)
    xs = stacked(stacked(x, inner), outer)  # q: [outer 3, inner 3, ...]
    both = jax.vmap(jax.vmap(answer, in_axes=(axes(x, inner), None)), in_axes=(axes(x, outer), None))
    got = jax.jit(both)(xs, W)
    loop = [[answer_jit(entry(entry(xs, outer, i), inner, j), W) for j in range(3)] for i in range(3)]
    rows = [jax.tree.map(lambda *y: jnp.stack(y), *row) for row in loop]
    assert_same(got, jax.tree.map(lambda *y: jnp.stack(y), *rows))


def test_gradient_of_vmap_sums_over_what_is_not_mapped():
    x, mapped = operands("bias", "sinks"), ("q", "v")
    xs, W = stacked(x, mapped), cotangents(x)
    W = jax.tree.map(lambda w: jnp.stack([w, -w, 2 * w]), W)
    call = jax.vmap(attention, in_axes=(axes(x, mapped),))
    (out, lse), grads = answer_jit(xs, W, call=call)
    loop = [answer_jit(entry(xs, mapped, i), jax.tree.map(lambda w, i=i: w[i], W)) for i in range(3)]
    assert_same((out, lse), jax.tree.map(lambda *y: jnp.stack(y), *(y for y, _ in loop)))
    for name, got in grads.items():
        each = jnp.stack([g[name] for _, g in loop])
        assert_same({name: got}, {name: each if name in mapped else each.sum(0)}, atol=5e-5)


def test_vmap_over_no_entries():
    call = jax.vmap(attention)
    out, lse = jax.jit(call)({name: jnp.stack([y] * 3)[:0] for name, y in operands().items()})
    assert out.shape == (0, B, T, H, d) and lse.shape == (0, B, H, T)


# scan, checkpoint, control flow


def layer(params, y, key, policy=None):
    """A residual layer of attention with dropout; y [B, T, 8]."""

    def block(params, y, key):
        q, k, v = (jnp.einsum("btf,fhd->bthd", y, w) for w in params[:3])
        out, _ = attend(q, k, v, Causal(), dropout=Dropout(0.3, key))
        return y + jnp.einsum("bthd,hdf->btf", out, params[3])

    return (block if policy is None else jax.checkpoint(block, policy=policy))(params, y, key)


def layers(n):
    shapes = [(8, 2, 4)] * 3 + [(2, 4, 8)]
    params = [0.2 * normal(n, *shape, seed=20 + i) for i, shape in enumerate(shapes)]
    return params, normal(2, 5, 8, seed=30), jax.random.split(jax.random.key(3), n)


def test_scan_over_layers_is_a_python_loop():
    """With a checkpoint inside, and dropout."""
    params, y, keys = layers(2)
    W = normal(*y.shape, seed=31)

    def scanned(params, y):
        step = lambda y, p: (layer(p[0], y, p[1], POLICIES["nothing"]), None)
        y, _ = lax.scan(step, y, (params, keys))
        return (y * W).sum()

    def looped(params, y):
        for i in range(2):
            y = layer([p[i] for p in params], y, keys[i])
        return (y * W).sum()

    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(params, y)
    assert_same(grad(scanned), grad(looped), atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_changes_nothing(policy):
    x = operands("key")
    W = cotangents(x)
    call = jax.checkpoint(attention, policy=POLICIES[policy])
    assert_same(answer_jit(x, W, call=call), answer_jit(x, W))


def forward_runs(f, *args):
    """How often the traced `f` runs attention forward, once what nobody uses is gone."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    names = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            names[eqn.params.get("name")] += 1
            for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda y: hasattr(y, "eqns")):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr)
    assert names["_backward"] == 1
    return names["_forward"]


@pytest.mark.parametrize("policy, runs", [("names", 1), ("everything", 1), ("nothing", 2)])
@pytest.mark.parametrize("extras", [(), ("sinks", "key")], ids=["plain", "sinks and dropout"])
def test_saved_names_spare_the_second_forward(policy, runs, extras):
    x = operands(*extras)
    W = cotangents(x)

    def loss(q):
        inner = lambda q: attention(x | {"q": jnp.sin(q)})
        out, lse = jax.checkpoint(inner, policy=POLICIES[policy])(q)
        return (out * W[0]).sum() + (lse * W[1]).sum()

    assert forward_runs(jax.value_and_grad(loss), x["q"]) == runs


def test_checkpoint_names_are_out_and_lse():
    assert len(jflash.CHECKPOINT_NAMES) == 2 and all(isinstance(n, str) for n in jflash.CHECKPOINT_NAMES)
    assert forward_runs(jax.grad(lambda q: attention(operands() | {"q": q})[0].sum()), operands()["q"]) == 1


def test_control_flow_with_operands_from_the_carry():
    x = operands("scale", "left")

    def looped(x):
        def body(i, carry):
            q, scale, left = carry
            out, _ = attention(x | dict(q=q, scale=scale, left=left))
            return q + jnp.pad(out, [(0, 0)] * 3 + [(0, D - d)]), scale * 0.9, left - 1

        return lax.fori_loop(0, 2, body, (x["q"], x["scale"], x["left"]))[0]

    def unrolled(x):
        q = x["q"]
        for i in range(2):
            out, _ = call(x | dict(q=q, scale=x["scale"] * 0.9**i, left=x["left"] - i))
            q = q + jnp.pad(out, [(0, 0)] * 3 + [(0, D - d)])
        return q

    call = jax.jit(attention)
    assert_same(jax.jit(looped)(x), unrolled(x))
    branch = jax.jit(lambda yes, x: lax.cond(yes, attention, lambda x: attention(x | {"scale": 2.0}), x))
    assert_same(branch(True, x), call(x))
    assert_same(branch(False, x), call(x | {"scale": jnp.float32(2.0)}))


# shard_map and meshes

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


# export, ahead of time, donation


def exported(f, *args, order=0):
    exported = jax.export.export(jax.jit(f))(*args)
    return jax.export.deserialize(exported.serialize(vjp_order=order))


def test_export_round_trip_of_forward_and_vjp():
    x = operands("bias", "ids", "sinks")
    W = cotangents(x)
    floats = {name: x.pop(name) for name in list(x) if name in FLOATS}
    call = lambda floats, x: attention(floats | x)
    back = exported(call, floats, x, order=1)
    (out, lse), grads = answer_jit(floats | x, W)
    assert_same(tuple(back.call(floats, x)), (out, lse))
    # The vjp of an exported function takes its inputs and cotangents flat.
    leaves = jax.tree.leaves((floats, x))
    got = back.vjp().call(*leaves, *W)
    named = dict(zip(sorted(floats), got))
    assert_same({name: named[name] for name in grads}, grads)


@pytest.mark.parametrize("names", [(), ("ids",)], ids=["plain", "segments"])
def test_export_with_a_symbolic_batch(names):
    x = operands(*names, B=3)
    W = cotangents(x)
    b = jax.export.symbolic_shape("b")[0]
    struct = lambda y: jax.ShapeDtypeStruct((b, *y.shape[1:]), y.dtype)
    back = exported(lambda x, W: answer(x, W), *jax.tree.map(struct, (x, W)))
    for n in (1, 3):
        cut = jax.tree.map(lambda y, n=n: y[:n], (x, W))
        assert_same(back.call(*cut), answer_jit(*cut))


def test_donated_inputs_are_reused():
    x = operands(h=H)
    x["v"] = normal(B, T, H, D, seed=3)
    wanted = jax.jit(attention)(x)[0]
    q = jnp.array(x["q"])
    step = jax.jit(lambda q, k, v: attend(q, k, v, Causal())[0], donate_argnums=0)
    assert_same(step(q, x["k"], x["v"]), wanted)  # a buffer that could not be used would warn
    assert q.is_deleted() and not x["k"].is_deleted()


def test_eval_shape_computes_nothing():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    f = functools.partial(attend, mask=Causal())
    # 2^40 scores a head: only the shapes can be asked for.
    out, lse = jax.eval_shape(f, struct(2**20, 8, 64), struct(2**20, 2, 64), struct(2**20, 2, 32))
    assert (out.shape, out.dtype) == ((2**20, 8, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((8, 2**20), jnp.float32)


# Kinds of inputs


def test_numpy_inputs():
    x = operands("bias", "ids", "sinks", "slopes", "prefix", "left")
    call = jax.jit(attention)
    assert_same(attention(jax.tree.map(np.asarray, x)), call(x))


def test_weak_types_and_strict_promotion():
    x = operands("scale", "ids", "sinks", "bias", "slopes")
    W = cotangents(x)
    half = jax.tree.map(lambda y: y.astype(jnp.bfloat16) if y.dtype == jnp.float32 else y, x)
    with jax.numpy_dtype_promotion("strict"):
        (out, lse), grads = answer(half, (W[0].astype(jnp.bfloat16), W[1]))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert {g.dtype for g in grads.values()} == {jnp.dtype(jnp.bfloat16)}
    weak = lax.full((B, T, H, D), 0.5)  # of a Python number
    assert jax.typeof(weak).weak_type
    out, lse = attend(weak, weak, weak, scale=jnp.asarray(0.4))
    assert out.dtype == lse.dtype == jnp.float32
    assert not jax.typeof(out).weak_type and not jax.typeof(lse).weak_type


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rank_promotion_may_be_an_error(tiny_blocks, implementation):
    """As JAX's own tests have it, and users whose axes must match."""
    extras = ("bias", "scale", "sinks", "slopes", "cap", "key")
    call = functools.partial(attention, implementation=implementation)
    with jax.numpy_rank_promotion("raise"):
        for names in ((), ("left", "ids"), ("ids",), ("prefix", "ids"), ("q_positions", *extras)):
            x = operands(*names)
            jax.eval_shape(functools.partial(answer, call=call), x, cotangents(x))


def test_x64_keeps_float32_and_takes_float64():
    x = operands("bias", "scale", "ids", "left")
    W = cotangents(x)
    wanted = answer_jit(x, W)
    with jax.enable_x64(True):
        assert_same(jax.jit(attention)(x | {"key": jax.random.key(7)})[1], wanted[0][1])
        assert_same(answer_jit(x, W), wanted)
        double = jax.tree.map(lambda y: y.astype(jnp.float64) if y.dtype == jnp.float32 else y, x)
        double["ids"] = x["ids"].astype(jnp.int64)
        exact = answer_jit(double, tuple(w.astype(jnp.float64) for w in W))
        reference = functools.partial(attention, implementation="reference")
        assert_same(exact, answer_jit(double, tuple(w.astype(jnp.float64) for w in W), call=reference), 1e-12)
        assert exact[0][0].dtype == exact[0][1].dtype == exact[1]["q"].dtype == jnp.float64
        single = jax.tree.map(lambda y: y.astype(jnp.float32), exact)
        assert_same(single, wanted)


def test_debug_nans_does_not_trip(tiny_blocks):
    """Rows without keys have lse -inf inside; none of it may become NaN on the way."""
    x = operands("bias", "ids", "sinks", "cap")
    W = cotangents(x)
    with jax.debug_nans(True):
        (out, lse), grads = answer_jit(x, W)
    assert (lse[1, :, 4:] == -jnp.inf).all() and (out[1, 4:] == 0).all()
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_typed_and_raw_keys_draw_the_same(kind):
    x = operands()
    key = jax.random.key(5, impl=kind)
    with jax.default_prng_impl(kind):
        raw = jax.random.key_data(key)
        assert raw.dtype == jnp.uint32
        call = jax.jit(attention)
        assert_same(call(x | {"key": key}), call(x | {"key": raw}), atol=0)
    assert not np.allclose(call(x | {"key": key})[0], call(x)[0])


# Gradients of some of the inputs

PARTS = [
    "q",
    "k",
    "v",
    "bias",
    "scale",
    "sinks",
    "slopes",
    "cap",
    "q k",
    "k bias",
    "v sinks cap",
    "scale slopes",
]


def test_gradients_of_some_inputs_are_those_of_all():
    x = operands("bias", "scale", "sinks", "slopes", "cap")
    W = cotangents(x)
    subsets = [part.split() for part in PARTS]

    @jax.jit
    def each(x):
        of = lambda names: jax.grad(lambda y: total(x | y, W))({name: x[name] for name in names})
        return [of(names) for names in subsets]

    _, every = answer_jit(x, W)
    for names, grads in zip(subsets, each(x)):
        assert_same(grads, {name: every[name] for name in names})
        assert all(np.abs(g).max() > 1e-3 for g in grads.values()), names


def test_stop_gradient_gives_exact_zeros():
    x = operands("bias")
    W = cotangents(x)
    stopped = lambda x: attention(x | {name: lax.stop_gradient(x[name]) for name in ("k", "bias")})
    _, grads = answer_jit(x, W, call=stopped)
    _, every = answer_jit(x, W)
    assert_same({n: grads[n] for n in "qv"}, {n: every[n] for n in "qv"})
    assert (grads["k"] == 0).all() and (grads["bias"] == 0).all()


def test_one_array_as_query_key_and_value():
    y = normal(B, T, h, D)
    W = cotangents(dict(q=y, v=y))
    loss = lambda q, k, v: total(dict(q=q, k=k, v=v), W)
    once = jax.jit(jax.grad(lambda y: loss(y, y, y)))(y)
    parts = jax.jit(jax.grad(loss, (0, 1, 2)))(y, y, y)
    assert_same(once, sum(parts))
    shared = jax.jit(jax.grad(lambda q, kv: loss(q, kv, kv), 1))(y, y)
    assert_same(shared, parts[1] + parts[2])


def test_integers_get_float0():
    x = operands("ids", "left", "q_positions", "prefix")
    W = cotangents(x)
    integers = {name: x[name] for name in ("ids", "left", "q_positions", "prefix")}
    grads = jax.grad(lambda i: total(x | i, W), allow_int=True)(integers)
    for name, g in grads.items():
        assert g.dtype == jax.dtypes.float0 and g.shape == x[name].shape, name


@pytest.mark.parametrize("only", ["out", "lse"])
def test_a_loss_of_one_result(only):
    """The other's cotangent is a symbolic zero inside the rule; it equals one of zeros."""
    x = operands("bias", "sinks", "ids")
    W = cotangents(x)
    floats = {name: x[name] for name in x if name in FLOATS}
    zeroed = (W[0], jnp.zeros_like(W[1])) if only == "out" else (jnp.zeros_like(W[0]), W[1])
    W_lse = jnp.where(attention(x)[1] == -jnp.inf, 0, W[1])

    def loss(floats):
        out, lse = attention(x | floats)
        return (out * W[0]).sum() if only == "out" else jnp.where(W_lse == 0, 0, lse * W_lse).sum()

    got = jax.jit(jax.grad(loss))(floats)
    assert_same(got, answer_jit(x, zeroed)[1])
    if only == "lse":
        assert (got["v"] == 0).all() and (got["sinks"] == 0).all()
        assert np.abs(got["q"]).max() > 1e-3


# Compilations


def test_run_time_operands_do_not_compile_anew():
    x = operands("bias", "scale", "sinks", "slopes", "cap", "ids", "left", "prefix", "q_positions", "key")
    step = jax.jit(lambda x: attention(x))
    base = step(x)[0]
    changes = dict(
        scale=[jnp.float32(0.1), jnp.float32(-2.0)],
        cap=[jnp.float32(0.5)],
        left=[jnp.int32(0), jnp.int32(5)],
        ids=[x["ids"] + 1, x["ids"][::-1]],
        prefix=[x["prefix"] * 0, x["prefix"] * 0 + 1],
        q_positions=[x["q_positions"] + 3, x["q_positions"][:, ::-1]],
        slopes=[x["slopes"] * 3],
        sinks=[x["sinks"] + 1],
        key=[jax.random.key(8)],
    )
    for name, values in changes.items():
        results = [step(x | {name: value})[0] for value in values]
        assert any(not np.allclose(out, base) for out in results), name
    assert step._cache_size() == 1


def test_eager_calls_compile_once():
    """A mask function defined once, new ids, new bounds: no new trace of the inner program."""
    from jflash.rules import _forward

    x = operands("ids", "left")
    every_third = jflash.Function(lambda b, h, q_pos, k_pos: (q_pos - k_pos) % 3 == 0)
    call = lambda ids, left: attend(x["q"], x["k"], x["v"], every_third & Segments(ids) & Window(left))
    call(x["ids"], x["left"])
    before = _forward._cache_size()
    for i in range(3):
        call(x["ids"] + i, x["left"] + i)
    assert _forward._cache_size() == before


def test_interpret_is_part_of_the_key_of_jit():
    q = normal(3, 1, 4)

    def sizes():  # of the cache, after a call outside and one inside
        step = jax.jit(lambda q: jflash.attention(q, q, q))
        outside, size = step(q), step._cache_size()
        with jflash.interpret():
            inside = step(q)
        np.testing.assert_allclose(outside, inside, rtol=1e-5, atol=1e-6)
        return size, step._cache_size(), step(q) is not None and step._cache_size()

    sizes()  # what Pallas loads when it is first used adds to the key of every jit
    assert sizes() == (1, 2, 2)


def test_interpret_ends_where_its_block_ends():
    from jflash.backends import interpreting

    with pytest.raises(KeyError), jflash.interpret():
        assert interpreting()
        raise KeyError
    assert not interpreting()


# Which implementation


def test_explain_names_the_choice_and_the_reasons():
    x = operands()
    record = jflash.explain(x["q"], x["k"], x["v"], Causal())
    assert record.implementation == "xla" and record.platform == "cpu"
    assert record.config == jflash.xla.default_config(record.problem)
    assert "T·t memory" in record.why_not["reference"] and "reference" in record.why_not["reference"]
    text = str(record)
    assert "xla on cpu" in text and "(2, 6, 4, 8)" in text and "not reference" in text
    named = jflash.explain(x["q"], x["k"], x["v"], implementation="reference")
    assert named.implementation == "reference"
    assert "'reference' was asked for" in named.why_not["xla"]


@pytest.mark.parametrize(
    "mask, words",
    [
        (None, "no mask"),
        (Causal(), "arithmetic"),
        (Segments(jnp.arange(6)), "ranges"),
        (Causal() | Prefix(2), "lists"),
    ],
)
def test_explain_tells_the_form_of_the_schedule(mask, words):
    x = operands()
    assert words in jflash.explain(*map(x.get, "qkv"), mask).schedule


def test_explain_takes_shapes():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    record = jflash.explain(struct(1, 2**20, 8, 64), struct(1, 2**20, 2, 64), struct(1, 2**20, 2, 64))
    assert record.implementation == "xla" and record.problem.T == 2**20


def test_explain_in_a_trace():
    seen = []
    jax.eval_shape(lambda x: seen.append(jflash.explain(*map(x.get, "qkv"), Causal())), operands())
    assert seen[0].implementation == "xla"


def test_a_named_implementation_runs_or_raises(monkeypatch):
    x = operands()
    monkeypatch.setattr("jflash.reference.unsupported", lambda problem: "it has a cold")
    with pytest.raises(NotImplementedError, match="reference: it has a cold") as caught:
        jflash.attention(*map(x.get, "qkv"), implementation="reference")
    assert "xla" not in str(caught.value)
    assert jflash.explain(*map(x.get, "qkv")).implementation == "xla"
    monkeypatch.setattr("jflash.xla.unsupported", lambda problem: "it is asleep")
    with pytest.raises(NotImplementedError, match="xla: it is asleep.*reference: it has a cold"):
        jflash.attention(*map(x.get, "qkv"))
    with pytest.raises(NotImplementedError, match="no implementation for this call"):
        jflash.explain(*map(x.get, "qkv"))


def test_the_platform_is_that_of_the_trace():
    from jflash.backends import target

    assert target() == ("cpu", "")
    with jax.default_device(jax.devices("cpu")[2]):
        assert target() == ("cpu", "")
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    abstract = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    x = operands()
    with jax.sharding.use_abstract_mesh(abstract):
        assert target() == ("cuda", "sm_90")
        assert jflash.explain(*map(x.get, "qkv")).platform == "cuda"
    assert target() == ("cpu", "")


def test_lowering_for_other_platforms():
    """From a CPU, without their devices: the program may not depend on what is plugged in."""
    x = operands("ids")
    for name in ("cuda", "tpu"):
        text = jax.jit(attention).trace(x).lower(lowering_platforms=(name,)).as_text()
        assert "stablehlo" in text
    both = jax.export.export(jax.jit(attention), platforms=("cpu", "cuda"))(x)
    assert_same(both.call(x), jax.jit(attention)(x))

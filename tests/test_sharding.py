"""On meshes of each kind: what devices say to each other, and that they compute what one does."""

import functools

import collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import answer, answer_jit, assert_same, attention, cotangents, operands
from arrays import normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import Causal, Dropout
from pallas_kernels.compat import tiles

EIGHT = dict(B=8, H=8, h=4)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
SHAPE = {"x": 2, "y": 4}


def mesh(kind, **axes):
    kinds = {"mixed": [AxisType.Explicit, AxisType.Auto]}.get(kind) or [KINDS[kind]] * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), tuple(kinds))


def by(batch, heads):
    """The specs of all operands, W and (out, lse) where these axes share out batch entries and heads."""
    each = dict.fromkeys("qkv", P(batch, None, heads))
    each |= dict.fromkeys(("ids", "prefix"), P(batch))
    each |= dict(bias=P(None, heads), sinks=P(heads), slopes=P(heads))
    return each, (P(batch, None, heads), P(batch, heads))


def placed(x, W, specs, over):
    of_x, of_W = specs
    put = lambda y, spec: jax.device_put(y, NamedSharding(over, spec))
    return {n: put(y, of_x.get(n, P())) for n, y in x.items()}, tuple(map(put, W, of_W))


def assert_agree(got, wanted):
    assert_same(jax.device_get(got), jax.device_get(wanted), atol=5e-5)


def check(f, over, specs, x, W, found):
    """`f(x, W)` on the mesh gives what it does on one device, by these collectives."""
    wanted = jax.jit(f)(x, W)
    with jax.set_mesh(over):
        at = placed(x, W, specs, over)
        compiled = jax.jit(f).lower(*at).compile()
        assert collectives.in_text(compiled.as_text()) == found
        assert_agree(compiled(*at), wanted)


def gradients(x, W, call=attention):
    """Those of q, k and v."""
    rest = {n: y for n, y in x.items() if n not in "qkv"}
    return jax.vjp(lambda y: call(rest | y), {n: x[n] for n in "qkv"})[1](W)[0]


def inputs(*names, **sizes):
    x = operands(*names, **EIGHT | sizes)
    return x, cotangents(x)


def test_every_collective_counts():
    text = "%a = (f32[2], f32[3]) all-reduce-start(%x), %b = f32[2] all-reduce-done(%a)\n"
    text += "%c = f32[4] all-gather(%b), channel_id=1 %d = collective-permute-start(%c) = send(%all-reduce)"
    wanted = {"all-reduce": 1, "all-gather": 1, "collective-permute": 1, "send": 1}
    assert collectives.in_text(text) == wanted
    over = mesh("automatic", x=8)
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(over, P("x")))
    assert collectives.of(lambda x: x.sum(0), x) == {"all-reduce": 1}
    moved = lambda x: lax.with_sharding_constraint(x, NamedSharding(over, P()))
    assert collectives.of(moved, x) == {"all-gather": 1}


# Batch and heads, of grouped queries too, stay where they are.

PLACES = {
    "batch": (("x", "y"), None),
    "heads": (None, "y"),
    "batch and heads": ("x", "y"),
    "heads over two axes": (None, ("x", "y")),
}


@pytest.mark.parametrize("kind", ["automatic", "explicit", "mixed", "manual"])
@pytest.mark.parametrize("place", PLACES)
def test_no_collective_forward_and_backward(kind, place):
    specs = by(*PLACES[place])
    x, W = inputs("ids", **dict(B=2, H=16, h=8) if place == "heads over two axes" else {})
    if kind != "manual":
        check(answer, mesh(kind, **SHAPE), specs, x, W, {})
        return
    of_x, of_W = specs
    local = jax.shard_map(
        answer,
        mesh=mesh("automatic", **SHAPE),
        in_specs=({n: of_x[n] for n in x}, of_W),
        out_specs=(of_W, {n: of_x[n] for n in "qkv"}),
    )
    at = placed(x, W, specs, mesh("automatic", **SHAPE))
    assert collectives.of(local, *at) == {}
    assert_agree(jax.jit(local)(*at), answer_jit(x, W))


def attention_of(x):
    return lambda x, W: attention(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("bias", "sinks", "ids", "slopes"), ("prefix", "q_positions"), ("key",)])
def test_data_goes_along(kind, names):
    """Of what is shared out; what has no batch axis is not gathered. Dropout draws what one device draws."""
    x, W = inputs(*names)
    check(gradients, mesh(kind, **SHAPE), by("x", "y"), x, W, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_any_implementation(kind, implementation):
    x, W = inputs("ids", "bias", B=2, H=4, h=2)
    call = functools.partial(attention, implementation=implementation)
    with jflash.interpret():
        f = functools.partial(gradients, call=call)
        check(f, mesh(kind, x=2, y=2), by("x", "y"), x, W, {})


@pytest.mark.parametrize("kind", ["automatic", "explicit", "mixed"])
def test_the_gradient_of_a_replicated_operand_is_one_sum(kind):
    x, W = inputs("bias")
    specs = by("x", "y")
    of_bias = lambda x, W: answer(x, W)[1]["bias"]
    check(of_bias, mesh(kind, **SHAPE), specs, x, W, {"all-reduce": 1})
    check(answer, mesh(kind, **SHAPE), specs, x, W, {"all-reduce": 1})


# Transformations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [(("x", "y"), None), ("x", "y")], ids=["alone", "beside heads"])
def test_a_sharded_axis_under_vmap(kind, axes):
    mapped, heads = axes
    x, W = inputs("ids", B=2)
    xs, Ws = jax.tree.map(lambda y: jnp.stack([y] * 8), (x, W))
    xs["q"] = xs["q"] * jnp.arange(1, 9).reshape(8, 1, 1, 1, 1)
    of_x, of_W = by(None, heads)
    specs = {n: P(mapped, *of_x[n]) for n in x}, tuple(P(mapped, *spec) for spec in of_W)
    check(jax.vmap(answer), mesh(kind, **SHAPE), specs, xs, Ws, {})


def test_a_sharded_axis_within_nested_vmap_and_an_operand_for_all():
    x, W = inputs("bias", B=2)
    xs, Ws = jax.tree.map(lambda y: jnp.stack([jnp.stack([y] * 2)] * 4), (x, W))
    xs["bias"] = x["bias"]
    axes = {n: None if n == "bias" else 0 for n in xs}
    f = jax.vmap(jax.vmap(gradients, (axes, 0)), (axes, 0))
    specs = {n: P("y", "x") for n in "qkv"}, (P("y", "x"),) * 2
    check(f, mesh("automatic", **SHAPE), specs, xs, Ws, {})


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint(kind):
    policy = jax.checkpoint_policies.save_only_these_names(*jflash.CHECKPOINT_NAMES)
    x, W = inputs("ids")
    f = functools.partial(answer, call=jax.checkpoint(attention, policy=policy))
    check(f, mesh(kind, **SHAPE), by("x", "y"), x, W, {})


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_and_second_order(kind):
    x, W = inputs("ids", B=4, H=4)
    rest_of = lambda x: {"ids": x["ids"]}

    def each(x, W):
        along = {n: jnp.cos(x[n]) for n in "qkv"}
        at = {n: x[n] for n in "qkv"}
        forward = jax.jvp(lambda y: attention(rest_of(x) | y), (at,), (along,))
        product = jax.jvp(lambda y: gradients(rest_of(x) | y, W), (at,), (along,))
        penalty = lambda y: sum((g**2).sum(None) for g in gradients(rest_of(x) | y, W).values())
        return forward, product, jax.grad(penalty)(at)

    check(each, mesh(kind, **SHAPE), by("x", "y"), x, W, {})


@pytest.mark.parametrize("kind", KINDS)
def test_scan_over_layers(kind):
    """A gradient of shared parameters: one sum a program, none of it around attention."""
    over = mesh(kind, x=8)
    params, y, W = normal(2, 8, 2, 4, seed=1) / 4, normal(8, 6, 8, seed=2), normal(8, 6, 8, seed=3)

    def loss(params, y, W):
        def layer(y, w):
            q = jnp.einsum("btf,fhd->bthd", y, w)
            out = jflash.attention(q, q, q, Causal(), dropout=Dropout(0.3, jax.random.key(1)))
            return y + jnp.einsum("bthd,fhd->btf", out, w), None

        return (lax.scan(layer, y, params)[0] * W).sum()

    f = jax.value_and_grad(loss, 1)
    wanted = jax.jit(f)(params, y, W)
    with jax.set_mesh(over):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(over, P(*spec)))
        at = put(params), put(y, "x"), put(W, "x")
        assert collectives.of(f, *at) == {"all-reduce": 1}  # of the loss
        assert_agree(jax.jit(f)(*at), wanted)


def test_without_jit_and_without_a_mesh_around():
    x, W = inputs("ids")
    over = mesh("automatic", **SHAPE)
    at = placed(x, W, by("x", "y"), over)
    got = answer(*at)
    assert got[0][0].sharding.is_equivalent_to(NamedSharding(over, P("x", None, "y")), 4)
    assert_agree(got, answer_jit(x, W))
    assert collectives.of(answer, *at) == {}


def test_xla_without_shardy():
    x, W = inputs("ids")
    at = placed(x, W, by("x", "y"), mesh("automatic", **SHAPE))
    wanted = answer_jit(x, W)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert collectives.of(answer, *at) == {}
        assert_agree(answer_jit(*at), wanted)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


# Some axes manual


@pytest.mark.parametrize("kind", KINDS)
def test_one_manual_axis_beside_others(kind):
    x, W = inputs("ids")
    over = mesh(kind, **SHAPE)
    specs = by("x", "y")
    here = ({n: P("x") for n in x}, (P("x"),) * 2)
    with jax.set_mesh(over):
        f = jax.shard_map(
            answer, in_specs=here, out_specs=((P("x"),) * 2, {n: P("x") for n in "qkv"}), axis_names={"x"}
        )
        at = placed(x, W, specs, over)
        assert collectives.of(f, *at) == {}
        assert_agree(jax.jit(f)(*at), answer_jit(x, W))


@pytest.mark.parametrize("order", ["yz", "zy"])
def test_one_manual_axis_beside_two_automatic_ones(order):
    """XLA tells nobody in which order it numbers the devices then: sums within keep things whole."""
    batch, heads = order
    over = mesh("automatic", x=2, y=2, z=2)
    specs = by(("x", batch), heads)
    for names in ((), ("bias", "sinks", "ids")):
        x, W = inputs(*names)
        of_x = {n: P("x") if n in (*"qkv", "ids") else P() for n in x}
        of_grads = {n: of_x[n] for n in x if n != "ids"}
        f = jax.shard_map(
            answer,
            mesh=over,
            in_specs=(of_x, (P("x"),) * 2),
            out_specs=((P("x"),) * 2, of_grads),
            axis_names={"x"},
        )
        at = placed(x, W, specs, over)
        assert_agree(jax.jit(f)(*at), answer_jit(x, W))
        assert names or collectives.of(f, *at) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pmap itself
def test_pmap():
    x, W = inputs("ids")
    split = lambda tree: jax.tree.map(lambda y: y.reshape(8, 1, *y.shape[1:]), tree)
    f = jax.pmap(answer)
    assert collectives.in_text(f.lower(split(x), split(W)).compile().as_text()) == {}
    got = jax.tree.map(lambda y: y.reshape(8, *y.shape[2:]), f(split(x), split(W)))
    assert_agree(got, answer_jit(x, W))


# Fewer heads than devices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("h", [4, 2, 1])
def test_fewer_key_heads_than_devices(kind, h):
    """Each device has a query head and takes the key head that it needs."""
    x, W = inputs(B=2, h=h)
    over = mesh(kind, y=8)
    of_x, of_W = by(None, "y")
    specs = {"q": of_x["q"]}, of_W
    check(attention_of(x), over, specs, x, W, {})
    with jax.set_mesh(over):
        at, _ = placed(x, W, specs, over)
        told = jflash.explain(*map(at.get, "qkv"), Causal())
        assert_agree(answer_jit(*placed(x, W, specs, over)), answer_jit(x, W))
    assert told.sharding == (
        f"batch entries among 1 devices, heads among 8; key heads, {h}, do not divide among the 8 devices of "
        "y: they are gathered once, and each device takes what it needs"
    )
    assert told.sharding in str(told)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_groups_need_whole_heads(kind):
    """24 query heads on 8 devices: the three of one need two of the 12 key heads."""
    x, W = inputs(B=2, H=24, h=12)
    over = mesh(kind, y=8)
    specs = {"q": P(None, None, "y")}, by(None, "y")[1]
    with jax.set_mesh(over):
        assert_agree(answer_jit(*placed(x, W, specs, over)), answer_jit(x, W))


@pytest.mark.parametrize("kind, once", [("automatic", "all-gather"), ("explicit", "all-to-all")])
def test_keys_that_lie_elsewhere_move_once(kind, once):
    """Sharded by their length; heads are then exchanged for keys where that suffices."""
    x, W = inputs(B=2, h=2, T=8)
    specs = {"q": P(None, None, "y"), "k": P(None, "y"), "v": P(None, "y")}, by(None, "y")[1]
    over = mesh(kind, y=8)
    check(attention_of(x), over, specs, x, W, {once: 2})
    with jax.set_mesh(over):
        at, _ = placed(x, W, specs, over)
        told = jflash.explain(*map(at.get, "qkv"), Causal()).sharding
    assert "they are gathered once" in told and told.endswith("lengths and head sizes are gathered")


def test_fewer_heads_than_devices():
    """Heads and head size are one axis of a projection, over more devices than there are heads."""
    over = mesh("automatic", y=8)
    y, weights = normal(2, 6, 16), [normal(16, 32, seed=i) / 4 for i in range(3)]

    def loss(y, *weights):
        q, k, v = ((y @ w).reshape(2, 6, 4, 8) for w in weights)
        return (jflash.attention(q, k, v, Causal()) ** 2).sum()

    at = [jax.device_put(w, NamedSharding(over, P(None, "y"))) for w in weights]
    wanted = jax.jit(jax.value_and_grad(loss, (1, 2, 3)))(y, *weights)
    # q, k and v among pairs of devices, which compute the same head; the loss.
    assert collectives.of(loss, y, *at) == {"all-gather": 3, "all-reduce": 1}
    assert_agree(jax.jit(jax.value_and_grad(loss, (1, 2, 3)))(y, *at), wanted)
    struct = jax.ShapeDtypeStruct((2, 6, 4, 8), y.dtype, sharding=NamedSharding(over, P(None, None, "y")))
    assert jflash.explain(struct, struct, struct).sharding == (
        "batch entries among 1 devices, heads among 4; 4 query heads with 4 key heads do not divide among "
        "the 8 devices of y: they are gathered once, and 2 devices compute the same"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_who_computes_what(kind):
    x, W = inputs()
    over = mesh(kind, **SHAPE)
    with jax.set_mesh(over):
        at, _ = placed(x, W, by("x", "y"), over)
        told = jflash.explain(*map(at.get, "qkv")).sharding
    assert told == "batch entries among 2 devices, heads among 4"
    alone = jflash.explain(*map(x.get, "qkv"))
    assert alone.sharding == "" and "sharding" not in str(alone)


# Export


def test_an_export_of_explicit_axes():
    x, W = inputs("ids")
    over = mesh("explicit", **SHAPE)
    with jax.set_mesh(over):
        at = placed(x, W, by("x", "y"), over)
        exported = jax.export.export(jax.jit(answer))(*at)
        assert exported.nr_devices == 8
        back = jax.export.deserialize(exported.serialize())
        assert_agree(back.call(*at), answer_jit(x, W))


def test_an_export_of_automatic_axes_names_the_way_out():
    x, W = inputs()
    at = placed(x, W, by("x", "y"), mesh("automatic", **SHAPE))
    for f in (answer, attention_of(x)):
        with pytest.raises(NotImplementedError, match="cannot be exported .* Make the axes explicit"):
            jax.export.export(jax.jit(f))(*at)


# One device


def test_one_device_pays_nothing(monkeypatch):
    x, W = inputs("ids")
    lowered = jax.jit(answer).lower(x, W).as_text()
    assert "CustomSPMDPartitioning" not in lowered
    several = str(jax.make_jaxpr(answer)(x, W))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert str(jax.make_jaxpr(answer)(x, W)) == several
    jax.clear_caches()
    assert jax.jit(answer).lower(x, W).as_text() == lowered


def test_a_mesh_of_one_device():
    x, W = inputs("ids")
    for kind in KINDS:
        check(answer, mesh(kind, x=1, y=1), by("x", "y"), x, W, {})


def test_the_devices_of_parts_by_number():
    over = mesh("automatic", **SHAPE)
    numbers = tiles(NamedSharding(over, P(None, "x")), 2)
    np.testing.assert_array_equal(numbers.reshape(2, 4), np.arange(8).reshape(2, 4))

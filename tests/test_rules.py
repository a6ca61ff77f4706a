"""Every transformation of JAX against a Python loop, the unsharded call or the reference."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import FLOATS, T, answer, answer_jit, assert_same, attention, cotangents, operands, total
from arrays import B, D, H, d, h, normal
from jax import lax
from jax.interpreters import partial_eval

import jflash
from jflash import Causal, Dropout, interpret
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


def assert_vmap_is_a_loop(x, names, call=attention):
    xs, W = stacked(x, names), cotangents(x)
    each = functools.partial(answer, call=call)
    got = jax.jit(jax.vmap(each, in_axes=(axes(x, names), None)))(xs, W)
    loop = [answer_jit(entry(xs, names, i), W, call=call) for i in range(3)]
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


by_triton = functools.partial(attention, implementation="triton")


@pytest.mark.parametrize("subset", ["q", "ids", "k bias", "q k v bias ids"])
def test_vmap_of_a_kernel(subset):
    with interpret():
        assert_vmap_is_a_loop(operands(*FIRST), subset.split(), by_triton)


@pytest.mark.parametrize("subset", ["scale slopes", "q left"])
def test_vmap_of_a_kernel_over_extras(subset):
    with interpret():
        assert_vmap_is_a_loop(operands(*SECOND), subset.split(), by_triton)


def test_vmap_starts_each_kernel_once():
    """The mapped axis is one more of their grids, not a loop around them."""

    def kernels(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield math.prod(eqn.params["grid_mapping"].grid)
                continue
            for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda y: hasattr(y, "eqns")):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    assert eqn.primitive.name not in ("scan", "while"), eqn
                    yield from kernels(inner)

    x = operands(*FIRST)
    W, each = cotangents(x), functools.partial(answer, call=by_triton)
    for names in (["q"], ["k", "bias"], list(x)):
        with interpret():
            one = jax.make_jaxpr(each)(x, W).jaxpr
            all_three = jax.make_jaxpr(jax.vmap(each, (axes(x, names), None)))(stacked(x, names), W).jaxpr
        assert len(list(kernels(one))) == 4  # forward; dk and dv, dq, the gradient of bias
        assert list(kernels(all_three)) == [3 * n for n in kernels(one)]


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
    padding = x["ids"] < 0
    assert padding.any() and (out[padding] == 0).all() and (lse.mT[padding] == -jnp.inf).all()
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

"""Forward mode and second order against the reference, which JAX differentiates itself, in float64.

`xla` runs in float64, the kernels in float32 and in interpret mode: theirs is what they compute
themselves (out, lse, gradients), beside the tangents that `xla` computes for them.
"""

import contextlib
import functools
import re

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import FLOATS, attention
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import QUICK

import jflash
from jflash import Causal, xla
from pallas_kernels import triton

T = 18
TILE = triton.Block(16, 16, 4, 1)
CONFIGS = {"xla": xla.Config(8, 8, scores=128), "triton": triton.Config(TILE, TILE, TILE)}
IMPLEMENTATIONS = {"xla": (jnp.float64, 1e-11), "triton": (jnp.float32, 2e-4)}
EVERYTHING = ("bias", "scale", "sinks", "slopes", "cap", "ids", "key")
FEW = ("bias", "sinks", "ids")
jit = functools.partial(jax.jit, compiler_options=QUICK)
normal = functools.partial(arrays.numpy_normal, dtype=np.float64)
operands = functools.partial(arrays.operands, T=T)
by_xla = functools.partial(attention, implementation="xla")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of which tiny arrays have several, in both directions."""
    monkeypatch.setattr(xla, "default_config", lambda problem: CONFIGS["xla"])
    monkeypatch.setattr(triton, "default_config", lambda problem: CONFIGS["triton"])


@contextlib.contextmanager
def environment(implementation):
    with jax.enable_x64(True), jflash.interpret() if implementation == "triton" else contextlib.nullcontext():
        yield


def loss(results):
    """A number of (out, lse), nonlinear in both; an lse of -inf is left out."""
    out, lse = results
    W = (
        jnp.asarray(normal(*out.shape, seed=10), out.dtype),
        jnp.asarray(normal(*lse.shape, seed=11), lse.dtype),
    )
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    return (jnp.sin(2 * out) * W[0]).sum() + (jnp.square(lse) * W[1]).sum()


def dot(x, y):
    return sum((x[name] * y[name]).sum() for name in x)


def penalty(f, x):
    """Of a gradient, as in Wasserstein GANs."""
    gradient = jax.grad(lambda x: loss(f(x)))(x)
    return dot(gradient, gradient)


def some(f, x, names=("sinks", "scale", "v")):
    """`f` of few numbers, with all others as they are: a Jacobian of all would be large."""
    small = {name: x[name] for name in names if name in x}
    small["v"] = x["v"][:, :2, :1]
    return (lambda y: f(x | y | {"v": x["v"].at[:, :2, :1].set(y["v"])})), small


def hvp(f, x, e):
    return jax.jvp(jax.grad(lambda x: loss(f(x))), (x,), (e,))[1]


def jacfwd(f, x, e):
    f, small = some(f, x)
    return jax.jacfwd(f)(small)


def hessian(f, x, e):
    f, small = some(f, x, ("sinks", "scale"))
    return jax.hessian(lambda y: loss(f(y)))(small)


def vmap_of_jvp(f, x, e):
    """Points, or directions, or both mapped; bias and v as they are."""
    pairs = lambda q, dq, dk: jax.jvp(f, (x | {"q": q},), (e | {"q": dq, "k": dk},))[1]
    q, dq = (jnp.stack([y, 1.5 * y]) for y in (x["q"], e["q"]))
    k = jnp.stack([e["k"], -e["k"]], 1)
    return jax.vmap(pairs, (0, 0, None))(q, dq, e["k"]), jax.vmap(pairs, (None, None, 1))(x["q"], e["q"], k)


def vmap_of_hvp(f, x, e):
    """Points and directions mapped, along axes of their own."""
    q, dk = jnp.stack([x["q"], 1.5 * x["q"]], 1), jnp.stack([e["k"], -e["k"]])
    x, e = ({name: y[name] for name in ("q", "k", "bias")} for y in (x, e))
    return jax.vmap(lambda q, dk: hvp(f, x | {"q": q}, e | {"k": dk}), (1, 0))(q, dk)


def gradient_of_vmap(f, x, e):
    """Second order through operands that are not mapped, whose gradients sum over the mapped ones."""
    mapped = lambda x: jax.vmap(lambda q: loss(f(x | {"q": q})))(jnp.stack([x["q"], 1.5 * x["q"]])).sum()
    return jax.grad(lambda x: dot(jax.grad(mapped)(x), e))(x)


TRANSFORMS = {
    "gradient": lambda f, x, e: jax.grad(lambda x: loss(f(x)))(x),
    "jvp": lambda f, x, e: jax.jvp(f, (x,), (e,)),
    "jvp in some": lambda f, x, e: jax.jvp(lambda v: f(x | {"v": v}), (x["v"],), (e["v"],))[1],
    "linearize": lambda f, x, e: jax.linearize(f, x)[1](e),
    "jacfwd": jacfwd,
    "hessian": hessian,
    "hvp": hvp,
    "reverse over reverse": lambda f, x, e: jax.grad(lambda x: dot(jax.grad(lambda x: loss(f(x)))(x), e))(x),
    "reverse over forward": lambda f, x, e: jax.grad(lambda x: jax.jvp(lambda x: loss(f(x)), (x,), (e,))[1])(
        x
    ),
    "forward over forward": lambda f, x, e: jax.jvp(lambda x: jax.jvp(f, (x,), (e,))[1], (x,), (e,))[1],
    "gradient penalty": lambda f, x, e: jax.grad(functools.partial(penalty, f))(x),
    "vmap of jvp": vmap_of_jvp,
    "vmap of hvp": vmap_of_hvp,
    "gradient of vmap": gradient_of_vmap,
    "third order, forward": lambda f, x, e: jax.jvp(lambda x: hvp(f, x, e), (x,), (e,))[1],
}


def inputs(names, dtype):
    x = {name: jnp.asarray(y, dtype if name in FLOATS else None) for name, y in operands(*names).items()}
    floats = {name: y for name, y in x.items() if name in FLOATS}
    e = {
        name: jnp.asarray(normal(*y.shape, seed=50 + n), dtype) for n, (name, y) in enumerate(floats.items())
    }
    return x, floats, e


@functools.cache
def exact(transform, names):
    return answer(transform, names, "reference", jnp.float64)


def answer(transform, names, implementation, dtype):
    with environment(implementation):
        x, floats, e = inputs(names, dtype)
        f = lambda floats, x: attention(x | floats, implementation=implementation)
        program = jit(lambda floats, x, e: transform(lambda y: f(floats | y, x), floats, e))
        return jax.device_get(program(floats, x, e))


def assert_close(got, wanted, tolerance):
    """Each leaf within `tolerance` of the largest value of the wanted one."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted)):
        empty = y == -np.inf
        np.testing.assert_array_equal(x == -np.inf, empty)
        x, y = np.where(empty, 0, x), np.where(empty, 0, y)
        worst = np.abs(x - y).max() / max(np.abs(y).max(), 1e-3)
        assert worst <= tolerance, f"{jax.tree_util.keystr(path)}: {worst:.3g}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformations(transform, implementation):
    """Of a call in which some rows see no key; the first derivatives of each kind with every extra."""
    dtype, tolerance = IMPLEMENTATIONS[implementation]
    names = EVERYTHING if transform in ("jvp", "hvp", "forward over forward") else FEW
    got = answer(TRANSFORMS[transform], names, implementation, dtype)
    assert_close(got, exact(TRANSFORMS[transform], names), tolerance)


# The three forms of the schedule, with trip counts that reverse mode of a loop would have to know.
@pytest.mark.parametrize("names", [(), ("left",), ("prefix",)], ids=["arithmetic", "traced", "lists"])
def test_masks(names):
    both = lambda f, x, e: (jax.jvp(f, (x,), (e,))[1], TRANSFORMS["reverse over reverse"](f, x, e))
    assert_close(answer(both, names, "xla", jnp.float64), exact(both, names), 1e-11)


def test_third_order_in_reverse_mode_is_refused_or_right():
    """Forward mode alone goes on beyond second order: JAX does not reverse loops of traced length."""
    third = lambda f, x, e: jax.grad(lambda x: dot(hvp(f, x, e), e))(x)
    with pytest.raises(ValueError, match="[Rr]everse-mode differentiation"):
        answer(third, ("left",), "xla", jnp.float64)


# checkpoint, scan


def layers(implementation, policy, scanned):
    """A scalar function of two layers' parameters."""

    def block(w, y):
        q, k, v = (jnp.einsum("btf,fhd->bthd", y, each) for each in w)
        return y + jflash.attention(q, k, v, Causal(), implementation=implementation).reshape(y.shape)

    step = block if policy is None else jax.checkpoint(block, policy=policy)

    def f(w):
        y = jnp.asarray(normal(2, T, 8, seed=9))
        if scanned:
            return jnp.square(lax.scan(lambda y, w: (step(w, y), None), y, w)[0]).sum()
        for i in range(2):
            y = step([each[i] for each in w], y)
        return jnp.square(y).sum()

    return f


POLICIES = {
    "names": jax.checkpoint_policies.save_only_these_names(*jflash.CHECKPOINT_NAMES),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointed_layers_under_scan(policy):
    with jax.enable_x64(True):
        w = [jnp.asarray(0.3 * normal(2, 8, 2, 4, seed=20 + i)) for i in range(3)]
        e = [jnp.asarray(normal(2, 8, 2, 4, seed=30 + i)) for i in range(3)]

        def each(f):
            total = lambda w: sum(map(jnp.vdot, jax.grad(f)(w), e))
            return jax.jvp(jax.grad(f), (w,), (e,)), jax.grad(total)(w)

        got = jax.device_get(jit(lambda: each(layers("xla", POLICIES[policy], True)))())
        wanted = jax.device_get(jit(lambda: each(layers("reference", None, False)))())
    assert_close(got, wanted, 1e-11)


# Meshes


def mesh(shape, names, kind):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def second_order(f, x, e):
    """jvp, and the product with the Hessian, of which the latter twice."""
    return jax.jvp(f, (x,), (e,)), TRANSFORMS["hvp"](f, x, e), TRANSFORMS["reverse over reverse"](f, x, e)


BY_BOTH = dict(
    q=P("x", None, "y"), k=P("x", None, "y"), v=P("x", None, "y"), ids=P("x"), bias=P(None, "y"), sinks=P("y")
)
OUT_SPECS = P("x", None, "y"), P("x", "y")


@pytest.mark.parametrize("kind", ["shard_map", "explicit", "automatic"])
def test_meshes_equal_one_device(kind):
    """On `shard_map`, bias and sinks are replicated over one axis, so their gradients sum over it."""
    x = {name: jnp.asarray(y) for name, y in operands(*FEW, B=2).items()}
    x = {name: y.astype(jnp.float32) if name in FLOATS else y for name, y in x.items()}
    e = {name: jnp.asarray(normal(*x[name].shape, seed=60), jnp.float32) for name in x if name in FLOATS}
    ids = {"ids": x.pop("ids")}
    wanted = jax.device_get(jit(lambda x, e: second_order(lambda y: by_xla(y | ids), x, e))(x, e))
    over = mesh((2, 2), ("x", "y"), AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    call = by_xla
    if kind == "shard_map":
        specs = ({name: BY_BOTH[name] for name in (*x, "ids")},)
        call = jax.shard_map(by_xla, mesh=over, in_specs=specs, out_specs=OUT_SPECS)
    place = lambda x: {name: jax.device_put(y, NamedSharding(over, BY_BOTH[name])) for name, y in x.items()}
    with jax.set_mesh(over):
        program = jit(lambda x, e, ids: second_order(lambda y: call(y | ids), x, e))
        got = jax.device_get(program(place(x), place(e), place(ids)))
    assert_close(got, wanted, 1e-5)


def test_forward_mode_inside_shard_map_and_pmap_communicates_nothing():
    x = jnp.asarray(normal(2, T, 2, 4), jnp.float32)
    f = lambda q: by_xla(dict(q=q, k=q, v=q))
    local = lambda x: second_order(f, x, jnp.cos(x))
    local = lambda x: (jax.jvp(f, (x,), (x,)), jax.jvp(jax.grad(lambda x: loss(f(x))), (x,), (x,)))
    alone = jax.device_get(jax.jit(jax.vmap(local))(x[:, None]))
    over = mesh((2,), ("x",), AxisType.Auto)
    program = jit(jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P("x"))).lower(x).compile()
    assert not re.findall(r"(all-reduce|all-gather|all-to-all|collective-permute)\(", program.as_text())
    flat = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), alone)
    assert_close(jax.device_get(program(jax.device_put(x, NamedSharding(over, P("x"))))), flat, 1e-5)
    assert_close(jax.device_get(jax.pmap(local)(x[:, None])), alone, 1e-5)


# What reverse mode keeps to


def test_export_with_a_symbolic_batch():
    b = jax.export.symbolic_shape("b")[0]

    def call(q, e):
        f = lambda q: by_xla(dict(q=q, k=q, v=q))
        return jax.jvp(f, (q,), (e,)), jax.jvp(jax.grad(lambda q: jnp.sin(f(q)[0]).sum()), (q,), (e,))

    q, e = (jnp.asarray(normal(3, T, 2, 4, seed=n), jnp.float32) for n in (1, 2))
    struct = jax.ShapeDtypeStruct((b, T, 2, 4), jnp.float32)
    back = jax.export.deserialize(jax.export.export(jax.jit(call))(struct, struct).serialize())
    for n in (1, 3):
        got, wanted = (jax.device_get(f(q[:n], e[:n])) for f in (back.call, jax.jit(call)))
        assert_close(got, wanted, 1e-5)


def test_hidden_keys_and_empty_rows_may_hold_nan():
    """In the point and in the direction; debug_nans sees none made on the way, and nothing else changes."""
    x = {name: jnp.asarray(y, jnp.float32) for name, y in operands().items()}
    e = {name: jnp.asarray(normal(*y.shape, seed=60), jnp.float32) for name, y in x.items()}
    padding = jnp.arange(T)[None, :, None, None] >= jnp.array([T, 11])[:, None, None, None]
    ids = jnp.where(padding[:, :, 0, 0], -1, 0)
    both = lambda x, e: second_order(lambda x: by_xla(x | {"ids": ids}), x, e)[:2]
    fill = lambda x, value: {name: jnp.where(padding, value, y) for name, y in x.items()}
    with jax.debug_nans(True):
        wanted = jit(both)(fill(x, 0), fill(e, 0))
    got = jit(both)(fill(x, jnp.nan), fill(e, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, got[1], wanted[1])
    for (out, lse), (out_, lse_) in zip(got[0], wanted[0]):
        np.testing.assert_array_equal(out, out_)
        np.testing.assert_array_equal(lse, lse_)
    assert (got[0][1][0][1, 11:] == 0).all() and (got[0][1][1][1, :, 11:] == 0).all()


def test_second_order_is_bitwise_deterministic():
    _, floats, e = inputs(FEW, jnp.float32)
    f = lambda x: by_xla(x | {"ids": operands("ids")["ids"]})
    program = jit(lambda x, e: second_order(f, x, e))
    jax.tree.map(np.testing.assert_array_equal, program(floats, e), program(floats, e))


def test_integers_have_no_tangent():
    x = {name: jnp.asarray(y) for name, y in operands("ids", "left").items()}
    x = {name: y.astype(jnp.float32) if name in FLOATS else y for name, y in x.items()}
    zero = lambda y: np.zeros(y.shape, jax.dtypes.float0)
    e = {name: jnp.ones_like(y) if name in FLOATS else zero(y) for name, y in x.items()}
    got = jax.jvp(by_xla, (x,), (e,))[1]
    floats = {name: y for name, y in x.items() if name in FLOATS}
    wanted = jax.jvp(lambda y: by_xla(x | y), (floats,), ({name: e[name] for name in floats},))[1]
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_what_no_gradient_reaches_has_no_tangent():
    """A float that only a mask closes over, and calls without pairs."""
    q = jnp.asarray(normal(1, 4, 1, 2), jnp.float32)
    mask = lambda c: jflash.Function(lambda b, h, i, j: (i - j) * c > -1)
    _, tangents = jax.jvp(lambda c: jflash.attention_with_lse(q, q, q, mask(c)), (2.0,), (1.0,))
    assert all((t == 0).all() for t in tangents)
    assert jax.hessian(lambda c: loss(jflash.attention_with_lse(q * c, q, q, mask(c))))(2.0) != 0
    _, tangents = jax.jvp(lambda q: by_xla(dict(q=q, k=q, v=q)), (q[:0],), (q[:0],))
    assert tangents[0].shape == (0, 4, 1, 2)


def test_a_modifier_that_only_reverse_mode_can_differentiate():
    """Its users' plain gradients do not need forward mode, which says so itself."""

    @jax.custom_vjp
    def double(s):
        return 2 * s

    double.defvjp(lambda s: (2 * s, None), lambda _, ds: (2 * ds,))
    q = jnp.asarray(normal(1, 4, 1, 2), jnp.float32)
    f = lambda q: jflash.attention(q, q, q, score_mod=lambda s, *at: double(s)).sum()
    plain = lambda q: jflash.attention(q, q, q, score_mod=lambda s, *at: 2 * s).sum()
    np.testing.assert_allclose(jax.grad(f)(q), jax.grad(plain)(q), rtol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (q,), (q,))


def test_a_bias_that_nobody_differentiates_costs_no_tangent():
    """Nor a gradient of T·t elements, in first and second order."""
    length = 1024
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = lambda q, bias: jnp.sin(by_xla(dict(q=q, k=q, v=q, bias=bias))[0]).sum()

    def both(q, e, bias):
        along = lambda g: jax.jvp(lambda q: g(q, bias), (q,), (e,))
        return along(f), along(jax.grad(f))

    used = jax.jit(both).lower(of(1, length, 1, 8), of(1, length, 1, 8), of(1, 1, length, length)).compile()
    assert used.memory_analysis().temp_size_in_bytes < 4 * length**2


def test_lowered_where_the_trace_was_not():
    """Tangents are traced when the program is lowered, and x64 may be off again by then."""
    program = lambda x, e: jit(lambda x, e: jax.jvp(lambda x: by_xla(x)[0], (x,), (e,))[1]).trace(x, e)
    with jax.enable_x64(True):
        _, x, e = inputs((), jnp.float64)
        traced = program(x, e)
        wanted = program(x, e).lower().compile()(x, e)
    compiled = traced.lower().compile()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(compiled(x, e), wanted)


def test_explain_tells_who_differentiates():
    q = jnp.zeros((1, 4, 1, 16))
    assert "xla" in str(jflash.explain(q, q, q)).split("derivatives:")[1].split("\n")[0]
    with jflash.interpret():
        line = str(jflash.explain(q, q, q, implementation="triton")).split("derivatives:")[1].split("\n")[0]
    assert "gradient by triton" in line and "forward mode and second order by xla" in line
    assert "JAX" in jflash.explain(q, q, q, implementation="reference").derivatives

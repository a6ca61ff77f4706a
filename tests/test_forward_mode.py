"""Forward mode and second order against the reference, which JAX differentiates itself, in float64.

`xla` runs in float64, the kernels in float32 and in interpret mode: theirs is what they compute
themselves (out, lse, gradients), beside the tangents that `xla` computes for them.
"""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import QUICK

import jflash
from jflash import Alibi, Causal, Dropout, Prefix, Segments, SoftCap, Window, xla
from pallas_kernels import triton

B, T, H, h, D, d = 2, 18, 4, 2, 8, 4
TILE = triton.Block(16, 16, 4, 1)
CONFIGS = {"xla": xla.Config(8, 8, scores=128), "triton": triton.Config(TILE, TILE, TILE)}
IMPLEMENTATIONS = {"xla": (jnp.float64, 1e-11), "triton": (jnp.float32, 2e-4)}
FLOATS = ("q", "k", "v", "bias", "scale", "sinks", "slopes", "cap")
EXTRAS = ("bias", "scale", "sinks", "slopes", "cap", "ids", "key")
jit = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of which tiny arrays have several, in both directions."""
    monkeypatch.setattr(xla, "default_config", lambda problem: CONFIGS["xla"])
    monkeypatch.setattr(triton, "default_config", lambda problem: CONFIGS["triton"])


@contextlib.contextmanager
def environment(implementation):
    with jax.enable_x64(True), jflash.interpret() if implementation == "triton" else contextlib.nullcontext():
        yield


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def operands(*names, B=B, H=H, h=h):
    """Those of `names`, and always q, k and v; in the second entry of the batch some rows see nothing."""
    ids = np.stack([np.arange(T) // 7, np.where(np.arange(T) % 5 == 2, -1, np.arange(T) // 4)])
    everything = dict(
        q=lambda: normal(B, T, H, D, seed=1),
        k=lambda: normal(B, T, h, D, seed=2),
        v=lambda: normal(B, T, h, d, seed=3),
        bias=lambda: normal(1, H, T, T, seed=4),
        scale=lambda: np.float64(0.4),
        sinks=lambda: normal(H, seed=5),
        slopes=lambda: np.abs(normal(H, seed=6)),
        cap=lambda: np.float64(2.0),
        ids=lambda: np.resize(ids, (B, T)).astype(np.int32),
        prefix=lambda: np.resize([5, T, 0], B).astype(np.int32),
        left=lambda: np.int32(6),
        key=lambda: np.array([3, 5], np.uint32),
    )
    return {name: everything[name]() for name in ("q", "k", "v", *names)}


def attend(x, implementation):
    """(out, lse) of causal attention with the extras that `x` holds."""
    mask = Causal()
    if "ids" in x:
        mask = mask & Segments(x["ids"])
    if "left" in x:
        mask = mask & Window(x["left"], None)
    if "prefix" in x:
        mask = mask | Prefix(x["prefix"])
    mods = [kind(x[name]) for name, kind in (("cap", SoftCap), ("slopes", Alibi)) if name in x]
    given = {name: x[name] for name in ("bias", "scale", "sinks") if name in x}
    dropout = Dropout(0.4, x["key"]) if "key" in x else None
    return jflash.attention_with_lse(
        *map(x.get, "qkv"),
        mask,
        score_mod=tuple(mods) or None,
        dropout=dropout,
        implementation=implementation,
        **given,
    )


def loss(results):
    """A number of (out, lse), nonlinear in both; an lse of -inf is left out."""
    out, lse = results
    W = jnp.asarray(normal(*out.shape, seed=10), out.dtype), jnp.asarray(normal(*lse.shape, seed=11), lse.dtype)
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    return (jnp.sin(2 * out) * W[0]).sum() + (jnp.square(lse) * W[1]).sum()


def dot(x, y):
    return sum(jnp.vdot(x[name], y[name]) for name in x)


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
    "reverse over reverse": lambda f, x, e: jax.grad(
        lambda x: dot(jax.grad(lambda x: loss(f(x)))(x), e)
    )(x),
    "reverse over forward": lambda f, x, e: jax.grad(
        lambda x: jax.jvp(lambda x: loss(f(x)), (x,), (e,))[1]
    )(x),
    "forward over forward": lambda f, x, e: jax.jvp(lambda x: jax.jvp(f, (x,), (e,))[1], (x,), (e,))[1],
    "gradient penalty": lambda f, x, e: jax.grad(functools.partial(penalty, f))(x),
    "vmap of jvp": vmap_of_jvp,
    "vmap of hvp": vmap_of_hvp,
    "gradient of vmap": gradient_of_vmap,
    "third order, forward": lambda f, x, e: jax.jvp(lambda x: hvp(f, x, e), (x,), (e,))[1],
}


def inputs(names, dtype):
    x = {
        name: jnp.asarray(y, dtype if name in FLOATS else None) for name, y in operands(*names).items()
    }
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
        f = lambda floats, x: attend(x | floats, implementation)
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
    """Of a call with everything, in which some rows see no key."""
    dtype, tolerance = IMPLEMENTATIONS[implementation]
    got = answer(TRANSFORMS[transform], EXTRAS, implementation, dtype)
    assert_close(got, exact(TRANSFORMS[transform], EXTRAS), tolerance)

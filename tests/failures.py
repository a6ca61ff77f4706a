"""What tests of public bug reports share: jflash in one program, and what is right.

That is `oracle`: dense attention in NumPy and float64, with gradients by hand, which knows nothing of
jflash. A masked pair is excluded; a row that sees no key is 0, has an lse of -inf and takes part in no
gradient. Cotangents are random: a uniform one hides gradients that are permuted or summed too often.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

import jflash
import jflash.xla
from jflash import SoftCap

BOTH = pytest.mark.parametrize("implementation", [None, "reference"])


@contextlib.contextmanager
def optimised():
    """For tests of what XLA makes of a program: its memory, its collectives."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def qkv(B, T, H, D, t=None, h=None, d=None, dtype=jnp.float32, seed=0):
    t, h, d = t or T, h or H, d or D
    return (
        normal(B, T, H, D, seed=seed, dtype=dtype),
        normal(B, t, h, D, seed=seed + 1, dtype=dtype),
        normal(B, t, h, d, seed=seed + 2, dtype=dtype),
    )


def cotangents(q, v, seed=100):
    B, T, H, _ = q.shape
    return normal(B, T, H, v.shape[-1], seed=seed, dtype=q.dtype), normal(B, H, T, seed=seed + 1)


def causal(T, t, left=None, right=0):
    i, j = np.arange(T)[:, None] + t - T, np.arange(t)
    seen = np.ones((T, t), bool) if right is None else j <= i + right
    return seen if left is None else seen & (j >= i - left)


# The oracle


def oracle(q, k, v, visible=None, bias=0.0, scale=None, cap=None, sinks=None, do=None, dlse=None):
    """out, lse and gradients by name: float64, each formula as it is written on paper."""
    q, k, v, bias = (np.asarray(x, np.float64) for x in (q, k, v, bias))
    B, _, H, D = q.shape
    t, h = k.shape[1:3]
    repeat = lambda x: np.repeat(x, H // h, 2)
    scale = float(D) ** -0.5 if scale is None else float(scale)
    raw = np.einsum("bthd,bshd->bhts", q, repeat(k))
    s, slope = scale * raw + bias, 1.0
    if cap is not None:
        s, slope = cap * np.tanh(s / cap), 1 - np.tanh(s / cap) ** 2
    seen = np.broadcast_to(True if visible is None else np.asarray(visible), s.shape) & (s > -np.inf)
    m = np.where(seen, s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, 0)
    e = np.exp(np.where(seen, s - m, -np.inf))
    l = e.sum(-1, keepdims=True)
    some = l > 0
    sink = np.exp(np.asarray(sinks, np.float64)[:, None, None] - m) if sinks is not None else 0
    p, p_sink = e / np.where(some, l + sink, 1), sink / np.where(some, l + sink, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(some, m + np.log(l), -np.inf)[..., 0]
    out = np.einsum("bhts,bshd->bthd", p, repeat(v))
    if do is None:
        return out, lse
    do, dlse = np.asarray(do, np.float64), np.asarray(dlse, np.float64)[..., None]
    dp = np.einsum("bthd,bshd->bhts", do, repeat(v))
    delta = (p * dp).sum(-1, keepdims=True)
    ds = (p * (dp - delta) + e / np.where(some, l, 1) * dlse) * slope
    group = lambda x: x.reshape(B, t, h, H // h, x.shape[-1]).sum(3)
    shape = (1,) * (4 - bias.ndim) + bias.shape
    over = tuple(i for i, n in enumerate(shape) if n == 1)
    return (
        out,
        lse,
        dict(
            q=scale * np.einsum("bhts,bshd->bthd", ds, repeat(k)),
            k=group(scale * np.einsum("bhts,bthd->bshd", ds, q)),
            v=group(np.einsum("bhts,bthd->bshd", p, do)),
            bias=ds.sum(over, keepdims=True).reshape(bias.shape),
            scale=(ds * raw).sum(),
            sinks=-(np.where(some, p_sink, 0) * delta).sum((0, 2, 3)),
        ),
    )


# jflash, forward and backward in one program

TRACED = ("q", "k", "v", "bias", "scale", "sinks")


@contextlib.contextmanager
def blocks_of(n):
    """Blocks of at most n rows, so that short arrays are walked as long ones are; None: the default."""
    default = jflash.xla.default_config

    def small(problem):
        q, k = (max(1, min(n, length)) for length in (problem.T, problem.t))
        return dataclasses.replace(default(problem), block_q=q, block_k=k)

    with pytest.MonkeyPatch.context() as patch:
        if n is not None:
            patch.setattr(jflash.xla, "default_config", small)
        yield


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _run(x, others, W, statics, wanted, blocks):
    def call(floats):
        settings = x | floats | others | dict(statics)
        arrays = [settings.pop(name) for name in "qkv"]
        return jflash.attention_with_lse(*arrays, **settings)

    with blocks_of(blocks):
        if not wanted:
            return call({})
        y, pull = jax.vjp(call, {name: x[name] for name in wanted})
        return *y, pull(W)[0]


def run(q, k, v, mask=None, *, implementation=None, wanted=None, W=None, blocks=None, **settings):
    """(out, lse, gradients by name) as NumPy; shapes and static settings alone decide about compiling.

    - `wanted`: what to differentiate; by default every float array. () for (out, lse) alone.
    - `W`: the cotangents of out and lse, by default random ones.
    """
    x = dict(q=q, k=k, v=v)
    for name in ("bias", "scale", "sinks"):
        if hasattr(settings.get(name), "shape"):
            x[name] = settings.pop(name)
    pytrees = ("score_mod", "dropout", "q_positions", "k_positions")
    others = {name: settings.pop(name) for name in pytrees if name in settings}
    statics = tuple(settings.items()) + (("implementation", implementation),)
    wanted = tuple(x) if wanted is None else wanted
    W = cotangents(q, v) if W is None else W
    return jax.device_get(_run(x, others | dict(mask=mask), W, statics, wanted, blocks))


def assert_close(got, wanted, atol, name=""):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, name
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=name)


def assert_right(got, wanted, atol=2e-5):
    """`run` against `oracle`."""
    for name, x, y in zip(("out", "lse"), got, wanted):
        assert_close(x, y, atol, name)
    for name, x in got[2].items() if len(got) == 3 else ():
        assert_close(x, wanted[2][name], atol * max(1, np.abs(wanted[2][name]).max()), name)


def check(q, k, v, mask=None, visible=None, *, atol=2e-5, cap=None, W=None, **settings):
    """Runs jflash and the oracle and compares; returns what jflash gave."""
    W = cotangents(q, v) if W is None else W
    of_oracle = {name: settings[name] for name in ("bias", "scale", "sinks") if name in settings}
    if cap is not None:
        settings["score_mod"] = SoftCap(cap)
    got = run(q, k, v, mask, W=W, **settings)
    wanted = oracle(q, k, v, visible, cap=cap, do=W[0], dlse=W[1], **of_oracle)
    assert_right(got, wanted, atol)
    return got


@functools.partial(jax.jit, static_argnums=6)
def _naive(q, k, v, visible, bias, W, scale):
    """What a careful user writes: products in the dtype of the inputs, softmax in float32."""

    def call(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * scale + bias
        p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1).astype(v.dtype)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    out, pull = jax.vjp(call, q, k, v)
    return out, dict(zip("qkv", pull(W)))


def check_low_precision(q, k, v, mask=None, visible=True, bias=0.0, blocks=None, gradients=True):
    """The largest errors of out and of the gradients are at most 3 times those of `_naive`."""
    W = cotangents(q, v)[0]
    W = W, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
    with_bias = dict(bias=bias) if hasattr(bias, "shape") else {}
    out, _, grads = run(q, k, v, mask, W=W, wanted=("q", "k", "v"), blocks=blocks, **with_bias)
    exact_out, _, exact = oracle(q, k, v, visible, bias=bias, do=W[0], dlse=W[1])
    naive_out, naive = _naive(q, k, v, visible, bias, W[0], q.shape[-1] ** -0.5)
    pairs = [("out", out, naive_out, exact_out)]
    pairs += [(name, grads[name], naive[name], exact[name]) for name in "qkv" if gradients]
    eps = float(jnp.finfo(q.dtype).eps)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads.values())
    for name, got, same, truth in pairs:
        assert got.dtype == q.dtype, name
        error = lambda x, truth=truth: np.abs(np.asarray(x, np.float64) - truth).max()
        assert error(got) <= 3 * error(same) + eps * np.abs(truth).max(), name

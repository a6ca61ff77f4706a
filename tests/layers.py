"""What tests of the NNX layer share: the layer by einsum, and short ways to call both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from arrays import normal
from flax import nnx

from jflash.rotary import Rotary


def turned(x, positions, rotary):
    """Returns x with half pairs (or interleaved ones) rotated, by a matrix for each pair."""
    r = x.shape[-1] if rotary.dim is None else rotary.dim
    out = x
    for i in range(r // 2):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + r // 2)
        angle = positions[..., None] * rotary.base ** (-2 * i / r)
        c, s = jnp.cos(angle), jnp.sin(angle)
        out = out.at[..., a].set(x[..., a] * c - x[..., b] * s)
        out = out.at[..., b].set(x[..., a] * s + x[..., b] * c)
    return out


def plain(params, x_q, x_kv, visible=None, bias=None, rotary=None, q_pos=None, k_pos=None):
    """Returns what the layer should: einsum and softmax over parameters {name: {kernel, bias}}."""
    project = lambda name, x: (
        jnp.einsum("...tf,fhd->...thd", x, params[name]["kernel"]) + params[name].get("bias", 0)
    )
    q, k, v = project("query", x_q), project("key", x_kv), project("value", x_kv)
    T, t = q.shape[-3], k.shape[-3]
    if rotary is not None:
        q = turned(q, jnp.arange(T) + t - T if q_pos is None else q_pos, rotary)
        k = turned(k, jnp.arange(t) if k_pos is None else k_pos, rotary)
    group = q.shape[-2] // k.shape[-2]
    k, v = (jnp.stack([x[..., i // group, :] for i in range(q.shape[-2])], -2) for x in (k, v))
    s = jnp.einsum("...thd,...shd->...hts", q, k) / math.sqrt(q.shape[-1])
    s = s if bias is None else s + bias
    s = s if visible is None else jnp.where(visible, s, -jnp.inf)
    out = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(s, axis=-1), v)
    out = jnp.einsum("...thd,hdo->...to", out, params["out"]["kernel"])
    return out + params["out"].get("bias", 0)


def call(layer, *inputs, **settings):
    """Returns `layer(*inputs, **settings)` compiled at once: eagerly it would take dozens."""
    return nnx.jit(lambda layer: layer(*inputs, **settings))(layer)


def expected(layer, *args):
    """Returns `plain` with the parameters and the rotary of `layer`."""
    x_q, x_kv, visible, q_pos, k_pos = (*args, None, None)[:5]
    f = lambda params: plain(params, x_q, x_kv, visible, None, layer.rotary, q_pos, k_pos)
    return jax.jit(f)(parameters(layer))


def parameters(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def causal(T, t):
    return np.tril(np.ones((T, t), bool), t - T)


def settings_of(qk_norm):
    return dict(
        num_kv_heads=2, rotary=Rotary(dim=2), alibi=True, softcap=2.0, use_sinks=True, qk_norm=qk_norm
    )


def with_random_parameters(layer):
    params = nnx.state(layer, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    random = [x + normal(*x.shape, seed=50 + n) / 4 for n, x in enumerate(leaves)]
    nnx.update(layer, jax.tree.unflatten(tree, random))
    return layer

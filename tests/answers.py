"""A small call with any of the extras, its results and its gradients.

`answer` calls attention with whatever the dict `x` holds, and pulls a random cotangent of
(out, lse) back to each float in it: one compiled program checks forward and gradient.
"""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
from arrays import normal

from jflash import Alibi, Causal, Dropout, Prefix, Segments, SoftCap, Window
from jflash import attention_with_lse as attend

T = 6
FLOATS = ("q", "k", "v", "bias", "scale", "sinks", "slopes", "cap")


def operands(*names, T=T, **sizes):
    """Those of `names`, and always q, k and v; floats are float32."""
    x = {name: jnp.asarray(y) for name, y in arrays.operands(*names, T=T, **sizes).items()}
    return x | {"key": jax.random.key(7)} if "key" in x else x


def cotangents(x, seed=10):
    lead, (T, H) = x["q"].shape[:-3], x["q"].shape[-3:-1]
    return normal(*lead, T, H, x["v"].shape[-1], seed=seed), normal(*lead, H, T, seed=seed + 1)


def attention(x, offsets=(0, 0, 0, 0), **settings):
    """(out, lse) of causal attention with the extras that `x` holds."""
    mask = Causal()
    if "ids" in x:
        mask = mask & Segments(x["ids"])
    if "left" in x:
        mask = mask & Window(x["left"], None)
    if "prefix" in x:
        mask = mask | Prefix(x["prefix"])
    mods = ()
    if "cap" in x:
        mods += (SoftCap(x["cap"]),)
    if "slopes" in x:
        mods += (Alibi(x["slopes"]),)
    if "key" in x:
        settings["dropout"] = Dropout(0.4, x["key"], offsets)
    for name in ("bias", "scale", "sinks", "q_positions", "k_positions"):
        if name in x:
            settings[name] = x[name]
    return attend(x["q"], x["k"], x["v"], mask, score_mod=mods or None, **settings)


def answer(x, W, call=attention):
    """((out, lse), gradients by name)."""
    floats = {name: x[name] for name in x if name in FLOATS}
    out, pull = jax.vjp(lambda floats: call(x | floats), floats)
    return out, pull(W)[0]


answer_jit = jax.jit(answer, static_argnames="call")


def assert_same(got, wanted, atol=2e-5):
    """Trees of one structure, dtypes and values; -inf may stand where -inf should."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted)):
        name = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, name
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=atol, err_msg=name)


def total(x, W, **settings):
    """A scalar loss of (out, lse), safe where lse is -inf."""
    out, lse = attention(x, **settings)
    return (out * W[0]).sum() + jnp.where(lse == -jnp.inf, 0, lse * W[1]).sum()

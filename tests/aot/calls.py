"""The calls that are compiled: each feature with each head size, forward and backward.

Forward and backward are one program, so a row below is a compilation of all kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp

import jflash

HEAD_SIZES = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Features:
    """What a call has beside q, k and v; gradients are taken of every float operand."""

    causal: bool = False
    bias: bool = False  # of each pair
    mods: bool = False
    dropout: bool = False
    segments: bool = False
    T: int = 4096
    h: int = 8  # of 8 heads of queries


FEATURES = {
    "full": Features(),
    "causal": Features(causal=True),
    "bias": Features(bias=True),
    "mods": Features(causal=True, mods=True),
    "dropout": Features(causal=True, dropout=True),
    "segments": Features(causal=True, segments=True),
    # A length that no block divides, and grouped queries: what costs most registers.
    "all": Features(causal=True, bias=True, mods=True, dropout=True, segments=True, T=4001, h=2),
}


def program(features: Features, D: int, dtype=jnp.bfloat16):
    """(function, shapes of its operands): out and the gradients of one call."""
    B, T, H, h = 2, features.T, 8, features.h
    shape = jax.ShapeDtypeStruct
    floats = dict(q=shape((B, T, H, D), dtype), k=shape((B, T, h, D), dtype), v=shape((B, T, h, D), dtype))
    if features.bias:
        floats["bias"] = shape((1, H, T, T), dtype)
    if features.mods:
        floats["slopes"] = shape((H,), jnp.float32)
    data = dict(key=shape((2,), jnp.uint32), ids=shape((B, T), jnp.int32))

    def attend(floats, data):
        mask = jflash.Causal() if features.causal else None
        if features.segments:
            mask = mask & jflash.Segments(data["ids"], data["ids"])
        return jflash.attention(
            floats["q"],
            floats["k"],
            floats["v"],
            mask,
            bias=floats.get("bias"),
            score_mod=(jflash.SoftCap(50.0), jflash.Alibi(floats["slopes"])) if features.mods else None,
            dropout=jflash.Dropout(0.1, data["key"]) if features.dropout else None,
            implementation="triton",
        )

    def run(floats, data, do):
        out, pull = jax.vjp(lambda floats: attend(floats, data), floats)
        return out, pull(do)

    return run, (floats, data, floats["q"])

"""The calls that are compiled: a cover of features, head sizes and dtypes, forward and backward.

Forward and backward are one program, so each call below is a compilation of all its kernels.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jflash


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call; gradients are taken of every float operand."""

    name: str
    D: int
    dtype: Any = jnp.bfloat16
    causal: bool = True
    segments: bool = False
    bias: bool = False  # of each pair
    mods: bool = False
    dropout: bool = False
    T: int = 8192
    h: int = 2  # of 2 heads of queries
    window: int | None = None  # keys behind a query's own position
    implementation: str = "triton"

    @property
    def kind(self) -> str:
        """Which tiles it gets: as `Problem.features`, but for float32."""
        if self.dtype == jnp.float32:
            return "float32"
        if self.bias or self.mods:
            return "scores"
        if self.segments or self.dropout:
            return "data"
        return "positions" if self.causal else "none"

    def __str__(self) -> str:
        return f"D {self.D}, {jnp.dtype(self.dtype).name}, {self.name}"


# A length that no block divides, and heads of keys that serve two of queries.
UNEVEN = dict(T=8111, h=1)
FEATURES = {
    "full": dict(causal=False),
    "causal": dict(),
    "segments": dict(segments=True, **UNEVEN),
    "bias": dict(bias=True),
    "score_mod": dict(mods=True),
    "dropout": dict(dropout=True),
    "everything": dict(segments=True, bias=True, mods=True, dropout=True, **UNEVEN),
}
# "everything" has each feature with each head size; alone they are compiled with one.
COVER = {
    jnp.bfloat16: {
        "full": (64, 128, 256),
        "causal": (64, 128, 256),
        "segments": (64, 128, 256),
        "dropout": (64,),
        "bias": (128,),
        "score_mod": (256,),
        "everything": (64, 128, 256),
    },
    jnp.float32: {"causal": (64, 128, 256), "everything": (64,)},  # they take long to compile
}
CALLS = [
    Call(name, D, dtype, **FEATURES[name])
    for dtype, features in COVER.items()
    for name, sizes in features.items()
    for D in sizes
]
# For a second version of JAX, whose kernels are the same ones: the plainest and the richest calls.
BRIEF = [call for call in CALLS if call.dtype == jnp.bfloat16 and call.name in ("causal", "everything")]

# The Hopper kernels have tiles by length, too; theirs are the heads up to 128 channels, backward.
LONG = dict(T=16384)
HOPPER = [
    Call(name, D, implementation="mosaic", **more)
    for name, D, more in (
        ("full", 64, LONG | dict(causal=False)),
        ("causal", 64, dict(T=1024)),
        ("causal", 64, LONG),
        ("full", 128, LONG | dict(causal=False)),
        ("causal", 128, LONG),
        ("window", 128, UNEVEN | dict(window=1024)),
        ("segments", 64, FEATURES["segments"]),
        ("segments", 128, FEATURES["segments"]),
        ("dropout", 128, FEATURES["dropout"]),
        ("score_mod", 64, FEATURES["score_mod"]),
        ("everything", 128, FEATURES["everything"]),
        ("causal", 256, LONG),
        ("causal, float16", 128, dict(dtype=jnp.float16)),
        ("causal", 96, dict()),
    )
]


def program(call: Call):
    """(function, shapes of its operands): out and the gradients of a call."""
    B, H = 2, 2
    shape = jax.ShapeDtypeStruct
    rows = lambda heads: shape((B, call.T, heads, call.D), call.dtype)
    floats = dict(q=rows(H), k=rows(call.h), v=rows(call.h))
    if call.bias:
        floats["bias"] = shape((1, H, call.T, call.T), call.dtype)
    if call.mods:
        floats["slopes"] = shape((H,), jnp.float32)
    data = dict(key=shape((2,), jnp.uint32), ids=shape((B, call.T), jnp.int32))

    def attend(floats, data):
        mask = jflash.Causal() if call.causal else None
        if call.segments:
            mask = mask & jflash.Segments(data["ids"], data["ids"])
        if call.window is not None:
            mask = jflash.Window(call.window, 0)
        return jflash.attention(
            floats["q"],
            floats["k"],
            floats["v"],
            mask,
            bias=floats.get("bias"),
            score_mod=(jflash.SoftCap(50.0), jflash.Alibi(floats["slopes"])) if call.mods else None,
            dropout=jflash.Dropout(0.1, data["key"]) if call.dropout else None,
            implementation=call.implementation,
        )

    def run(floats, data, do):
        out, pull = jax.vjp(lambda floats: attend(floats, data), floats)
        return out, pull(do)

    return run, (floats, data, floats["q"])

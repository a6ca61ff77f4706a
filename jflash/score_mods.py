"""Score modifiers: elementwise functions of a score and of the pair that it belongs to.

They act on `scale * q·k + bias` in float32, before the mask, and are differentiated inside the
tile by `jax.vjp`: float fields get gradients, nobody writes a backward rule.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pairs import Pairs

from .fields import Fields, elementwise, per_head, scalar, static


class ScoreMod(Fields):
    """Base of the score modifiers that come with jflash; a plain function serves as well.

    A function `mod(s, b, h, q_pos, k_pos) -> s` takes and returns scalars that JAX traces. It may
    close over scalars and [H] vectors (indexed by `h`), traced or not, and floats among them get
    gradients. The function keys the trace: define it once.
    """

    def __call__(self, s: jax.Array, at: Pairs) -> jax.Array:
        raise NotImplementedError


class SoftCap(ScoreMod):
    """`cap * tanh(s / cap)`: keeps scores within (-cap, cap), before the mask.

    Gemma 2 (https://arxiv.org/abs/2408.00118, sec. 2). `cap` is positive; it may be traced.
    """

    cap: Any = scalar()

    def __call__(self, s, at):
        cap = jnp.asarray(self.cap, s.dtype)
        return cap * jnp.tanh(s / cap)


class Alibi(ScoreMod):
    """`s - slopes[h] * |q_pos - k_pos|`: a linear penalty on distance.

    ALiBi (https://arxiv.org/abs/2108.12409, sec. 3). `slopes` is [H], or [*batch or 1, H], and
    gets a gradient. Distances use the positions of the call, so that decoding with a cache
    continues what training did.
    """

    slopes: Any = per_head()

    def __call__(self, s, at):
        return s - self.slopes.astype(s.dtype) * jnp.abs(at.q - at.k).astype(s.dtype)


def alibi_slopes(heads: int) -> jax.Array:
    """The slopes of ALiBi's paper for so many heads, float32 [heads]: 2^(-8/H), 2^(-16/H), ..., 2^-8.

    Where `heads` is no power of two: those of the next lower one, then every other slope of the next
    higher one (its released code, https://github.com/ofirpress/attention_with_linear_biases).

    >>> import jflash
    >>> jflash.alibi_slopes(4)
    Array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    of = lambda n: 2.0 ** (-8 / n * np.arange(1, n + 1))
    lower = 2 ** (heads.bit_length() - 1)
    return jnp.asarray(np.append(of(lower), of(2 * lower)[::2][: heads - lower]), jnp.float32)


class TracedMod(ScoreMod):
    """A user's function after tracing: see `tracing`. Made by `validate`."""

    call: Any = static()
    values: tuple = per_head()

    def __call__(self, s, at):
        return elementwise(self.call, *self.values, s, at.q, at.k).astype(s.dtype)

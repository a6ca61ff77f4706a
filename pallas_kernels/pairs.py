"""What a token pair is, and functions of it that every implementation computes alike.

A mask, a score modifier and dropout are functions of (query, key) pairs. Every implementation,
whatever its tiles, hands them a `Pairs`: arrays that broadcast against each other to the tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Pairs(NamedTuple):
    """The coordinates of a tile of pairs; each broadcasts to the tile's shape."""

    b: Any  # index of the batch entry, int32; several batch axes count row-major
    h: Any  # index of the query head, int32
    q: Any  # position of the query token
    k: Any  # position of the key token
    q_row: Any  # its row in q, int32
    k_row: Any  # its row in k and v, int32


def _mul_hi_lo(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    # By 16-bit halves: `lax.mulhi` lowers neither in Triton nor in Mosaic, and there is no uint64.
    b_hi, b_lo = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    a_hi, a_lo = a >> 16, a & jnp.uint32(0xFFFF)
    low = a_lo * b_lo
    mid = a_hi * b_lo + (low >> 16)  # < 2^32
    mid_2 = a_lo * b_hi + (mid & jnp.uint32(0xFFFF))  # < 2^32
    return a_hi * b_hi + (mid >> 16) + (mid_2 >> 16), a * jnp.uint32(b)


def philox(counter: tuple, key: tuple, rounds: int = 10) -> tuple:
    """Philox4x32: four random uint32 words from four counter words and two key words.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = _mul_hi_lo(c0, 0xD2511F53)
        hi1, lo1 = _mul_hi_lo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def words(key: tuple, b: Any, h: Any, row: Any, side: str) -> tuple:
    """Two random uint32 words of each row of one `side`, "q" or "k", in each batch entry and head."""
    u32 = lambda x: jnp.asarray(x).astype(jnp.uint32)
    return philox((u32(row), u32(h), u32(b), jnp.uint32("qk".index(side))), key)[:2]


def mix(q_words: tuple, k_words: tuple) -> jax.Array:
    """Uniform uint32 of each pair, from the `words` of its rows, which broadcast to the pairs.

    A full Philox would be the dearest part of a tile. So rows and columns go through Philox, each
    for itself (in a tile of 128 x 128, 256 evaluations), and a pair mixes the words of its row
    and its column by the two multiplications of a 32-bit finaliser. The second word, added
    between them, keeps the four corners of a rectangle of pairs from being dependent, as the
    exclusive or of one word each would leave them.
    """
    (q0, q1), (k0, k1) = q_words, k_words
    x = q0 ^ k0
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) + (q1 ^ k1)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def kept(rate: float, bits: jax.Array) -> jax.Array:
    """True where dropout keeps a pair with these bits: with probability 1 - rate, to a multiple of 2^-32."""
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def keep(rate: float, key: tuple, at: Pairs, q_offset: Any = 0, k_offset: Any = 0) -> jax.Array:
    """True where dropout keeps a pair: a function of the key, the heads' index and the rows alone."""
    q_words = words(key, at.b, at.h, at.q_row + q_offset, "q")
    k_words = words(key, at.b, at.h, at.k_row + k_offset, "k")
    return kept(rate, mix(q_words, k_words))

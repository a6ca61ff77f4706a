"""Rotary position embedding: pairs of channels turn by an angle linear in the position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def apply_rotary(
    x: Float[Array, "*B T H D"],
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Float[Array, "*B T H D"]:
    """Returns `x` with each pair of channels rotated by `position * base ** (-2 i / r)`.

    Scores of rotated queries and keys then depend on the difference of their positions only:
    RoFormer (https://arxiv.org/abs/2104.09864, sec. 3.2.2), with `r = rotary_dim` and pairs
    `i = 0 ... r/2 - 1`. Angles and products are float32 (float64 for float64 inputs).

    Partial rotary follows GPT-NeoX and GPT-J: the first `r` channels form a rotary head of
    their own, so both the frequencies and the pairs count within `r`, and channels from `r` on
    pass through bit for bit. The other convention in use, "proportional" (pairs across the
    whole head, the highest of them with frequency zero), is not this one and gives other numbers.

    **Arguments:**

    - `x`: Queries or keys, of any float dtype.
    - `positions`: `[*B, T]`, with 1 for any axis of `*B`, or `[T]`. Integers, or floats for
      interpolated positions. Any offset is fine, including negative ones.
    - `base`: The wavelengths run from 2 pi to about 2 pi `base`.
    - `rotary_dim`: Channels to rotate, even. `None` is all of `D`; 0 rotates nothing.
    - `interleaved`: Which channels form pair `i`: `(i, i + r/2)` when False (GPT-NeoX, Llama in
      Hugging Face's layout), `(2i, 2i + 1)` when True (RoFormer, GPT-J, Llama as released).

    **Returns:**

    The same shape and dtype as `x`.

    **Raises:**

    ValueError when `rotary_dim` is odd, negative or above `D`, or when `positions` do not fit `x`.
    """
    head_dim = x.shape[-1]
    r = head_dim if rotary_dim is None else rotary_dim
    if r % 2 or not 0 <= r <= head_dim:
        raise ValueError(
            f"`apply_rotary(x, positions, rotary_dim=...)`: rotary_dim must be even, because "
            f"channels turn in pairs, and between 0 and the head dimension, {head_dim}. Got "
            f"rotary_dim={rotary_dim} and x.shape={x.shape}. Pass an even rotary_dim, such as "
            f"{min(max(r, 0), head_dim) // 2 * 2}."
        )
    positions = jnp.asarray(positions)
    _check_positions(positions, x)

    dtype = jnp.promote_types(x.dtype, jnp.float32)
    # Powers in float64 on the host: an error in a frequency is multiplied by the position.
    frequencies = jnp.asarray(float(base) ** (-np.arange(0, r, 2) / max(r, 1)), dtype)
    positions = jnp.expand_dims(positions.astype(dtype), range(x.ndim - 2 - positions.ndim))
    angles = positions[..., None, None] * jnp.expand_dims(frequencies, range(x.ndim - 1))  # [*B T 1 r/2]
    return rotate(x, jnp.cos(angles), jnp.sin(angles), interleaved)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Returns `x` with pair `i` turned by the angle that `cos` and `sin` [..., r/2] are those of.

    They broadcast against [*B, T, H, r/2]; products have their dtype. Channels from `r` on pass.
    """
    r = 2 * cos.shape[-1]
    rotated = x[..., :r].astype(cos.dtype)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., : r // 2], rotated[..., r // 2 :]
    a, b = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        rotated = jnp.stack([a, b], axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate([a, b], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., r:]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Holds the settings of `apply_rotary`, so that a layer can carry them as one static field.

    **Arguments:**

    - `base`: As in `apply_rotary`.
    - `dim`: `rotary_dim` of `apply_rotary`: channels to rotate; `None` is the whole head.
    - `interleaved`: As in `apply_rotary`.
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False

    def __call__(self, x: Float[Array, "*B T H D"], positions: ArrayLike) -> Float[Array, "*B T H D"]:
        """Returns `apply_rotary(x, positions)` with these settings."""
        return apply_rotary(x, positions, base=self.base, rotary_dim=self.dim, interleaved=self.interleaved)


def _check_positions(positions, x):
    """Raises unless `positions` are [T] or [*B, T] with 1 for any axis of *B."""
    rows = x.shape[:-2]  # [*B, T]
    fits = positions.shape == rows[-1:] or (
        positions.ndim == len(rows)
        and positions.shape[-1] == rows[-1]
        and all(n in (1, size) for n, size in zip(positions.shape, rows, strict=True))
    )
    if not fits:
        raise ValueError(
            f"`apply_rotary(x, positions)`: positions must be one number per row of x, so [T] or "
            f"[*B, T] with 1 for any axis of *B, because a shape that merely broadcasts would turn "
            f"rows by the position of others. Got positions.shape={positions.shape} and "
            f"x.shape={x.shape} in the order (*B, T, H, D); pass shape {rows} or {rows[-1:]}."
        )

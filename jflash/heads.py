"""What the Flax layers compute between their projections. No parameters, no Flax."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from .api import attention
from .masks import Causal, as_mask
from .rotary import Rotary
from .score_mods import Alibi, SoftCap, alibi_slopes


@runtime_checkable
class Settings(Protocol):
    """What a layer holds beside parameters; both Flax layers do, under these names."""

    rotary: Rotary | None
    alibi: bool
    softcap: float | None
    precision: Any
    implementation: str | None


def attend(
    layer: Settings,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    *,
    positions: ArrayLike | None,
    k_positions: ArrayLike | None,
    **operands: Any,
) -> jax.Array:
    """Attention of projected q [*B, T, H, D] to k and v [*B, t, h, D]; [*B, T, H, D].

    `positions` and `k_positions` are [T] and [t], or with batch axes; None is bottom-right.
    `operands` are bias, sinks and dropout, as in `attention`.
    """
    positions, k_positions = (_with_batch_axes(x, q.ndim - 3) for x in (positions, k_positions))
    if layer.rotary is not None:
        T, t = q.shape[-3], k.shape[-3]
        q = layer.rotary(q, jnp.arange(t - T, t) if positions is None else positions)
        k = layer.rotary(k, jnp.arange(t) if k_positions is None else k_positions)
    return _attention(layer, q, k, v, mask, q_positions=positions, k_positions=k_positions, **operands)


def attend_cached(
    layer: Settings,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple[jax.Array, ...],
    mask: Any,
    **operands: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Causal attention of T new tokens to those in the cache and to themselves; and the new cache.

    `cache` is (keys, values, index): [*B, length, h, D] twice, and how many tokens they hold, int32
    []. The new tokens stand at the positions from `index` on. Keys are stored rotated.
    """
    keys, values, index = cache
    T, length = q.shape[-3], keys.shape[-3]
    _check_room(k, keys, index)
    positions = _with_batch_axes(index + jnp.arange(T, dtype=jnp.int32), q.ndim - 3)
    if layer.rotary is not None:
        q, k = layer.rotary(q, positions), layer.rotary(k, positions)
    write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index, old.ndim - 3)
    keys, values = write(keys, k), write(values, v)
    # Rows that are not written yet lie after every query: causal hides them.
    mask = Causal() if mask is None else Causal() & as_mask(mask)
    out = _attention(
        layer,
        q,
        keys.astype(q.dtype),
        values.astype(v.dtype),
        mask,
        q_positions=positions,
        k_positions=None,
        **operands,
    )
    # A trace cannot raise, and a token written over another must not pass unnoticed.
    out = jnp.where(index + T <= length, out, jnp.nan)
    return out, (keys, values, index + T)


def _attention(layer: Settings, q, k, v, mask, **operands):
    mods = (Alibi(alibi_slopes(q.shape[-2])),) if layer.alibi else ()
    mods += () if layer.softcap is None else (SoftCap(layer.softcap),)
    return attention(
        q,
        k,
        v,
        mask,
        score_mod=mods or None,
        precision=layer.precision,
        implementation=layer.implementation,
        **operands,
    )


def _with_batch_axes(positions: Any, batch_axes: int) -> Any:
    """[T] positions as `attention` takes them, [1, ..., 1, T], and others as given."""
    if positions is None:
        return None
    positions = jnp.asarray(positions)
    if positions.ndim != 1:
        return positions
    return positions.reshape((1,) * batch_axes + positions.shape)


# Checks


def check_settings(dropout_rate: float, qk_norm: str | None, sharding: tuple | None) -> None:
    """Raises unless each is one that the layers know."""
    if not 0 <= dropout_rate <= 1:  # also refuses NaN
        raise ValueError(
            f"`FlashMultiHeadAttention(dropout_rate=...)`: dropout_rate is a probability, so "
            f"it lies in [0, 1]. Got {dropout_rate}; 0 turns dropout off."
        )
    if qk_norm not in (None, "layer", "rms"):
        raise ValueError(
            f"`FlashMultiHeadAttention(qk_norm=...)`: must be None, 'layer' (LayerNorm) or 'rms' "
            f"(RMSNorm), over each head of q and k. Got {qk_norm!r}."
        )
    if sharding is not None and (isinstance(sharding, str) or len(sharding) != 3):
        raise ValueError(
            f"`FlashMultiHeadAttention(sharding=...)`: needs one name or None for each of the three "
            f"kinds of axes that parameters have: (features, heads, head size). Got {sharding!r}."
        )


def check_heads(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Raises unless the heads share out the channels and each other."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"`FlashMultiHeadAttention(num_heads, num_kv_heads=...)`: each key head must serve the "
            f"same number of query heads, at least one, so num_kv_heads must divide num_heads. Got "
            f"num_heads={num_heads} and num_kv_heads={num_kv_heads}."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"`FlashMultiHeadAttention(in_features, num_heads)`: without head_dim, heads share "
            f"in_features evenly. Got in_features={in_features} and num_heads={num_heads}; pass "
            f"head_dim."
        )


def check_decoding(**given: Any) -> None:
    """Raises if an argument that has no meaning beside a cache was given."""
    for name, x in given.items():
        if x is not None:
            why = "the cache counts positions" if "positions" in name else "the cache holds keys of x_q"
            raise ValueError(
                f"`FlashMultiHeadAttention.__call__`: with decode=True there is no {name}, since "
                f"{why}. Got {name}. Leave it out, or pass decode=False."
            )


def _check_room(k: jax.Array, keys: jax.Array, index: jax.Array) -> None:
    fits = (*k.shape[:-3], *k.shape[-2:]) == (*keys.shape[:-3], *keys.shape[-2:])
    if not fits or k.shape[-3] > keys.shape[-3]:
        raise ValueError(
            f"`FlashMultiHeadAttention.__call__`: with decode=True the new keys must fit into the "
            f"cache, in the order (*B, rows, heads, head size). Got new keys of shape {k.shape} and "
            f"a cache of shape {keys.shape}."
        )
    if not isinstance(index, Tracer) and int(index) + k.shape[-3] > keys.shape[-3]:
        raise ValueError(
            f"`FlashMultiHeadAttention.__call__`: the cache is full. Got {k.shape[-3]} tokens for a "
            f"cache of {keys.shape[-3]} that holds {int(index)}. Make a longer cache."
        )

"""Attention for Flax's own layers: what `attention_fn=` of its multi-head attention takes. No Flax in it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .api import attention
from .checks import as_array, check, kind
from .dropout import Dropout
from .masks import Causal, Dense, Function, Mask
from .rotary import Rotary
from .score_mods import ScoreMod

_EXTRAS = ("scale", "score_mod", "sinks", "q_positions", "k_positions", "implementation")


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    input_positions: ArrayLike | None = None,
    rotary: Rotary | None = None,
    **extras: Any,
) -> jax.Array:
    """`jflash.attention` as the `attention_fn` of Flax's layers, NNX and Linen.

    `nnx.MultiHeadAttention(..., attention_fn=jflash.nnx.attention_fn)` and
    `linen.MultiHeadDotProductAttention(..., attention_fn=jflash.linen.attention_fn)`. Every argument
    has a name here, because Linen leaves out those that the signature does not name, the mask too.
    `functools.partial` adds arguments, such as `score_mod=jflash.SoftCap(50.0)`.

    **Arguments:**

    - `query`: [*batch, T, H, D]. `key`, `value`: [*batch, t, h, D], with fewer heads for grouped queries.
    - `bias`: Broadcasts to [*batch, H, T, t].
    - `mask`: As Flax makes it, broadcasting to [*batch, H, T, t]: boolean, or numbers, of which all
      but 0 show a key. Or a jflash mask, such as `Causal()`, which skips blocks and needs no T·t memory.
      A row that sees no key gives 0, where Flax gives the mean of all values.
    - `broadcast_dropout`: True, as in Flax, drops the same pairs in all batch entries and heads.
    - `dropout_rng`, `dropout_rate`, `deterministic`: Dropout, off where `deterministic`. (Not
      `jflash.attention`'s `deterministic`, about bitwise gradients.) The bits are jflash's, not Flax's.
    - `dtype`: Of the computation; None promotes query, key and value.
    - `precision`: As in `jflash.attention`.
    - `force_fp32_for_softmax`: The softmax is always float32.
    - `is_causal`: As Flax means it, aligned top-left: query row i sees the key rows up to i.
    - `rotary`: A `jflash.rotary.Rotary` turns queries and keys, at `input_positions`.
    - `input_positions`: Integers [*batch or 1, T], for `rotary` only, as in Flax. Keys stand there, too,
      where there are as many, else at their rows, as in a cache.
    - `extras`: `scale`, `score_mod`, `sinks`, `q_positions`, `k_positions`, `implementation` of
      `jflash.attention`. An unknown argument is refused unless it is None.

    **Returns:**

    [*batch, T, H, d].

    **Raises:**

    ValueError for `module` (`sow_weights`): the attention weights are never in memory; and for what
    cannot be honoured. TypeError for unknown arguments. Otherwise as `jflash.attention`.
    """
    _check_arguments(module, qk_attn_weights_einsum, attn_weights_value_einsum, extras)
    extras = {name: x for name, x in extras.items() if x is not None}
    q, k, v = (
        as_array(f"attention_fn({n}=...)", x) for n, x in zip(("query", "key", "value"), (query, key, value))
    )
    dtype = jnp.result_type(q, k, v) if dtype is None else dtype
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    q, k = _rotated(q, k, rotary, input_positions)
    if mask is not None and not isinstance(mask, Mask):
        array = as_array("attention_fn(mask=...)", mask)
        mask = Dense(array if array.dtype == bool else array != 0)
    if is_causal:
        mask = Causal() if mask is None else Causal() & mask
        if q.shape[-3] != k.shape[-3]:  # aligned top-left; where the lengths agree that is the default
            extras.setdefault("q_positions", _rows(q))
    dropout = None
    if not deterministic and dropout_rate > 0:
        check(
            dropout_rng is not None,
            ValueError,
            "attention_fn(dropout_rng=...)",
            "is needed where dropout_rate > 0 and deterministic=False",
            f"dropout_rate={dropout_rate} and no key",
        )
        if broadcast_dropout:
            _check_broadcast(mask, extras.get("score_mod"))
        dropout = _dropout(dropout_rate, dropout_rng, broadcast_dropout, q.shape)
    return attention(q, k, v, mask, bias=bias, dropout=dropout, precision=precision, **extras)


def _rows(x: jax.Array) -> jax.Array:
    """The rows of [*batch, T, H, D] as positions, [1, ..., T]."""
    T = x.shape[-3]
    return jnp.arange(T, dtype=jnp.int32).reshape((1,) * (x.ndim - 3) + (T,))


def _rotated(q: jax.Array, k: jax.Array, rotary: Any, positions: Any) -> tuple[jax.Array, jax.Array]:
    if rotary is None:
        check(
            positions is None,
            ValueError,
            "attention_fn(input_positions=...)",
            "are where `rotary` turns queries and keys, and would have no effect without",
            f"{kind(positions)} and rotary=None",
            "Pass functools.partial(attention_fn, rotary=jflash.rotary.Rotary()).",
        )
        return q, k
    alike = q.shape[-3] == k.shape[-3]
    check(
        alike or positions is not None,
        ValueError,
        "attention_fn(rotary=...)",
        "needs input_positions where queries are not the rows of the keys, as in decoding",
        f"{q.shape[-3]} queries, {k.shape[-3]} keys and no input_positions",
        "Pass them to the layer's call.",
    )
    positions = _rows(q) if positions is None else positions
    return rotary(q, positions), rotary(k, positions if alike else _rows(k))


def _check_arguments(module: Any, qk_einsum: Any, value_einsum: Any, extras: dict[str, Any]) -> None:
    check(
        module is None,
        ValueError,
        "attention_fn(module=...)",
        "cannot store attention weights (sow_weights=True): they are never in memory",
        kind(module),
        "Leave sow_weights out, or use Flax's own dot_product_attention for that call.",
    )
    check(
        qk_einsum is None and value_einsum is None,
        ValueError,
        "attention_fn(qk_attn_weights_einsum, attn_weights_value_einsum)",
        "must be None: products run inside the implementation, none can be replaced",
        "an einsum",
        "Leave qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls out of the layer.",
    )
    unknown = [name for name, x in extras.items() if name not in _EXTRAS and x is not None]
    check(
        not unknown,
        TypeError,
        f"attention_fn({', '.join(f'{name}=...' for name in unknown)})",
        "would have no effect; beside Flax's arguments there are " + ", ".join(_EXTRAS),
        ", ".join(unknown),
    )


def _dropout(rate: float, key: Any, broadcast: bool, shape: tuple) -> Dropout:
    if not broadcast:
        return Dropout(rate, key)
    *batch, _, heads, _ = shape
    # Offsets that take each entry and each head back to 0: all of them draw the same bits.
    b = -jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
    return Dropout(rate, key, offsets=(b, -jnp.arange(heads, dtype=jnp.int32), 0, 0))


def _check_broadcast(mask: Any, score_mod: Any) -> None:
    """Raises where a user's function would be handed the indices that broadcast dropout sets to 0."""
    several = score_mod if isinstance(score_mod, tuple | list) else (score_mod,)
    functions = [f"score_mod={kind(x)}" for x in several if x is not None and not isinstance(x, ScoreMod)]
    functions += ["mask=Function(...)"] if _has_function(mask) else []
    check(
        not functions,
        ValueError,
        "attention_fn(broadcast_dropout=True)",
        "gives all batch entries and heads the index 0, which a function of b and h would see",
        " and ".join(functions),
        "Make the layer with broadcast_dropout=False.",
    )


def _has_function(mask: Any) -> bool:
    parts = vars(mask).values() if isinstance(mask, Mask) else ()
    return isinstance(mask, Function) or any(map(_has_function, parts))

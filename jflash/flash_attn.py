"""The functions of PyTorch's flash-attn package, with its names, defaults and alignment, over `attention`.

The interface is that of version 2 (https://github.com/Dao-AILab/flash-attention,
`flash_attn/flash_attn_interface.py`). What differs from it:

- Nothing is written in place: `flash_attn_with_kvcache` returns the caches that it appended to.
- Dropout takes a key of `jax.random` (`dropout_key`), and no probabilities are returned.
- A row that sees no key gives 0, as there, and an lse of -inf, there +inf.
- float32 and any head size are computed, and everything is differentiable: slopes, lse, caches.
- `window_size`: -1 or None opens a side; other negative bounds are refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import flags, validate, validate_cache
from .api import _attend
from .flash_attn_varlen import flash_attn_unpadded_func as flash_attn_unpadded_func
from .flash_attn_varlen import flash_attn_varlen_func as flash_attn_varlen_func
from .flash_attn_varlen import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from .flash_attn_varlen import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from .masks import Prefix
from .rotary import rotate
from .validate_cache import Step


def flash_attn_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dropout_p: float | int = 0.0,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: ArrayLike | None = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: Any = None,
) -> Any:
    """Attention of q [B, T, H, D] to k [B, t, h, D] and v [B, t, h, d].

    **Arguments:**

    - `dropout_p`: Share of probabilities to drop, a Python float; 0 in evaluation.
    - `softmax_scale`: Factor of q·k; None is 1/sqrt(D).
    - `causal`: True hides the keys after a query's position, aligned bottom-right: query row i
      stands at i + t - T.
    - `window_size`: (left, right): a query at i sees the keys j with i - left <= j <= i + right.
      -1 leaves a side open.
    - `softcap`: Scores become softcap * tanh(score / softcap); 0 leaves them.
    - `alibi_slopes`: [H] or [B, H]: -slope * |i + t - T - j| is added after the cap.
    - `deterministic`: As in `jflash.attention`.
    - `return_attn_probs`: True gives `(out, softmax_lse, None)`.
    - `dropout_key`: A key of `jax.random`, needed where `dropout_p` is not 0.

    **Returns:**

    `out` [B, T, H, d], in the dtype of q; with `return_attn_probs` a tuple of it, `softmax_lse`
    [B, H, T], in nats, float32, and None, where the package has probabilities for its tests.

    **Raises:**

    As `jflash.attention`; ValueError for dropout without a key.

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_func
    >>> q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> flash_attn_func(q, k, k, causal=True, window_size=(2, -1)).shape
    (2, 3, 4, 8)
    """
    return _flash_attn("flash_attn_func", **locals())


def flash_attn_kvpacked_func(
    q: ArrayLike,
    kv: ArrayLike,
    dropout_p: float | int = 0.0,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: ArrayLike | None = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: Any = None,
) -> Any:
    """`flash_attn_func` of keys and values in one array, kv [B, t, 2, h, D].

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 2, 8))).shape
    (2, 3, 4, 8)
    """
    settings = locals()
    call = "flash_attn_kvpacked_func"
    k, v = flags.parts(f"{call}(kv=...)", "[B, t, 2, h, D]", settings.pop("kv"), 2)
    return _flash_attn(call, k=k, v=v, **settings)


def flash_attn_qkvpacked_func(
    qkv: ArrayLike,
    dropout_p: float | int = 0.0,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: ArrayLike | None = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: Any = None,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one array, qkv [B, T, 3, H, D].

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(jnp.ones((2, 5, 3, 4, 8)), causal=True).shape
    (2, 5, 4, 8)
    """
    settings = locals()
    call = "flash_attn_qkvpacked_func"
    q, k, v = flags.parts(f"{call}(qkv=...)", "[B, T, 3, H, D]", settings.pop("qkv"), 3)
    return _flash_attn(call, q=q, k=k, v=v, **settings)


def flash_attn_with_kvcache(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    cache_seqlens: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
    block_table: Any = None,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: ArrayLike | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: ArrayLike | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q [B, T, H, D] to a cache, to which k and v may be appended first.

    Functional: the caches that are returned are new arrays. A jitted step which is given them by
    `donate_argnums` updates them in place.

    **Arguments:**

    - `k_cache`, `v_cache`: [B, S, h, D], or with `cache_batch_idx` of any first axis. Rows outside of
      the length may hold anything, also NaN.
    - `k`, `v`: [B, n, h, D], written to the rows from `cache_seqlens` on; both or neither. Rows
      beyond S are dropped.
    - `rotary_cos`, `rotary_sin`: [at least S, r / 2]: the angles by position. Turns the first r
      channels of k, at its rows of the cache, and of q: from `cache_seqlens` on where `causal` or
      a window is given, otherwise all at `cache_seqlens`. Only with `k`.
    - `cache_seqlens`: [B], or an int: rows in use before the call. None is all S.
    - `cache_batch_idx`: [B]: which entry of the cache each entry of q has; these are then copied.
      Where k is given they must differ.
    - `cache_leftpad`: [B]: the row of the cache where each entry begins.
    - `block_table`: None: pages are not taken yet.
    - `causal`, `window_size`, `alibi_slopes`: As in `flash_attn_func`; the last query stands at the
      last row in use, appended ones included.
    - `softmax_scale`, `softcap`: As in `flash_attn_func`.
    - `rotary_interleaved`: True turns channels (2i, 2i + 1), False (i, i + r / 2).
    - `num_splits`: A hint of the package, without effect.
    - `return_softmax_lse`: True gives `softmax_lse`, too.

    **Returns:**

    `out` [B, T, H, d], then with `return_softmax_lse` its `softmax_lse` [B, H, T], float32, then
    with `k` and `v` the new `k_cache` and `v_cache`; a tuple, if it is more than `out`.

    **Raises:**

    ValueError for shapes that do not fit, for `k` without `v` or without `cache_seqlens` or, where
    that is an int, beyond the cache, for `rotary_cos` without `rotary_sin` or without `k`, and for
    a `block_table`; TypeError for mixed dtypes.

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_with_kvcache
    >>> cache, x = jnp.zeros((1, 16, 2, 8)), jnp.ones((1, 1, 2, 8))
    >>> out, k_cache, v_cache = flash_attn_with_kvcache(x, cache, cache, x, x, cache_seqlens=3)
    >>> v_cache[0, :5, 0, 0]
    Array([0., 0., 0., 1., 0.], dtype=float32)
    """
    call = "flash_attn_with_kvcache"
    validate.flag(call, "rotary_interleaved", rotary_interleaved)
    validate.flag(call, "return_softmax_lse", return_softmax_lse)
    step = validate_cache.step(call, q, k_cache, v_cache, k, v, cache_batch_idx, block_table)
    validate_cache.rotary(call, rotary_cos, rotary_sin, step)
    (B, T, _, _), new = step.q.shape, 0 if step.k is None else step.k.shape[1]
    of_entries = lambda name, x: None if x is None else flags.lengths(f"{call}({name}=...)", x, (B,))
    entry = of_entries("cache_batch_idx", cache_batch_idx)
    leftpad = of_entries("cache_leftpad", cache_leftpad)
    used = validate_cache.seqlens(call, cache_seqlens, step)
    mask = flags.causal_window(call, causal, window_size)

    if rotary_cos is not None:
        q_row = 0 if mask is None else jnp.arange(T)[None]
        step = _rotated(step, rotary_cos, rotary_sin, used[:, None], q_row, rotary_interleaved)
    if new:
        step = _appended(step, jnp.arange(B) if entry is None else entry, used)
    positions = None
    if used is not None:
        mask = flags.together(mask, Prefix(used + new))
        positions = used[:, None] + jnp.arange(new - T, new)[None]
    if leftpad is not None:
        mask = flags.together(mask, ~Prefix(leftpad))
    keys, values = (x if entry is None else x[entry] for x in (step.k_cache, step.v_cache))
    mods = flags.score_mods(call, softcap, alibi_slopes)
    arguments = dict(q=step.q, k=keys, v=values, mask=mask, scale=softmax_scale, score_mod=mods)
    out, lse = _attend(call, arguments | dict(q_positions=positions))
    results = (out,) + (lse,) * return_softmax_lse
    results += () if k is None else (step.k_cache, step.v_cache)
    return results if len(results) > 1 else out


def _rotated(step: Step, cos: Any, sin: Any, used: jax.Array, q_row: Any, interleaved: bool) -> Step:
    """The step with k turned by its rows of the cache, q by `used + q_row`; `used` is [B, 1]."""
    dtype = jnp.promote_types(step.q.dtype, jnp.float32)
    cos, sin = (jnp.asarray(x, dtype)[:, None] for x in (cos, sin))  # [rows, 1, r/2]
    turn = lambda x, rows: rotate(x, cos[rows], sin[rows], interleaved)
    k_rows = used + jnp.arange(step.k.shape[1])[None]
    return step._replace(q=turn(step.q, used + q_row), k=turn(step.k, k_rows))


def _appended(step: Step, entry: jax.Array, used: jax.Array) -> Step:
    """The step with k and v in the caches, behind the `used` [B] rows of each `entry` [B]."""
    at = entry[:, None], used[:, None] + jnp.arange(step.k.shape[1])[None]
    write = lambda cache, x: cache.at[at].set(x, mode="drop")
    return step._replace(k_cache=write(step.k_cache, step.k), v_cache=write(step.v_cache, step.v))


def _flash_attn(
    call: str,
    q: Any,
    k: Any,
    v: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
    dropout_key: Any,
) -> Any:
    validate.flag(call, "return_attn_probs", return_attn_probs)
    arguments = dict(
        q=q,
        k=k,
        v=v,
        mask=flags.causal_window(call, causal, window_size),
        scale=softmax_scale,
        score_mod=flags.score_mods(call, softcap, alibi_slopes),
        dropout=flags.dropout(call, dropout_p, dropout_key),
        deterministic=deterministic,
    )
    out, lse = _attend(call, arguments)
    return (out, lse, None) if return_attn_probs else out

"""The functions of packed sequences of PyTorch's flash-attn package, over `varlen_attention`.

`jflash.flash_attn` has their names, and says what differs from the package.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import flags, packing, validate, validate_cache
from .api import _attend, _attend_packed
from .checks import as_array, check, kind


def flash_attn_varlen_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float | int = 0.0,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: ArrayLike | None = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    dropout_key: Any = None,
) -> Any:
    """Attention within each of the sequences packed into q [N, H, D], k [M, h, D] and v [M, h, d].

    **Arguments:**

    - `cu_seqlens_q`, `cu_seqlens_k`: Integers [sequences + 1]: 0, then where each sequence ends.
      Sequences may be empty; rows behind the last are padding.
    - `max_seqlen_q`, `max_seqlen_k`: The longest lengths. Without effect but for slopes [sequences, H].
    - `causal`, `window_size`: As in `flash_attn_func`, aligned bottom-right within each sequence.
    - `alibi_slopes`: [H], or [sequences, H]: these are computed in a padded batch, [sequences,
      max_seqlen_q, H, D], for which `max_seqlen_q` and `max_seqlen_k` must be Python ints.
    - `block_table`: None: pages are not taken yet.
    - The others as in `flash_attn_func`.

    **Returns:**

    `out` [N, H, d]; with `return_attn_probs` a tuple of it, `softmax_lse` [H, N], in nats, float32,
    and None. In padding rows `out` is 0 and `softmax_lse` -inf.

    **Raises:**

    As `jflash.varlen_attention`; ValueError for dropout without a key, and for a `block_table`.

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_varlen_func
    >>> q, k, v = jnp.ones((12, 4, 8)), jnp.ones((20, 2, 8)), jnp.ones((20, 2, 8))
    >>> q_offsets, k_offsets = jnp.array([0, 5, 12]), jnp.array([0, 9, 20])
    >>> flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 11, causal=True).shape
    (12, 4, 8)
    """
    return _flash_attn_varlen("flash_attn_varlen_func", **locals())


flash_attn_unpadded_func = flash_attn_varlen_func  # the name in version 1, with the arguments of version 2


def flash_attn_varlen_kvpacked_func(
    q: ArrayLike,
    kv: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
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
    """`flash_attn_varlen_func` of keys and values in one array, kv [M, 2, h, D].

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_varlen_kvpacked_func
    >>> q, kv, cu = jnp.ones((5, 4, 8)), jnp.ones((5, 2, 2, 8)), jnp.array([0, 2, 5])
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 3, 3).shape
    (5, 4, 8)
    """
    settings = locals()
    call = "flash_attn_varlen_kvpacked_func"
    k, v = flags.parts(f"{call}(kv=...)", "[M, 2, h, D]", settings.pop("kv"), 2)
    return _flash_attn_varlen(call, k=k, v=v, **settings)


def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayLike,
    cu_seqlens: ArrayLike,
    max_seqlen: Any,
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
    """`flash_attn_varlen_func` of queries, keys and values in one array, qkv [N, 3, H, D].

    >>> import jax.numpy as jnp
    >>> from jflash.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> flash_attn_varlen_qkvpacked_func(jnp.ones((5, 3, 4, 8)), jnp.array([0, 2, 5]), 3).shape
    (5, 4, 8)
    """
    settings = locals()
    call = "flash_attn_varlen_qkvpacked_func"
    q, k, v = flags.parts(f"{call}(qkv=...)", "[N, 3, H, D]", settings.pop("qkv"), 3)
    cu, longest = settings.pop("cu_seqlens"), settings.pop("max_seqlen")
    offsets = dict(cu_seqlens_q=cu, cu_seqlens_k=None, max_seqlen_q=longest, max_seqlen_k=longest)
    return _flash_attn_varlen(call, q=q, k=k, v=v, **offsets, **settings)


def _flash_attn_varlen(
    call: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
    dropout_key: Any,
    block_table: Any = None,
) -> Any:
    validate.flag(call, "return_attn_probs", return_attn_probs)
    validate_cache.no_pages(call, block_table, "Pass k and v as packed rows, [M, h, D].")
    arguments = dict(
        q=q,
        k=k,
        v=v,
        mask=flags.causal_window(call, causal, window_size),
        scale=softmax_scale,
        score_mod=flags.score_mods(call, softcap, alibi_slopes),
        dropout=flags.dropout(call, dropout_p, dropout_key),
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    if np.ndim(alibi_slopes) == 2:
        out, lse = _padded(call, arguments, max_seqlen_q, max_seqlen_k)
    else:
        out, lse = _attend_packed(call, arguments)
    return (out, lse, None) if return_attn_probs else out


def _padded(call: str, arguments: dict, *longest: Any) -> tuple[jax.Array, jax.Array]:
    """As `_attend_packed`, through a batch of one entry a sequence, for what an entry has of its own."""
    packing.in_one_row(call, **arguments)  # the checks
    cu_q, cu_k = arguments.pop("cu_seqlens_q"), arguments.pop("cu_seqlens_k")
    cu_q, cu_k = (jnp.asarray(x, jnp.int32) for x in (cu_q, cu_q if cu_k is None else cu_k))
    for name, x in zip("qk", longest):
        check(
            isinstance(x, int | np.integer),
            TypeError,
            f"{call}(max_seqlen_{name}=...)",
            "must be a Python int where each sequence has its own slopes: it is the length of a padded batch",
            kind(x),
        )
    T, t = map(int, longest)
    q, k, v = (as_array(f"{call}({name}=...)", arguments[name]) for name in "qkv")
    N, (n, m) = len(q), (jnp.diff(cu) for cu in (cu_q, cu_k))
    padded = (packing.unpack(x, cu, length) for x, cu, length in ((q, cu_q, T), (k, cu_k, t), (v, cu_k, t)))
    arguments |= dict(zip("qkv", padded))
    arguments["mask"] = flags.together(arguments["mask"], flags.prefix(n, m, T, t))
    arguments["q_positions"] = jnp.arange(T)[None] + (m - n)[:, None]
    out, lse = _attend(call, arguments)
    entry, row = packing.segment_ids(cu_q, N), packing.segment_positions(cu_q, N)
    out = jnp.where((entry >= 0)[:, None, None], out[entry, row], 0)
    return out, jnp.where((entry >= 0)[None], lse.mT[entry, row].mT, -jnp.inf)

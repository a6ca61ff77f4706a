"""Sequences of any lengths, packed into one row without padding, and told apart by offsets.

`cu_seqlens`, int32 [sequences + 1], holds 0 and the running sum of the lengths: sequence i has the
rows from `cu_seqlens[i]` to before `cu_seqlens[i + 1]`. Sequences may be empty. Rows from
`cu_seqlens[-1]` on belong to none: they are padding, which sees nothing and is seen by nothing.
Offsets are run-time data: one compiled program serves all lengths that fit into the same rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Shaped

from .checks import as_array, check, kind
from .masks import InSequence, Segments, as_mask


def pack(
    x: ArrayLike | Sequence[ArrayLike],
    lengths: ArrayLike | None = None,
    *,
    rows: int | None = None,
) -> tuple[Shaped[Array, "N ..."], Int[Array, " offsets"]]:
    """`x` packed into one row of tokens, and the offsets of its sequences: `(packed, cu_seqlens)`.

    **Arguments:**

    - `x`: A list of sequences, each [length, *features], or an array [B, T, *features] whose entry
      i has `lengths[i]` tokens, padded at the end. What stands in the padding has no effect.
    - `lengths`: Integers [B], from 0 to T; only for an array. They may be traced.
    - `rows`: The rows N of `packed`, so that other lengths give the same shape. By default as many
      as a list has tokens, and B·T for an array. Rows that no sequence fills are 0.

    **Returns:**

    `packed` [N, *features] and `cu_seqlens`, int32 [B + 1].

    **Raises:**

    ValueError where sequences do not fit, TypeError where lengths are no integers. Lengths inside
    `jax.jit` cannot be checked: what does not fit into `rows` is lost.

    >>> import jax.numpy as jnp, jflash
    >>> packed, cu_seqlens = jflash.pack([jnp.ones((3, 8)), jnp.ones((2, 8))])
    >>> packed.shape, cu_seqlens
    ((5, 8), Array([0, 3, 5], dtype=int32))
    """
    if isinstance(x, list | tuple):
        check(
            lengths is None,
            ValueError,
            "pack(lengths=...)",
            "is for an array [B, T, ...] only; the sequences of a list have the lengths that they have",
            "a list",
        )
        return _pack_list(x, rows)
    padded = as_array("pack(x)", x)
    check(
        padded.ndim >= 2 and lengths is not None,
        ValueError,
        "pack(x, lengths)",
        "must be a list of sequences [length, ...], or an array [B, T, ...] and its lengths [B]",
        f"{kind(padded)} and {'no lengths' if lengths is None else 'lengths'}",
    )
    B, T = padded.shape[:2]
    lengths = _checked_lengths("pack(lengths=...)", lengths, B, T)
    rows = _checked_rows(rows, B * T, lengths)
    return _pack_array(padded, lengths, rows)


def unpack(
    packed: ArrayLike, cu_seqlens: ArrayLike, length: int | None = None
) -> Shaped[Array, "B T ..."] | list[jax.Array]:
    """The sequences of `packed` [N, *features]: the way back from `pack`.

    **Arguments:**

    - `cu_seqlens`: As `pack` returns them, [B + 1].
    - `length`: T of a padded array to return, at least the longest length; None returns a list,
      which needs offsets that are known outside of a trace.

    **Returns:**

    [B, length, *features], 0 where a sequence has ended; or a list of [length of it, *features].

    **Raises:**

    ValueError where offsets or length do not fit, TypeError where offsets are no integers or a list
    is asked for inside `jax.jit`.

    >>> import jax.numpy as jnp, jflash
    >>> jflash.unpack(jnp.arange(1, 6), jnp.array([0, 3, 5]), 4)
    Array([[1, 2, 3, 0],
           [4, 5, 0, 0]], dtype=int32)
    """
    packed = as_array("unpack(packed)", packed)
    check(packed.ndim >= 1, ValueError, "unpack(packed)", "must be [N, ...]", kind(packed))
    cu = _checked_offsets("unpack(cu_seqlens)", cu_seqlens, packed.shape[0])
    known = _values(cu)
    check(
        length is not None or known is not None,
        TypeError,
        "unpack(length=None)",
        "returns a list, whose shapes need offsets with known values",
        "offsets that are traced",
        "Pass length, the longest that a sequence may be, for a padded array.",
    )
    starts = np.zeros(1, int) if known is None else known
    if length is None:
        return [packed[a:b] for a, b in zip(starts[:-1], starts[1:])]
    longest = int(np.diff(starts).max(initial=0))
    check(
        length >= longest,
        ValueError,
        "unpack(length=...)",
        "must be at least the longest sequence's",
        f"length={length}, and a sequence of {longest}",
    )
    return _unpack_array(packed, cu, length)


def segment_ids(cu_seqlens: ArrayLike, rows: int) -> Int[Array, " rows"]:
    """The index of each row's sequence, int32 [rows]; -1 in rows that belong to none.

    As `Segments` takes them.

    >>> import jax.numpy as jnp, jflash
    >>> jflash.segment_ids(jnp.array([0, 3, 3, 5]), 6)
    Array([ 0,  0,  0,  2,  2, -1], dtype=int32)
    """
    return _places(_checked_offsets("segment_ids(cu_seqlens)", cu_seqlens, rows), rows)[0]


def segment_positions(cu_seqlens: ArrayLike, rows: int) -> Int[Array, " rows"]:
    """The position of each row within its sequence, int32 [rows]; 0 in rows that belong to none.

    As rotary and learned position embeddings take them.

    >>> import jax.numpy as jnp, jflash
    >>> jflash.segment_positions(jnp.array([0, 3, 3, 5]), 6)
    Array([0, 1, 2, 0, 1, 0], dtype=int32)
    """
    cu = _checked_offsets("segment_positions(cu_seqlens)", cu_seqlens, rows)
    ids, start, _ = _places(cu, rows)
    return jnp.where(ids < 0, 0, jnp.arange(rows, dtype=jnp.int32) - start)


def in_one_row(
    call: str,
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    mask: Any,
    q_positions: Any = None,
    k_positions: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """The arguments of `attention` that a call of `varlen_attention` amounts to; `call` is its name.

    One row without batch axes, under `Segments & mask`. Query i of a sequence stands at
    i + (its keys) - (its queries) and key j at j, unless positions are given.
    """
    q, k = as_array(f"{call}(q=...)", q), as_array(f"{call}(k=...)", k)
    check(
        q.ndim == k.ndim == 3,
        ValueError,
        f"{call}(q, k, v)",
        "must be one row of tokens each, [N, heads, head size], without batch axes",
        f"q.shape={q.shape}, k.shape={k.shape}",
        "A batch of packed rows: jax.vmap, or one longer row.",
    )
    N, M = q.shape[0], k.shape[0]
    same_tokens = cu_seqlens_k is None
    check(
        not same_tokens or N == M,
        ValueError,
        f"{call}(cu_seqlens_k=...)",
        "is needed where queries and keys are not the same tokens",
        f"{N} rows in q, {M} in k and no cu_seqlens_k",
    )
    cu_q = _checked_offsets(f"{call}(cu_seqlens_q=...)", cu_seqlens_q, N)
    cu_k = cu_q if same_tokens else _checked_offsets(f"{call}(cu_seqlens_k=...)", cu_seqlens_k, M)
    check(
        cu_q.shape == cu_k.shape,
        ValueError,
        f"{call}(cu_seqlens_q, cu_seqlens_k)",
        "must hold as many sequences, since queries of sequence i see keys of sequence i",
        f"{cu_q.size - 1} of queries and {cu_k.size - 1} of keys",
    )
    ids, starts, positions = _sides(cu_q, cu_k, N, M)
    packed = Segments(ids[0], None if same_tokens else ids[1])
    if mask is not None:
        try:
            mask = as_mask(mask)
        except TypeError as error:
            raise TypeError(f"`{call}(mask=...)`: {error}") from None
        packed = packed & InSequence(mask, *starts)
    return settings | dict(
        q=q,
        k=k,
        mask=packed,
        q_positions=positions[0] if q_positions is None else q_positions,
        k_positions=positions[1] if k_positions is None else k_positions,
    )


# Arithmetic on offsets


@functools.partial(jax.jit, static_argnums=1)
def _places(cu: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sequence or -1, its first row, the row after its last) of each row, int32 [rows]."""
    sequences = cu.size - 1
    row = jnp.arange(rows, dtype=jnp.int32)
    # From the right: of sequences that start at one row, all but the last are empty.
    i = jnp.searchsorted(cu, row, side="right").astype(jnp.int32) - 1
    ids = jnp.where((i >= 0) & (i < sequences), i, -1)
    i = jnp.maximum(ids, 0)
    return ids, cu[i], cu[jnp.minimum(i + 1, sequences)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sides(cu_q: jax.Array, cu_k: jax.Array, N: int, M: int) -> tuple:
    """(ids, starts of the keys, positions), each a pair of int32 [N] and [M]."""
    q_ids, _, q_end = _places(cu_q, N)
    k_ids, k_start, _ = _places(cu_k, M)
    i = jnp.maximum(q_ids, 0)
    q_start, k_end = cu_k[i], cu_k[jnp.minimum(i + 1, cu_k.size - 1)]
    # Bottom-right: the last query of a sequence stands at its last key.
    q_positions = jnp.arange(N, dtype=jnp.int32) - q_end + k_end - q_start
    k_positions = jnp.arange(M, dtype=jnp.int32) - k_start
    return (q_ids, k_ids), (q_start, k_start), (q_positions, k_positions)


@functools.partial(jax.jit, static_argnums=2)
def _pack_array(x: jax.Array, lengths: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    cu = jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))
    if 0 in x.shape[:2]:
        return jnp.zeros((rows, *x.shape[2:]), x.dtype), cu
    ids, start, _ = _places(cu, rows)
    position = jnp.arange(rows, dtype=jnp.int32) - start
    return _where(ids >= 0, x[jnp.maximum(ids, 0), position]), cu


@functools.partial(jax.jit, static_argnums=2)
def _unpack_array(packed: jax.Array, cu: jax.Array, length: int) -> jax.Array:
    if packed.shape[0] == 0:
        return jnp.zeros((cu.size - 1, length, *packed.shape[1:]), packed.dtype)
    row = cu[:-1, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return _where(row < cu[1:, None], packed[jnp.minimum(row, packed.shape[0] - 1)])


def _where(filled: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(filled.reshape(filled.shape + (1,) * (x.ndim - filled.ndim)), x, 0)


def _pack_list(xs: Sequence, rows: int | None) -> tuple[jax.Array, jax.Array]:
    xs = [as_array(f"pack(x[{i}])", x) for i, x in enumerate(xs)]
    alike = xs and all(x.ndim >= 1 and x.shape[1:] == xs[0].shape[1:] for x in xs)
    check(
        bool(alike) and len({x.dtype for x in xs}) == 1,
        ValueError,
        "pack(x)",
        "must be sequences [length, ...], at least one, that differ in nothing but their lengths",
        ", ".join(kind(x) for x in xs) or "an empty list",
    )
    lengths = np.array([len(x) for x in xs])
    rows = _checked_rows(rows, int(lengths.sum()), lengths)
    packed = jnp.concatenate(xs)
    pad = [(0, rows - packed.shape[0])] + [(0, 0)] * (packed.ndim - 1)
    return jnp.pad(packed, pad), jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32)


# Checks


def _values(x: jax.Array) -> np.ndarray | None:
    """What an array holds, or None inside a trace or where other processes hold some of it."""
    if isinstance(x, Tracer) or not x.is_fully_addressable:
        return None
    return np.asarray(x)


def _checked_offsets(argument: str, cu: Any, rows: int) -> jax.Array:
    """`cu` as int32 [sequences + 1], its values checked where they are known."""
    cu = as_array(argument, cu)
    rule = "must be integers [sequences + 1]: 0, then where each sequence ends"
    check(cu.ndim == 1 and cu.size > 0, ValueError, argument, rule, kind(cu))
    check(jnp.issubdtype(cu.dtype, jnp.integer), TypeError, argument, rule, kind(cu))
    known = _values(cu)
    if known is not None:
        got = np.array2string(known, threshold=8, separator=", ")
        check(int(known[0]) == 0, ValueError, argument, rule, got, "Lengths are not offsets.")
        check(bool((np.diff(known) >= 0).all()), ValueError, argument, "must never decrease", got)
        check(int(known[-1]) <= rows, ValueError, argument, f"must end within the {rows} rows", got)
    return cu.astype(jnp.int32)


def _checked_lengths(argument: str, lengths: Any, B: int, T: int) -> jax.Array:
    lengths = as_array(argument, lengths)
    rule = f"must be integers [B], from 0 to T, with B={B}, T={T}"
    check(lengths.shape == (B,), ValueError, argument, rule, kind(lengths))
    check(jnp.issubdtype(lengths.dtype, jnp.integer), TypeError, argument, rule, kind(lengths))
    known = _values(lengths)
    inside = known is None or bool(((known >= 0) & (known <= T)).all())
    check(inside, ValueError, argument, rule, f"{known}")
    return lengths


def _checked_rows(rows: int | None, default: int, lengths: Any) -> int:
    if rows is None:
        return default
    known = lengths if isinstance(lengths, np.ndarray) else _values(lengths)
    total = 0 if known is None else int(known.sum())
    check(rows >= total, ValueError, "pack(rows=...)", f"must hold all {total} tokens", f"{rows}")
    return rows

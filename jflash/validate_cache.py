"""Checks of what `flash_attn_with_kvcache` takes: caches, what is appended to them, rotary tables."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import flags
from .checks import as_array, check, kind


class Step(NamedTuple):
    """The arrays of one call: the cache, and what is appended to it, or None."""

    q: Any  # [B, T, H, D]
    k_cache: Any  # [entries, S, h, D]
    v_cache: Any  # [entries, S, h, d]
    k: Any  # [B, n, h, D]
    v: Any  # [B, n, h, d]


def step(call: str, q, k_cache, v_cache, k, v, cache_batch_idx, block_table) -> Step:
    """The arrays, if they belong together."""
    no_pages(call, block_table, "Pass caches [B, S, h, D].")
    missing = "k=None" if k is None else "v=None"
    check((k is None) == (v is None), ValueError, f"{call}(k, v)", "must be given together", missing)
    named = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    arrays = {name: as_array(f"{call}({name}=...)", x) for name, x in named.items() if x is not None}
    got = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in arrays.items())
    names = f"{call}({', '.join(arrays)})"
    check(len({x.dtype for x in arrays.values()}) == 1, TypeError, names, "must have one dtype", got)
    check(
        all(x.ndim == 4 for x in arrays.values()),
        ValueError,
        names,
        "must have the axes (batch, length, heads, head size)",
        got,
    )
    q, k_cache, v_cache = arrays["q"], arrays["k_cache"], arrays["v_cache"]
    check(
        k_cache.shape[:3] == v_cache.shape[:3] and (cache_batch_idx is not None or len(k_cache) == len(q)),
        ValueError,
        f"{call}(q, k_cache, v_cache)",
        "must agree in batch, both caches also in length and heads",
        got,
        "cache_batch_idx tells which entries of a larger cache are meant." if len(k_cache) > len(q) else "",
    )
    if k is None:
        return Step(q, k_cache, v_cache, None, None)
    k, v = arrays["k"], arrays["v"]
    rows = lambda cache: (len(q), k.shape[1], *cache.shape[2:])
    check(
        k.shape == rows(k_cache) and v.shape == rows(v_cache) and k.shape[1] <= k_cache.shape[1],
        ValueError,
        f"{call}(k, v)",
        "must be rows of the caches, for each entry of q: [B, n, h, D] with n of at most S",
        got,
    )
    return Step(q, k_cache, v_cache, k, v)


def no_pages(call: str, block_table: Any, fix: str) -> None:
    """Raises for a table of pages."""
    check(
        block_table is None,
        ValueError,
        f"{call}(block_table=...)",
        "must be None: pages come with jflash's paged caches, which this version has not",
        kind(block_table),
        fix,
    )


def rotary(call: str, cos: Any, sin: Any, step: Step) -> None:
    """Raises unless the tables are both None, or both fit the cache and turn new keys."""
    if cos is None and sin is None:
        return
    names = f"{call}(rotary_cos, rotary_sin)"
    missing = "rotary_cos=None" if cos is None else "rotary_sin=None"
    check(cos is not None and sin is not None, ValueError, names, "must be given together", missing)
    check(step.k is not None, ValueError, names, "turn q beside new keys, which must be given", "k=None")
    S, D = step.k_cache.shape[1], step.q.shape[-1]
    shapes = [as_array(names, x).shape for x in (cos, sin)]
    check(
        shapes[0] == shapes[1] and len(shapes[0]) == 2 and shapes[0][0] >= S and 2 * shapes[0][1] <= D,
        ValueError,
        names,
        f"must be [at least S, r / 2], one row a row of the cache, with S={S} and r of at most D={D}",
        f"shapes {shapes[0]} and {shapes[1]}",
    )


def seqlens(call: str, x: Any, step: Step) -> Any:
    """The number of rows in use, int32 [B]; an int must leave room for the new ones."""
    argument = f"{call}(cache_seqlens=...)"
    check(
        step.k is None or x is not None,
        ValueError,
        argument,
        "must be given with k and v, which are written behind the rows in use",
        "None",
    )
    if isinstance(x, int | np.integer):
        S, n = step.k_cache.shape[1], 0 if step.k is None else step.k.shape[1]
        rule = f"must be between 0 and {S - n}: the cache has {S} rows and k adds {n}"
        check(0 <= int(x) <= S - n, ValueError, argument, rule, f"{x}")
        x = jnp.full(len(step.q), int(x), jnp.int32)
    return None if x is None else flags.lengths(argument, x, (len(step.q),))

"""Dropout of attention probabilities, by a counter instead of a state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
    """Drops each probability with probability `rate` and divides the others by 1 - rate.

    The bits are a function of (key, batch index, head index, query row, key row) alone: forward,
    backward, every tiling and every implementation draw the same ones. The softmax's denominator
    is taken before dropout, so `lse` does not depend on it.

    - `rate`: A Python float in [0, 1]. 0 drops nothing and needs no key; 1 gives `out = 0`.
    - `key`: A key of `jax.random`, typed or raw; the caller splits it a layer and a step.
    - `offsets`: (b, h, q, k), what to add to the local indices, where this call computes a part
      of a larger attention: with them the parts draw what the whole would. Inside a user's own
      `shard_map` the user passes them (`jax.lax.axis_index(...) * local_size`). Score modifiers
      and masks are handed the shifted batch and head index, too. Several batch axes count as one.

    Under `vmap` the mapped index is no part of the counter: as with `jax.random`, map over keys
    to get different bits.
    """

    rate: float = dataclasses.field(metadata={"static": True})
    key: Any = None
    offsets: Any = (0, 0, 0, 0)


jax.tree_util.register_dataclass(Dropout, ["key", "offsets"], ["rate"])


def key_words(key: Any) -> jax.Array:
    """Two uint32 that stand for `key`, whatever its implementation; [2]."""
    return jax.random.bits(key, (2,), jnp.uint32)

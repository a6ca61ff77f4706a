"""Masks from the flags of other libraries: window sizes, lengths. Only the drop-ins know these."""

import functools
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp

from .checks import as_array, check, kind
from .masks import Mask, Prefix, Window
from .validate_fields import window_bound


def together(*masks: Mask | None) -> Mask | None:
    """Visible where every mask that is given shows it; None if none is given."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, given) if given else None


def window(argument: str, size: Any, opens: int | None = None) -> Window | None:
    """The `Window` of a pair (left, right), where `opens` leaves a side open as None does."""
    pair = isinstance(size, tuple | list)
    got = f"{len(size)} values" if pair else kind(size)
    check(pair and len(size) == 2, ValueError, argument, "must be a pair (left, right)", got)
    is_open = lambda x: isinstance(x, numbers.Integral) and x == opens
    left, right = (None if is_open(x) else x for x in size)
    if left is None and right is None:
        return None
    return Window(window_bound(argument, "left", left), window_bound(argument, "right", right))


def lengths(argument: str, x: Any, batch: tuple) -> jax.Array:
    """Lengths [*batch], as int32."""
    x = as_array(argument, x)
    check(
        jnp.issubdtype(x.dtype, jnp.integer) and x.shape == batch,
        ValueError,
        argument,
        f"must be integers [*batch], one length a batch entry, with batch={batch}",
        kind(x),
    )
    return x.astype(jnp.int32)


def prefix(q_lengths: jax.Array | None, k_lengths: jax.Array | None, T: int, t: int) -> Prefix | None:
    """The pairs within both lengths [*batch], of T query rows and t key rows."""
    if q_lengths is None:
        return None if k_lengths is None else Prefix(k_lengths)
    seen = t if k_lengths is None else k_lengths[..., None]
    row = jax.lax.broadcasted_iota(jnp.int32, (*q_lengths.shape, T), q_lengths.ndim)  # [*batch, T]
    return Prefix(jnp.where(row < q_lengths[..., None], seen, 0))

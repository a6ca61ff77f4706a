"""Masks and modifiers from the flags of other libraries, which only the drop-ins know."""

import functools
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp

from . import validate
from .checks import as_array, check, kind
from .dropout import Dropout
from .masks import Causal, Mask, Prefix, Window
from .score_mods import Alibi, SoftCap
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


def causal_window(call: str, causal: Any, window_size: Any) -> Mask | None:
    """The mask of `causal` and of a window which -1 opens, both of PyTorch's package."""
    validate.flag(call, "causal", causal)
    size = window(f"{call}(window_size=...)", window_size, opens=-1)
    return together(Causal() if causal else None, size)


def score_mods(call: str, softcap: Any, alibi_slopes: Any) -> tuple:
    """The modifiers of a cap, which 0 takes off, and of slopes or None."""
    is_number = isinstance(softcap, numbers.Real)
    rule = "must be at least 0, which caps nothing"
    check(not is_number or not softcap < 0, ValueError, f"{call}(softcap=...)", rule, f"{softcap}")
    is_off = softcap is None or (is_number and softcap == 0)
    cap = () if is_off else (SoftCap(softcap),)
    return cap + (() if alibi_slopes is None else (Alibi(alibi_slopes),))


def dropout(call: str, p: Any, key: Any) -> Dropout | None:
    """The `Dropout` of a probability and a key; None where nothing is dropped."""
    argument = f"{call}(dropout_p=...)"
    is_number = isinstance(p, numbers.Real) and not isinstance(p, bool)
    check(is_number, TypeError, argument, "must be a Python float: it is part of the program", kind(p))
    check(
        p == 0 or key is not None,
        ValueError,
        argument,
        "needs a key, since JAX has no random state of its own",
        f"dropout_p={p} and no dropout_key",
        "Pass dropout_key=jax.random.key(...), split anew for each layer and step.",
    )
    return None if p == 0 else Dropout(float(p), key)


def parts(argument: str, axes: str, x: Any, n: int) -> list[jax.Array]:
    """The `n` arrays that `x` stacks on its third axis from the end; `axes` are its own, for errors."""
    x = as_array(argument, x)
    fits = x.ndim >= 4 and x.shape[-3] == n
    check(fits, ValueError, argument, f"must be {axes}", f"shape {x.shape}")
    return [x[..., i, :, :] for i in range(n)]

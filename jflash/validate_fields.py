"""Checks of what belongs to pairs, heads and tokens: bias, masks, score modifiers, positions, sinks.

Each returns its argument with all axes: batch axes of their full size or 1, then its own.
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.problem import Problem

from . import masks, score_mods
from .checks import as_array, check, kind
from .tracing import trace


@dataclasses.dataclass(frozen=True)
class Where:
    """Which call is checked, and its axes."""

    call: str
    problem: Problem
    shapes: tuple
    at: tuple  # the index of each batch entry [*batch], of each query head [H]

    def full(self) -> tuple:
        p = self.problem
        return (*p.batch, p.H, p.T, p.t)


# What belongs to pairs, heads and tokens


def checked_bias(where: Where, bias: Any) -> jax.Array | None:
    if bias is None:
        return None
    argument = f"{where.call}(bias=...)"
    bias = as_array(argument, bias)
    check(
        jnp.issubdtype(bias.dtype, jnp.floating),
        TypeError,
        argument,
        "is added to the scores and must be a floating-point array",
        kind(bias),
        "A boolean array that hides keys is a mask: pass it as `mask`.",
    )
    return _pairwise(where, argument, bias)


def _pairwise(where: Where, argument: str, x: jax.Array) -> jax.Array:
    """`x`, broadcastable to [*batch, H, T, t], with all of these axes, some of size 1."""
    full = where.full()
    lead = (1,) * (len(full) - x.ndim)
    fits = x.ndim <= len(full) and all(n in (1, m) for n, m in zip((*lead, *x.shape), full))
    p = where.problem
    swapped = f" Axes are (*batch, heads, T, t), and this call has T={p.T} queries over t={p.t} keys."
    check(
        fits,
        ValueError,
        argument,
        f"must broadcast to (*batch, H, T, t) = {full}",
        f"shape {x.shape} with q.shape={where.shapes[0]}, k.shape={where.shapes[1]}",
        swapped.strip(),
    )
    return x.reshape(*lead, *x.shape)


def _per_token(where: Where, argument: str, x: Any, axis: str, length: int) -> jax.Array:
    """Integers [*batch or 1, length], with all batch axes."""
    x = as_array(argument, x)
    check(
        jnp.issubdtype(x.dtype, jnp.integer),
        TypeError,
        argument,
        "must be an array of integers",
        kind(x),
    )
    batch = where.problem.batch
    lead = (1,) * (len(batch) + 1 - x.ndim)
    shape = (*lead, *x.shape)
    fits = x.ndim >= 1 and len(shape) == len(batch) + 1 and shape[-1] == length
    fits = fits and all(n in (1, m) for n, m in zip(shape, batch))
    check(
        fits,
        ValueError,
        argument,
        f"must be [*batch or 1, {axis}] with {axis}={length}, batch={batch}",
        f"shape {x.shape}",
        f"It was built for another length than this call's {axis}={length}."
        if x.ndim and x.shape[-1] != length
        else "",
    )
    return x.reshape(shape).astype(jnp.int32)


def checked_positions(where: Where, name: str, x: Any, axis: str, length: int) -> jax.Array | None:
    return None if x is None else _per_token(where, f"{where.call}({name}=...)", x, axis, length)


def _per_head(where: Where, argument: str, x: Any) -> jax.Array:
    """[*batch or 1, H], with all batch axes."""
    x = as_array(argument, x)
    p = where.problem
    lead = (1,) * (len(p.batch) + 1 - x.ndim)
    shape = (*lead, *x.shape)
    fits = x.ndim >= 1 and len(shape) == len(p.batch) + 1 and shape[-1] == p.H
    fits = fits and all(n in (1, m) for n, m in zip(shape, p.batch))
    check(
        fits,
        ValueError,
        argument,
        f"must be [H] or [*batch or 1, H], one value a query head (H={p.H}, batch={p.batch})",
        f"shape {x.shape}",
    )
    return x.reshape(shape)


def checked_sinks(where: Where, sinks: Any) -> jax.Array | None:
    if sinks is None:
        return None
    argument = f"{where.call}(sinks=...)"
    sinks = as_array(argument, sinks)
    check(
        jnp.issubdtype(sinks.dtype, jnp.floating) and sinks.shape == (where.problem.H,),
        ValueError,
        argument,
        f"must be a floating-point array [H], one logit a query head, with H={where.problem.H}",
        kind(sinks),
    )
    return sinks


# Masks


def checked_mask(where: Where, mask: Any) -> masks.Mask | None:
    return None if mask is None else _mask(where, as_mask(where.call, mask))


def as_mask(call: str, mask: Any) -> masks.Mask:
    """`mask`, a boolean array as `Dense`."""
    try:
        return masks.as_mask(mask)
    except TypeError as error:
        raise TypeError(f"`{call}(mask=...)`: {error}") from None


def _mask(where: Where, mask: masks.Mask) -> masks.Mask:
    """The mask with its fields checked and with all their axes."""
    p, argument = where.problem, f"{where.call}(mask={type(mask).__name__}(...))"
    match mask:
        case masks.And() | masks.Or():
            return type(mask)(_mask(where, mask.a), _mask(where, mask.b))
        case masks.Not():
            return masks.Not(_mask(where, mask.a))
        case masks.InSequence():  # from `packing`, which has checked its fields
            return masks.InSequence(_mask(where, mask.a), mask.q_start, mask.k_start)
        case masks.Moved():
            return masks.Moved(_mask(where, mask.a), mask.by)
        case masks.Causal():
            return mask
        case masks.Window():
            return masks.Window(
                window_bound(argument, "left", mask.left),
                window_bound(argument, "right", mask.right),
            )
        case masks.Segments():
            q_ids = _per_token(where, f"{argument[:-6]}(q_ids=...))", mask.q_ids, "T", p.T)
            same = mask.k_ids is None
            check(
                not same or p.T == p.t,
                ValueError,
                argument,
                "needs k_ids where queries and keys are not the same tokens",
                f"T={p.T} queries, t={p.t} keys and no k_ids",
            )
            if same:
                return masks.Segments(q_ids, q_ids, same_tokens=True)
            k_ids = _per_token(where, f"{argument[:-6]}(k_ids=...))", mask.k_ids, "t", p.t)
            return masks.Segments(q_ids, k_ids)
        case masks.Prefix():
            return masks.Prefix(_prefix(where, argument, mask.n))
        case masks.Dense():
            array = as_array(argument, mask.array)
            check(
                array.dtype == bool,
                TypeError,
                argument,
                "must hold a boolean array, True where a query may see a key",
                kind(array),
                "A 0/1 array becomes one by `array != 0`; a float array that is added is a `bias`.",
            )
            return masks.Dense(_pairwise(where, argument, array))
        case masks.Function():
            arguments = dict.fromkeys("bhqk", jax.ShapeDtypeStruct((), jnp.int32))
            signature = "fn(b, h, q_pos, k_pos)"
            return masks.Traced(
                *trace(f"{argument[:-6]}(fn))", mask.fn, arguments, signature, bool, where.at)
            )
    raise TypeError(
        f"`{where.call}(mask=...)` knows the masks of jflash and their combinations. Got a "
        f"{type(mask).__name__}. A predicate of your own goes into `jflash.Function(fn)`."
    )


def _is_int(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def window_bound(argument: str, side: str, x: Any) -> Any:
    """A bound of `Window`: None, an int or int32 of shape ()."""
    if x is None:
        return None
    rule = "must be None (open) or an integer of at least 0 (0 is a real bound)"
    if _is_int(x):
        fix = "None opens a side; -1 does not." if x == -1 else ""
        x = int(x)
        check(int(x) >= 0, ValueError, argument, f"{side} {rule}", f"{x}", fix)
        return x
    is_scalar = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer) and jnp.ndim(x) == 0
    check(is_scalar, TypeError, argument, f"{side} {rule}", kind(x))
    return jnp.asarray(x, jnp.int32)


def _prefix(where: Where, argument: str, n: Any) -> jax.Array:
    p = where.problem
    nb = len(p.batch)
    if _is_int(n):
        n = int(n)
        check(
            0 <= n <= p.t,
            ValueError,
            argument,
            f"n must be between 0 and the number of keys, {p.t}",
            f"{n}",
        )
        return jnp.full((1,) * (nb + 1), n, jnp.int32)
    n = as_array(argument, n)
    check(jnp.issubdtype(n.dtype, jnp.integer), TypeError, argument, "n must be integers", kind(n))
    if n.ndim == nb and all(a in (1, b) for a, b in zip(n.shape, p.batch)):
        return n.astype(jnp.int32)[..., None]
    if n.ndim == nb + 1 and n.shape[-1] == 1:
        n = jnp.broadcast_to(n, (*n.shape[:-1], p.T))
    check(
        n.ndim == nb + 1,
        ValueError,
        argument,
        f"n must be an int, [*batch or 1] or [*batch or 1, T] with batch={p.batch}, T={p.T}",
        f"shape {n.shape}",
    )
    return _per_token(where, argument, n, "T", p.T)


# Functions of users


def checked_mods(where: Where, score_mod: Any) -> tuple:
    if score_mod is None:
        return ()
    several = score_mod if isinstance(score_mod, tuple | list) else (score_mod,)
    return tuple(_mod(where, mod) for mod in several)


def _mod(where: Where, mod: Any) -> score_mods.ScoreMod:
    argument = f"{where.call}(score_mod={getattr(mod, '__name__', type(mod).__name__)})"
    match mod:
        case score_mods.SoftCap():
            cap = mod.cap
            if isinstance(cap, int | float):
                check(
                    cap > 0 and math.isfinite(cap),
                    ValueError,
                    argument,
                    "needs a positive, finite cap",
                    f"{cap}",
                    "Leave SoftCap out to cap nothing.",
                )
                return score_mods.SoftCap(float(cap))
            cap = as_array(argument, cap)
            check(
                cap.ndim == 0 and jnp.issubdtype(cap.dtype, jnp.floating),
                ValueError,
                argument,
                "needs a positive number or a floating-point array of shape () as cap",
                kind(cap),
            )
            return score_mods.SoftCap(cap)
        case score_mods.Alibi():
            slopes = _per_head(where, argument, mod.slopes)
            check(
                jnp.issubdtype(slopes.dtype, jnp.floating),
                TypeError,
                argument,
                "needs floating-point slopes",
                kind(slopes),
            )
            return score_mods.Alibi(slopes)
    check(
        callable(mod) and not isinstance(mod, score_mods.ScoreMod | type),
        TypeError,
        argument,
        "must be SoftCap(...), Alibi(...), a function mod(s, b, h, q_pos, k_pos) or a tuple of these",
        kind(mod),
    )
    arguments = dict(s=jax.ShapeDtypeStruct((), where.problem.accumulator))
    arguments |= dict.fromkeys("bhqk", jax.ShapeDtypeStruct((), jnp.int32))
    signature = "mod(s, b, h, q_pos, k_pos)"
    return score_mods.TracedMod(*trace(argument, mod, arguments, signature, float, where.at))

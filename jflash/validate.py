"""Every check of what a user passes; what passes becomes a Problem and Operands.

Errors name the call, the argument, the rule and why it holds, what was got, and the fix:
ValueError for shapes and values, TypeError for kinds.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from pallas_kernels.problem import Operands, Problem, batch_index, head_index

from . import masks, score_mods
from .backends import TABLE, platform
from .dropout import Dropout, key_words

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def attention(
    call: str,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    *,
    bias: Any,
    scale: Any,
    score_mod: Any,
    sinks: Any,
    dropout: Any,
    q_positions: Any,
    k_positions: Any,
    precision: Any,
    deterministic: Any,
    implementation: Any,
) -> tuple[Problem, Operands]:
    """The checked arguments of `attention`; `call` is its name, for errors."""
    names = [row.name for row in TABLE]
    _check(
        implementation is None or implementation in names,
        ValueError,
        f"{call}(implementation=...)",
        f"must be None (the best one for the platform) or one of {names}",
        f"{implementation!r}",
    )
    _check(
        isinstance(deterministic, bool | np.bool_),
        TypeError,
        f"{call}(deterministic=...)",
        "must be a Python bool, since it selects the program",
        _kind(deterministic),
    )
    q, k, v = _qkv(call, q, k, v)
    *batch, T, H, D = q.shape
    *_, t, h, d = v.shape
    axes = dict(batch=tuple(batch), T=T, t=t, H=H, h=h)
    scale_static, scale_traced = _scale(call, scale, D)
    rate, words, row_offsets, b_offset, h_offset = _dropout(call, dropout)
    problem = Problem(
        **axes,
        D=D,
        d=d,
        dtype=jnp.dtype(q.dtype),
        scale=scale_static,
        dropout_rate=rate,
        precision=_precision(precision, q.dtype),
        deterministic=bool(deterministic),
        platform=platform(),
        masked=mask is not None,
        default_positions=q_positions is None and k_positions is None,
    )
    where = _Where(call, problem, (q.shape, k.shape, v.shape))
    operands = Operands(
        q=q,
        k=k,
        v=v,
        scale=scale_traced,
        bias=_bias(where, bias),
        mods=_mods(where, score_mod),
        sinks=_sinks(where, sinks),
        mask=None if mask is None else _mask(where, _as_mask(call, mask)),
        q_positions=_positions(where, "q_positions", q_positions, "T", T),
        k_positions=_positions(where, "k_positions", k_positions, "t", t),
        dropout=words,
        row_offsets=row_offsets,
    )
    if dropout is not None:
        operands = dataclasses.replace(
            operands,
            b=batch_index(problem, operands) + b_offset,
            h=head_index(problem, operands) + h_offset,
        )
    return problem, operands


@dataclasses.dataclass(frozen=True)
class _Where:
    """Which call is checked, and its axes."""

    call: str
    problem: Problem
    shapes: tuple

    def full(self) -> tuple:
        p = self.problem
        return (*p.batch, p.H, p.T, p.t)


def _check(holds: bool, error: type, argument: str, rule: str, got: str, fix: str = "") -> None:
    if not holds:
        raise error(f"`{argument}` {rule}. Got {got}.{' ' + fix if fix else ''}")


def _kind(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"an array of {x.dtype} and shape {tuple(x.shape)}"
    return f"{x!r}" if isinstance(x, int | float | str | bool) else f"a {type(x).__name__}"


def _array(argument: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{argument}` must be an array. Got {_kind(x)}.") from error


# q, k, v


def _qkv(call: str, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = [_array(f"{call}({name}=...)", x) for name, x in zip("qkv", (q, k, v))]
    for name, x in zip("qkv", arrays):
        _check(
            x.dtype in DTYPES,
            TypeError,
            f"{call}({name}=...)",
            "must be float16, bfloat16 or float32 (float64 where x64 is enabled)",
            f"{x.dtype}",
            "Cast it: x.astype(jax.numpy.bfloat16).",
        )
    q, k, v = arrays
    shapes = f"q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape}"
    order = f"{shapes} in the order (*batch, length, heads, head size)"
    _check(
        q.dtype == k.dtype == v.dtype,
        TypeError,
        f"{call}(q, k, v)",
        "must have one dtype, since mixing would round some of them silently",
        f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
        "Cast them to the dtype that you want the output in.",
    )
    _check(
        q.ndim == k.ndim == v.ndim >= 3,
        ValueError,
        f"{call}(q, k, v)",
        "must have the same number of axes, at least 3: (*batch, length, heads, head size)",
        shapes,
    )
    *batch, T, H, D = q.shape
    *k_batch, t, h, k_D = k.shape
    hint = _layout_hint(q.shape, k.shape)
    _check(
        k.shape[:-1] == v.shape[:-1],
        ValueError,
        f"{call}(k, v)",
        "must agree in batch, length and heads; only the head size of v may differ",
        order,
        hint,
    )
    _check(
        k_batch == batch,
        ValueError,
        f"{call}(q, k, v)",
        "must have the same batch axes",
        order,
        hint or "Broadcast with jax.numpy.broadcast_to where that is meant.",
    )
    _check(
        D == k_D,
        ValueError,
        f"{call}(q, k)",
        "must have the same head size D, over which q·k sums",
        f"D {D} in q and {k_D} in k ({order})",
        hint,
    )
    divides = H == h or (h != 0 and H % h == 0)
    _check(
        divides,
        ValueError,
        f"{call}(q, k)",
        f"q has {H} heads and k has {h}, but each k head must serve the same number of q heads "
        "(grouped-query attention needs H % h == 0)",
        order,
        hint,
    )
    return q, k, v


def _layout_hint(q: tuple, k: tuple) -> str:
    # Read as (batch, heads, length, head size), do the shapes fit where as ours they did not?
    _, q_heads, q_length, _ = (1, *q)[-4:]
    _, k_heads, k_length, _ = (1, *k)[-4:]
    fits = k_heads and q_heads % k_heads == 0
    ours = k_length and q_length % k_length == 0
    if fits and not ours and q_heads <= q_length:
        return (
            "The shapes look like (batch, heads, length, head size); jflash takes (batch, length, "
            "heads, head size): x.swapaxes(-3, -2)."
        )
    return ""


def _scale(call: str, scale: Any, D: int) -> tuple[float | None, jax.Array | None]:
    if scale is None:
        return (1 / math.sqrt(D) if D else 1.0), None
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool | np.bool_):
        return float(scale), None
    array = _array(f"{call}(scale=...)", scale)
    _check(
        array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.floating),
        ValueError,
        f"{call}(scale=...)",
        "must be a number or a floating-point array of shape ()",
        _kind(array),
        "A factor per head or per token goes into q.",
    )
    return None, array


def _precision(precision: Any, dtype: Any) -> Any:
    if precision is None and jax.config.jax_default_matmul_precision is None:
        # On GPU and TPU the default would round float32 to TF32 or bfloat16.
        return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return precision


# What belongs to pairs, heads and tokens


def _bias(where: _Where, bias: Any) -> jax.Array | None:
    if bias is None:
        return None
    argument = f"{where.call}(bias=...)"
    bias = _array(argument, bias)
    _check(
        jnp.issubdtype(bias.dtype, jnp.floating),
        TypeError,
        argument,
        "is added to the scores and must be a floating-point array",
        _kind(bias),
        "A boolean array that hides keys is a mask: pass it as `mask`.",
    )
    return _pairwise(where, argument, bias)


def _pairwise(where: _Where, argument: str, x: jax.Array) -> jax.Array:
    """`x`, broadcastable to [*batch, H, T, t], with all of these axes, some of size 1."""
    full = where.full()
    lead = (1,) * (len(full) - x.ndim)
    fits = x.ndim <= len(full) and all(n in (1, m) for n, m in zip((*lead, *x.shape), full))
    p = where.problem
    swapped = f" Axes are (*batch, heads, T, t), and this call has T={p.T} queries over t={p.t} keys."
    _check(
        fits,
        ValueError,
        argument,
        f"must broadcast to (*batch, H, T, t) = {full}",
        f"shape {x.shape} with q.shape={where.shapes[0]}, k.shape={where.shapes[1]}",
        swapped.strip(),
    )
    return x.reshape(*lead, *x.shape)


def _per_token(where: _Where, argument: str, x: Any, axis: str, length: int) -> jax.Array:
    """Integers [*batch or 1, length], with all batch axes."""
    x = _array(argument, x)
    _check(
        jnp.issubdtype(x.dtype, jnp.integer),
        TypeError,
        argument,
        "must be an array of integers",
        _kind(x),
    )
    batch = where.problem.batch
    lead = (1,) * (len(batch) + 1 - x.ndim)
    shape = (*lead, *x.shape)
    fits = x.ndim >= 1 and len(shape) == len(batch) + 1 and shape[-1] == length
    fits = fits and all(n in (1, m) for n, m in zip(shape, batch))
    _check(
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


def _positions(where: _Where, name: str, x: Any, axis: str, length: int) -> jax.Array | None:
    return None if x is None else _per_token(where, f"{where.call}({name}=...)", x, axis, length)


def _per_head(where: _Where, argument: str, x: Any) -> jax.Array:
    """[*batch or 1, H], with all batch axes."""
    x = _array(argument, x)
    p = where.problem
    lead = (1,) * (len(p.batch) + 1 - x.ndim)
    shape = (*lead, *x.shape)
    fits = x.ndim >= 1 and len(shape) == len(p.batch) + 1 and shape[-1] == p.H
    fits = fits and all(n in (1, m) for n, m in zip(shape, p.batch))
    _check(
        fits,
        ValueError,
        argument,
        f"must be [H] or [*batch or 1, H], one value a query head (H={p.H}, batch={p.batch})",
        f"shape {x.shape}",
    )
    return x.reshape(shape)


def _sinks(where: _Where, sinks: Any) -> jax.Array | None:
    if sinks is None:
        return None
    argument = f"{where.call}(sinks=...)"
    sinks = _array(argument, sinks)
    _check(
        jnp.issubdtype(sinks.dtype, jnp.floating) and sinks.shape == (where.problem.H,),
        ValueError,
        argument,
        f"must be a floating-point array [H], one logit a query head, with H={where.problem.H}",
        _kind(sinks),
    )
    return sinks


# Masks


def _as_mask(call: str, mask: Any) -> masks.Mask:
    try:
        return masks.as_mask(mask)
    except TypeError as error:
        raise TypeError(f"`{call}(mask=...)`: {error}") from None


def _mask(where: _Where, mask: masks.Mask) -> masks.Mask:
    """The mask with its fields checked and with all their axes."""
    p, argument = where.problem, f"{where.call}(mask={type(mask).__name__}(...))"
    match mask:
        case masks.And() | masks.Or():
            return type(mask)(_mask(where, mask.a), _mask(where, mask.b))
        case masks.Not():
            return masks.Not(_mask(where, mask.a))
        case masks.Causal():
            return mask
        case masks.Window():
            return masks.Window(
                _window_bound(argument, "left", mask.left),
                _window_bound(argument, "right", mask.right),
            )
        case masks.Segments():
            q_ids = _per_token(where, f"{argument[:-5]}(q_ids=...))", mask.q_ids, "T", p.T)
            same = mask.k_ids is None
            _check(
                not same or p.T == p.t,
                ValueError,
                argument,
                "needs k_ids where queries and keys are not the same tokens",
                f"T={p.T} queries, t={p.t} keys and no k_ids",
            )
            if same:
                return masks.Segments(q_ids, q_ids, same_tokens=True)
            k_ids = _per_token(where, f"{argument[:-5]}(k_ids=...))", mask.k_ids, "t", p.t)
            return masks.Segments(q_ids, k_ids)
        case masks.Prefix():
            return masks.Prefix(_prefix(where, argument, mask.n))
        case masks.Dense():
            array = _array(argument, mask.array)
            _check(
                array.dtype == bool,
                TypeError,
                argument,
                "must hold a boolean array, True where a query may see a key",
                _kind(array),
                "A 0/1 array becomes one by `array != 0`; a float array that is added is a `bias`.",
            )
            return masks.Dense(_pairwise(where, argument, array))
        case masks.Function():
            at = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
            call, consts = _trace(where, f"{argument[:-5]}(fn))", mask.fn, at, "fn(b, h, q_pos, k_pos)", bool)
            return masks.Traced(call, consts)
    raise TypeError(
        f"`{where.call}(mask=...)` knows the masks of jflash and their combinations. Got a "
        f"{type(mask).__name__}. A predicate of your own goes into `jflash.Function(fn)`."
    )


def _window_bound(argument: str, side: str, x: Any) -> Any:
    if x is None:
        return None
    rule = "must be None (open) or an integer of at least 0 (0 is a real bound)"
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        fix = "None opens a side; -1 does not." if x == -1 else ""
        _check(x >= 0, ValueError, argument, f"{side} {rule}", f"{x}", fix)
        return int(x)
    is_scalar = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer) and jnp.ndim(x) == 0
    _check(is_scalar, TypeError, argument, f"{side} {rule}", _kind(x))
    return jnp.asarray(x, jnp.int32)


def _prefix(where: _Where, argument: str, n: Any) -> jax.Array:
    p = where.problem
    nb = len(p.batch)
    if isinstance(n, numbers.Integral) and not isinstance(n, bool):
        _check(
            0 <= n <= p.t,
            ValueError,
            argument,
            f"n must be between 0 and the number of keys, {p.t}",
            f"{n}",
        )
        return jnp.full((1,) * (nb + 1), int(n), jnp.int32)
    n = _array(argument, n)
    _check(jnp.issubdtype(n.dtype, jnp.integer), TypeError, argument, "n must be integers", _kind(n))
    if n.ndim == nb and all(a in (1, b) for a, b in zip(n.shape, p.batch)):
        return n.astype(jnp.int32)[..., None]
    if n.ndim == nb + 1 and n.shape[-1] == 1:
        n = jnp.broadcast_to(n, (*n.shape[:-1], p.T))
    _check(
        n.ndim == nb + 1,
        ValueError,
        argument,
        f"n must be an int, [*batch or 1] or [*batch or 1, T] with batch={p.batch}, T={p.T}",
        f"shape {n.shape}",
    )
    return _per_token(where, argument, n, "T", p.T)


# Functions of users


def _mods(where: _Where, score_mod: Any) -> tuple:
    if score_mod is None:
        return ()
    several = score_mod if isinstance(score_mod, tuple | list) else (score_mod,)
    return tuple(_mod(where, mod) for mod in several)


def _mod(where: _Where, mod: Any) -> score_mods.ScoreMod:
    argument = f"{where.call}(score_mod={getattr(mod, '__name__', type(mod).__name__)})"
    match mod:
        case score_mods.SoftCap():
            cap = mod.cap
            if isinstance(cap, numbers.Real):
                _check(
                    cap > 0 and math.isfinite(cap),
                    ValueError,
                    argument,
                    "needs a positive, finite cap",
                    f"{cap}",
                    "Leave SoftCap out to cap nothing.",
                )
                return score_mods.SoftCap(float(cap))
            cap = _array(argument, cap)
            _check(
                cap.ndim == 0 and jnp.issubdtype(cap.dtype, jnp.floating),
                ValueError,
                argument,
                "needs a positive number or a floating-point array of shape () as cap",
                _kind(cap),
            )
            return score_mods.SoftCap(cap)
        case score_mods.Alibi():
            slopes = _per_head(where, argument, mod.slopes)
            _check(
                jnp.issubdtype(slopes.dtype, jnp.floating),
                TypeError,
                argument,
                "needs floating-point slopes",
                _kind(slopes),
            )
            return score_mods.Alibi(slopes)
    _check(
        callable(mod) and not isinstance(mod, score_mods.ScoreMod | type),
        TypeError,
        argument,
        "must be SoftCap(...), Alibi(...), a function mod(s, b, h, q_pos, k_pos) or a tuple of these",
        _kind(mod),
    )
    at = [jax.ShapeDtypeStruct((), jnp.promote_types(where.problem.dtype, jnp.float32))]
    at += [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    call, consts = _trace(where, argument, mod, at, "mod(s, b, h, q_pos, k_pos)", float)
    return score_mods.TracedMod(call, consts)


class _Jaxpr:
    """A traced function of (constants, *scalars): one key for jit as long as the trace is the same."""

    def __init__(self, fn: Callable, jaxpr: Any):
        self.fn, self.jaxpr, self.text = fn, jaxpr, str(jaxpr)

    def __hash__(self):
        return hash((self.fn, self.text))

    def __eq__(self, other):
        return isinstance(other, _Jaxpr) and (self.fn, self.text) == (other.fn, other.text)

    def __call__(self, consts, *args):
        closed = jax.extend.core.ClosedJaxpr(self.jaxpr, consts)
        return jax.extend.core.jaxpr_as_fun(closed)(*args)[0]


def _trace(where: _Where, argument: str, fn: Callable, at: list, signature: str, returns: type) -> tuple:
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*at)
    wanted = "a boolean" if returns is bool else "a floating-point"
    fits = isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == ()
    fits = fits and (shape.dtype == bool if returns is bool else jnp.issubdtype(shape.dtype, jnp.floating))
    _check(fits, ValueError, argument, f"{signature} must map scalars to {wanted} scalar", f"{shape}")
    consts = tuple(jnp.asarray(c) for c in closed.consts)
    for c in consts:
        _check(
            c.shape in ((), (where.problem.H,)),
            ValueError,
            argument,
            f"may close over scalars and over vectors [H] (H={where.problem.H}) that it indexes by h",
            f"an array of shape {c.shape}",
            "Data per token goes into positions or Segments, data per pair into `bias` or `Dense`.",
        )
    return _Jaxpr(fn, closed.jaxpr), consts


# Dropout


def _dropout(call: str, dropout: Any) -> tuple:
    """(rate, the key's words, row offsets, batch offset, head offset)."""
    if dropout is None:
        return 0.0, None, None, 0, 0
    argument = f"{call}(dropout=...)"
    _check(
        isinstance(dropout, Dropout),
        TypeError,
        argument,
        "must be a jflash.Dropout(rate, key)",
        _kind(dropout),
    )
    rate = dropout.rate
    _check(
        isinstance(rate, numbers.Real) and not isinstance(rate, bool),
        TypeError,
        argument,
        "needs a Python float as rate: it is part of the compiled program",
        _kind(rate),
    )
    rate = float(rate)
    _check(0 <= rate <= 1, ValueError, argument, "needs a rate between 0 and 1", f"{rate}")
    _check(
        rate in (0, 1) or dropout.key is not None,
        ValueError,
        argument,
        "needs a key where 0 < rate < 1",
        "key=None",
        "Pass jflash.Dropout(rate, jax.random.key(...)), split anew for each layer and step.",
    )
    offsets = dropout.offsets
    _check(
        isinstance(offsets, tuple | list) and len(offsets) == 4,
        ValueError,
        argument,
        "needs four offsets: (b, h, q, k)",
        f"{offsets!r}",
    )
    b, h, q_row, k_row = (jnp.asarray(x, jnp.int32) for x in offsets)
    if rate in (0, 1):
        return rate, None, None, b, h
    return rate, key_words(dropout.key), (q_row, k_row), b, h

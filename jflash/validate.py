"""Every check of what a user passes; what passes becomes a Problem and Operands.

Errors name the call, the argument, the rule and why it holds, what was got, and the fix:
ValueError for shapes and values, TypeError for kinds.
"""

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.problem import Operands, Problem, batch_index, head_index

from . import validate_fields as fields
from .backends import TABLE, interpreting, target
from .checks import as_array, check, kind
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
    check(
        implementation is None or implementation in names,
        ValueError,
        f"{call}(implementation=...)",
        f"must be None (the best one for the platform) or one of {names}",
        f"{implementation!r}",
        "cuDNN is behind jax.nn.dot_product_attention only." if implementation == "cudnn" else "",
    )
    flag(call, "deterministic", deterministic)
    q, k, v = qkv(call, q, k, v)
    *batch, T, H, D = q.shape
    *_, t, h, d = v.shape
    scale_static, scale_traced = _scale(call, scale, D)
    rate, words, row_offsets, b_offset, h_offset = _dropout(call, dropout)
    platform, architecture = target()
    problem = Problem(
        batch=tuple(batch),
        T=T,
        t=t,
        H=H,
        h=h,
        D=D,
        d=d,
        dtype=jnp.dtype(q.dtype),
        scale=scale_static,
        dropout_rate=rate,
        precision=_precision(call, precision, q.dtype),
        deterministic=bool(deterministic),
        platform=platform,
        architecture=architecture,
        interpret=interpreting(),
        masked=mask is not None,
        features="none",
        default_positions=q_positions is None and k_positions is None,
    )
    operands = Operands(q=q, k=k, v=v)
    at = batch_index(problem, operands) + b_offset, head_index(problem, operands) + h_offset
    where = fields.Where(call, problem, (q.shape, k.shape, v.shape), at)
    operands = dataclasses.replace(
        operands,
        scale=scale_traced,
        bias=fields.checked_bias(where, bias),
        mods=fields.checked_mods(where, score_mod),
        sinks=fields.checked_sinks(where, sinks),
        mask=fields.checked_mask(where, mask),
        q_positions=fields.checked_positions(where, "q_positions", q_positions, "T", T),
        k_positions=fields.checked_positions(where, "k_positions", k_positions, "t", t),
        dropout=words,
        row_offsets=row_offsets,
        b=at[0] if dropout is not None else None,
        h=at[1] if dropout is not None else None,
    )
    return dataclasses.replace(problem, features=_features(operands)), operands


def _features(operands: Operands) -> str:
    if operands.bias is not None or operands.mods:
        return "scores"
    arrays = operands.mask, operands.q_positions, operands.k_positions, operands.dropout
    if jax.tree.leaves(arrays):
        return "data"
    if operands.mask is None:
        return "none"
    seen = operands.mask.interval(0, "query")
    return "positions" if seen is None or seen.lo is None else "window"


def flag(call: str, name: str, x: Any) -> None:
    """Raises unless `x` is a bool."""
    check(
        isinstance(x, bool | np.bool_),
        TypeError,
        f"{call}({name}=...)",
        "must be a Python bool, since it selects the program",
        kind(x),
    )


def qkv(call: str, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v as arrays that belong together."""
    arrays = [as_array(f"{call}({name}=...)", x) for name, x in zip("qkv", (q, k, v))]
    for name, x in zip("qkv", arrays):
        check(
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
    check(
        q.dtype == k.dtype == v.dtype,
        TypeError,
        f"{call}(q, k, v)",
        "must have one dtype, since mixing would round some of them silently",
        f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
        "Cast them to the dtype that you want the output in.",
    )
    check(
        q.ndim == k.ndim == v.ndim >= 3,
        ValueError,
        f"{call}(q, k, v)",
        "must have the same number of axes, at least 3: (*batch, length, heads, head size)",
        shapes,
    )
    *batch, T, H, D = q.shape
    *k_batch, t, h, k_D = k.shape
    hint = _layout_hint(q.shape, k.shape)
    check(
        k.shape[:-1] == v.shape[:-1],
        ValueError,
        f"{call}(k, v)",
        "must agree in batch, length and heads; only the head size of v may differ",
        order,
        hint,
    )
    check(
        k_batch == batch,
        ValueError,
        f"{call}(q, k, v)",
        "must have the same batch axes",
        order,
        hint or "Broadcast with jax.numpy.broadcast_to where that is meant.",
    )
    check(
        D == k_D,
        ValueError,
        f"{call}(q, k)",
        "must have the same head size D, over which q·k sums",
        f"D {D} in q and {k_D} in k ({order})",
        hint,
    )
    divides = H == h or (h != 0 and H % h == 0)
    check(
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
    array = as_array(f"{call}(scale=...)", scale)
    check(
        array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.floating),
        ValueError,
        f"{call}(scale=...)",
        "must be a number or a floating-point array of shape ()",
        kind(array),
        "A factor per head or per token goes into q.",
    )
    return None, array


def _precision(call: str, precision: Any, dtype: Any) -> Any:
    if precision is None:
        # On GPU and TPU the default would round float32 to TF32 or bfloat16.
        open_choice = jax.config.jax_default_matmul_precision is None and dtype == jnp.float32
        return jax.lax.Precision.HIGHEST if open_choice else None
    try:
        matrix = jax.ShapeDtypeStruct((1, 1), dtype)
        jax.eval_shape(lambda x: jnp.matmul(x, x, precision=precision), matrix)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"`{call}(precision=...)` must be what jax.numpy.matmul takes as precision. "
            f"Got {precision!r}. Leave it out for float32 products of float32 inputs."
        ) from error
    return precision


def _dropout(call: str, dropout: Any) -> tuple:
    """(rate, the key's words, row offsets, batch offset, head offset)."""
    if dropout is None:
        return 0.0, None, None, 0, 0
    argument = f"{call}(dropout=...)"
    check(
        isinstance(dropout, Dropout),
        TypeError,
        argument,
        "must be a jflash.Dropout(rate, key)",
        kind(dropout),
    )
    rate = dropout.rate
    check(
        isinstance(rate, numbers.Real) and not isinstance(rate, bool),
        TypeError,
        argument,
        "needs a Python float as rate: it is part of the compiled program",
        kind(rate),
    )
    rate = float(rate)
    check(0 <= rate <= 1, ValueError, argument, "needs a rate between 0 and 1", f"{rate}")
    check(
        rate in (0, 1) or dropout.key is not None,
        ValueError,
        argument,
        "needs a key where 0 < rate < 1",
        "key=None",
        "Pass jflash.Dropout(rate, jax.random.key(...)), split anew for each layer and step.",
    )
    offsets = dropout.offsets
    check(
        isinstance(offsets, tuple | list) and len(offsets) == 4,
        ValueError,
        argument,
        "needs four offsets: (b, h, q, k)",
        f"{offsets!r}",
    )
    b, h, q_row, k_row = (jnp.asarray(x, jnp.int32) for x in offsets)
    if rate in (0, 1):
        return rate, None, None, b, h
    try:
        words = key_words(dropout.key)
    except (TypeError, ValueError) as error:
        got = kind(dropout.key)
        raise TypeError(f"`{argument}` needs a single key of jax.random as key. Got {got}.") from error
    return rate, words, (q_row, k_row), b, h

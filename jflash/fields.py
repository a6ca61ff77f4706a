"""Data that belongs to queries, keys, heads or pairs: the ground that masks and score mods share.

A mask or a score modifier is a frozen dataclass. Each field says which side its data belongs to;
nobody indexes anything. An implementation slices the fields as it slices q and k, and calls the
object unchanged: on the whole matrix (reference), on tiles, on the extents of blocks (schedule).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp


def static(**kw) -> Any:
    """A Python value: part of the trace's key."""
    return dataclasses.field(metadata={"side": "static"}, **kw)


def scalar(**kw) -> Any:
    """One number. A Python number keys the trace, an array is a run-time operand."""
    return dataclasses.field(metadata={"side": "scalar"}, **kw)


def per_head(**kw) -> Any:
    """[*batch or 1, H or 1]."""
    return dataclasses.field(metadata={"side": "head"}, **kw)


def per_query(**kw) -> Any:
    """[*batch or 1, T]."""
    return dataclasses.field(metadata={"side": "query"}, **kw)


def per_key(**kw) -> Any:
    """[*batch or 1, t]."""
    return dataclasses.field(metadata={"side": "key"}, **kw)


def per_pair(**kw) -> Any:
    """Broadcastable to [*batch, H, T, t]."""
    return dataclasses.field(metadata={"side": "pair"}, **kw)


def part(**kw) -> Any:
    """Another such object."""
    return dataclasses.field(metadata={"side": "part"}, **kw)


@dataclass_transform(
    frozen_default=True,
    field_specifiers=(static, scalar, per_head, per_query, per_key, per_pair, part),
)
class Fields:
    """Base of masks and score modifiers: every subclass is a frozen dataclass and a pytree."""

    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        # eq=False: comparing array fields by == would give an array.
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        jax.tree_util.register_pytree_with_keys(
            cls,
            _flatten_with_keys,
            lambda aux, data: _build(cls, dict(zip(aux[0], data)) | dict(aux[1])),
        )

    def map(self, **by_side: Callable[[Any], Any]) -> Any:
        """The same object over other views of its data: `map(query=f, key=g, ...)`."""
        new = {}
        for f in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            side, value = f.metadata["side"], getattr(self, f.name)
            if side == "part":
                value = value.map(**by_side)
            elif side in by_side and not _is_static(f, value):
                value = jax.tree.map(by_side[side], value)
            new[f.name] = value
        return _build(type(self), new)


def _is_static(field: dataclasses.Field, value: Any) -> bool:
    side = field.metadata["side"]
    return side == "static" or (side == "scalar" and isinstance(value, int | float))


def _flatten_with_keys(obj):
    values = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}
    fixed = {f.name: values[f.name] for f in dataclasses.fields(obj) if _is_static(f, values[f.name])}
    names = tuple(name for name in values if name not in fixed)
    children = [(jax.tree_util.GetAttrKey(name), values[name]) for name in names]
    return children, (names, tuple(fixed.items()))


def _build(cls, values: dict[str, Any]):
    # Not through __init__: transformations build these objects with placeholders for the arrays.
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


def elementwise(fn: Callable, *operands: Any) -> jax.Array:
    """`fn` of scalars, applied to each element of operands that broadcast against each other.

    By nested `vmap`, an axis at a time and only over the operands that have it: `slopes[h]` in
    `fn` is gathered once a head, not once a pair.
    """
    arrays = [jnp.asarray(x) for x in operands]
    rank = max(x.ndim for x in arrays)
    arrays = [x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim else x for x in arrays]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    for axis in reversed(range(rank)):
        has = [x.ndim > 0 and x.shape[axis] != 1 for x in arrays]
        if any(has):
            fn = jax.vmap(fn, in_axes=tuple(0 if y else None for y in has))
    squeezed = [x.reshape(tuple(n for n in x.shape if n != 1)) if x.ndim else x for x in arrays]
    return fn(*squeezed).reshape(shape)

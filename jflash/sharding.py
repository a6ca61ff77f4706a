"""Attention over device meshes: each device computes its batch entries and heads.

The axes of a call's arrays that devices may share out have names: the batch axes, and the heads.
They stay where they are and need no communication; lengths and head sizes are gathered. How that
comes about depends on the axes of the mesh (`jax.sharding.AxisType`):

- explicit (sharding is part of an array's type, the default of `jax.make_mesh`): each map of
  `rules.py` wraps itself in `shard_map`, by the types of its operands;
- automatic (XLA decides when it compiles): `partitioning` tells it what it may share out;
- manual (`shard_map`, `pmap`): the call is one device's own.

Rows of dropout and the indices that masks and score modifiers see are those of the whole, so the
result does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.compat import varying_axes
from pallas_kernels.problem import Operands


def axis_names(operands: Operands) -> list[PartitionSpec]:
    """The names of each leaf's axes: "b0", "b1", ... (batch), "h" (key heads), "g" (query heads of one).

    Query heads have two, ("h", "g"), the group within; None is an axis that stays whole, as those of
    size 1 do beside axes of their full size.
    """
    batch = tuple(f"b{n}" for n in range(operands.q.ndim - 3))
    H, h = operands.q.shape[-2], operands.k.shape[-2]
    heads = "h" if H == h else "g" if h == 1 else ("h", "g")

    def named(x, *axes):
        return PartitionSpec(*(None if n == 1 else name for n, name in zip(x.shape, axes)))

    whole = lambda x: PartitionSpec(*(None,) * len(x.shape))
    sides = dict(
        head=lambda x: named(x, *batch, heads),
        query=lambda x: named(x, *batch, None),
        key=lambda x: named(x, *batch, None),
        pair=lambda x: named(x, *batch, heads, None, None),
        scalar=whole,
    )
    per_key = lambda x: named(x, *batch, None, "h", None)
    fields: dict[str, Callable] = dict(
        q=lambda x: named(x, *batch, None, heads, None),
        k=per_key,
        v=per_key,
        bias=sides["pair"],
        mods=lambda mods: tuple(mod.map(**sides) for mod in mods),
        sinks=lambda x: named(x, heads),
        mask=lambda mask: mask.map(**sides),
        q_positions=sides["query"],
        k_positions=sides["key"],
        b=lambda x: named(x, *batch),
        h=lambda x: named(x, heads),
    )
    get = lambda name: getattr(operands, name)
    known: dict[str, Any] = {name: f(get(name)) for name, f in fields.items() if get(name) is not None}
    rest: dict[str, Any] = {f.name: jax.tree.map(whole, get(f.name)) for f in dataclasses.fields(operands)}
    return jax.tree.leaves(Operands(**rest | known), is_leaf=lambda x: isinstance(x, PartitionSpec))


def result_names(of_q: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
    """Those of (out, lse), from those of q."""
    *batch, T, heads, _ = of_q
    return of_q, PartitionSpec(*batch, heads, T)


def each(name: Any) -> tuple:
    return name if isinstance(name, tuple) else () if name is None else (name,)


def names_in(named: PartitionSpec) -> set[str]:
    return {name for axis in named for name in each(axis)}


def name_sizes(arrays: list[tuple]) -> dict[str, int]:
    """The size of each name in (names, shape) of arrays."""
    axes = [axis for named, shape in arrays for axis in zip(named, shape)]
    sizes = {name: n for name, n in axes if isinstance(name, str)}
    return sizes | {name[1]: n // sizes[name[0]] for name, n in axes if isinstance(name, tuple)}


def shared_out(arrays: list[tuple], of_mesh: Mapping) -> dict[str, tuple]:
    """The axes of the mesh that share out each name.

    `arrays`: (names, shape, axes of the mesh for each axis) of each array; the first that is sharded
    along a name decides. Its axes count, from the first one on, as far as they divide the name's size.
    `of_mesh`: the sizes of the mesh's axes.
    """
    of_names = name_sizes([(named, shape) for named, shape, _ in arrays])
    parts = lambda axes: math.prod(of_mesh[axis] for axis in axes)
    over: dict[str, tuple] = {}
    for name, size in sorted(of_names.items(), key=lambda item: item[0] == "g"):  # it follows "h"
        taken = {axis for axes in over.values() for axis in axes}
        for named, _, spec in arrays:
            for here, axes in zip(named, spec):
                if name not in each(here) or name in over:
                    continue
                if name == "g" and isinstance(here, tuple):
                    # A part of a group is a part of the heads only where no device has two key heads.
                    of_h = over.get("h", ())
                    follows = axes[: len(of_h)] == of_h and parts(of_h) == of_names["h"]
                    axes = axes[len(of_h) :] if follows else ()
                while size % parts(axes):
                    axes = axes[:-1]
                if axes and not taken & set(axes):
                    over[name] = axes
    return over


def spec_of(named: PartitionSpec, over: dict) -> PartitionSpec:
    return PartitionSpec(*(sum((over.get(n, ()) for n in each(name)), ()) or None for name in named))


def missing(named: PartitionSpec, over: dict) -> tuple:
    """The axes of the mesh along which a result without some names is each device's share of a sum."""
    return tuple(axis for name, axes in over.items() if name not in names_in(named) for axis in axes)


def sum_over(axes: tuple, x: jax.Array) -> jax.Array:
    if not axes:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return lax.psum(wide, axes).astype(x.dtype)


# Explicit axes


def over_explicit_axes(local: Callable, named: tuple, operands: Sequence, like: Any, interpret: bool) -> list:
    """Results of which each device computes `local` of its parts of the operands, whose types are sharded.

    `named`: the names of the axes of the operands and of the results; `like`: arrays whose types the
    results get, None: whatever comes of it.
    """
    mesh = explicit_mesh(operands)
    of_operands, of_results = named
    over = shared_out([(n, x.shape, axes_of_type(x)) for n, x in zip(of_operands, operands)], mesh.shape)
    specs = lambda named: tuple(spec_of(n, over) for n in named)

    def part(*parts):
        return [sum_over(missing(n, over), x) for n, x in zip(of_results, local(*vary_alike(parts)))]

    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    results = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=specs(of_operands),
        out_specs=list(specs(of_results)),
        # By default all, but for those of a `vmap` around, which cannot be named.
        **({} if len(explicit) == len(mesh.axis_names) else dict(axis_names=explicit)),
        check_vma=not interpret,  # Pallas's interpreter mixes what varies with what does not
    )(*(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs(of_operands))))
    if like is None:
        return results
    return [jax.sharding.reshard(x, jax.typeof(y).sharding) for x, y in zip(results, like)]


def with_enough_heads(operands: Operands) -> Operands:
    """Key heads that are fewer than the devices of the query heads, several times: one for each."""
    mesh, H, h = explicit_mesh(jax.tree.leaves(operands)), operands.q.shape[-2], operands.k.shape[-2]
    parts = math.prod(mesh.shape[axis] for axis in axes_of_type(operands.q)[-2])
    times = parts // math.gcd(parts, h)
    if times == 1 or h == 1 or H // h % times:
        return operands
    k, v = (jnp.repeat(x, times, axis=-2) for x in (operands.k, operands.v))
    return dataclasses.replace(operands, k=k, v=v)


def replicated(x: jax.Array) -> jax.Array:
    """`x`, whole on each device if its type shards it."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def explicit_mesh(arrays: Sequence) -> Any:
    """The mesh over which the types of some arrays are sharded, or None."""
    for x in arrays:
        sharding = jax.typeof(x).sharding
        if any(axis is not None for axis in sharding.spec):
            return sharding.mesh
    return None


def axes_of_type(x: jax.Array) -> list[tuple]:
    """For each axis of `x` the axes of the mesh that shard it."""
    return list(map(each, (*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim]))


def vary_alike(arrays: Any) -> Any:
    """A pytree of arrays, all cast to vary over the same manual mesh axes (`shard_map` with `check_vma`)."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(arrays)))

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays) if axes else arrays

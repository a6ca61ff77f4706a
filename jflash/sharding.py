"""Attention over device meshes: each device computes its batch entries and heads.

The axes of a call's arrays that devices may share out have names: the batch axes, and the heads.
They stay where they are and need no communication; lengths and head sizes are gathered. How that
comes about depends on the axes of the mesh (`jax.sharding.AxisType`):

- explicit (sharding is part of an array's type, the default of `jax.make_mesh`): the call wraps
  itself in `shard_map`, by the types of its operands;
- automatic (XLA decides when it compiles): each map of `rules.py` is lowered as a
  `custom_partitioning`, which tells XLA what may be shared out and what a device computes then;
- manual (`shard_map`, `pmap`): the call is one device's own.

Rows of dropout and the indices that masks and score modifiers see are those of the whole, so the
result does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.compat import tiles, varying_axes
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


def _each(name: Any) -> tuple:
    return name if isinstance(name, tuple) else () if name is None else (name,)


def _flat(named: PartitionSpec) -> set[str]:
    return {name for axis in named for name in _each(axis)}


def _sizes(arrays: list[tuple]) -> dict[str, int]:
    """The size of each name in (names, shape) of arrays."""
    axes = [axis for named, shape in arrays for axis in zip(named, shape)]
    sizes = {name: n for name, n in axes if isinstance(name, str)}
    return sizes | {name[1]: n // sizes[name[0]] for name, n in axes if isinstance(name, tuple)}


def _shared_out(arrays: list[tuple], mesh: Any) -> dict[str, tuple]:
    """The axes of the mesh that share out each name.

    `arrays`: (names, shape, axes of the mesh for each axis) of each array; the first that is sharded
    along a name decides. Its axes count, from the first one on, as far as they divide the name's size.
    """
    sizes = _sizes([(named, shape) for named, shape, _ in arrays])
    parts = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
    over: dict[str, tuple] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[0] == "g"):  # it follows "h"
        taken = {axis for axes in over.values() for axis in axes}
        for named, _, spec in arrays:
            for here, axes in zip(named, spec):
                if name not in _each(here) or name in over:
                    continue
                if name == "g" and isinstance(here, tuple):
                    # A part of a group is a part of the heads only where no device has two key heads.
                    of_h = over.get("h", ())
                    follows = axes[: len(of_h)] == of_h and parts(of_h) == sizes["h"]
                    axes = axes[len(of_h) :] if follows else ()
                while size % parts(axes):
                    axes = axes[:-1]
                if axes and not taken & set(axes):
                    over[name] = axes
    return over


def _spec(named: PartitionSpec, over: dict) -> PartitionSpec:
    return PartitionSpec(*(sum((over.get(n, ()) for n in _each(name)), ()) or None for name in named))


# Explicit axes


def over_explicit_axes(local: Callable, named: tuple, operands: Sequence, like: Any, interpret: bool) -> list:
    """Results of which each device computes `local` of its parts of the operands, whose types are sharded.

    `named`: the names of the axes of the operands and of the results; `like`: arrays whose types the
    results get, None: whatever comes of it.
    """
    mesh = explicit_mesh(operands)
    of_operands, of_results = named
    over = _shared_out([(n, x.shape, _axes_of_type(x)) for n, x in zip(of_operands, operands)], mesh)
    spec = lambda named: tuple(_spec(n, over) for n in named)

    def part(*parts):
        return [_sum_over(_missing(n, over), x) for n, x in zip(of_results, local(*vary_alike(parts)))]

    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    results = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=spec(of_operands),
        out_specs=list(spec(of_results)),
        # By default all, but for those of a `vmap` around, which cannot be named.
        **({} if len(explicit) == len(mesh.axis_names) else dict(axis_names=explicit)),
        check_vma=not interpret,  # Pallas's interpreter mixes what varies with what does not
    )(*(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(operands, spec(of_operands))))
    if like is None:
        return results
    return [jax.sharding.reshard(x, jax.typeof(y).sharding) for x, y in zip(results, like)]


def with_enough_heads(operands: Operands) -> Operands:
    """Key heads that are fewer than the devices of the query heads, several times: one for each."""
    mesh, H, h = explicit_mesh(jax.tree.leaves(operands)), operands.q.shape[-2], operands.k.shape[-2]
    parts = math.prod(mesh.shape[axis] for axis in _axes_of_type(operands.q)[-2])
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


def _axes_of_type(x: jax.Array) -> list[tuple]:
    """For each axis of `x` the axes of the mesh that shard it."""
    spec = (*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim]
    return [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in spec]


# Automatic axes

EXPORT = (
    "attention over several devices cannot be exported with automatic mesh axes: what a device computes is "
    "known only when XLA compiles. Make the axes explicit, jax.make_mesh(shape, names, axis_types="
    "(jax.sharding.AxisType.Explicit,) * n), and shard the operands over them; or export a jax.shard_map."
)


def automatic() -> bool:
    """Whether XLA may share out among several devices what is traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh.size > 1 and AxisType.Auto in mesh.axis_types
    return getattr(mesh, "abstract_device", None) is None and jax.device_count() > 1


def on_several_devices(operands: Any) -> bool:
    return any(len(x.sharding.device_set) > 1 for x in operands if isinstance(x, jax.Array))


def automatic_mesh(context: Any) -> Mesh | None:
    """The devices of what is lowered in this `LoweringRuleContext`; None where XLA shares nothing out.

    The axes are those of the program's mesh, split into prime factors: XLA also shards by parts of an
    axis. Some may be manual.
    """
    module = context.module_context
    axes = module.axis_context
    manual: frozenset = getattr(axes, "manual_axes", frozenset())
    mesh: Any = axes.mesh if manual else getattr(axes, "abstract_mesh", None)
    if manual:
        devices = mesh.devices
    elif getattr(axes, "num_devices", 1) > 1:
        devices = np.array(axes.device_assignment).reshape(mesh.axis_sizes if mesh else -1)
    else:
        return None
    names = mesh.axis_names if mesh else ("",)
    primes = [(name, n) for name, size in zip(names, devices.shape) for n in _primes(size)]
    kinds = tuple(AxisType.Manual if name in manual else AxisType.Auto for name, _ in primes)
    if AxisType.Auto not in kinds:
        return None
    if module.lowering_parameters.for_export:
        raise NotImplementedError(EXPORT)
    return Mesh(devices.reshape([n for _, n in primes]), [f"part{n}" for n in range(len(primes))], kinds)


def _primes(n: int) -> list[int]:
    first = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if first is None else [first, *_primes(n // first)]


def partitioned(compute: Callable, local: Callable, named: tuple, shapes: list, mesh: Mesh) -> Callable:
    """`compute(*operands)`, of which each device computes `local` of its parts.

    `named`: the names of the axes of the operands and of the results; `shapes`: those of the operands;
    `mesh`: an `automatic_mesh`.
    """
    of_operands, of_results = named
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    free = [name for name, kind in kinds.items() if kind == AxisType.Auto]
    # Among manual axes XLA numbers the devices of one group, in an order that it keeps to itself.
    group = Mesh(mesh.devices[tuple(slice(None) if name in free else 0 for name in kinds)], free)

    def place(operands, results=()):
        arrays = [*zip(of_operands, operands), *zip(of_results, results)]
        over = _shared_out([(n, x.shape, _axes_of(x, group)) for n, x in arrays], group)
        sums = {len(_missing(n, over)) for n in of_results} - {0, len(free)}
        if sums and group.size < mesh.size:  # over which devices of a group depends on that order
            over = {name: axes for name, axes in over.items() if all(name in _flat(n) for n in of_results)}
        return over, *(tuple(NamedSharding(group, _spec(n, over)) for n in x) for x in named)

    def partition(_, operands, results):
        over, operands, results = place(operands, results)
        sums = [_missing(n, over) for n in of_results]

        def part(*parts):
            # Else the shardings of an explicit mesh around it would stay in what XLA has partitioned.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return tuple(map(_sum_over, sums, local(*parts)))

        return mesh, part, results, operands

    call = custom_partitioning(lambda *operands: tuple(compute(*operands)))
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda _, operands, results: place(operands)[2],
        decode_shardings=False,  # JAX fails on a sharding by parts of an axis
        sharding_rule=_rule(named, _sizes(list(zip(of_operands, shapes)))),
    )
    return call


def _missing(named: PartitionSpec, over: dict) -> tuple:
    """The axes of the mesh along which a result without some names is each device's share of a sum."""
    return tuple(axis for name, axes in over.items() if name not in _flat(named) for axis in axes)


def _sum_over(axes: tuple, x: jax.Array) -> jax.Array:
    if not axes:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return lax.psum(wide, axes).astype(x.dtype)


def _rule(named: tuple, sizes: dict[str, int]) -> SdyShardingRule:
    """How XLA (Shardy) propagates shardings: along names."""
    whole, within = [], {}

    def factor(name):
        if isinstance(name, str):
            return name
        if name is not None:
            within[name[1]] = sizes[name[1]]
            return CompoundFactor(*name)
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    operands, results = (tuple(ArrayMapping(*map(factor, x)) for x in side) for side in named)
    return SdyShardingRule(operands, results, need_replication_factors=tuple(whole), **within)


def _axes_of(x: Any, mesh: Mesh) -> list[tuple]:
    """For each axis of `x` the axes of the mesh that shard it, where its sharding is of that kind."""
    sharding, ndim = getattr(x, "sharding", None), len(x.shape)
    if sharding is None or sharding.is_fully_replicated:
        return [()] * ndim
    numbers = tiles(sharding, ndim)
    at = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)  # where each device stands
    found = []
    for part in np.indices(numbers.shape)[:ndim]:
        part = part.flat[np.argsort(numbers, None)]  # which part of the axis each device has
        # Its number has one digit for each axis of the mesh that shards this one.
        steps = [part[(i == 1) & (at.sum(0) == 1)].item() for i in at]
        axes = sorted((-step, axis) for step, axis in zip(steps, mesh.axis_names) if step)
        found.append(tuple(axis for _, axis in axes) if (steps @ at == part).all() else ())
    return found


def vary_alike(arrays: Any) -> Any:
    """A pytree of arrays, all cast to vary over the same manual mesh axes (`shard_map` with `check_vma`)."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(arrays)))

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays) if axes else arrays

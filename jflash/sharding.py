"""Attention over device meshes: each device computes its batch entries and heads.

On explicit mesh axes (sharding is part of an array's type, the default of `jax.make_mesh`) the
call wraps itself in `shard_map`, by the types of its operands: batch axes and heads stay where they
are and need no communication; lengths and head sizes are gathered. Rows of dropout and the indices
that masks and score modifiers see are those of the whole, so the result does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.compat import varying_axes
from pallas_kernels.problem import Operands, Problem, batch_index, head_index


def over_explicit_axes(problem: Problem, operands: Operands, attend: Callable) -> tuple:
    """`attend(operands)`, (out, lse), on each device's part of operands whose types are sharded."""
    mesh = explicit_mesh(operands)
    operands = dataclasses.replace(
        operands, b=batch_index(problem, operands), h=head_index(problem, operands)
    )
    batch, heads = _axes(problem, operands, mesh)
    specs = jax.tree.leaves(_specs(operands, batch, heads), is_leaf=_is_spec)
    leaves, tree = jax.tree.flatten(operands)
    leaves = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs)]
    local = jax.shard_map(
        lambda *parts: attend(jax.tree.unflatten(tree, parts)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=(PartitionSpec(*batch, None, heads, None), PartitionSpec(*batch, heads, None)),
        axis_names={
            name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit
        },
        check_vma=not problem.interpret,  # Pallas's interpreter mixes what varies with what does not
    )
    return local(*leaves)


def replicated(x: jax.Array) -> jax.Array:
    """`x`, whole on each device if its type shards it."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def explicit_mesh(operands: Operands) -> Any:
    """The mesh over which the types of some operands are sharded, or None."""
    for x in jax.tree.leaves(operands):
        sharding = jax.typeof(x).sharding
        if any(axis is not None for axis in sharding.spec):
            return sharding.mesh
    return None


def _axes(problem: Problem, operands: Operands, mesh: Any) -> tuple[tuple, Any]:
    """The mesh axes of each batch axis and of the heads, as q has them, else k."""
    q, k = (_padded_spec(x) for x in (operands.q, operands.k))
    taken = set()

    def choose(axis, size):
        for names in (q[axis], k[axis]):
            every = names if isinstance(names, tuple) else (names,) if names else ()
            parts = math.prod(mesh.shape[name] for name in every)
            if every and not taken & set(every) and size % parts == 0:
                taken.update(every)
                return names
        return None

    batch = tuple(choose(axis, size) for axis, size in enumerate(problem.batch))
    return batch, choose(-2, problem.h)  # a device needs whole groups of query heads


def _padded_spec(x: jax.Array) -> tuple:
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def _specs(operands: Operands, batch: tuple, heads: Any) -> Operands:
    """The operands with each array replaced by its spec; an axis of size 1 stays whole."""

    def spec(x, *axes):
        return PartitionSpec(*(None if n == 1 else name for n, name in zip(x.shape, axes)))

    whole = lambda x: PartitionSpec()
    sides = dict(
        head=lambda x: spec(x, *batch, heads),
        query=lambda x: spec(x, *batch, None),
        key=lambda x: spec(x, *batch, None),
        pair=lambda x: spec(x, *batch, heads, None, None),
        scalar=whole,
    )
    per_token = lambda x: spec(x, *batch, None, heads, None)
    fields: dict[str, Callable] = dict(
        q=per_token,
        k=per_token,
        v=per_token,
        bias=sides["pair"],
        mods=lambda mods: tuple(mod.map(**sides) for mod in mods),
        sinks=lambda x: spec(x, heads),
        mask=lambda mask: mask.map(**sides),
        q_positions=sides["query"],
        k_positions=sides["key"],
        b=lambda x: spec(x, *batch),
        h=lambda x: spec(x, heads),
    )
    get = lambda name: getattr(operands, name)
    known: dict[str, Any] = {name: f(get(name)) for name, f in fields.items() if get(name) is not None}
    rest: dict[str, Any] = {f.name: jax.tree.map(whole, get(f.name)) for f in dataclasses.fields(operands)}
    return Operands(**rest | known)


def vary_alike(arrays: Any) -> Any:
    """A pytree of arrays, all cast to vary over the same manual mesh axes (`shard_map` with `check_vma`)."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(arrays)))

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays) if axes else arrays

"""Attention on automatic mesh axes: what XLA is told, and what it does, which `explain` tells.

XLA decides which device computes what when it compiles. A `custom_partitioning` tells it which axes it
may share out, and what each device then computes; see `sharding` for the names of axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from pallas_kernels.compat import tiles
from pallas_kernels.problem import Operands

from .sharding import (
    axes_of_type,
    axis_names,
    each,
    explicit_mesh,
    missing,
    name_sizes,
    names_in,
    shared_out,
    spec_of,
    sum_over,
    with_enough_heads,
)

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
        over = shared_out([(n, x.shape, _axes_of(x, group)) for n, x in arrays], group.shape)
        sums = {len(missing(n, over)) for n in of_results} - {0, len(free)}
        if sums and group.size < mesh.size:  # over which devices of a group depends on that order
            over = {name: axes for name, axes in over.items() if all(name in names_in(n) for n in of_results)}
        return over, *(tuple(NamedSharding(group, spec_of(n, over)) for n in x) for x in named)

    def partition(_, operands, results):
        over, operands, results = place(operands, results)
        sums = [missing(n, over) for n in of_results]

        def part(*parts):
            # Else the shardings of an explicit mesh around it would stay in what XLA has partitioned.
            device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
                return tuple(map(sum_over, sums, local(*parts)))

        return mesh, part, results, operands

    call = custom_partitioning(lambda *operands: tuple(compute(*operands)))
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda _, operands, results: place(operands)[2],
        decode_shardings=False,  # JAX fails on a sharding by parts of an axis
        sharding_rule=_rule(named, name_sizes(list(zip(of_operands, shapes)))),
    )
    return call


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


def describe(operands: Operands, given: Sequence) -> str:
    """How devices share out a call, "" on one device.

    `given`: the shardings of q, k and v that their types do not tell, or None.
    """
    mesh: Any = explicit_mesh(jax.tree.leaves(operands))
    H, h, whole = operands.q.shape[-2], operands.k.shape[-2], (None,) * operands.q.ndim
    if mesh is not None:
        operands = with_enough_heads(operands)
        specs = [axes_of_type(x) for x in (operands.q, operands.k, operands.v)]
        split = {name: [(name, n)] for name, n in mesh.shape.items()}
    else:
        mesh = next((x.mesh for x in given if isinstance(x, NamedSharding)), None)
        if mesh is None:
            return ""
        known = [(*x.spec, *whole) if isinstance(x, NamedSharding) else whole for x in given]
        specs = [list(map(each, spec[: len(whole)])) for spec in known]
        split = {
            name: [(f"{name}{i}", p) for i, p in enumerate(_primes(n))] for name, n in mesh.shape.items()
        }
    of_mesh = dict(axis for axes in split.values() for axis in axes)
    spread = lambda spec: [tuple(axis for name in axes for axis, _ in split[name]) for axes in spec]
    arrays = zip(axis_names(operands), (operands.q, operands.k, operands.v), specs)
    over = shared_out([(named, x.shape, spread(spec)) for named, x, spec in arrays], of_mesh)
    parts = lambda names: math.prod(of_mesh[axis] for name in names for axis in over.get(name, ()))
    wanted = next((spec[-2] for spec in specs if spec[-2]), ())
    devices, shared = math.prod(mesh.shape[name] for name in wanted), parts(["h", "g"])
    text = f"batch entries among {parts([n for n in over if n[0] == 'b'])} devices, heads among {shared}"
    among = f"do not divide among the {devices} devices of {', '.join(wanted)}"
    if shared < devices:
        text += (
            f"; {H} query heads with {h} key heads {among}: they are gathered once, and "
            f"{devices // shared} devices compute the same"
        )
    elif h % devices:
        text += f"; key heads, {h}, {among}: they are gathered once, and each device takes what it needs"
    if any(spec[-3] or spec[-1] for spec in specs):
        text += "; lengths and head sizes are gathered"
    return text

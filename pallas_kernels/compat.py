"""What differs between the supported JAX versions, in one place."""

from typing import Any

import jax
import numpy as np
from jax._src import dispatch


def varying_axes(x: Any) -> frozenset:
    """The manual mesh axes over which `x` varies, inside `shard_map` with `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


def requires_devices(primitive: Any) -> None:
    """Lets JAX tell the rule that lowers `primitive` for which devices. There is no public way."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def tiles(sharding: Any, ndim: int) -> np.ndarray:
    """The number of the device of each part of an array of `ndim` axes, as XLA shards it.

    Where several have the same part, they stand along more axes, behind those of the array.
    """
    hlo = sharding._to_xla_hlo_sharding(ndim)
    return np.reshape(hlo.tile_assignment_devices(), hlo.tile_assignment_dimensions())

"""What differs between the supported JAX versions, in one place."""

from typing import Any

import jax
from jax._src import dispatch


def varying_axes(x: Any) -> frozenset:
    """The manual mesh axes over which `x` varies, inside `shard_map` with `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


def requires_devices(primitive: Any) -> None:
    """Lets JAX tell the rule that lowers `primitive` for which devices. There is no public way."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)

"""What differs between the supported JAX versions, in one place."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset:
    """The manual mesh axes over which `x` varies, inside `shard_map` with `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying

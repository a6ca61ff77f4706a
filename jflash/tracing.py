"""Functions of users, as operands: traced once on scalars, their constants hoisted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from .checks import check


class TracedFunction:
    """A traced function of (constants, *scalars): one key for jit as long as the trace is the same."""

    def __init__(self, fn: Callable, jaxpr: Any):
        self.fn, self.jaxpr, self.text = fn, jaxpr, str(jaxpr)

    def __hash__(self):
        return hash((self.fn, self.text))

    def __eq__(self, other):
        return isinstance(other, TracedFunction) and (self.fn, self.text) == (other.fn, other.text)

    def __call__(self, consts, *args):
        closed = jax.extend.core.ClosedJaxpr(self.jaxpr, consts)  # pyright: ignore[reportPrivateImportUsage]
        return jax.extend.core.jaxpr_as_fun(closed)(*args)[0]


def trace(heads: int, argument: str, fn: Callable, at: list, signature: str, returns: type) -> tuple:
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*at)
    wanted = "a boolean" if returns is bool else "a floating-point"
    fits = isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == ()
    fits = fits and (shape.dtype == bool if returns is bool else jnp.issubdtype(shape.dtype, jnp.floating))
    check(fits, ValueError, argument, f"{signature} must map scalars to {wanted} scalar", f"{shape}")
    consts = tuple(jnp.asarray(c) for c in closed.consts)
    for c in consts:
        check(
            c.shape in ((), (heads,)),
            ValueError,
            argument,
            f"may close over scalars and over vectors [H] (H={heads}) that it indexes by h",
            f"an array of shape {c.shape}",
            "Data per token goes into positions or Segments, data per pair into `bias` or `Dense`.",
        )
    return TracedFunction(fn, closed.jaxpr), consts

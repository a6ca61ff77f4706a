"""Functions of users, as operands: traced once on scalars, their constants hoisted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core.primitives import jit_p
from jax.sharding import AxisType

from .checks import check
from .sharding import vary_alike


class TracedFunction:
    """A traced function of (constants, *scalars): one key for jit as long as the trace is the same."""

    def __init__(self, fn: Callable, jaxpr: Any):
        self.fn, self.jaxpr, self.text = fn, jaxpr, str(jaxpr)

    def __hash__(self):
        return hash((self.fn, self.text))

    def __eq__(self, other):
        return isinstance(other, TracedFunction) and (self.fn, self.text) == (other.fn, other.text)

    def __call__(self, consts, *args):
        return _replay(self.jaxpr, consts, args)[0]


def _replay(jaxpr: Any, consts: Sequence, args: Sequence) -> list:
    """The results of the trace. Where it was made nothing varied over devices; here everything may.

    Bodies of control flow and of custom derivatives (`jax.nn.relu`) stay as they were traced: where
    `shard_map` checks what varies (`check_vma`, its default), JAX may refuse them.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    for eqn in jaxpr.eqns:
        operands = vary_alike([read(x) for x in eqn.invars])
        if eqn.primitive is jit_p:
            inner = eqn.params["jaxpr"]
            results = _replay(inner.jaxpr, inner.consts, operands)
        elif eqn.primitive.name == "pvary":
            results = operands
        else:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        results = results if isinstance(results, list | tuple) else [results]
        values.update(zip(eqn.outvars, results))
    return [read(x) for x in jaxpr.outvars]


def trace(heads: int, argument: str, fn: Callable, at: list, signature: str, returns: type) -> tuple:
    # Without an explicit mesh, whose shardings the equations would keep: `sharding` hands the function
    # to each device. In a user's `shard_map`, what it closes over may be of the manual one.
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh if AxisType.Manual in mesh.axis_types else jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(mesh):
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

"""Linear maps as a primitive of JAX: how one is differentiated, transposed and batched.

A map is a function that is linear in its last operands; the others, the residuals, it may depend on
in any way. Where it is a tangent (`linear`) it is computed by whoever asks for it: plain reverse mode
only transposes it. What a transpose gives is asked for (`value`), and so is attention itself, a map
without linear operands. All of this is over flat lists of arrays.

A primitive rather than `jax.custom_jvp`, whose rule partial evaluation drops within `lax.scan`
(JAX 0.11), so that gradients of gradients would reverse the loops within.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from pallas_kernels.compat import requires_devices

from . import partitioning, sharding


class Map:
    """What JAX must know of a linear map. Hashable: a map is a static part of an equation."""

    residuals: int  # how many of the operands are residuals; they come first
    names: tuple[str, ...] = ()  # of the results, for policies of `jax.checkpoint`
    interpret: bool = False  # whether Pallas interprets it

    def __repr__(self) -> str:  # short: it stands in every printed jaxpr
        return type(self).__name__

    def apply(self, *operands) -> list:
        """The results."""
        raise NotImplementedError

    def like(self, *operands) -> list | None:
        """Those operands whose types the results have; None where these have types of their own."""
        return None

    def types(self, *operands) -> list:
        """Those types, nothing computed."""
        return [jax.typeof(x) for x in self.like(*operands) or ()]

    def axis_names(self, *operands) -> tuple[list, list]:
        """The names of the axes that devices may share out, of operands and results: see `sharding`."""
        raise NotImplementedError

    def transpose(self, residuals: list, cotangents: list) -> list:
        """A cotangent for each linear operand, from those of the results; None where one is zero."""
        raise NotImplementedError

    def derivative(self, residuals: list, arguments: list, results: list, tangents: list) -> list | None:
        """The results' tangents along those of the residuals, None where one is zero; None if all are."""
        raise NotImplementedError


# One primitive twice: JAX passes the devices on to be lowered only for those that ask for it.
map_p, shared_p = Primitive("jflash"), Primitive("jflash")
requires_devices(shared_p)


def _bind(operands, map, types, jaxpr):
    explicit = sharding.explicit_mesh(operands) is not None
    primitive = shared_p if partitioning.automatic() and not explicit else map_p
    return primitive.bind(*operands, map=map, types=types, jaxpr=jaxpr)


def linear(map: Map, *operands: Any) -> list:
    """The results of a map, traced and computed once they are asked for."""
    return _bind(operands, map, tuple(map.types(*operands)), None)


def value(map: Map, *operands: Any) -> list:
    """The results of a map, traced or computed now."""
    if not any(isinstance(x, Tracer) for x in operands):  # nobody transforms it
        run = (
            functools.partial(_among_devices, map) if partitioning.on_several_devices(operands) else map.apply
        )
        return run(*operands)
    jaxpr = jax.make_jaxpr(functools.partial(_compute_now, map))(*operands)
    return _bind(operands, map, tuple(jaxpr.out_avals), jaxpr)


@functools.partial(jax.jit, static_argnums=0)
def _among_devices(map: Map, *operands: Any) -> list:
    return value(map, *operands)


def plain(map: Map, *operands: Any, local: Callable | None = None) -> list:
    """The results of a map as JAX itself differentiates it.

    Of operands whose types are sharded each device has a part, and `local`, by default the map, is of those.
    """
    if sharding.explicit_mesh(operands) is None:
        return map.apply(*operands)
    named, like = map.axis_names(*operands), map.like(*operands)
    return sharding.over_explicit_axes(local or map.apply, named, operands, like, map.interpret)


def _compute_now(map: Map, *operands: Any) -> list:
    return plain(map, *operands, local=functools.partial(value, map))  # other axes may be automatic


def _jvp(operands, tangents, *, map, types, jaxpr):
    results = _bind(operands, map, types, jaxpr)
    if map.names:
        results = [checkpoint_name(x, name) for x, name in zip(results, map.names)]
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    residuals, arguments = list(operands[: map.residuals]), list(operands[map.residuals :])
    of_residuals, of_arguments = given[: map.residuals], given[map.residuals :]
    terms = []
    if any(t is not None for t in of_arguments):
        filled = [jnp.zeros_like(x) if t is None else t for x, t in zip(arguments, of_arguments)]
        terms.append(linear(map, *residuals, *filled))
    if any(t is not None for t in of_residuals):
        terms.append(map.derivative(residuals, arguments, results, of_residuals))
    terms = [term for term in terms if term is not None] or [[jnp.zeros_like(x) for x in results]]
    return results, [functools.reduce(jnp.add, each) for each in zip(*terms)]


def _transpose(cotangents, *operands, map, types, jaxpr):
    given = [None if isinstance(t, ad.Zero) else t for t in cotangents]
    return [None] * map.residuals + map.transpose(list(operands[: map.residuals]), given)


@dataclasses.dataclass(frozen=True, repr=False)
class _Batched(Map):
    """A map under `vmap`. Linear operands that are not mapped get the sum of their cotangents."""

    map: Map
    axes: tuple
    over: tuple  # the other arguments of `vmap`

    @property
    def residuals(self):
        return self.map.residuals

    @property
    def names(self):
        return self.map.names

    @property
    def interpret(self):
        return self.map.interpret

    def apply(self, *operands):
        return self._vmap(self.map.apply, self.axes)(*operands)

    def like(self, *operands):
        return self._vmap(self.map.like, self.axes)(*operands)

    def types(self, *operands):
        return jax.make_jaxpr(self.like)(*operands).out_avals

    def axis_names(self, *operands):
        own, mapped = f"v{self._depth}", zip(operands, self.axes)
        one = lambda x, n: jax.ShapeDtypeStruct(
            x.shape if n is None else (*x.shape[:n], *x.shape[n + 1 :]), x.dtype
        )
        of_operands, of_results = self.map.axis_names(*(one(x, n) for x, n in mapped))
        put = lambda x, n: x if n is None else PartitionSpec(*x[:n], own, *x[n:])
        return [put(x, n) for x, n in zip(of_operands, self.axes)], [put(x, 0) for x in of_results]

    @property
    def _depth(self):
        return self.map._depth + 1 if isinstance(self.map, _Batched) else 0

    def transpose(self, residuals, cotangents):
        of_residuals, of_arguments = self._split()
        each = self._vmap(self.map.transpose, (of_residuals, 0))(residuals, cotangents)
        return [x.sum(0) if n is None else jnp.moveaxis(x, 0, n) for x, n in zip(each, of_arguments)]

    def derivative(self, residuals, arguments, results, tangents):
        of_residuals, of_arguments = self._split()
        of_tangents = [None if t is None else n for t, n in zip(tangents, of_residuals)]
        return self._vmap(self.map.derivative, (of_residuals, of_arguments, 0, of_tangents))(
            residuals, arguments, results, tangents
        )

    def _split(self):
        return list(self.axes[: self.residuals]), list(self.axes[self.residuals :])

    def _vmap(self, f, axes):
        return jax.vmap(f, in_axes=axes, **dict(self.over))


def _batch(axis, operands, axes, *, map, types, jaxpr):
    if all(n is None for n in axes):
        return _bind(operands, map, types, jaxpr), [None] * len(types)
    names = dict(axis_name=axis.name, spmd_axis_name=axis.spmd_name)
    batched = _Batched(map, tuple(axes), tuple(names.items()))
    results = (linear if jaxpr is None else value)(batched, *operands)
    return results, [0] * len(results)


def _compute(*operands, map, types, jaxpr):
    if jaxpr is not None:
        return jaxpr_as_fun(jaxpr)(*operands)
    # A program may be lowered where x64 is off again.
    wide = any(x.dtype.itemsize == 8 for x in operands)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return _compute_now(map, *operands)


def _run(*operands, map, types, jaxpr):
    if partitioning.on_several_devices(operands):
        return _among_devices(map, *operands)
    return _compute(*operands, map=map, types=types, jaxpr=jaxpr)


def _lower(context, *values, map, types, jaxpr):
    compute = functools.partial(_compute, map=map, types=types, jaxpr=jaxpr)
    mesh = partitioning.automatic_mesh(context)
    if mesh is not None:
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in context.avals_in]
        local = functools.partial(_compute, map=map, types=types, jaxpr=None)
        shapes = [x.shape for x in operands]
        compute = partitioning.partitioned(compute, local, map.axis_names(*operands), shapes, mesh)
    return mlir.lower_fun(compute, multiple_results=True)(context, *values)


for primitive in (map_p, shared_p):
    primitive.multiple_results = True
    primitive.def_impl(_run)
    # JAX 0.12 lowers types of its own (`hijax`) by tracing anew; what is traced already may hold them.
    primitive.to_lojax = _compute
    primitive.def_abstract_eval(lambda *_, map, types, jaxpr: list(types))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.fancy_primitive_batchers[primitive] = _batch
mlir.register_lowering(map_p, mlir.lower_fun(_compute, multiple_results=True))
mlir.register_lowering(shared_p, _lower)

"""Linear maps as a primitive of JAX: how one is differentiated, transposed and batched.

A map is a function that is linear in its last operands; the others, the residuals, it may depend on
in any way. Where it is a tangent it is bound as `linear_p` and computed by whoever asks for it: plain
reverse mode only transposes it. What a transpose gives is asked for, so it is computed at once
(`value`), and is in its turn a function that JAX can differentiate. All of this is over flat lists of
arrays.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Map:
    """What JAX must know of a linear map. Hashable: a map is a static part of an equation."""

    residuals: int  # how many of the operands are residuals; they come first

    def apply(self, *operands) -> list:
        """The results."""
        raise NotImplementedError

    def like(self, *operands) -> list:
        """Those operands whose types the results have."""
        raise NotImplementedError

    def types(self, *operands) -> list:
        """The types of the results, nothing of them computed."""
        return [jax.typeof(x) for x in self.like(*operands)]

    def transpose(self, residuals: list, cotangents: list) -> list:
        """A cotangent for each linear operand, from those of the results; None where one is zero."""
        raise NotImplementedError

    def derivative(self, residuals: list, arguments: list, tangents: list) -> list | None:
        """The results' tangents along those of the residuals, None where one is zero; None if all are."""
        raise NotImplementedError


linear_p = Primitive("jflash_linear")
linear_p.multiple_results = True


def linear(map: Map, *operands: Any) -> list:
    """The results of a map, computed once they are asked for."""
    return linear_p.bind(*operands, map=map, types=tuple(map.types(*operands)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def value(map: Map, *operands: Any) -> tuple:
    """The results of a map."""
    return tuple(map.apply(*operands))


@functools.partial(value.defjvp, symbolic_zeros=True)
def _value_jvp(map: Map, primals, tangents):
    results = value(map, *primals)
    given = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    return results, tuple(_tangents(map, primals, given, results))


def _linear_jvp(primals, tangents, *, map, types):
    results = linear_p.bind(*primals, map=map, types=types)
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    return results, _tangents(map, primals, given, results)


def _tangents(map: Map, operands, tangents, results) -> list:
    residuals, arguments = operands[: map.residuals], operands[map.residuals :]
    of_residuals, of_arguments = tangents[: map.residuals], tangents[map.residuals :]
    terms = []
    if any(t is not None for t in of_arguments):
        filled = [jnp.zeros_like(x) if t is None else t for x, t in zip(arguments, of_arguments)]
        terms.append(linear(map, *residuals, *filled))
    if any(t is not None for t in of_residuals):
        terms.append(map.derivative(list(residuals), list(arguments), list(of_residuals)))
    terms = [term for term in terms if term is not None] or [[jnp.zeros_like(x) for x in results]]
    return [functools.reduce(jnp.add, each) for each in zip(*terms)]


def _linear_transpose(cotangents, *operands, map, types):
    given = [None if isinstance(t, ad.Zero) else t for t in cotangents]
    return [None] * map.residuals + map.transpose(list(operands[: map.residuals]), given)


@dataclasses.dataclass(frozen=True)
class _Batched(Map):
    """A map under `vmap`. Linear operands that are not mapped get the sum of their cotangents."""

    residuals: int
    map: Map
    axes: tuple
    over: tuple  # the other arguments of `vmap`

    def apply(self, *operands):
        return self._vmap(self.map.apply, self.axes)(*operands)

    def like(self, *operands):
        return self._vmap(self.map.like, self.axes)(*operands)

    def types(self, *operands):
        return jax.make_jaxpr(self.like)(*operands).out_avals

    def transpose(self, residuals, cotangents):
        of_residuals, of_arguments = self._split()
        each = self._vmap(self.map.transpose, (of_residuals, 0))(residuals, cotangents)
        return [x.sum(0) if n is None else jnp.moveaxis(x, 0, n) for x, n in zip(each, of_arguments)]

    def derivative(self, residuals, arguments, tangents):
        of_residuals, of_arguments = self._split()
        of_tangents = [None if t is None else n for t, n in zip(tangents, of_residuals)]
        return self._vmap(self.map.derivative, (of_residuals, of_arguments, of_tangents))(
            residuals, arguments, tangents
        )

    def _split(self):
        return list(self.axes[: self.residuals]), list(self.axes[self.residuals :])

    def _vmap(self, f, axes):
        return jax.vmap(f, in_axes=axes, **dict(self.over))


def _linear_batch(axis, operands, axes, *, map, types):
    if all(n is None for n in axes):
        return linear_p.bind(*operands, map=map, types=types), [None] * len(types)
    names = dict(axis_name=axis.name, spmd_axis_name=axis.spmd_name or axis.explicit_mesh_axis)
    batched = _Batched(map.residuals, map, tuple(axes), (("axis_size", axis.size), *names.items()))
    results = linear(batched, *operands)
    return results, [0] * len(results)


def _compute(*operands, map, types):
    # A program may be lowered where x64 is off again.
    wide = any(x.dtype.itemsize == 8 for x in operands)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return map.apply(*operands)


linear_p.def_impl(_compute)
linear_p.def_abstract_eval(lambda *_, map, types: list(types))
mlir.register_lowering(linear_p, mlir.lower_fun(_compute, multiple_results=True))
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.fancy_primitive_batchers[linear_p] = _linear_batch

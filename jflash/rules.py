"""How attention transforms: every rule, once, above all implementations.

`attend` runs an implementation's `forward`, and under reverse mode its `backward`, from the
residuals (operands, out, lse). Implementations know nothing of sinks, of the cotangent of lse or
of rows that see no key; all of that is arithmetic on their inputs and outputs:

- A sink adds exp(sink) to the denominator. With w = exp(lse) / (exp(lse) + exp(sink)), out is w
  times the out without it, and its backward pass is the ordinary one at w·do and w·delta.
- d lse / d s = p, so the cotangent of lse is subtracted from delta = rowsum(out·do).
- A row without keys hands its lse on as +inf, so that exp(s - lse) is 0.

The tangent of attention is a linear map, T; its transpose B is `backward`. Their derivatives, S and
H, transpose to each other, so forward mode and second order need these four and nothing else. T, S
and H are forward mode through the loops of `xla`, whichever implementation is chosen: linear memory,
and no kernels of their own. `docs/design-notes.md` has the alternatives.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.problem import Operands, Problem

from . import linear_maps, schedule, sharding, xla

# For `jax.checkpoint_policies.save_only_these_names`: with these two saved, the backward pass of a
# checkpointed layer does not run attention forward again.
CHECKPOINT_NAMES = ("jflash_out", "jflash_lse")
# The fields of operands whose floats have gradients.
DIFFERENTIABLE = ("q", "k", "v", "scale", "bias", "mods", "sinks")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call: what is computed, by which implementation, how configured."""

    problem: Problem
    implementation: ModuleType
    config: Any


def attend(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the call, differentiable."""
    problem = call.problem
    if 0 in (*problem.batch, problem.T, problem.t, problem.H):  # no pairs: every row is empty
        out = jnp.zeros((*operands.q.shape[:-1], problem.d), problem.dtype)
        return out, jnp.full((*problem.batch, problem.H, problem.T), -jnp.inf, problem.accumulator)
    # A replicated operand beside sharded ones is cast out here, so that the transpose of the cast sums
    # its gradient over the devices.
    operands = sharding.vary_alike(sharding.with_enough_heads(operands))
    leaves, tree = jax.tree.flatten(operands)
    run = linear_maps.plain if call.implementation.backward is None else linear_maps.value
    out, lse = run(_Attention(call, tree), *leaves)
    return out, lse


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    problem = call.problem.of(operands)
    out, lse = call.implementation.forward(problem, operands, call.config, _plan(problem, operands))
    if operands.sinks is not None and call.implementation.backward is not None:
        out = _times(out, _sink_weight(operands, lse))
    return out, lse


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(call: Call, wanted: frozenset, operands: Operands, out, lse, do, dlse) -> dict[str, Any]:
    problem = call.problem.of(operands)
    empty = lse == -jnp.inf
    if do is None:
        do, delta = jnp.zeros_like(out), jnp.zeros_like(lse)
    else:
        do = jnp.where(_per_row(empty), 0, do)  # what a row without keys holds may be NaN
        delta = jnp.einsum("...THd,...THd->...HT", out.astype(lse.dtype), do.astype(lse.dtype))
    grads = {}
    if operands.sinks is not None:
        weight = _sink_weight(operands, lse)
        if "sinks" in wanted:
            rows = (*range(lse.ndim - 2), lse.ndim - 1)
            dsinks = -((1 - weight) * delta).sum(rows)
            grads["sinks"] = dsinks.astype(operands.sinks.dtype)
        do, delta = _times(do, weight), delta * weight
    if dlse is not None:
        delta = delta - jnp.where(empty, 0, dlse)
    if schedule.hides(problem, operands.mask)[0]:
        operands = dataclasses.replace(operands, q=jnp.where(_per_row(empty), 0, operands.q))
    lse = jnp.where(empty, jnp.inf, lse)
    return grads | call.implementation.backward(
        problem, operands, call.config, _plan(problem, operands), lse, delta, do, wanted - {"sinks"}
    )


# The four maps. Directions e, f and gradients are dicts by place among the operands' leaves, without
# those that are zero; of cotangents u = (do, dlse) those that are zero are None. `places`: of the
# gradients that are wanted.


class _Point(NamedTuple):
    """Where a map is taken; out and lse are functions of the operands, kept."""

    operands: Operands
    out: jax.Array
    lse: jax.Array


def _places(operands: Operands) -> dict[int, str]:
    """The leaves of the operands that have gradients: their fields by place."""
    return {
        place: path[0].name
        for place, (path, x) in enumerate(jax.tree.leaves_with_path(operands))
        if path[0].name in DIFFERENTIABLE and jnp.issubdtype(x.dtype, jnp.floating)
    }


def _directions(operands: Operands, tangents: list) -> dict:
    """Those of the leaves that have gradients. A full bias that nobody differentiates is not among them."""
    return {n: tangents[n] for n in _places(operands) if tangents[n] is not None}


def _moving(operands: Operands, along: dict) -> tuple[dict, Callable]:
    """Those leaves that move `along` a direction, and a function of them: the operands."""
    leaves, tree = jax.tree.flatten(operands)
    put = lambda x: jax.tree.unflatten(tree, [x.get(n, leaf) for n, leaf in enumerate(leaves)])
    return {n: leaves[n] for n in along}, put


def _in_lax(call: Call, operands: Operands) -> Call:
    """The same call by `xla`, which JAX can differentiate."""
    if call.implementation is xla:
        return call
    return Call(call.problem, xla, xla.default_config(call.problem.of(operands)))


def _tangent(call: Call, places, point: _Point, e: dict):
    """T: Df(x)[e], the tangents of (out, lse)."""
    lax = _in_lax(call, point.operands)
    x, put = _moving(point.operands, e)
    return jax.jvp(lambda x: _forward(lax, put(x)), (x,), (e,))[1]


def _gradients(call: Call, places, point: _Point, u: tuple):
    """B: Df(x)ᵀu, by the implementation's own backward pass."""
    fields = _places(point.operands)
    wanted = frozenset(fields[n] for n in places) - {"q", "k", "v"}
    grads = _backward(call, wanted, *point, *u)
    found = {}
    for name, grad in grads.items():
        found |= zip((n for n in fields if fields[n] == name), jax.tree.leaves(grad))
    return {n: found[n] for n in places}


def _tangent_along(call: Call, places, point: _Point, e: dict, f: dict):
    """S: D²f(x)[e, f]."""
    x, put = _moving(point.operands, f)
    moved = lambda x: _tangent(call, places, point._replace(operands=put(x)), e)
    return jax.jvp(moved, (x,), (f,))[1]


def _gradients_along(call: Call, places, point: _Point, u: tuple, f: dict):
    """H: D(Df(x)ᵀu)[f], the Hessian of ⟨u, f(x)⟩ times f."""
    lax = _in_lax(call, point.operands)
    x, put = _moving(point.operands, f)
    moved = lambda x, out, lse: _gradients(lax, places, _Point(put(x), out, lse), u)
    return jax.jvp(moved, (x, point.out, point.lse), (f, *_tangent(call, (), point, f)))[1]


@dataclasses.dataclass(frozen=True, repr=False)
class _OfCall(linear_maps.Map):
    call: Call

    @property
    def interpret(self):
        return self.call.problem.interpret


@dataclasses.dataclass(frozen=True, repr=False)
class _Attention(_OfCall):
    """(out, lse) at the operands, flat, for `linear_maps`."""

    tree: Any  # of the operands
    names = CHECKPOINT_NAMES

    @property
    def residuals(self):
        return self.tree.num_leaves

    def apply(self, *operands):
        return list(_forward(self.call, jax.tree.unflatten(self.tree, operands)))

    def axis_names(self, *operands):
        named = sharding.axis_names(jax.tree.unflatten(self.tree, operands))
        return named, [*sharding.result_names(named[0])]

    def derivative(self, residuals, arguments, results, tangents):
        point = _Point(jax.tree.unflatten(self.tree, residuals), *results)
        e = _directions(point.operands, tangents)
        return _linear(_tangent, self.call, (point,), e) if e else None


@dataclasses.dataclass(frozen=True, repr=False)
class _Map(_OfCall):
    """One of the four at (residuals, argument), flat, for `linear_maps`."""

    rule: Callable
    places: tuple[int, ...]
    tree: Any  # of (residuals, argument)
    residuals: int

    def apply(self, *operands):
        residuals, argument = jax.tree.unflatten(self.tree, operands)
        return jax.tree.leaves(self.rule(self.call, self.places, *residuals, argument))

    def like(self, *operands):
        (point, *_), _ = jax.tree.unflatten(self.tree, operands)
        return [operands[n] for n in self.places] or [point.out, point.lse]

    def axis_names(self, *operands):
        (point, *given), argument = jax.tree.unflatten(self.tree, operands)
        leaves = sharding.axis_names(point.operands)
        results = sharding.result_names(leaves[0])
        named = [*leaves, *results]
        for part in (*given, argument):
            if isinstance(part, dict):
                named += [leaves[n] for n in sorted(part)]
            else:
                named += [x for x, y in zip(results, part) if y is not None]
        return named, self.like(*named)

    def transpose(self, residuals, cotangents):
        (point, *given), argument = self._structure(residuals)
        g = {n: x for n, x in zip(self.places, cotangents) if x is not None}
        to = functools.partial(_value, call=self.call, places=tuple(argument))
        if self.rule is _tangent:
            return to(_gradients, residuals=(point,), argument=tuple(cotangents))
        if self.rule is _tangent_along:
            return to(_gradients_along, residuals=(point, tuple(cotangents)), argument=given[0])
        if self.rule is _gradients_along:  # a Hessian is symmetric
            return to(_gradients_along, residuals=(point, *given), argument=g)
        both = to(_tangent, residuals=(point,), argument=g, places=())
        return [x for x, wanted in zip(both, argument) if wanted is not None]

    def derivative(self, residuals, arguments, results, tangents):
        if self.rule in SECOND:
            (point, *_), argument = jax.tree.unflatten(self.tree, [*residuals, *arguments])
            f = _directions(point.operands, tangents)
            return _linear(SECOND[self.rule], self.call, (point, argument), f, self.places) if f else None
        moving = {n: t for n, t in enumerate(tangents) if t is not None}
        put = lambda x: [x.get(n, y) for n, y in enumerate(residuals)]
        moved = lambda x: linear_maps.plain(self, *put(x), *arguments)
        return jax.jvp(moved, ({n: residuals[n] for n in moving},), (moving,))[1]

    def _structure(self, residuals):
        count = self.tree.num_leaves - self.residuals
        return jax.tree.unflatten(self.tree, [*residuals, *range(count)])


SECOND = {_tangent: _tangent_along, _gradients: _gradients_along}  # the derivatives in the point


def _map(rule: Callable, call: Call, residuals: tuple, argument: Any, places: tuple = ()) -> tuple:
    operands, tree = jax.tree.flatten((residuals, argument))
    return _Map(call, rule, places, tree, len(jax.tree.leaves(residuals))), *operands


def _linear(*args, **kw) -> list:
    return linear_maps.linear(*_map(*args, **kw))


def _value(*args, **kw) -> list:
    return linear_maps.value(*_map(*args, **kw))


def _plan(problem: Problem, operands: Operands) -> Callable:
    """`plan(block_q, block_k, of)`: the schedule of the call, for blocks of an implementation's choice."""
    return functools.partial(schedule.make, problem, operands)


def _per_row(x: jax.Array) -> jax.Array:
    """[*batch, H, T] -> [*batch, T, H, 1], to go with out."""
    return x.mT[..., None]


def _times(x: jax.Array, weight: jax.Array) -> jax.Array:
    return (x.astype(weight.dtype) * _per_row(weight)).astype(x.dtype)


def _sink_weight(operands: Operands, lse: jax.Array) -> jax.Array:
    """exp(lse) / (exp(lse) + exp(sink)); [*batch, H, T], 0 in rows without keys."""
    sinks = operands.sinks.reshape(*(1,) * (lse.ndim - 2), -1, 1)
    return jax.nn.sigmoid(lse - sinks.astype(lse.dtype))

"""How attention transforms: every rule, once, above all implementations.

`attend` runs an implementation's `forward`, and under reverse mode its `backward`, from the
residuals (operands, out, lse). Implementations know nothing of sinks, of the cotangent of lse or
of rows that see no key; all of that is arithmetic on their inputs and outputs:

- A sink adds exp(sink) to the denominator. With w = exp(lse) / (exp(lse) + exp(sink)), out is w
  times the out without it, and its backward pass is the ordinary one at w·do and w·delta.
- d lse / d s = p, so the cotangent of lse is subtracted from delta = rowsum(out·do).
- A row without keys hands its lse on as +inf, so that exp(s - lse) is 0.

Forward mode and second order: see docs/design-notes.md.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.problem import Operands, Problem

from . import schedule, sharding

# For `jax.checkpoint_policies.save_only_these_names`: with these two saved, the backward pass of a
# checkpointed layer does not run attention forward again.
CHECKPOINT_NAMES = ("jflash_out", "jflash_lse")


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
    over = _attend_locally if sharding.explicit_mesh(operands) is None else _attend_over_mesh
    return over(call, operands)


@functools.partial(jax.jit, static_argnums=0)  # `shard_map` of a `custom_vjp` does not run eagerly
def _attend_over_mesh(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    return sharding.over_explicit_axes(call.problem, operands, functools.partial(_attend_locally, call))


def _attend_locally(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    # A replicated operand beside sharded ones is cast out here, so that the transpose of the cast sums
    # its gradient over the devices.
    operands = sharding.vary_alike(operands)
    if call.implementation.backward is None:
        problem = call.problem.of(operands)
        return call.implementation.forward(problem, operands, call.config, _plan(problem, operands))
    return _attend(call, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, operands: Operands):
    return _forward(call, operands)


def _attend_fwd(call: Call, primals: Operands):
    is_primal = lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal)
    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=is_primal)
    wanted = frozenset(
        name
        for name in ("scale", "bias", "mods", "sinks")
        if any(x.perturbed for x in jax.tree.leaves(getattr(primals, name), is_leaf=is_primal))
    )
    out, lse = map(checkpoint_name, _forward(call, operands), CHECKPOINT_NAMES)
    return (out, lse), (operands, out, lse, _Static(wanted))


def _attend_bwd(call: Call, residuals, cotangents):
    operands, out, lse, wanted = residuals
    do, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    grads = _backward(call, wanted.value, operands, out, lse, do, dlse)
    none = {
        f.name: jax.tree.map(lambda _: None, getattr(operands, f.name)) for f in dataclasses.fields(operands)
    }
    return (Operands(**none | grads),)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any


# `perturbed` tells which gradients are asked for: a full bias that nobody differentiates then
# costs no T·t gradient.
_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    problem = call.problem.of(operands)
    out, lse = call.implementation.forward(problem, operands, call.config, _plan(problem, operands))
    if operands.sinks is not None:
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

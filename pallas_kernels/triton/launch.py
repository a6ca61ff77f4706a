"""How the kernels are started: operands as references, one axis of programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..problem import Problem
from ..tiles import with_scalars
from .config import Block

NARROW = 2**31  # elements: what offsets of 32 bits reach


def launch(
    kernel: Callable,
    problem: Problem,
    block: Block,
    name: str,
    programs: int,
    operands: Any,
    outputs: dict[Any, tuple],
) -> dict[Any, jax.Array]:
    """Runs `kernel(program, operands, outputs)` `programs` times.

    `operands` is a pytree; the kernel gets it with a reference in place of each array. `outputs`
    names shapes and dtypes; the kernel gets a dict of references, the caller one of arrays. One grid
    axis, which has no limit that matters: the others stop at 65535.
    """
    leaves, tree = jax.tree.flatten(operands)
    alike = jax.typeof(leaves[0]).manual_axis_type  # inside `shard_map`, results vary as operands do
    shapes = {
        key: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=alike)
        for key, (shape, dtype) in outputs.items()
    }

    def body(*refs):
        arguments = jax.tree.unflatten(tree, refs[: len(leaves)])
        kernel(pl.program_id(0), arguments, dict(zip(shapes, refs[len(leaves) :])))

    results = pl.pallas_call(
        body,
        grid=(programs,),
        out_shape=list(shapes.values()),
        compiler_params=plt.CompilerParams(num_warps=block.num_warps, num_stages=block.num_stages),
        interpret=problem.interpret,
        name=name,
    )(*map(_addressable, leaves))
    return dict(zip(shapes, results))


def _addressable(x: jax.Array) -> jax.Array:
    """`x` as a kernel can read it: a scalar as [1], offsets beyond 32 bits made of wider elements.

    Pallas counts offsets in 64 bits from 2^32 bytes on; between, those of bytes would overflow.
    """
    if x.ndim == 0:
        return x.reshape(1)
    if x.dtype.itemsize == 1 and NARROW < x.size <= 2 * NARROW:
        return x.astype(jnp.int16)
    return x


def visits_of(schedule: Any, i: Any, entry: tuple) -> Any:
    """What block `i` visits."""
    return with_scalars(schedule).visits(i, entry)


def over_visits(schedule: Any, visits: Any, body: Callable, carry: Any) -> Any:
    """`body(j, carry, masked)` over the blocks of `visits`: partial ones, then full ones."""
    if schedule.has_masked:
        step = lambda n, c: body(visits.masked(n), c, True)
        carry = lax.fori_loop(0, visits.n_masked, step, carry)
    if schedule.has_full:
        step = lambda n, c: body(visits.full(n), c, False)
        carry = lax.fori_loop(0, visits.n_full, step, carry)
    return carry

"""Operands as these kernels want them, and how the kernels are started."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import varying_axes
from ..problem import Operands, Problem
from ..tiles import Span, Tools
from . import below

# Copies of swizzled tiles want multiples of so many rows and channels.
ROWS_MULTIPLE, CHANNELS_MULTIPLE = 8, 64


def channels(size: int) -> int:
    """Channels of a head in shared memory."""
    return -(-size // CHANNELS_MULTIPLE) * CHANNELS_MULTIPLE


def flat(x: jax.Array) -> jax.Array:
    """[*batch, T, H, D] -> [B, T', H, D'], with zeros behind T and D to the multiples above."""
    x = x.reshape(-1, *x.shape[-3:])
    return _padded(_padded(x, 1, ROWS_MULTIPLE, always=True), 3, CHANNELS_MULTIPLE, always=True)


def prepared(
    problem: Problem, operands: Operands, block_q: int, block_k: int, transposed: bool = False
) -> Operands:
    """The operands with what tiles read from registers (all but q, k, v) padded to whole tiles.

    Loads are not bounded. What the padding holds is hidden, as keys that do not exist, or not stored.
    What depends on both sides is `transposed` for tiles that are: [..., t, T].
    """
    on_q = lambda x: _readable(_padded(x, -1, block_q))
    on_k = lambda x: _readable(_padded(x, -1, block_k))
    order = lambda x: x.mT if transposed else x
    both = lambda x: _readable(order(_padded(_padded(x, -1, block_k), -2, block_q)))
    sides = dict(query=on_q, key=on_k, pair=both, scalar=_readable, head=_readable)
    view = lambda fields: fields.map(**sides)
    o = operands
    return dataclasses.replace(
        o,
        q=flat(o.q),
        k=flat(o.k),
        v=flat(o.v),
        scale=None if o.scale is None else _readable(o.scale),
        bias=None if o.bias is None else both(o.bias),
        mods=tuple(map(view, o.mods)),
        mask=None if o.mask is None else view(o.mask),
        q_positions=None if o.q_positions is None else on_q(o.q_positions),
        k_positions=None if o.k_positions is None else on_k(o.k_positions),
        dropout=None
        if o.dropout is None
        else (tuple(map(on_q, o.dropout[0])), tuple(map(on_k, o.dropout[1]))),
        sinks=None,
    )


def _padded(x: jax.Array, axis: int, multiple: int, always: bool = False) -> jax.Array:
    """`x` with zeros behind it along an axis, up to a multiple. An axis of 1 broadcasts, but not `always`."""
    axis %= x.ndim
    more = -x.shape[axis] % multiple
    if more == 0 or (x.shape[axis] == 1 and not always):
        return x
    return jnp.pad(x, [(0, more if n == axis else 0) for n in range(x.ndim)])


def _readable(x: jax.Array) -> jax.Array:
    """Booleans, which registers cannot be loaded with, as uint8 (see `tools`)."""
    if x.dtype in (jnp.uint8, jnp.int8):
        return x.astype(jnp.int16)
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def tools(rows: int, columns: int) -> Tools:
    """How tiles of this shape read operands."""

    def read(ref: Any, index: tuple, read_at: Callable) -> jax.Array:
        x = read_at(ref.at[tuple(pl.ds(x.start, x.size) if isinstance(x, Span) else x for x in index)])
        return x != 0 if ref.dtype == jnp.uint8 else x

    def load(ref: Any, index: tuple) -> jax.Array:
        return read(ref, index, lambda at: at[...])

    def spread(x: jax.Array, axis: int) -> jax.Array:
        return below.across_columns(x, columns) if axis == 0 else below.across_rows(x, rows)

    def along(ref: Any, index: tuple, axes: tuple) -> jax.Array:
        match axes:
            case ():
                return load(ref, index)
            case (0,):
                x = read(ref, index, lambda at: below.load(at, below.ROW, (rows,)))
            case (1,):
                x = read(ref, index, lambda at: below.load(at, below.COLUMN, (columns,)))
            case _:
                return read(ref, index, lambda at: below.load(at, below.TILE, (rows, columns)))
        return spread(x, *axes)

    def of_rows(span: Span, axis: int) -> jax.Array:
        return spread(below.index(span.size, (below.ROW, below.COLUMN)[axis]) + span.start, axis)

    return Tools(load, along, of_rows)


def in_sections(n: Any, pairs: int, section: int, outer: int) -> tuple:
    """(one of `pairs`, one of `outer` blocks) of the n-th block of threads.

    Blocks of threads start in their order. All blocks of a section of pairs, a batch entry and a head each,
    come before the next section's, so that what they share stays in L2; within it every pair's first block
    comes before any second one.
    """
    each = section * outer
    at, inner = lax.div(n, jnp.int32(each)), lax.rem(n, jnp.int32(each))
    width = jnp.int32(section)
    if pairs % section:
        width = jnp.where(at < pairs // section, width, jnp.int32(pairs % section))
    return at * section + lax.rem(inner, width), lax.div(inner, width)


def launch(
    kernel: Callable,
    problem: Problem,
    name: str,
    operands: Any,
    outputs: dict[str, tuple],
    scratch: dict[str, Any],
    blocks: int,
    warpgroups: int,
    sums: tuple = (),
) -> dict[str, jax.Array]:
    """Runs `kernel(operands, outputs, **scratch)` in so many blocks of so many warpgroups.

    `operands` is a pytree; the kernel gets it with a reference in place of each array. `outputs`
    names shapes and dtypes; the kernel gets a dict of references, the caller one of arrays. Those in
    `sums` hold zeros when the kernel starts.
    """
    leaves, tree = jax.tree.flatten(operands)
    leaves = [x.reshape(1) if x.ndim == 0 else x for x in leaves]
    alike = jax.typeof(leaves[0]).manual_axis_type  # inside `shard_map`, results vary as operands do
    shapes = {
        key: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=alike)
        for key, (shape, dtype) in outputs.items()
    }

    def body(*refs, **scratch):
        arguments = jax.tree.unflatten(tree, refs[: len(leaves)])
        with below.plainly(problem.interpret):
            kernel(arguments, dict(zip(shapes, refs[len(leaves) :])), **scratch)

    body.__name__ = name
    run = plgpu.kernel(
        body,
        out_type=[] if sums else list(shapes.values()),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if problem.interpret else None,
        # Reductions over rows stay within four lanes: no scratch. No automatic barriers: every handover of
        # shared memory is synchronised in the kernels.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    if not sums:
        return dict(zip(shapes, run(*leaves)))

    def before(key: str) -> jax.Array:
        x = (jnp.zeros if key in sums else lax.empty)(*outputs[key])
        axes = tuple(varying_axes(leaves[0]))
        return lax.pcast(x, axes, to="varying") if axes else x

    after = pl.run_state(lambda refs: run(*leaves, *refs))(tuple(map(before, shapes)))
    return dict(zip(shapes, after))

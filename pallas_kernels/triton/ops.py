"""Loads, stores, products and exponentials of tiles, as Pallas's Triton lowering wants them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..problem import Problem
from ..tiles import Span, expanding

# 2^x by the hardware's instruction, subnormals flushed to 0. `jnp.exp2` adds to each a test for
# small x and two multiplications: 12% of the instructions of a loop on NVIDIA, as many on AMD.
EXP2 = {"cuda": ("ex2.approx.ftz.f32 $0, $1;", "=f,f"), "rocm": ("v_exp_f32 $0, $1", "=v,v")}


def _slices(index: tuple) -> tuple[tuple, jax.Array | None]:
    """The index for a reference, and where what it names exists (None: everywhere)."""
    spans = [x for x in index if isinstance(x, Span)]
    exists = None
    for axis, span in enumerate(spans):
        if (inside := span.existing) is not None:
            inside = inside.reshape(tuple(span.size if i == axis else 1 for i in range(len(spans))))
            exists = inside if exists is None else exists & inside
    if exists is not None:
        exists = jnp.broadcast_to(exists, tuple(span.size for span in spans))
    # Arrays as starts: of numbers, Pallas checks that the slice ends within the array.
    number = lambda x: jnp.asarray(x, jnp.int32)
    at = (pl.ds(number(x.start), x.size) if isinstance(x, Span) else number(x) for x in index)
    return tuple(at), exists


def load(ref: Any, index: tuple, fill: float = 0) -> jax.Array:
    """The part of `ref` at `index`, of numbers and `Span`s; `fill` where it does not exist.

    Masked by hand: the lowering of JAX 0.11 reads what lies behind an array.
    """
    at, exists = _slices(index)
    other = None if exists is None else jnp.full((), fill, ref.dtype)
    return plt.load(ref.at[at], mask=exists, other=other)


TOOLS = expanding(load)


def store(ref: Any, index: tuple, x: jax.Array) -> None:
    """Writes `x` to the part of `ref` at `index` that exists."""
    at, exists = _slices(index)
    plt.store(ref.at[at], x.astype(ref.dtype), mask=exists)


def dot(problem: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """a·b of two tiles, accumulated in float32.

    Products of float32 use the float32 instructions, at 10 TFLOP/s on an H200, as fast as XLA's. As six
    products of bfloat16 parts (`DotAlgorithmPreset.BF16_BF16_F32_X6`) the forward kernel reached 45 with
    half the error, but with D 256, and the backward kernels with any D, spilled registers.
    """
    return jnp.dot(a, b, precision=problem.precision, preferred_element_type=jnp.float32)


def exp2(problem: Problem, x: jax.Array) -> jax.Array:
    """2^x of a float32 tile."""
    if problem.interpret or problem.platform not in EXP2:
        return jnp.exp2(x)
    assembly, constraints = EXP2[problem.platform]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    [y] = plt.elementwise_inline_asm(
        assembly, args=[x], constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )
    return y


def seen(visible: jax.Array, x: jax.Array) -> jax.Array:
    """`x` [block_k, D], but 0 in the rows of keys that no query of the tile sees: 0 times NaN is NaN."""
    some = jnp.where(visible, 1, 0).max(0)  # `any` is not lowered
    # By bits: for a selected operand of a product, Triton may want booleans in shared memory, and fail.
    bits = jnp.int16 if x.dtype.itemsize == 2 else jnp.int32
    kept = lax.bitcast_convert_type(x, bits) & (-some).astype(bits)[:, None]
    return lax.bitcast_convert_type(kept, x.dtype)


def channels(size: int) -> Span:
    """All channels of a head as a power of 2; those that the head does not have read as 0."""
    return Span(0, max(16, pl.next_power_of_2(size)), size)

"""No implementation holds an array of T·t elements, to second order: read off the compiled program."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from programs import IMPLEMENTATIONS, ON_GPU, QUICK

import jflash
from jflash import Causal, Segments

LENGTHS = (8192, 16384, 32768)
KINDS = {
    "causal": (lambda ids: Causal(), ()),
    "packed segments": (lambda ids: Segments(ids) & Causal(), ()),
    "bias": (lambda ids: Causal(), (1, 2, 1, None)),  # None: one for each key
}


# In q, k and v: the tangent; the product with the Hessian, forward over reverse and reverse over reverse.
SECOND_ORDER = {
    "jvp": lambda f, x, e: jax.jvp(f, (x,), (e,)),
    "hvp": lambda f, x, e: jax.jvp(lambda x: pulled(f, x, e[0]), (x,), (e,)),
    "penalty": lambda f, x, e: jax.grad(lambda x: sum(jnp.square(y).sum() for y in pulled(f, x, e[0])))(x),
}


def pulled(f, x, do):
    return jax.vjp(f, x)[1](do)[0]


def compiled(implementation, kind, length, transform):
    mask, bias = KINDS[kind]
    of = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    dtype = jnp.bfloat16 if implementation == "mosaic" else jnp.float32
    floats = [of((1, length, heads, 8), dtype) for heads in (2, 1, 1)]
    floats += [of(tuple(length if n is None else n for n in bias))] if bias else []
    ids = of((1, length), jnp.int32)

    def attend(floats, ids):
        q, k, v, *bias = floats
        return jflash.attention(
            q, k, v, mask(ids), bias=bias[0] if bias else None, implementation=implementation
        )

    def gradients(floats, ids, do):
        out, pull = jax.vjp(lambda floats: attend(floats, ids), floats)
        return out, pull(do)

    call, more = attend, ()
    if transform == "gradient":
        call, more = gradients, (floats[0],)
    elif transform != "forward":
        call = lambda floats, ids, e: SECOND_ORDER[transform](lambda x: attend(x, ids), floats, e)
        more = (floats,)
    return jax.jit(call, compiler_options=QUICK).lower(floats, ids, *more).compile()


CASES = [("forward", "causal"), *(("gradient", kind) for kind in KINDS), ("jvp", "causal")]
CASES += [("hvp", "bias"), ("penalty", "packed segments")]


@pytest.mark.parametrize("transform, kind", CASES)
# Of a kernel, interpret mode shows the interpreter's memory.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS if ON_GPU else ("xla",))
def test_memory_is_linear(implementation, transform, kind):
    used = []
    for length in LENGTHS:
        program = compiled(implementation, kind, length, transform)
        shapes = re.findall(r"[a-z]\d*\[([\d,]+)\]", program.as_text())
        sizes = {shape: math.prod(map(int, shape.split(","))) for shape in set(shapes)}
        assert max(sizes.values()) >= length * 2 * 8  # the text does show shapes
        assert max(sizes.values()) < length * length, max(sizes, key=sizes.get)
        used.append(program.memory_analysis().temp_size_in_bytes)
    # On a line through (or above) the origin four times the length takes at most four times as much; T·t
    # would be 4 and 16. On a GPU, packed segments by the Triton kernels took 1.3, 2.9 and 4.8 MB.
    twice, four_times = (2.4, 4.6) if ON_GPU else (2.1, 4.2)
    assert 0 < used[1] <= twice * used[0] and used[2] <= four_times * used[0], used


def test_the_reference_would_not_pass():
    q = jax.ShapeDtypeStruct((1, 512, 1, 8), jnp.float32)
    call = lambda q: jflash.attention(q, q, q, implementation="reference")
    assert "512,512]" in jax.jit(call, compiler_options=QUICK).lower(q).compile().as_text()

"""Functions of users: traced once on scalars, and what does not depend on the pair taken out."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core.primitives import jit_p
from jax.sharding import AxisType

from .checks import check
from .fields import elementwise
from .sharding import replicated, vary_alike


class Slot(NamedTuple):
    """Where a step finds or leaves a value."""

    n: int


class Step(NamedTuple):
    """One operation of a trace; its operands are slots, or values that are known."""

    primitive: Any
    params: dict
    operands: tuple
    results: tuple

    def run(self, values: dict) -> None:
        """Where it was traced nothing varied over devices; here everything may.

        Bodies of control flow and of custom derivatives (`jax.nn.relu`) stay as they were traced: where
        `shard_map` checks what varies (`check_vma`, its default), JAX may refuse them.
        """
        operands = vary_alike([values[x] if isinstance(x, Slot) else x for x in self.operands])
        if self.primitive.name == "pvary":
            results = operands
        else:
            results = self.primitive.bind(*operands, **self.primitive.get_bind_params(self.params))
        values.update(zip(self.results, results if isinstance(results, list | tuple) else [results]))


class TracedFunction:
    """The part of a traced function that pairs decide: a function of (values, *scalars).

    `values` are what the rest, of batch entry and head, left for it. One key for jit as long as
    function and trace are the same.
    """

    def __init__(self, fn: Callable, jaxpr: Any, steps: list, inputs: list, result: Any):
        self.fn, self.text, self.steps, self.inputs, self.result = fn, str(jaxpr), steps, inputs, result

    def __hash__(self):
        return hash((self.fn, self.text))

    def __eq__(self, other):
        return isinstance(other, TracedFunction) and (self.fn, self.text) == (other.fn, other.text)

    def __call__(self, *inputs):
        values = dict(zip(self.inputs, inputs))
        for step in self.steps:
            step.run(values)
        return values[self.result] if isinstance(self.result, Slot) else self.result


def _flat(jaxpr: Any, inputs: Sequence, numbers: Iterator) -> tuple[list[Step], list]:
    """(steps, results) of the trace and of what it calls; `inputs` are slots or values."""
    places = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs))
    at = lambda x: x.val if isinstance(x, Literal) else places[x]
    steps = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(at, eqn.invars))
        if eqn.primitive is jit_p:
            inner = eqn.params["jaxpr"]
            inside, results = _flat(inner.jaxpr, (*inner.consts, *operands), numbers)
            steps += inside
        else:
            results = [Slot(next(numbers)) for _ in eqn.outvars]
            steps.append(Step(eqn.primitive, eqn.params, operands, tuple(results)))
        places |= dict(zip(eqn.outvars, results))
    return steps, list(map(at, jaxpr.outvars))


def _split(fn: Callable, closed: Any, names: str, at: tuple, refuse: Callable) -> tuple:
    """(the TracedFunction of a trace, its values [*batch or 1, H or 1]).

    What depends on nothing but constants, batch entry and head is computed here, once for each:
    `slopes[h]` is no load in the middle of a tile, and JAX differentiates it.
    `names` are those of the arguments; `refuse` raises.
    """
    numbers = itertools.count()
    consts, arguments = ([Slot(next(numbers)) for _ in x] for x in (closed.consts, names))
    steps, [result] = _flat(closed.jaxpr, (*consts, *arguments), numbers)
    slots = dict(zip(names, arguments))
    pairs = [slots[name] for name in names if name not in "bh"]
    depends = {x: frozenset() for x in consts} | {slots[name]: frozenset(name) for name in "bh"}
    early, late = [], []
    for step in steps:
        operands = [x for x in step.operands if isinstance(x, Slot)]
        known = all(x in depends for x in operands)
        (early if known else late).append(step)
        if known:
            depends |= dict.fromkeys(step.results, frozenset().union(*(depends[x] for x in operands)))
    needed = [x for step in late for x in step.operands] + [result]
    needed = list(dict.fromkeys(x for x in needed if isinstance(x, Slot) and x in depends))

    b, h = at
    constants = [replicated(jnp.asarray(c)) for c in closed.consts]

    def value(slot):
        def of_one(b, h):
            values = dict(zip(consts, constants)) | {slots["b"]: b, slots["h"]: h}
            for step in early:
                step.run(values)
            return values[slot]

        one = jnp.zeros((1,) * (b.ndim + 1), jnp.int32)
        indices = (b[..., None] if "b" in depends[slot] else one, h if "h" in depends[slot] else one)
        shape = jax.eval_shape(of_one, *(jax.ShapeDtypeStruct((), jnp.int32),) * 2).shape
        if shape:
            refuse(f"one that it indexes by something else, shape {shape}")
        return elementwise(of_one, *indices)

    return TracedFunction(fn, closed.jaxpr, late, [*needed, *pairs], result), tuple(map(value, needed))


def trace(argument: str, fn: Callable, arguments: dict, signature: str, returns: type, at: tuple) -> tuple:
    """(the TracedFunction of `fn`, its values [*batch or 1, H or 1]).

    `arguments` are the shapes of its arguments by name ("s", "b", "h", "q", "k"), `at` is (the index of
    each batch entry [*batch], of each query head [H]).
    """
    # Without an explicit mesh, whose shardings the equations would keep: `sharding` hands the function
    # to each device. In a user's `shard_map`, what it closes over may be of the manual one.
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh if AxisType.Manual in mesh.axis_types else jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(mesh):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*arguments.values())
    wanted = "a boolean" if returns is bool else "a floating-point"
    fits = isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == ()
    fits = fits and (shape.dtype == bool if returns is bool else jnp.issubdtype(shape.dtype, jnp.floating))
    check(fits, ValueError, argument, f"{signature} must map scalars to {wanted} scalar", f"{shape}")
    (heads,) = at[1].shape
    rule = f"may close over scalars and over vectors [H] (H={heads}) that it indexes by h"
    fix = "Data per token goes into positions or Segments, data per pair into `bias` or `Dense`."
    for c in closed.consts:
        shape = jnp.shape(c)
        check(shape in ((), (heads,)), ValueError, argument, rule, f"an array of shape {shape}", fix)
    return _split(
        fn, closed, "".join(arguments), at, lambda got: check(False, ValueError, argument, rule, got, fix)
    )

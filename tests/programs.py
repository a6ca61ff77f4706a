"""Compiled programs of the cases, by implementation. An implementation joins by a row in `TILES`."""

import contextlib
import dataclasses
import functools
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import assert_as_accurate, plain_attention
from cases import MASKS, MODS, SHAPES, Inputs, coordinates

import jflash
from jflash import Dropout, backends, xla
from pallas_kernels import mosaic, triton

# What each implementation is tested with: small tiles, so that short sequences have several and the
# loops over heads and batch entries run.
SQUARE, WIDE = triton.Block(16, 16, 4, 1), triton.Block(16, 32, 4, 1)
TILES = {
    "xla": (xla.Config(16, 16), xla.Config(16, 32, scores=1)),
    "triton": (triton.Config(SQUARE, SQUARE, SQUARE), triton.Config(WIDE, WIDE, WIDE, frozen_maximum=True)),
}
# With `-m gpu` all run as they are, else the kernels in interpret mode.
ON_GPU = "JFLASH_TESTS_ON_GPU" in os.environ
if ON_GPU:  # in interpret mode see test_mosaic
    TILES["mosaic"] = (
        mosaic.Config(mosaic.Forward(2, 64, 2)),
        mosaic.Config(mosaic.Forward(3, 64, 3, turns=False, persistent=True)),
    )
IMPLEMENTATIONS = tuple(pytest.param(name, marks=pytest.mark.gpu) if ON_GPU else name for name in TILES)
ORDERS = 4  # in which plain JAX computes the same
# LLVM's optimisations take more than half of the time of a test and decide nothing that is tested.
QUICK = {} if ON_GPU else {"xla_backend_optimization_level": 0}


def widest(implementation):
    """The widest dtype that it takes, but for float64."""
    return jnp.bfloat16 if implementation == "mosaic" else np.float32


@contextlib.contextmanager
def tiled(implementation, tiles=0):
    """Within it, what is traced uses the tiles of this number in `TILES`."""
    if implementation not in TILES:
        yield
        return
    [row] = [row for row in backends.TABLE if row.name == implementation]
    config = TILES[implementation][tiles]

    def fitting(problem):
        if implementation != "xla":
            return config
        # No larger than the call, as the default is.
        sizes = dict(
            block_q=max(1, min(config.block_q, problem.T)), block_k=max(1, min(config.block_k, problem.t))
        )
        return dataclasses.replace(config, **sizes)

    context = contextlib.nullcontext() if ON_GPU or implementation == "xla" else jflash.interpret()
    with mock.patch.object(row.load(), "default_config", fitting), context:
        yield


def attend(case, implementation, floats, data, **more):
    """(out, lse) of the case by an implementation of jflash."""
    if widest(implementation) == jnp.bfloat16 and floats["q"].dtype.itemsize > 2:
        pytest.skip(f"{implementation} is for 16 bits")
    dropout = Dropout(case.rate, data["key"], data["offsets"]) if case.rate else None
    return jflash.attention_with_lse(
        floats["q"],
        floats["k"],
        floats["v"],
        MASKS[case.mask].mask(SHAPES[case.shape], *data["mask"]),
        bias=floats.get("bias"),
        scale=floats.get("scale", case.scale),
        score_mod=MODS[case.mods].mods(*floats["mods"]) if case.mods else None,
        sinks=floats.get("sinks"),
        dropout=dropout,
        q_positions=data["q_positions"],
        k_positions=data["k_positions"],
        implementation=implementation,
        **more,
    )


def attend_plainly(case, floats, data):
    """(out, lse) of the case by plain JAX."""
    mods = MODS[case.mods].plain(coordinates(case, data), *floats["mods"]) if case.mods else ()
    default = 1 / np.sqrt(SHAPES[case.shape].D) if case.scale is None else case.scale
    return plain_attention(
        floats["q"],
        floats["k"],
        floats["v"],
        data["visible"],
        scale=floats.get("scale", default),
        bias=floats.get("bias"),
        mods=mods,
        sinks=floats.get("sinks"),
        kept=data.get("kept"),
        rate=case.rate,
    )


@functools.cache
def program(case, implementation, tiles=0):
    """A compiled function of `Inputs`: a dict of "out", "lse" and each gradient ("dq", "dbias", ...).

    `implementation` is one of jflash's, or "plain".
    """

    def run(floats, data, cotangents):
        with tiled(implementation, tiles):
            call = functools.partial(attend, case, implementation)
            if implementation == "plain":
                call = functools.partial(attend_plainly, case)
            (out, lse), pull = jax.vjp(lambda floats: call(floats, data), floats)
            (grads,) = pull(cotangents)
        mods = {f"mods[{i}]": x for i, x in enumerate(grads.pop("mods", ()))}
        return dict(out=out, lse=lse) | {f"d{name}": x for name, x in (grads | mods).items()}

    compiled = jax.jit(run, compiler_options=QUICK)
    return lambda inputs: jax.tree.map(np.asarray, compiled(*inputs))


def results(case, implementation, inputs, tiles=0):
    """What `program` returns; by the reference in float64, the truth, by others in their dtype."""
    if implementation != "reference":
        return program(case, implementation, tiles)(inputs)
    wide = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.enable_x64(True):
        return program(case, implementation)(Inputs(*jax.tree.map(wide, tuple(inputs))))


# The last axes of what a call takes and gives, by the letters of `Shape`.
LAYOUTS = dict(
    q="THD", k="thD", v="thd", bias="HTt", visible="HTt", kept="HTt", q_positions="T", k_positions="t"
)
LAYOUTS |= dict(out="THd", lse="HT", dq="THD", dk="thD", dv="thd", dbias="HTt")


def reordered(name, x, orders):
    """`x` with the axes in `orders` permuted; one of size 1 broadcasts and stays."""
    letters = LAYOUTS.get(name, "")
    for place, letter in enumerate(letters):
        axis = x.ndim - len(letters) + place
        if letter in orders and axis >= 0 and x.shape[axis] != 1:
            x = np.take(x, orders[letter], axis)
    return x


def plain_results(case, inputs, seed):
    """What plain JAX returns if rows and channels come in another order: the same but for rounding."""
    shape = SHAPES[case.shape]
    rng = np.random.default_rng(seed)
    orders = {letter: rng.permutation(getattr(shape, letter)) for letter in "TtDd"}
    lead = (1,) * len(shape.batch)
    rows = dict(q_positions=np.arange(shape.T) + shape.t - shape.T, k_positions=np.arange(shape.t))
    rows = {name: x.reshape(*lead, -1) for name, x in rows.items() if inputs.data[name] is None}
    floats, data = (
        {name: reordered(name, x, orders) for name, x in part.items()}
        for part in (inputs.floats, inputs.data | rows)
    )
    cotangents = tuple(reordered(name, x, orders) for name, x in zip(("out", "lse"), inputs.cotangents))
    got = program(case, "plain")(Inputs(floats, data, cotangents))
    back = {letter: np.argsort(order) for letter, order in orders.items()}
    return {name: reordered(name, x, back) for name, x in got.items()}


def assert_accurate(case, implementation, samples, tiles=0):
    """Fails unless the implementation is as accurate as plain JAX; `samples` is a list of `Inputs`."""
    stacked = lambda each: {name: np.stack([x[name] for x in each]) for name in each[0]}
    ours, truth = (
        stacked([results(case, name, inputs, tiles) for inputs in samples])
        for name in (implementation, "reference")
    )
    plain = [stacked([plain_results(case, inputs, seed) for inputs in samples]) for seed in range(ORDERS)]
    assert_as_accurate(ours, plain, truth, samples[0].floats["q"].dtype)

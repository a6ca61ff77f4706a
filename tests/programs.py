"""Compiled programs of the cases, by implementation. An implementation joins by a row in `TILES`."""

import contextlib
import dataclasses
import functools
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import assert_as_accurate, plain_attention
from cases import MASKS, MODS, SHAPES, Inputs, coordinates

import jflash
from jflash import Dropout, xla

# What each implementation is tested with: small tiles, so that short sequences have several and the
# loops over heads and batch entries run.
TILES = {"xla": (xla.Config(16, 16), xla.Config(16, 32, scores=1))}
IMPLEMENTATIONS = tuple(TILES)
# LLVM's optimisations take more than half of the time of a test and decide nothing that is tested.
QUICK = {"xla_backend_optimization_level": 0}


@contextlib.contextmanager
def tiled(implementation, tiles=0):
    """Within it, what is traced uses the tiles of this number in `TILES`."""
    if implementation not in TILES:
        yield
        return
    module = importlib.import_module(f"jflash.{implementation}")
    config = TILES[implementation][tiles]

    def fitting(problem):  # no larger than the call, as the default is
        sizes = dict(
            block_q=max(1, min(config.block_q, problem.T)), block_k=max(1, min(config.block_k, problem.t))
        )
        return dataclasses.replace(config, **sizes)

    with mock.patch.object(module, "default_config", fitting):
        yield


def attend(case, implementation, floats, data, **more):
    """(out, lse) of the case by an implementation of jflash."""
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


def assert_accurate(case, implementation, samples, tiles=0):
    """Fails unless the implementation is as accurate as plain JAX; `samples` is a list of `Inputs`."""

    def stacked(name):
        each = [results(case, name, inputs, tiles) for inputs in samples]
        return {key: np.stack([x[key] for x in each]) for key in each[0]}

    dtype = samples[0].floats["q"].dtype
    assert_as_accurate(stacked(implementation), stacked("plain"), stacked("reference"), dtype)

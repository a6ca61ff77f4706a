"""Tiles of the Triton kernels. That they fit each card is what `make test-aot` shows."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jflash
from pallas_kernels.triton import config


def problem(D=64, dtype=jnp.bfloat16, **facts):
    x = jax.ShapeDtypeStruct((1, 128, 2, D), dtype)
    return dataclasses.replace(jflash.explain(x, x, x).problem, **facts)


@pytest.mark.parametrize("architecture", [*config.TABLES, "sm_75", "gfx1100", ""])
def test_every_call_has_tiles(architecture):
    platform = "rocm" if architecture.startswith("gfx") else "cuda"
    for features in ("none", "positions", "data", "scores"):
        for dtype in (jnp.bfloat16, jnp.float32):
            for D in (8, 64, 96, 256):
                call = problem(D, dtype, architecture=architecture, platform=platform, features=features)
                default, *others = config.candidates(call)
                assert default == config.default_config(call)
                assert others and default not in others
                assert platform == "cuda" or default.forward.num_stages == 1


def test_smaller_tiles_where_less_fits():
    area = lambda **facts: config.default_config(problem(**facts)).forward.block_q
    assert area(platform="cuda", architecture="sm_90", features="none") == 128
    assert area(platform="cuda", architecture="sm_90", features="scores") < 128
    assert area(platform="cuda", architecture="", features="none") < 128
    assert area(platform="cuda", architecture="sm_90", features="none", dtype=jnp.float32) < 128


def test_what_a_tile_needs():
    x, ids = jnp.ones((1, 128, 2, 64)), jnp.zeros((1, 128), jnp.int32)
    features = lambda mask=None, **more: jflash.explain(x, x, x, mask, **more).problem.features
    assert features() == "none"
    assert features(jflash.Causal()) == "positions"
    assert features(jflash.Causal() & jflash.Segments(ids, ids)) == "data"
    assert features(dropout=jflash.Dropout(0.1, jax.random.key(0))) == "data"
    assert features(bias=jnp.zeros((128, 128))) == "scores"
    assert features(score_mod=jflash.SoftCap(2.0)) == "scores"

"""The Hopper kernels in Pallas's GPU interpret mode, which looks for races between their threads.

It stops at the first race. Registers, layouts and the hand-made barriers are the twins' there: what they
are on hardware, `pytest -m gpu` and `make test-aot` show.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from programs import ON_GPU, QUICK

import jflash
from jflash import Alibi, Causal, Dense, Dropout, Function, Prefix, Segments, SoftCap, Window, rules
from pallas_kernels import mosaic
from pallas_kernels.mosaic import Backward, Forward

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="the interpreter is for the CPU"),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 12), reason="JAX 0.11's interpreter refuses a barrier's last, unread phase"
    ),
]

TILES = Forward(2, 64, 2)
DRAWN = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(DRAWN.integers(-1, 3, (1, 200)), 1), jnp.int32)
SEEN = jnp.asarray(DRAWN.random((1, 1, 130, 200)) < 0.3)
# Names, tiles, (T, t, D), mask and what else attention is given.
CASES = {
    "full": (TILES, (128, 192, 64), None, {}),
    "causal, ragged, grouped": (TILES, (150, 200, 64), Causal(), {}),
    "persistent, three warpgroups": (Forward(3, 64, 2, persistent=True), (300, 300, 64), Causal(), {}),
    "no turns, D 128": (Forward(2, 64, 3, turns=False), (100, 200, 128), Window(50, 10), {}),
    "running maximum": (Forward(2, 64, 2, frozen_maximum=False), (130, 200, 64), Causal(), {}),
    "packed": (TILES, (200, 200, 64), Segments(IDS) & Causal(), {}),
    "lists": (TILES, (130, 200, 64), Dense(SEEN) | Window(3, 3), {}),
    "function": (TILES, (130, 200, 40), Function(lambda b, h, q, k: (q - k) % 3 == h) & Causal(), {}),
    "scores": (
        TILES,
        (130, 200, 64),
        Prefix(150),
        dict(score_mod=(SoftCap(5.0), Alibi(jnp.array([0.1, 0.02]))), scale=jnp.float32(0.3)),
    ),
    "bias, dropout": (
        TILES,
        (130, 200, 64),
        Causal(),
        dict(bias=normal(1, 2, 130, 200, seed=5), dropout=Dropout(0.3, jax.random.key(1))),
    ),
    "no key for some": (TILES, (200, 100, 64), Causal(), {}),
}
# Scores that rise by far more than 2^40 behind the first block of keys.
RISING = jnp.linspace(0, 900, 300)[None, None, None].astype(jnp.float32)


def traced(arrays, mask, more):
    """(problem, operands) of a call, to be interpreted.

    The kernels are called directly: a primitive, as attention is, cannot hold the interpreter's ordered
    callbacks.
    """
    given = []
    results = arrays[0], arrays[0][..., 0].mT  # of the right shapes
    keep = lambda call, operands: given.append((call, operands)) or results
    with mock.patch.object(rules, "attend", keep):
        jflash.attention_with_lse(*arrays, mask, implementation="reference", **more)
    [(call, operands)] = given
    return dataclasses.replace(call.problem, interpret=True), operands


def attended(implementation, tiles, arrays, mask, more):
    """(out, lse)."""
    if implementation == "reference":
        return jflash.attention_with_lse(*arrays, mask, implementation="reference", **more)
    problem, operands = traced(arrays, mask, more)

    def forward(operands):
        return mosaic.forward(problem, operands, mosaic.Config(tiles), rules._plan(problem, operands))

    return jax.jit(forward, compiler_options=QUICK)(operands)


def drawn(T, t, D, dtype, heads=(2, 1)):
    H, h = heads
    shapes = (1, T, H, D), (1, t, h, D), (1, t, h, D)
    return tuple(normal(*shape, seed=n).astype(dtype) for n, shape in enumerate(shapes))


def assert_right(tiles, arrays, mask, more):
    """Within the rounding of probabilities and of out; `lse` within float32's."""
    out, lse = (np.asarray(x, np.float64) for x in attended("mosaic", tiles, arrays, mask, more))
    wide = [x.astype(jnp.float32) for x in arrays]
    truth, lse_truth = (np.asarray(x, np.float64) for x in attended("reference", tiles, wide, mask, more))
    eps = float(jnp.finfo(arrays[0].dtype).eps)
    assert np.abs(out - truth).max() <= 1.5 * eps * np.abs(truth).max()
    empty = lse_truth == -np.inf
    np.testing.assert_array_equal(lse == -np.inf, empty)
    np.testing.assert_allclose(lse[~empty], lse_truth[~empty], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    tiles, sizes, mask, more = CASES[name]
    dtype = jnp.float16 if name == "no turns, D 128" else jnp.bfloat16
    assert_right(tiles, drawn(*sizes, dtype), mask, more)


@pytest.mark.parametrize("dtype, persistent", [(jnp.bfloat16, True), (jnp.float16, False)])
def test_a_maximum_that_was_frozen_too_low(dtype, persistent):
    """The second pass: with the first one's result these rows would be Inf or NaN."""
    arrays = drawn(130, 300, 64, dtype)
    assert_right(dataclasses.replace(TILES, persistent=persistent), arrays, None, dict(bias=RISING))


@pytest.mark.parametrize(
    "mask", [Prefix(100), Segments(IDS), Window(20, 0)], ids=["prefix", "packed", "window"]
)
def test_keys_that_nobody_sees_may_hold_nan(mask):
    T = 100 if isinstance(mask, Window) else 200
    q, k, v = drawn(T, 200, 64, jnp.bfloat16)
    unseen = np.ones(200, bool)
    rows = jnp.arange(200)
    if isinstance(mask, Prefix):
        unseen = rows >= 100
    elif isinstance(mask, Segments):
        unseen = IDS[0] < 0
    else:
        unseen = rows < 200 - T - 20
    assert unseen.any()
    clean = attended("mosaic", TILES, (q, k, v), mask, {})
    poison = lambda x: jnp.where(unseen[None, :, None, None], jnp.nan, x).astype(x.dtype)
    for x, y in zip(clean, attended("mosaic", TILES, (q, poison(k), poison(v)), mask, {})):
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(x, np.float32), atol=0.02)


STEP, DEFER = Backward(64), Backward(128, mode="defer")
GRADIENTS = {
    "full": ((128, 192, 64), None, {}),
    "causal, ragged, grouped": ((150, 200, 64), Causal(), {}),
    "window": ((200, 200, 64), Window(50, 10), {}),
    "packed": ((200, 200, 64), Segments(IDS) & Causal(), {}),
    "packed, D 128": ((200, 200, 128), Segments(IDS) & Causal(), {}),
    "keys that nobody sees": ((130, 200, 40), Prefix(50), {}),
    "lists": ((130, 200, 64), Dense(SEEN), {}),
    "scores, dropout": (
        (130, 200, 64),
        Causal(),
        dict(score_mod=SoftCap(5.0), dropout=Dropout(0.3, jax.random.key(1))),
    ),
}


@pytest.mark.parametrize("tiles", [STEP, DEFER], ids=lambda x: x.mode)
@pytest.mark.parametrize("name", ["causal, ragged, grouped", "packed"])
def test_backward(name, tiles):
    gradients_are_right(name, tiles)


@pytest.mark.parametrize("name", ["full", "window", "keys that nobody sees", "lists", "scores, dropout"])
def test_backward_with(name):
    gradients_are_right(name, STEP)


def test_backward_of_wide_heads():
    gradients_are_right("packed, D 128", Backward(64, mode="defer"))


def gradients_are_right(name, tiles):
    """dq, dk and dv, given the true lse and delta."""
    sizes, mask, more = GRADIENTS[name]
    arrays = drawn(*sizes, jnp.bfloat16)
    do = normal(*arrays[0].shape, seed=3).astype(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays]
    call = lambda *x: jflash.attention_with_lse(*x, mask, implementation="reference", **more)
    (out, lse), pull = jax.vjp(call, *wide)
    truth = pull((do.astype(jnp.float32), jnp.zeros_like(lse)))
    delta = jnp.einsum("bThd,bThd->bhT", out, do.astype(jnp.float32))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)

    q, k, v = arrays
    if name == "keys that nobody sees":
        unseen = jnp.arange(200)[None, :, None, None] >= 50
        k, v = (jnp.where(unseen, jnp.nan, x).astype(x.dtype) for x in (k, v))
    problem, operands = traced((q, k, v), mask, more)

    def backward(operands):
        plan, config = rules._plan(problem, operands), mosaic.Config(TILES, tiles)
        return mosaic.backward(problem, operands, config, plan, lse, delta, do, frozenset())

    grads = jax.jit(backward, compiler_options=QUICK)(operands)
    for name, want in zip("qkv", truth):
        want = np.asarray(want, np.float64)
        error = np.abs(np.asarray(grads[name], np.float64) - want).max() / np.abs(want).max()
        assert error <= 0.01, f"d{name}: {error}"


def test_a_missing_wait_is_a_race():
    """A control: without the consumers' release of a slot the copies overwrite what is being read."""
    from pallas_kernels.mosaic import below

    arrays = drawn(128, 512, 64, jnp.bfloat16, (1, 1))
    sync = below.sync
    skipping = lambda name, threads, cell: None if name >= 8 else sync(name, threads, cell)
    with mock.patch.object(below, "sync", skipping), pytest.raises(Exception, match="RACE|race"):
        jax.block_until_ready(attended("mosaic", TILES, arrays, None, {}))
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()

"""Every named mask against its dense twin, whichever shapes it meets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, SHAPES, grid

from jflash import Causal, Dense, Window, validate
from jflash.api import DEFAULTS
from pallas_kernels.pairs import Pairs


def visible(shape, mask, **more):
    """What the validated mask shows, [*batch, H, T, t]."""
    batch, T, t, H, h, D, d = shape
    q, k = np.zeros((*batch, T, H, D), np.float32), np.zeros((*batch, t, h, D), np.float32)
    arguments = DEFAULTS | dict(q=q, k=k, v=k, mask=mask) | more
    _, operands = validate.attention("attention", **arguments)
    positions = (more.get(f"{side}_positions") for side in "qk")
    at = Pairs(*(np.int32(x) for x in grid(shape, *positions)))
    shown = operands.mask.map(
        head=lambda x: np.asarray(x)[..., None, None],
        query=lambda x: np.asarray(x)[..., None, :, None],
        key=lambda x: np.asarray(x)[..., None, None, :],
        pair=np.asarray,
    )(at)
    return np.broadcast_to(shown, (*batch, H, T, t))


@pytest.mark.parametrize("shape", ["gqa", "cross", "more queries", "no batch", "two batch axes"])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_masks_show_what_their_twins_do(name, shape):
    shape = SHAPES[shape]
    rng = np.random.default_rng(0)
    data = MASKS[name].data(shape, rng)
    positions = dict(
        q_positions=rng.integers(0, shape.t, (*shape.batch, shape.T)),
        k_positions=rng.permutation(shape.t).reshape((1,) * len(shape.batch) + (shape.t,)),
    )
    for more in ({}, positions):
        at = grid(shape, *more.values())
        expected = np.broadcast_to(MASKS[name].dense(at, *data), (*shape.batch, shape.H, shape.T, shape.t))
        mask = MASKS[name].mask(shape, *jax.tree.map(jnp.asarray, data))
        np.testing.assert_array_equal(visible(shape, mask, **more), expected)


def test_an_array_is_a_mask_on_either_side():
    shape = SHAPES["gqa"]
    array = np.random.default_rng(0).random((shape.T, shape.t)) < 0.5
    expected = visible(shape, Dense(array) & Causal())
    for x in (array, jnp.asarray(array)):
        for mask in (x & Causal(), Causal() & x, ~(~Causal() | ~x)):
            np.testing.assert_array_equal(visible(shape, mask), expected)
        np.testing.assert_array_equal(visible(shape, x | ~Causal()), ~visible(shape, ~Dense(x) & Causal()))


def test_windows_that_are_other_masks():  # F03, F12
    shape = SHAPES["cross"]
    everything = np.ones((*shape.batch, shape.H, shape.T, shape.t), bool)
    causal = visible(shape, Causal())
    for left in (62, 63, 10**6, 2**31 - 1, None):
        np.testing.assert_array_equal(visible(shape, Window(left, 0)), causal)
        np.testing.assert_array_equal(visible(shape, Window(left, 2**31 - 1)), everything)
    assert visible(shape, Window(0, 0)).sum(-1).max() == 1

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import numpy_normal as normal

from jflash.rotary import Rotary, apply_rotary

_jitted = jax.jit(apply_rotary, static_argnames=("base", "rotary_dim", "interleaved"))


def rotate(x, positions, **settings):
    """Returns `apply_rotary` as numpy; in one compilation, where eagerly it would take a dozen."""
    return np.asarray(_jitted(x, positions, **settings))


def rotated(x, positions, base=10000.0, r=None, interleaved=False):
    """Returns the rotation in float64, each pair of channels as one complex number."""
    x = np.asarray(x, np.float64)
    r = x.shape[-1] if r is None else r
    i = np.arange(r // 2)
    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2)
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * base ** (-2.0 * i / r))
    pairs = (x[..., first] + 1j * x[..., second]) * turn
    out = x.copy()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("r", [None, 4, 8, 14])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_equals_complex_rotation(interleaved, r, base):
    x = normal(2, 5, 3, 16)
    positions = np.array([[0, 1, 2, 3, 700], [9, 4, 4, -6, 31]])
    out = rotate(x, positions, base=base, rotary_dim=r, interleaved=interleaved)
    assert out.shape == x.shape and out.dtype == x.dtype
    np.testing.assert_allclose(out, rotated(x, positions, base, r, interleaved), atol=2e-4)


def test_pairing_of_channels():  # O01
    x = np.array([1.0, 0, 0, 0]).reshape(1, 1, 4)
    one = np.array([1])
    c, s = np.cos(1.0), np.sin(1.0)
    np.testing.assert_allclose(rotate(x, one).ravel(), [c, 0, s, 0], atol=1e-6)
    np.testing.assert_allclose(rotate(x, one, interleaved=True).ravel(), [c, s, 0, 0], atol=1e-6)


def test_interleaved_is_half_under_a_permutation():  # O01
    x, positions = normal(2, 6, 2, 8), np.arange(6)
    permuted = np.arange(8).reshape(4, 2).T.ravel()  # [0 2 4 6 1 3 5 7]
    half = rotate(x[..., permuted], positions)[..., np.argsort(permuted)]
    np.testing.assert_array_equal(rotate(x, positions, interleaved=True), half)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("r", [4, 8])
def test_partial_rotary_is_a_rotary_head_of_its_own(r, interleaved):  # O02, O03
    x, positions = normal(1, 3, 2, 16), np.array([0, 1, 700])
    out = rotate(x, positions, rotary_dim=r, interleaved=interleaved)
    np.testing.assert_array_equal(out[..., r:], x[..., r:])
    alone = rotate(x[..., :r], positions, interleaved=interleaved)
    np.testing.assert_array_equal(out[..., :r], alone)
    assert np.abs(out[:, 1:, :, :r] - x[:, 1:, :, :r]).max() > 0.1


def test_partial_rotary_is_not_the_proportional_convention():  # O03
    x, one = normal(1, 1, 1, 16), np.array([1])
    frequencies = np.where(np.arange(8) < 2, 10000.0 ** (-np.arange(8) / 8), 0)  # pairs (i, i + 8)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * frequencies)
    proportional = np.concatenate([pairs.real, pairs.imag], -1)
    out = rotate(x, one, rotary_dim=4)
    assert np.abs(out - proportional).max() > 0.1
    np.testing.assert_allclose(out, rotated(x, one, r=4), atol=1e-5)


def test_passed_channels_may_hold_anything():
    x = normal(1, 2, 1, 8)
    x[..., 4:] = [np.nan, np.inf, -np.inf, -0.0]
    out = rotate(x, np.arange(2), rotary_dim=4)
    assert out[..., 4:].tobytes() == x[..., 4:].tobytes()
    assert np.isfinite(out[..., :4]).all()


def test_rotary_dim_0_changes_nothing():
    x = normal(1, 3, 2, 8)
    np.testing.assert_array_equal(rotate(x, np.arange(3), rotary_dim=0), x)


@pytest.mark.parametrize(
    "batch, shape",
    [((), (5,)), ((2,), (5,)), ((2,), (1, 5)), ((2,), (2, 5)), ((2, 3), (2, 1, 5)), ((2, 3), (5,))],
)
def test_shapes_of_positions(batch, shape):
    x = normal(*batch, 5, 2, 4)
    positions = np.random.default_rng(1).integers(0, 50, shape)
    np.testing.assert_allclose(rotate(x, positions), rotated(x, positions), atol=2e-5)


def test_head_of_256_with_64_rotated_channels_and_an_offset_per_row():  # O04
    x = normal(2, 7, 2, 256)
    positions = np.arange(7) + np.array([[0], [3]])
    out = rotate(x, positions, rotary_dim=64)
    np.testing.assert_allclose(out, rotated(x, positions, r=64), atol=2e-5)
    np.testing.assert_array_equal(out[..., 64:], x[..., 64:])


def test_two_offsets_in_one_process_differ():  # O04
    x = normal(1, 4, 1, 8)
    np.testing.assert_allclose(rotate(x, np.arange(4)), rotated(x, np.arange(4)), atol=1e-5)
    np.testing.assert_allclose(rotate(x, np.arange(4) + 5), rotated(x, np.arange(4) + 5), atol=1e-5)


def test_prefill_and_decode_equal_the_whole():  # O04
    x = normal(1, 8, 2, 8)
    whole = rotate(x, np.arange(8))
    parts = [rotate(x[:, :7], np.arange(7)), rotate(x[:, 7:], np.array([7]))]
    np.testing.assert_allclose(whole, np.concatenate(parts, 1), atol=1e-6)


def test_scores_depend_on_the_difference_of_positions():
    q, k, rows = normal(1, 6, 1, 16), normal(1, 6, 1, 16, seed=1), np.arange(6)

    def scores(offset):
        q_k = rotate(q, rows + offset), rotate(k, rows + offset)
        return np.einsum("bthd,bshd->ts", *q_k)

    np.testing.assert_allclose(scores(0), scores(100), atol=5e-4)
    assert np.abs(scores(0) - np.einsum("bthd,bshd->ts", q, k)).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_low_precision_is_rotated_in_float32(dtype):  # O04
    x = normal(1, 3, 2, 64, dtype=dtype)
    positions = np.array([1, 9999, 10000])
    out = rotate(x, positions)
    assert out.dtype == dtype
    exact = rotated(x.astype(np.float32), positions)
    # Half a unit in the last place of the result, and the float32 error of an angle near 10000.
    bound = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact) + 5e-3
    assert (np.abs(np.asarray(out, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_float64_is_rotated_in_float64(dtype):
    with jax.enable_x64(True):
        x = normal(1, 3, 1, 8, dtype=np.float64)
        positions = np.array([0, 5, 10000], dtype)
        out = rotate(x, positions)
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, rotated(x, positions), atol=1e-10)


def test_positions_may_be_fractions():
    x, positions = normal(1, 4, 1, 8), np.array([0, 0.25, 0.5, 0.75])
    out = rotate(x, positions.astype(np.float32))
    np.testing.assert_allclose(out, rotated(x, positions), atol=1e-5)


def test_gradient_turns_the_cotangent_back():
    x, w, positions = normal(2, 5, 2, 8), normal(2, 5, 2, 8, seed=1), np.arange(5) * 3
    f = lambda x: jnp.sum(apply_rotary(x, jnp.asarray(positions), rotary_dim=6) * w)
    grad = jax.jit(jax.grad(f))(x)
    np.testing.assert_allclose(grad, rotated(w, -positions, r=6), atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [3, 33, 10, -2])
def test_odd_or_too_large_rotary_dim(rotary_dim):  # O02
    with pytest.raises(ValueError, match=rf"must be even, .* Got rotary_dim={rotary_dim} and"):
        rotate(normal(1, 2, 1, 8), np.arange(2), rotary_dim=rotary_dim)


def test_odd_head_needs_a_rotary_dim():
    with pytest.raises(ValueError, match="rotary_dim=None and .* Pass an even rotary_dim, such as 6"):
        rotate(normal(1, 2, 1, 7), np.arange(2))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 1), (3, 5), (5, 2), (1, 2, 5)])
def test_positions_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"one number per row .* pass shape \(2, 5\) or \(5,\)"):
        rotate(normal(2, 5, 1, 8), np.zeros(shape, np.int32))


def test_rotary_holds_settings():
    x, positions = normal(1, 5, 2, 8), np.arange(5)
    rotary = Rotary(base=100.0, dim=4, interleaved=True)
    np.testing.assert_array_equal(
        jax.jit(rotary)(x, positions),
        rotate(x, positions, base=100.0, rotary_dim=4, interleaved=True),
    )
    assert hash(rotary) == hash(Rotary(100.0, 4, True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rotary.base = 1.0

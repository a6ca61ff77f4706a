"""Dropout: which bits are drawn, that all passes draw the same, and that they are random enough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, Case, Shape, inputs, kept, philox
from programs import IMPLEMENTATIONS, QUICK, TILES, results, tiled, widest

import jflash
from jflash import Dropout
from pallas_kernels import pairs

by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
by_each = pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "reference"))


def test_philox_by_its_known_answers():
    """Of the authors' Random123, file kat_vectors."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(x) for x in philox(counter, key)) == answer
        words = pairs.philox(tuple(map(jnp.uint32, counter)), tuple(map(jnp.uint32, key)))
        assert tuple(int(x) for x in words) == answer


def weights(implementation, case, x, tiles=0):
    """The weights of the pairs [*batch, H, T, t], as the forward and as the backward pass has them.

    The values are the rows of the identity, and so are the cotangents: out and dv are the matrix.
    """
    got = results(case, implementation, x, tiles)
    return np.moveaxis(got["out"], -2, -3), np.moveaxis(got["dv"], -3, -1)


def square(case, dtype, rows=slice(None), columns=slice(None)):
    x = inputs(case, dtype)
    batch, T, t, H, h, *_ = SHAPES[case.shape]
    eye = np.eye(40, dtype=dtype)
    spread = lambda y, heads: np.broadcast_to(y[:, None], (*batch, len(y), heads, 40))
    floats = dict(q=0 * x.floats["q"], k=x.floats["k"], v=spread(eye[columns], h))
    return x._replace(floats=floats, cotangents=(spread(eye[rows], H), 0 * x.cotangents[1]))


@by_each
def test_all_passes_and_tiles_draw_the_same_bits(implementation):
    case = Case("square", rate=0.3, offsets=(1, 2, 3, 4))
    dtype = widest(implementation)
    x = square(case, dtype)
    for tiles in range(len(TILES.get(implementation, "1"))):
        for weight in weights(implementation, case, x, tiles):
            np.testing.assert_array_equal(weight != 0, x.data["kept"])
            rounding = max(1e-6, float(jnp.finfo(dtype).eps))
            np.testing.assert_allclose(weight[weight != 0].astype(float), 1 / 40 / 0.7, rtol=rounding)


@by_each
def test_parts_draw_what_the_whole_would(implementation):
    """Halves along batch, heads, queries and keys, all at once."""
    case = Case("sixteenth of the square", rate=0.3)
    whole = kept(SHAPES["square"], 0.3, inputs(case, np.float32).data["key"], (1, 2, 3, 4))
    for part in np.ndindex(2, 2, 2, 2):
        b, h, i, j = part[0], part[1], 20 * part[2], 20 * part[3]
        rows, columns = slice(i, i + 20), slice(j, j + 20)
        x = square(case, widest(implementation), rows, columns)
        x.data["offsets"] = tuple(map(np.int32, (1 + b, 2 + h, 3 + i, 4 + j)))
        forward, backward = weights(implementation, case, x)
        np.testing.assert_array_equal(forward[0, 0][:, columns] != 0, whole[b, h, rows, columns])
        np.testing.assert_array_equal(backward[0, 0][rows] != 0, whole[b, h, rows, columns])


@by_each
def test_rates_0_and_1(implementation):
    x = inputs(Case("gqa"), widest(implementation))
    q, k, v = (x.floats[name] for name in "qkv")

    @jax.jit
    def run(q, k, v):
        def call(dropout):
            attend = lambda q, k, v: jflash.attention_with_lse(
                q, k, v, jflash.Causal(), dropout=dropout, implementation=implementation
            )
            outputs, pull = jax.vjp(attend, q, k, v)
            return *outputs, *pull(x.cotangents)

        return call(None), call(Dropout(0.0)), call(Dropout(1.0))

    with tiled(implementation):
        none, rate_0, rate_1 = run.lower(q, k, v).compile(QUICK)(q, k, v)
    for a, b in zip(none, rate_0):
        np.testing.assert_array_equal(a, b)
    out, lse, *grads = rate_1
    np.testing.assert_array_equal(lse, none[1])
    # What the cotangent of lse gives is left of the gradients; nothing comes through the values.
    assert (out == 0).all() and (grads[2] == 0).all()


@by_implementation
def test_the_gradient_is_of_the_forward_pass(implementation):
    """By finite differences: with other bits in the backward pass it would not be."""
    case = Case("square", rate=0.3, offsets=(1, 2, 3, 4))
    x = inputs(case, np.float32)
    rng = np.random.default_rng(1)
    got = results(case, implementation, x)

    def loss(step):
        moved = {name: y + np.float32(step) * along[name] for name, y in x.floats.items()}
        out, lse = (results(case, implementation, x._replace(floats=moved))[name] for name in ("out", "lse"))
        return sum((np.float64(a) * b).sum() for a, b in zip((out, lse), x.cotangents))

    for moving in "qkv":
        along = {name: (name == moving) * rng.standard_normal(y.shape) for name, y in x.floats.items()}
        along = {name: y.astype(np.float32) for name, y in along.items()}
        # Two steps, so that the error is of the fourth order in the step.
        slopes = [(loss(step) - loss(-step)) / (2 * step) for step in (0.01, 0.02)]
        slope = (4 * slopes[0] - slopes[1]) / 3
        np.testing.assert_allclose((np.float64(got[f"d{moving}"]) * along[moving]).sum(), slope, rtol=1e-3)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_independence(rate):  # I08
    shape = Shape((2,), 128, 128, 8, 8, 1, 1)
    keys = jax.random.split(jax.random.key(0))
    dropped = np.stack([~kept(shape, rate, key) for key in keys]) - np.float64(rate)
    variance = rate * (1 - rate)

    def assert_random(x, factors=1):  # the mean of independent products of `factors` is 0, by 5 sigma
        assert abs(x.mean()) < 5 * np.sqrt(variance**factors / x.size)

    assert_random(dropped)
    for axis in (1, 2, 3, 4):  # batch entries, heads, rows, columns: each on its own has the rate
        means = dropped.mean(tuple(a for a in range(5) if a != axis))
        assert abs(means).max() < 5 * np.sqrt(variance * means.size / dropped.size)
    for axis in range(5):  # and neighbours, and those of another tile, are not alike
        for distance in {1, min(16, dropped.shape[axis] - 1)}:
            ahead = np.moveaxis(dropped, axis, 0)
            assert_random(ahead[distance:] * ahead[:-distance], 2)
    corners = dropped[..., 1:, 1:] * dropped[..., 1:, :-1] * dropped[..., :-1, 1:] * dropped[..., :-1, :-1]
    assert_random(corners, 4)
    far = dropped[..., 64:, 64:] * dropped[..., 64:, :64] * dropped[..., :64, 64:] * dropped[..., :64, :64]
    assert_random(far, 4)

"""`pack` and `unpack`: there and back, their gradients, and what the helpers of packed rows refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import numpy_normal as normal
from refusals import refuses

import jflash


def test_a_list_there_and_back():
    xs = [normal(n, 2, 3, seed=n) for n in (4, 0, 1, 7)]
    packed, cu = jflash.pack(xs, rows=15)
    assert packed.shape == (15, 2, 3) and cu.tolist() == [0, 4, 4, 5, 12] and (packed[12:] == 0).all()
    for a, b in zip(jflash.unpack(packed, cu), xs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [None, 12, 40])
def test_a_padded_array_there_and_back(rows):
    x, lengths = normal(4, 7, 3), np.array([4, 0, 1, 7])
    x = np.where(np.arange(7)[:, None] < lengths[:, None, None], x, np.nan)

    @jax.jit
    def there_and_back(x, lengths):
        packed, cu = jflash.pack(x, lengths, rows=rows)
        return packed, cu, jflash.unpack(packed, cu, 7)

    packed, cu, back = there_and_back(x, lengths)
    as_list = jflash.pack([y[:n] for y, n in zip(x, lengths)], rows=28 if rows is None else rows)
    jax.tree.map(np.testing.assert_array_equal, (packed, cu), as_list)
    np.testing.assert_array_equal(back, np.nan_to_num(x))
    np.testing.assert_array_equal(jflash.unpack(packed, cu, 9)[:, :7], back)


def test_gradients_pass_through():
    x, lengths, w = normal(2, 5, 3), jnp.array([2, 5]), normal(8, 3, seed=1)
    grad = jax.grad(lambda x: (jflash.pack(x, lengths, rows=8)[0] * w).sum())(x)
    np.testing.assert_array_equal(grad[0], np.concatenate([w[:2], np.zeros((3, 3), np.float32)]))
    np.testing.assert_array_equal(grad[1], w[2:7])


@pytest.mark.parametrize("x, lengths", [(np.zeros((0, 3, 2)), []), (np.zeros((2, 0, 2)), [0, 0])], ids=str)
def test_nothing_to_pack(x, lengths):
    packed, cu = jflash.pack(x, np.array(lengths, np.int32), rows=4)
    assert packed.shape == (4, 2) and (cu == 0).all()
    assert jflash.unpack(packed, cu, 3).shape == (len(x), 3, 2)
    assert jflash.unpack(packed[:0], cu, 3).shape == (len(x), 3, 2)


Q, K = jnp.ones((12, 4, 8)), jnp.ones((9, 2, 8))
CU = [0, 5, 12]


@pytest.mark.parametrize(
    "name, run, error, words",
    [
        ("pack", lambda: jflash.pack([]), ValueError, "(x)` ... Got an empty list"),
        ("pack", lambda: jflash.pack([Q, K]), ValueError, "differ in nothing but their lengths ... Got"),
        ("pack", lambda: jflash.pack([Q], [12]), ValueError, "(lengths=...)` is for an array"),
        ("pack", lambda: jflash.pack(Q), ValueError, "(x, lengths)` ... and no lengths"),
        ("pack", lambda: jflash.pack(Q, [1, 2]), ValueError, "(lengths=...)` ... B=12, T=4. Got an array"),
        ("pack", lambda: jflash.pack(Q, [5] * 12), ValueError, "(lengths=...)` ... from 0 to T"),
        ("pack", lambda: jflash.pack(Q, [1.0] * 12), TypeError, "(lengths=...)`"),
        (
            "pack",
            lambda: jflash.pack(Q, [2] * 12, rows=23),
            ValueError,
            "(rows=...)` must hold all 24 ... Got 23",
        ),
        ("pack", lambda: jflash.pack([Q], rows=11), ValueError, "(rows=...)` must hold all 12 ... Got 11"),
        (
            "unpack",
            lambda: jflash.unpack(Q, CU, 6),
            ValueError,
            "(length=...)` ... length=6, and a sequence of 7",
        ),
        (
            "unpack",
            lambda: jax.jit(jflash.unpack)(Q, jnp.array(CU)),
            TypeError,
            "(length=None)` returns a list ... Got offsets that are traced. Pass length",
        ),
        ("unpack", lambda: jflash.unpack(K, CU, 7), ValueError, "(cu_seqlens)` must end within the 9 rows"),
        ("unpack", lambda: jflash.unpack(1.0, CU, 7), ValueError, "(packed)`"),
        (
            "segment_ids",
            lambda: jflash.segment_ids(CU, 11),
            ValueError,
            "(cu_seqlens)` must end within the 11",
        ),
        ("segment_positions", lambda: jflash.segment_positions([1], 1), ValueError, "0, then where"),
    ],
)
def test_refusals_of_the_helpers(as_users_run_it, name, run, error, words):
    refuses(name, run, error, words)

"""Arrays whose offsets do not fit into 32 bits, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash import Window


@pytest.mark.gpu
def test_R02_offsets_beyond_two_to_the_31_elements():
    """The last rows of 2.2e9 elements, and their gradients, are those of a call of their own."""
    T, H, D, n = 2**18, 66, 128, 512
    assert T * H * D > 2**31
    mask = Window(64, 0)
    draw = jax.jit(lambda key: jax.random.normal(key, (1, T, H, D), jnp.bfloat16))
    q, k, v = map(draw, jax.random.split(jax.random.key(0), 3))

    @jax.jit
    def tail(q, k, v):  # of the last n rows; the loss sees the last n - 64, which see no others
        weight = (jnp.arange(q.shape[1]) >= q.shape[1] - n + 64)[:, None, None]

        def loss(q, k, v):
            out = jflash.attention(q, k, v, mask, implementation="triton")
            return jnp.where(weight, out.astype(jnp.float32), 0).sum(), out[:, -n + 64 :]

        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, [g[:, -n + 64 :] for g in grads]

    whole = jax.tree.map(np.asarray, tail(q, k, v))
    part = jax.tree.map(np.asarray, tail(*(x[:, -n:] for x in (q, k, v))))
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(part)):
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=2e-2, atol=2e-2)

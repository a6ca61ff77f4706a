"""Arrays that tests draw."""

import jax.numpy as jnp
import numpy as np

B, H, h, D, d = 2, 4, 2, 8, 4  # of `operands`


def normal(*shape, seed=0, dtype=jnp.float32):
    """Of the standard normal distribution."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def numpy_normal(*shape, seed=0, dtype=np.float32):
    """The same numbers, for what must stay outside of JAX: in float64 or to be written to."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(*names, T, t=None, B=B, H=H, h=h):
    """Those of `names`, and always q, k and v, in NumPy, floats in float64."""
    t = T if t is None else t
    draw = lambda *shape, seed: numpy_normal(*shape, seed=seed, dtype=np.float64)
    # Documents, in the second entry of the batch not in order and with padding between and behind.
    ids = np.repeat([[0, 0, 0, 1, 1, 1], [2, -1, 2, 1, 1, -1]], -(-T // 6), axis=1)[:, :T]
    everything = dict(
        q=lambda: draw(B, T, H, D, seed=1),
        k=lambda: draw(B, t, h, D, seed=2),
        v=lambda: draw(B, t, h, d, seed=3),
        bias=lambda: draw(1, H, T, t, seed=4),
        scale=lambda: np.float64(0.4),
        sinks=lambda: draw(H, seed=5),
        slopes=lambda: np.abs(draw(H, seed=6)),
        cap=lambda: np.float64(2.0),
        ids=lambda: ids[np.arange(B) % 2].astype(np.int32),
        prefix=lambda: np.resize([t // 2, t, 0], B).astype(np.int32),
        left=lambda: np.int32(T // 3),
        q_positions=lambda: np.arange(T, dtype=np.int32)[None] + (t - T),
        key=lambda: np.array([3, 5], np.uint32),
    )
    return {name: everything[name]() for name in ("q", "k", "v", *names)}

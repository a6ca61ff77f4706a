"""How accurate an implementation must be: measured beside plain JAX, never chosen.

The truth is the reference in float64 on the same rounded inputs: float64 even for float32 inputs,
where otherwise nothing but the 2 eps would be allowed. Over some samples, and for each output and
gradient in each batch entry and head, the largest error over the largest true value, and the same
of the root mean squares, may be twice those of `plain_attention` in the inputs' dtype, plus 2 eps.
A largest error alone is luck, so plain JAX gets several tries, which differ only in the order of
its sums, and its largest error counts in whichever head it occurs.

`plain_attention` shares no code with jflash, so it is a second opinion on the reference, too: it
must have half of its digits right, and no wrong formula has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# The axes that errors are taken over; what is left are batch entries and heads. Else all axes.
WITHIN = {"out": (-3, -1), "lse": (-1,), "dq": (-3, -1), "dk": (-3, -1), "dv": (-3, -1), "dbias": (-2, -1)}


def plain_attention(q, k, v, visible, *, scale, bias=None, mods=(), sinks=None, kept=None, rate=0.0):
    """Returns (out, lse) as one would write them down, rounded where `jax.nn` rounds.

    Scores and softmax are float32. The probabilities have the dtype of the inputs, and so have the
    operands of every product, in the backward pass too.

    - `visible`: boolean, `bias`: float; both broadcast to [*batch, H, T, t].
    - `mods`: functions of the scores [*batch, H, T, t].
    - `kept`: boolean [*batch, H, T, t], the pairs that dropout of `rate` keeps.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    *batch, T, H, D = q.shape
    t, h = k.shape[-3:-1]
    q = q.reshape(*batch, T, h, H // h, D)
    s = _product("...ThgD,...thD->...hgTt", q, k, preferred_element_type=wide)
    s = _cotangent_in(q.dtype, s).reshape(*batch, H, T, t) * scale
    if bias is not None:
        s = s + bias.astype(wide)
    for mod in mods:
        s = mod(s)

    some_key = jnp.broadcast_to(visible, s.shape).any(-1, keepdims=True)
    s = jnp.where(some_key, jnp.where(visible, s, -jnp.inf), 0)
    lse = jax.nn.logsumexp(s, axis=-1, keepdims=True)
    total = lse if sinks is None else jnp.logaddexp(lse, sinks.astype(wide)[:, None, None])
    total = jnp.where(some_key, total, jnp.inf)
    weight = jnp.ones((), wide) if kept is None else kept / jnp.array(1 - rate, wide)
    grouped = lambda x: jnp.broadcast_to(x, (*batch, H, *x.shape[-2:])).reshape(
        *batch, h, H // h, *x.shape[-2:]
    )
    out = _weighted_sum(grouped(s), grouped(total), grouped(jnp.broadcast_to(weight, s.shape)), v)
    return out.reshape(*batch, T, H, -1), jnp.where(some_key, lse, -jnp.inf)[..., 0]


def _product(spec, a, b, **settings):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, **settings)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cotangent_in(dtype, x):
    """Returns `x`, and rounds its cotangent to `dtype`."""
    return x


_cotangent_in.defvjp(lambda dtype, x: (x, None), lambda dtype, _, dx: (dx.astype(dtype).astype(dx.dtype),))


@jax.custom_vjp
def _weighted_sum(s, lse, weight, v):
    """Returns the sum of `v` over keys, weighted by exp(s - lse) and by `weight`.

    In the backward pass the probabilities come from `lse` again and what their sum must be from
    the output, as everywhere where memory is linear. In float32 that costs more than all else if
    scores are large or few keys are visible, and `jax.nn`, which keeps the probabilities, need not
    pay it.
    """
    p = (jnp.exp(s - lse) * weight).astype(v.dtype)
    return _product("...hgTt,...thd->...Thgd", p, v)


def _weighted_sum_forward(s, lse, weight, v):
    out = _weighted_sum(s, lse, weight, v)
    return out, (s, lse, weight, v, out)


def _weighted_sum_backward(residuals, do):
    s, lse, weight, v, out = residuals
    p = jnp.exp(s - lse) * weight
    dp = _product("...Thgd,...thd->...hgTt", do, v).astype(p.dtype)
    dlse = -(out.astype(p.dtype) * do.astype(p.dtype)).sum(-1)
    dv = _product("...hgTt,...Thgd->...thd", p.astype(v.dtype), do)
    return p * dp, jnp.moveaxis(dlse, -3, -1)[..., None], None, dv


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def errors(name, x, truth):
    """Returns [2, *batch, heads]: the largest and the root mean square error, relative to the truth.

    Both arrays are [samples, ...].
    """
    x, truth = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    assert x.shape == truth.shape, f"{name} has shape {x.shape[1:]}, the truth {truth.shape[1:]}"
    if name == "lse":
        empty = truth == -np.inf
        np.testing.assert_array_equal(x == -np.inf, empty, "lse must be -inf in rows that see no key")
        x, truth = np.where(empty, 0, x), np.where(empty, 0, truth)
    within = WITHIN.get(name, range(1 - x.ndim, 0))
    axes = (0, *(axis for axis in within if axis + x.ndim > 0))
    largest = lambda y: np.abs(y).max(axes, initial=0)
    mean_square = lambda y: np.sqrt(np.square(y).sum(axes))
    return np.stack([_ratio(f(x - truth), f(truth)) for f in (largest, mean_square)])


def _ratio(error, size):
    # Where the truth is 0, nothing but 0 will do. A NaN stays one.
    return np.where(size == 0, np.where(error == 0, 0, np.inf), error / np.where(size == 0, 1, size))


def assert_as_accurate(got, plain, truth, dtype):
    """Fails unless `got` is as accurate as `plain`.

    Both and `truth` are dicts by name ("out", "lse", "dq", ...) of arrays [samples, ...]; `plain` is
    a list of them, from computations that differ in rounding only. `dtype` is that of the inputs.
    """
    assert all(each.keys() == got.keys() for each in (truth, *plain))
    for name in got:
        eps = max(float(jnp.finfo(kind).eps) for kind in (dtype, got[name].dtype))
        ours = errors(name, got[name], truth[name])
        theirs = np.max([errors(name, each[name], truth[name]) for each in plain], axis=0)
        assert (theirs < eps**0.5).all(), f"plain JAX and the reference disagree on {name}: {theirs}"
        theirs[0] = theirs[0].max(initial=0)
        budget = 2 * theirs + 2 * eps
        worst = np.unravel_index(np.argmax(np.nan_to_num(ours - budget, nan=np.inf)), ours.shape)
        assert ours[worst] <= budget[worst], (
            f"{name}: the {('largest', 'root mean square')[worst[0]]} error is {ours[worst]:.3g} in batch "
            f"entry and head {tuple(map(int, worst[1:]))}, of plain JAX {theirs[worst]:.3g}, eps {eps:.3g}"
        )


def assert_half_the_digits(got, truth, dtype):
    """Fails if some output or gradient has fewer right: no rounding does that, every wrong formula does.

    `got` and `truth` are dicts by name of arrays, of one sample.
    """
    for name in got:
        eps = max(float(jnp.finfo(kind).eps) for kind in (dtype, got[name].dtype))
        wrong = errors(name, got[name][None], truth[name][None])
        assert (wrong < eps**0.5).all(), f"{name}: relative errors of {wrong}"

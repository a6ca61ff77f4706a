"""Named shapes, masks, score modifiers and biases, and the inputs of calls made of them.

Each mask comes with a dense twin and each score modifier with a formula, in plain NumPy or JAX,
which share no code with jflash.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash import Alibi, Causal, Dense, Function, Prefix, Segments, SoftCap, Window
from jflash.masks import Moved


class Shape(NamedTuple):
    batch: tuple
    T: int
    t: int
    H: int
    h: int
    D: int
    d: int


SHAPES = {
    "mha": Shape((2,), 40, 40, 2, 2, 16, 16),
    "gqa": Shape((2,), 37, 37, 4, 2, 8, 8),  # as many batch entries as key heads
    "mqa": Shape((3,), 33, 33, 4, 1, 16, 16),
    "long": Shape((2,), 111, 111, 2, 1, 80, 80),
    "cross": Shape((2,), 21, 63, 4, 2, 16, 16),
    "more queries": Shape((2,), 63, 37, 4, 2, 8, 8),
    "one query": Shape((2,), 1, 37, 4, 2, 64, 64),
    "one key": Shape((2,), 37, 1, 2, 2, 8, 8),
    "wide keys": Shape((2,), 37, 45, 4, 2, 16, 3),
    "wide values": Shape((2,), 37, 45, 4, 2, 3, 16),
    "D=1": Shape((2,), 37, 37, 2, 2, 1, 8),
    "d=1": Shape((2,), 37, 37, 2, 2, 8, 1),
    "no batch": Shape((), 37, 45, 4, 2, 8, 8),
    "two batch axes": Shape((2, 3), 19, 35, 4, 2, 8, 16),
    "square": Shape((2,), 40, 40, 2, 2, 1, 40),
    "sixteenth of the square": Shape((1,), 20, 20, 1, 1, 1, 40),
    "no queries": Shape((2,), 0, 5, 4, 2, 8, 8),
    "no keys": Shape((2,), 5, 0, 4, 2, 8, 8),
    "no entries": Shape((0,), 5, 7, 4, 2, 8, 8),
}


class At(NamedTuple):
    """The coordinates of all pairs as NumPy arrays that broadcast to [*batch, H, T, t]."""

    b: Any
    h: Any
    q: Any
    k: Any
    q_row: Any
    k_row: Any


def grid(shape, q_positions=None, k_positions=None):
    q_row, k_row = np.arange(shape.T)[:, None], np.arange(shape.t)
    b = np.arange(np.prod(shape.batch, dtype=int)).reshape(*shape.batch, 1, 1, 1)
    return At(
        b=b,
        h=np.arange(shape.H)[:, None, None],
        q=q_row + shape.t - shape.T if q_positions is None else q_positions[..., None, :, None],
        k=k_row if k_positions is None else k_positions[..., None, None, :],
        q_row=q_row,
        k_row=k_row,
    )


class MaskCase(NamedTuple):
    data: Callable  # (shape, rng) -> the arrays of the mask, in NumPy
    mask: Callable  # (shape, *data) -> what `attention` gets
    dense: Callable  # (At, *data) -> boolean, broadcasting to [*batch, H, T, t]


def _static(mask, dense):
    return MaskCase(lambda shape, rng: (), lambda shape: mask, dense)


def _traced_window(left, right, dense):
    bounds = lambda shape, rng: (np.int32(left), np.int32(right))
    return MaskCase(bounds, lambda shape, l, r: Window(l, r), lambda at, l, r: dense(at))


def _segments(draw, of_batch=True):
    """`draw(rng, *shape)` gives ids; where T = t, queries and keys are the same tokens."""

    def data(shape, rng):
        batch = shape.batch if of_batch else (1,) * len(shape.batch)
        q_ids = draw(rng, *batch, shape.T)
        return (q_ids,) if shape.T == shape.t else (q_ids, draw(rng, *batch, shape.t))

    def dense(at, q_ids, k_ids=None):
        k_ids = q_ids if k_ids is None else k_ids
        q_ids, k_ids = q_ids[..., None, :, None], k_ids[..., None, None, :]
        return (q_ids == k_ids) & (q_ids >= 0)

    return MaskCase(data, lambda shape, *ids: Segments(*ids), dense)


def sorted_ids(rng, *shape):
    return np.sort(rng.choice([0, 1, 3, 7], shape), -1).astype(np.int32)


def unsorted_ids(rng, *shape):
    return rng.choice([-4, -1, 0, 2, 5], shape).astype(np.int32)


def padded_ids(rng, *shape):
    """Sorted ids, the last fifth padding."""
    return np.where(np.arange(shape[-1]) < shape[-1] * 4 // 5, sorted_ids(rng, *shape), -1).astype(np.int32)


def _prefix(pattern):
    """`pattern` names the axes of the lengths: "B", "1", "BT" or "1T"; "" is an int."""

    def data(shape, rng):
        batch = shape.batch if "B" in pattern else (1,) * len(shape.batch)
        rows = (shape.T,) if "T" in pattern else ()
        n = rng.integers(0, shape.t * 3 // 4 + 1, (*batch, *rows)).astype(np.int32)
        return (n,) if pattern else ()

    def dense(at, n=None):
        if n is None:
            return at.k_row < at.k_row.size // 2
        return at.k_row < (n[..., None, :, None] if "T" in pattern else n[..., None, None, None])

    return MaskCase(data, lambda shape, n=None: Prefix(shape.t // 2 if n is None else n), dense)


def broadcast_shape(pattern, shape):
    """The axes that `pattern` names, such as "B1Tt": its first letter of four stands for the batch."""
    sizes = dict(H=(shape.H,), T=(shape.T,), t=(shape.t,), B=shape.batch)
    sizes["1"] = (1,)
    batch, rest = (pattern[:-3], pattern[-3:]) if len(pattern) == 4 else ("", pattern)
    lead = (1,) * len(shape.batch) if batch == "1" else sizes.get(batch, ())
    return sum((sizes[axis] for axis in rest), lead)


def _dense(pattern, wrap=Dense):
    def data(shape, rng):
        return (rng.random(broadcast_shape(pattern, shape)) < 0.6,)

    return MaskCase(data, lambda shape, array: wrap(array), lambda at, array: array)


def _every_other(shape, n):
    return Function(lambda b, h, q, k: (q + b + k) % n != 1)


def _shift_of_head(shape, shift):
    return Function(lambda b, h, q, k: k <= q - shift[h])


def _combined(op, *parts):
    """`op` of masks; of NumPy arrays it is the dense twin."""

    def data(shape, rng):
        return tuple(part.data(shape, rng) for part in parts)

    def mask(shape, *data):
        return op(*(part.mask(shape, *x) for part, x in zip(parts, data)))

    def dense(at, *data):
        return op(*(part.dense(at, *x) for part, x in zip(parts, data)))

    return MaskCase(data, mask, dense)


_CAUSAL = _static(Causal(), lambda at: at.k <= at.q)
_ARRAY = _dense("B1Tt", wrap=lambda array: array)
_WINDOW = _static(Window(4, 6), lambda at: (at.q - at.k <= 4) & (at.k - at.q <= 6))
_SORTED, _UNSORTED, _PADDED = _segments(sorted_ids), _segments(unsorted_ids), _segments(padded_ids)
_FUNCTION = MaskCase(
    lambda shape, rng: (np.int32(3),), _every_other, lambda at, n: (at.q + at.b + at.k) % n != 1
)

MASKS = {
    "none": _static(None, lambda at: np.bool_(True)),
    "causal": _CAUSAL,
    "window": _WINDOW,
    "window 0 0": _static(Window(0, 0), lambda at: at.q == at.k),
    "window 20 0": _static(Window(20, 0), lambda at: (at.q - at.k <= 20) & (at.k <= at.q)),
    "window left": _static(Window(5, None), lambda at: at.q - at.k <= 5),
    "window right": _static(Window(None, 3), lambda at: at.k - at.q <= 3),
    "window open": _static(Window(None, None), lambda at: np.bool_(True)),
    "window huge": _static(Window(2**31 - 1, 0), lambda at: at.k <= at.q),
    "window traced": _traced_window(9, 2, lambda at: (at.q - at.k <= 9) & (at.k - at.q <= 2)),
    "window traced huge": _traced_window(2**31 - 1, 2**31 - 1, lambda at: np.bool_(True)),
    "moved": _static(
        Moved(Window(3, 1) & Causal(), -7), lambda at: (at.q + 7 - at.k <= 3) & (at.k <= at.q + 7)
    ),
    "segments": _SORTED,
    "segments unsorted": _UNSORTED,
    "segments padded": _PADDED,
    "segments of all": _segments(padded_ids, of_batch=False),
    "prefix": _prefix(""),
    "prefix 1": _prefix("1"),
    "prefix B": _prefix("B"),
    "prefix BT": _prefix("BT"),
    "prefix 1T": _prefix("1T"),
    "dense BHTt": _dense("BHTt"),
    "dense 1HTt": _dense("1HTt"),
    "dense B1Tt": _dense("B1Tt"),
    "dense BH1t": _dense("BH1t"),
    "dense BHT1": _dense("BHT1"),
    "dense B11t": _dense("B11t"),
    "dense Tt": _dense("Tt"),
    "dense": _dense(""),
    "array": _ARRAY,
    "function": _FUNCTION,
    "function of heads": MaskCase(
        lambda shape, rng: (np.arange(shape.H, dtype=np.int32) - 1,),
        _shift_of_head,
        lambda at, shift: at.k <= at.q - shift[at.h],
    ),
    "causal & segments": _combined(lambda a, b: a & b, _CAUSAL, _PADDED),
    "window & prefix": _combined(lambda a, b: a & b, _WINDOW, _prefix("B")),
    "window & causal": _combined(
        lambda a, b: a & b, _traced_window(9, 2, lambda at: (at.q - at.k <= 9) & (at.k - at.q <= 2)), _CAUSAL
    ),
    "causal | prefix": _combined(lambda a, b: a | b, _CAUSAL, _prefix("B")),
    "~window": _combined(lambda a: ~a, _WINDOW),
    "~segments & causal": _combined(lambda a, b: ~a & b, _UNSORTED, _CAUSAL),
    "array & causal": _combined(lambda a, b: a & b, _ARRAY, _CAUSAL),
    "causal | array": _combined(lambda a, b: a | b, _CAUSAL, _ARRAY),
    "function & window": _combined(lambda a, b: a & b, _FUNCTION, _WINDOW),
    "nested": _combined(lambda a, b, c, d: (a | b) & ~(c & d), _SORTED, _WINDOW, _FUNCTION, _CAUSAL),
}


# By the axes that they have, as in `broadcast_shape`.
BIASES = ("1HTt", "B1Tt", "11Tt", "111t", "B11t", "1H1t", "11T1", "HTt", "Tt", "", "BHTt", "BHT1")


class ModCase(NamedTuple):
    floats: Callable  # (shape, rng) -> the float arrays of the modifiers, in NumPy
    mods: Callable  # (*floats) -> what `attention` gets as score_mod
    plain: Callable  # (At, *floats) -> functions of the scores [*batch, H, T, t]


def _slopes(*lead):
    return lambda shape, rng: (rng.uniform(-0.1, 0.3, (*lead, shape.H)).astype(np.float32),)


def _far(at):
    return abs(at.q - at.k)


def _weighted(weight, slopes):
    return lambda s, b, h, q, k: s * weight + slopes[h] * jnp.sin(0.3 * (q - 2 * k) + b)


MODS = {
    "softcap": ModCase(
        lambda shape, rng: (), lambda: SoftCap(2.5), lambda at: (lambda s: 2.5 * jnp.tanh(s / 2.5),)
    ),
    "softcap traced": ModCase(
        lambda shape, rng: (np.float32(1.7),),
        lambda cap: SoftCap(cap),
        lambda at, cap: (lambda s: cap * jnp.tanh(s / cap),),
    ),
    "alibi": ModCase(
        _slopes(),
        lambda slopes: Alibi(slopes),
        lambda at, slopes: (lambda s: s - slopes[:, None, None] * _far(at),),
    ),
    "alibi of entries": ModCase(
        lambda shape, rng: _slopes(*shape.batch)(shape, rng),
        lambda slopes: Alibi(slopes),
        lambda at, slopes: (lambda s: s - slopes[..., None, None] * _far(at),),
    ),
    "function": ModCase(
        lambda shape, rng: (np.float32(0.8), *_slopes()(shape, rng)),
        _weighted,
        lambda at, w, x: (lambda s: s * w + x[:, None, None] * jnp.sin(0.3 * (at.q - 2 * at.k) + at.b),),
    ),
    "several": ModCase(
        lambda shape, rng: (np.float32(2.0), np.float32(1.3), *_slopes()(shape, rng)),
        lambda cap, weight, slopes: (SoftCap(cap), _weighted(weight, slopes), Alibi(slopes)),
        lambda at, cap, weight, slopes: (
            *MODS["softcap traced"].plain(at, cap),
            *MODS["function"].plain(at, weight, slopes),
            *MODS["alibi"].plain(at, slopes),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention, by names."""

    shape: str = "gqa"
    mask: str = "none"
    bias: str | None = None
    mods: str | None = None
    scale: float | str | None = None  # "traced" for an array
    sinks: bool = False
    rate: float = 0.0
    offsets: tuple = (0, 0, 0, 0)
    positions: bool = False
    bias_dtype: Any = np.float32

    def __str__(self):
        default = Case()
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = {name: x for name, x in changed.items() if x != getattr(default, name)}
        words = (changed.pop("shape", default.shape), changed.pop("mask", default.mask))
        more = (name if x is True else f"{name} {getattr(x, '__name__', x)}" for name, x in changed.items())
        return ", ".join((*words, *more))


class Inputs(NamedTuple):
    """What a program takes: pytrees of NumPy arrays."""

    floats: dict  # q, k, v and what else gets a gradient
    data: dict  # the rest, for jflash and for its dense twin
    cotangents: tuple  # of out and lse


def inputs(case, dtype, seed=0, heat=2.0):
    """Random inputs of a case; `heat` is about the standard deviation of the scores."""
    shape = SHAPES[case.shape]
    batch, T, t, H, h, D, d = shape
    rng = np.random.default_rng(seed)
    normal = lambda *size: rng.standard_normal(size).astype(np.float32)
    floats = dict(q=heat * normal(*batch, T, H, D), k=normal(*batch, t, h, D), v=normal(*batch, t, h, d))
    cotangents = normal(*batch, T, H, d).astype(dtype), normal(*batch, H, T)
    floats = {name: x.astype(dtype) for name, x in floats.items()}
    if case.bias is not None:
        floats["bias"] = normal(*broadcast_shape(case.bias, shape)).astype(case.bias_dtype)
    if case.scale == "traced":
        floats["scale"] = np.float32(0.4)
    if case.sinks:
        floats["sinks"] = normal(H)
    if case.mods is not None:
        floats["mods"] = MODS[case.mods].floats(shape, rng)
    data = dict(mask=MASKS[case.mask].data(shape, rng), q_positions=None, k_positions=None)
    if case.positions:
        data["q_positions"] = rng.integers(0, t, (*batch, T)).astype(np.int32)
        data["k_positions"] = rng.permutation(t).astype(np.int32).reshape((1,) * len(batch) + (t,))
    at = coordinates(case, data)
    data["visible"] = np.asarray(MASKS[case.mask].dense(at, *data["mask"]))
    if case.rate:
        data["key"] = np.asarray(jax.random.PRNGKey(seed))
        data["offsets"] = tuple(map(np.int32, case.offsets))
        data["kept"] = kept(shape, case.rate, data["key"], case.offsets)
    return Inputs(floats, data, cotangents)


def kept(shape, rate, key, offsets=(0, 0, 0, 0)):
    """The pairs that dropout keeps, [*batch, H, T, t]: by global indices and rows, as `Dropout` has it."""
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
    at = grid(shape)
    b, h, q_row, k_row = (np.uint32(x + n) for x, n in zip((at.b, at.h, at.q_row, at.k_row), offsets))
    q, k = (philox((row, h, b, np.uint32(side)), words) for side, row in enumerate((q_row, k_row)))
    x = q[0] ^ k[0]
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) + (q[1] ^ k[1])
    x = x * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)) >= np.uint32(round(rate * 2**32))


def philox(counter, key, rounds=10):
    """Philox4x32 in NumPy: four words from four words of the counter and two of the key."""
    c = [np.asarray(x, np.uint64) for x in counter]
    k = [int(x) for x in key]
    low, high = lambda x: x & np.uint64(0xFFFFFFFF), lambda x: x >> np.uint64(32)
    for _ in range(rounds):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [high(b) ^ c[1] ^ np.uint64(k[0]), low(b), high(a) ^ c[3] ^ np.uint64(k[1]), low(a)]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return [x.astype(np.uint32) for x in c]


def coordinates(case, data):
    at = grid(SHAPES[case.shape], data["q_positions"], data["k_positions"])
    return at._replace(b=at.b + case.offsets[0], h=at.h + case.offsets[1])

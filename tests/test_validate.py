"""Every check of what users pass: the error names the call, the argument, the rule, what was got, the fix."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusals import refuses

import jflash
from jflash import Alibi, Causal, Dense, Dropout, Function, Prefix, Segments, SoftCap, Window

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, T, t, H, h, D = 2, 5, 7, 4, 2, 8
q, k, v = jnp.ones((B, T, H, D)), jnp.ones((B, t, h, D)), jnp.ones((B, t, h, D))
KEY = jax.random.key(0)


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def raises(error, words, *args, call=jflash.attention, **settings):
    text = refuses(call.__name__, lambda: call(*(args or (q, k, v)), **settings), error, words)
    assert "  " not in text, text


# q, k, v


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((5, 8), (7, 8), (7, 8)), "same number of axes, at least 3: (*batch, length, heads, head size)"),
        (
            ((2, 5, 4, 8), (7, 4, 8), (7, 4, 8)),
            "same number of axes ... q.shape=(2, 5, 4, 8), k.shape=(7, 4, 8)",
        ),
        (((8,), (8,), (8,)), "at least 3 ... q.shape=(8,)"),
    ],
)
def test_ranks(shapes, words):
    raises(ValueError, f"(q, k, v)` ... {words}", *(ones(*s) for s in shapes))


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.bool_, jnp.complex64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_dtypes_that_are_not_computed(name, dtype):
    arrays = dict(q=q, k=k, v=v)
    arrays[name] = arrays[name].astype(dtype)
    words = f"({name}=...)` must be float16, bfloat16 or float32 ... {jnp.dtype(dtype)} ... Cast it"
    raises(TypeError, words, *arrays.values())


@pytest.mark.parametrize("kinds", ["fbb", "ffb", "bff", "fhf"])
def test_mixed_dtypes(kinds):
    dtypes = dict(f=jnp.float32, b=jnp.bfloat16, h=jnp.float16)
    a, b, c = (dtypes[x] for x in kinds)
    got = f"q {jnp.dtype(a)}, k {jnp.dtype(b)}, v {jnp.dtype(c)}"
    words = f"(q, k, v)` must have one dtype ... round some of them silently. Got {got}. Cast them"
    raises(TypeError, words, q.astype(a), k.astype(b), v.astype(c))


@pytest.mark.parametrize("x", [None, "q", object(), {"a": 1}], ids=["None", "str", "object", "dict"])
def test_what_is_no_array(x):
    raises(TypeError, "(q=...)` must be an array. Got", x, k, v)
    raises(TypeError, "(v=...)` must be an array. Got", q, k, x)


@pytest.mark.parametrize("heads, key_heads", [(6, 4), (3, 2), (2, 4), (4, 0)])
def test_heads_that_do_not_divide(heads, key_heads):
    words = (
        f"(q, k)` q has {heads} heads and k has {key_heads} ... (grouped-query attention needs H % h == 0)"
    )
    words += f" ... q.shape=(2, 5, {heads}, 8)"
    raises(ValueError, words, ones(B, T, heads, D), *[ones(B, t, key_heads, D)] * 2)


@pytest.mark.parametrize(
    "v_shape", [(B, t, 4, D), (B, t + 1, h, D), (1, t, h, D)], ids=["heads", "length", "batch"]
)
def test_keys_and_values_that_do_not_belong_together(v_shape):
    words = f"(k, v)` must agree in batch, length and heads; only the head size of v ... v.shape={v_shape}"
    raises(ValueError, words, q, k, ones(*v_shape))


def test_batches_are_not_broadcast():
    words = "(q, k, v)` must have the same batch axes ... q.shape=(2, 5, 4, 8) ... jax.numpy.broadcast_to"
    raises(ValueError, words, q, k[:1], v[:1])


def test_head_sizes():
    raises(ValueError, "(q, k)` must have the same head size D ... D 8 in q and 6 in k", q, k[..., :6], v)
    assert jflash.attention(q, k, v[..., :3]).shape == (B, T, H, 3)


def test_the_layout_of_pytorch_gets_a_hint():
    hint = "look like (batch, heads, length, head size) ... x.swapaxes(-3, -2)"
    # (B, H, T, D): 4 heads, 6 queries over 10 keys.
    raises(ValueError, hint, ones(B, 4, 6, D), *[ones(B, 2, 10, D)] * 2)
    raises(ValueError, hint, ones(B, 4, 6, D), *[ones(B, 4, 10, D)] * 2)
    with pytest.raises(ValueError) as caught:
        jflash.attention(ones(B, T, 6, D), *[ones(B, t, 4, D)] * 2)
    assert "swapaxes" not in str(caught.value)


# Scale, bias, sinks, positions


@pytest.mark.parametrize(
    "scale, error, words",
    [
        (ones(H), ValueError, "a floating-point array of shape () ... an array of float32 and shape (4,)"),
        (ones(dtype=jnp.int32), ValueError, "an array of int32 and shape () ... A factor per head"),
        (True, ValueError, "must be a number"),
        ("large", TypeError, "must be an array. Got 'large'"),
    ],
    ids=["vector", "integer array", "bool", "str"],
)
def test_scale(scale, error, words):
    raises(error, f"(scale=...)` ... {words}", scale=scale)


@pytest.mark.parametrize(
    "shape", [(B, H, T, T), (3, H, T, t), (B, h, T, t), (1, B, H, T, t), (T,), (B, T, t)], ids=str
)
def test_bias_and_dense_masks_of_other_shapes(shape):
    rule = (
        f"must broadcast to (*batch, H, T, t) = (2, 4, 5, 7) ... shape {shape} ... T=5 queries over t=7 keys"
    )
    raises(ValueError, f"(bias=...)` {rule}", bias=ones(*shape))
    array = ones(*shape, dtype=bool)
    raises(ValueError, f"(mask=Dense(...))` {rule}", q, k, v, array)
    raises(ValueError, f"(mask=Dense(...))` {rule}", q, k, v, Causal() & array)


def test_bias_of_other_dtypes():
    got = "Got an array of bool and shape (5, 7). A boolean array that hides keys is a mask"
    raises(TypeError, f"(bias=...)` ... floating-point array. {got}", bias=ones(T, t, dtype=bool))
    raises(TypeError, "(bias=...)` ... an array of int32", bias=ones(T, t, dtype=jnp.int32))


@pytest.mark.parametrize(
    "sinks",
    [ones(h), ones(B, H), ones(), ones(H, dtype=jnp.int32)],
    ids=["h", "batch", "scalar", "integers"],
)
def test_sinks(sinks):
    got = f"an array of {sinks.dtype} and shape {sinks.shape}"
    raises(
        ValueError, f"(sinks=...)` must be a floating-point array [H] ... with H=4. Got {got}", sinks=sinks
    )


@pytest.mark.parametrize("name, n, axis", [("q_positions", T, "T"), ("k_positions", t, "t")])
def test_positions(name, n, axis):
    integers = lambda *shape: ones(*shape, dtype=jnp.int32)
    rule = f"({name}=...)` must be [*batch or 1, {axis}] with {axis}={n}, batch=(2,). Got shape"
    raises(ValueError, f"{rule} (9,) ... built for another length", **{name: integers(9)})
    raises(ValueError, f"{rule} (3, {n})", **{name: integers(3, n)})
    raises(ValueError, f"{rule} (1, 1, {n})", **{name: integers(1, 1, n)})
    raises(ValueError, f"{rule} ()", **{name: integers()})
    raises(
        TypeError, f"({name}=...)` must be an array of integers. Got an array of float32", **{name: ones(n)}
    )


# Masks


@pytest.mark.parametrize(
    "mask, got",
    [
        (ones(T, t), "an array of float32"),
        (np.ones((T, t), np.int32), "an array of int32"),
        ("causal", "a str"),
        (lambda b, h, i, j: i >= j, "a function"),
    ],
    ids=["float", "integers", "name", "function"],
)
def test_what_is_no_mask(mask, got):
    rule = "must be a jflash mask (Causal(), Window(...), ...) or a boolean array"
    raises(TypeError, f"(mask=...)` ... {rule} ... {got}", q, k, v, mask)
    if not callable(mask) and not isinstance(mask, str):
        raises(TypeError, "is added to the scores is a `bias`; a 0/1 array becomes a mask", q, k, v, mask)


def test_a_mask_combined_with_what_is_none():
    with pytest.raises(TypeError, match="must be a jflash mask.*or a boolean array.*Got a str"):
        Causal() & "window"
    with pytest.raises(TypeError, match="Got an array of float32"):
        np.ones((T, t), np.float32) | Causal()


def test_a_mask_of_a_users_class():
    class Mine(jflash.Mask):
        def __call__(self, at):
            return at.k <= at.q

    words = "(mask=...)` knows the masks of jflash ... Got a Mine. ... `jflash.Function(fn)`"
    raises(TypeError, words, q, k, v, Mine())
    raises(TypeError, words, q, k, v, ~Mine() | Causal())


def test_dense_of_numbers():
    words = "(mask=Dense(...))` must hold a boolean array ... an array of int32 ... `array != 0`"
    raises(TypeError, words, q, k, v, Dense(ones(T, t, dtype=jnp.int32)))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "bound, error, got",
    [
        (-1, ValueError, "-1. None opens a side; -1 does not."),
        (-3, ValueError, "-3."),
        (np.int64(-2), ValueError, "-2."),
        (1.5, TypeError, "1.5."),
        (True, TypeError, "True."),
        (ones(2, dtype=jnp.int32), TypeError, "an array of int32 and shape (2,)"),
        (ones(), TypeError, "an array of float32 and shape ()"),
        ("all", TypeError, "'all'"),
    ],
    ids=str,
)
def test_window_bounds(side, bound, error, got):
    rule = f"(mask=Window(...))` {side} must be None (open) or an integer of at least 0 (0 is a real bound)"
    raises(error, f"{rule}. Got {got}", q, k, v, Window(**{side: bound}))
    raises(error, rule, q, k, v, Causal() & Window(**{side: bound}))


def test_segments_built_for_other_lengths():
    ids = lambda *shape: ones(*shape, dtype=jnp.int32)
    words = "(mask=Segments(q_ids=...))` must be [*batch or 1, T] with T=5, batch=(2,). Got shape (2, 6)"
    raises(
        ValueError, f"{words} ... another length than this call's T=5", q, k, v, Segments(ids(B, 6), ids(t))
    )
    words = "(mask=Segments(k_ids=...))` must be [*batch or 1, t] with t=7, batch=(2,). Got shape (2, 5)"
    raises(ValueError, words, q, k, v, Segments(ids(B, T), ids(B, T)))
    words = "(mask=Segments(...))` needs k_ids where queries and keys are not the same tokens. Got T=5"
    raises(ValueError, words, q, k, v, Segments(ids(B, T)))
    raises(
        ValueError, "(mask=Segments(q_ids=...))` ... Got shape (3, 5)", q, k, v, Segments(ids(3, T), ids(t))
    )
    raises(
        TypeError,
        "(mask=Segments(q_ids=...))` must be an array of integers",
        q,
        k,
        v,
        Segments(ones(T), ids(t)),
    )


def test_prefix():
    rule = "(mask=Prefix(...))` n must be"
    raises(ValueError, f"{rule} between 0 and the number of keys, 7. Got 8", q, k, v, Prefix(8))
    raises(ValueError, f"{rule} between 0 and the number of keys, 7. Got -1", q, k, v, Prefix(-1))
    raises(TypeError, f"{rule} integers. Got an array of float32 and shape ()", q, k, v, Prefix(2.5))
    raises(TypeError, f"{rule} integers. Got an array of float32", q, k, v, Prefix(ones(B)))
    shapes = "an int, [*batch or 1] or [*batch or 1, T] with batch=(2,), T=5"
    integers = lambda *shape: ones(*shape, dtype=jnp.int32)
    raises(ValueError, f"{rule} {shapes}. Got shape (3,)", q, k, v, Prefix(integers(3)))
    raises(ValueError, f"{rule} {shapes}. Got shape (1, 1, 5)", q, k, v, Prefix(integers(1, 1, 5)))
    raises(ValueError, "(mask=Prefix(...))` ... T=5 ... shape (2, 7)", q, k, v, Prefix(integers(B, t)))


# Functions


def test_functions_that_close_over_data_of_tokens_or_pairs():
    matrix, per_token = ones(T, t), jnp.arange(t)
    rule = "may close over scalars and over vectors [H] (H=4) that it indexes by h. Got an array of shape"
    way_out = "Data per token goes into positions or Segments, data per pair into `bias` or `Dense`"
    hide = Function(lambda b, h, i, j: matrix[i, j] > 0)
    raises(ValueError, f"(mask=Function(fn))` {rule} (5, 7). {way_out}", q, k, v, hide)
    raises(
        ValueError,
        f"(mask=Function(fn))` {rule} (7,)",
        q,
        k,
        v,
        Function(lambda b, h, i, j: per_token[j] > 0),
    )
    raises(ValueError, f"(score_mod=relative)` {rule} (5, 7). {way_out}", score_mod=relative(matrix))


def relative(matrix):
    def relative(s, b, h, i, j):
        return s + matrix[i, j]

    return relative


def test_functions_that_return_something_else():
    rule = "fn(b, h, q_pos, k_pos) must map scalars to a boolean scalar"
    raises(
        ValueError, f"(mask=Function(fn))` {rule}. Got ... int32", q, k, v, Function(lambda b, h, i, j: i - j)
    )
    raises(ValueError, rule, q, k, v, Function(lambda b, h, i, j: (i > j, i < j)))
    raises(ValueError, f"{rule}. Got ... (3,)", q, k, v, Function(lambda b, h, i, j: jnp.arange(3) > j))
    rule = "mod(s, b, h, q_pos, k_pos) must map scalars to a floating-point scalar"

    def compare(s, b, h, i, j):
        return s > 0

    raises(ValueError, f"(score_mod=compare)` {rule}. Got ... bool", score_mod=compare)


def test_functions_of_other_signatures():
    with pytest.raises(TypeError, match="positional argument"):
        jflash.attention(q, k, v, Function(lambda q_pos, k_pos: q_pos >= k_pos))


@pytest.mark.parametrize("mod", [3.0, "softcap", SoftCap, ones(3)], ids=["number", "name", "class", "array"])
def test_what_is_no_score_mod(mod):
    rule = "must be SoftCap(...), Alibi(...), a function mod(s, b, h, q_pos, k_pos) or a tuple of these"
    raises(TypeError, f"(score_mod= ... {rule}", score_mod=mod)
    raises(TypeError, f"(score_mod= ... {rule}", score_mod=(SoftCap(2.0), mod))


@pytest.mark.parametrize("cap", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_soft_cap(cap):
    rule = "(score_mod=SoftCap)` needs a positive, finite cap. Got"
    raises(ValueError, f"{rule} {cap}. Leave SoftCap out to cap nothing", score_mod=SoftCap(cap))


def test_soft_cap_of_an_array():
    rule = "(score_mod=SoftCap)` needs a positive number or a floating-point array of shape ()"
    raises(ValueError, f"{rule} as cap. Got an array of float32 and shape (4,)", score_mod=SoftCap(ones(H)))
    raises(ValueError, f"{rule} ... int32", score_mod=SoftCap(ones(dtype=jnp.int32)))


def test_alibi():
    rule = "(score_mod=Alibi)` must be [H] or [*batch or 1, H], one value a query head (H=4, batch=(2,))"
    raises(ValueError, f"{rule}. Got shape (2,)", score_mod=Alibi(ones(h)))
    raises(ValueError, f"{rule}. Got shape (3, 4)", score_mod=Alibi(ones(3, H)))
    raises(ValueError, f"{rule}. Got shape ()", score_mod=Alibi(ones()))
    integers = ones(H, dtype=jnp.int32)
    raises(
        TypeError,
        "(score_mod=Alibi)` needs floating-point slopes. Got an array of int32",
        score_mod=Alibi(integers),
    )


# Dropout


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), 2])
def test_dropout_rates_that_are_no_probability(rate):
    rule = "(dropout=...)` needs a rate between 0 and 1. Got"
    raises(ValueError, f"{rule} {float(rate)}", dropout=Dropout(rate, KEY))


@pytest.mark.parametrize("rate", [jnp.float32(0.1), "half", None, True], ids=["array", "str", "None", "bool"])
def test_dropout_rates_that_are_no_number(rate):
    rule = "(dropout=...)` needs a Python float as rate: it is part of the compiled program. Got"
    raises(TypeError, rule, dropout=Dropout(rate, KEY))


def test_dropout_without_a_key():
    words = (
        "(dropout=...)` needs a key where 0 < rate < 1. Got key=None. Pass jflash.Dropout(rate, jax.random"
    )
    raises(ValueError, words, dropout=Dropout(0.1))
    jflash.attention(q, k, v, dropout=Dropout(0.0))
    jflash.attention(q, k, v, dropout=Dropout(1.0))


@pytest.mark.parametrize("dropout", [0.1, True, KEY], ids=["rate", "flag", "key"])
def test_what_is_no_dropout(dropout):
    raises(TypeError, "(dropout=...)` must be a jflash.Dropout(rate, key). Got", dropout=dropout)


@pytest.mark.parametrize("offsets", [(0, 0), 3, (0, 0, 0, 0, 0)], ids=str)
def test_dropout_offsets(offsets):
    rule = "(dropout=...)` needs four offsets: (b, h, q, k). Got"
    raises(ValueError, f"{rule} {offsets!r}", dropout=Dropout(0.1, KEY, offsets))


@pytest.mark.parametrize(
    "key", [3, jnp.ones(2), jnp.ones(5, jnp.uint32), jax.random.split(KEY)], ids=["int", "floats", "5", "two"]
)
def test_what_is_no_key(key):
    raises(TypeError, "(dropout=...)` ... key", dropout=Dropout(0.1, key))


# Settings


def test_unknown_implementations():
    rule = "(implementation=...)` must be None (the best one for the platform) or one of"
    raises(
        ValueError, f"{rule} ['mosaic', 'triton', 'xla', 'reference']. Got 'cudnn'", implementation="cudnn"
    )
    raises(ValueError, f"{rule} ... Got 3", implementation=3)
    with pytest.raises(ValueError, match=r"^`explain\(implementation=\.\.\.\)` must be None.*Got 'flash'"):
        jflash.explain(q, k, v, implementation="flash")


@pytest.mark.parametrize("x", [None, 1, jnp.bool_(True)], ids=["None", "int", "array"])
def test_deterministic(x):
    rule = "(deterministic=...)` must be a Python bool, since it selects the program. Got"
    raises(TypeError, rule, deterministic=x)
    jflash.attention(q, k, v, deterministic=np.bool_(True))


def test_lists_of_numbers_are_arrays():
    out = jflash.attention(q.tolist(), k.tolist(), v.tolist(), bias=np.zeros((T, t), np.float32).tolist())
    assert out.shape == (B, T, H, D) and out.dtype == jnp.float32


@pytest.mark.parametrize("precision", ["exact", 3, ("highest",) * 3], ids=str)
def test_precision(precision):
    raises(ValueError, "(precision=...)` ... Got", precision=precision)


def test_unknown_keywords():
    with pytest.raises(TypeError, match="causal"):
        jflash.attention(q, k, v, causal=True)
    with pytest.raises(TypeError, match="causal"):
        jflash.explain(q, k, v, causal=True)


def test_errors_name_the_function_that_was_called():
    raises(ValueError, "must have the same batch axes", q, k[:1], v[:1], call=jflash.attention_with_lse)
    raises(TypeError, "must be a jflash.Dropout", dropout=0.5, call=jflash.attention_with_lse)
    raises(ValueError, "(mask=Window(...))` left", q, k, v, Window(-1), call=jflash.explain)


def test_errors_come_before_any_computation_also_in_a_trace():
    with pytest.raises(ValueError, match=re.escape("`attention(bias=...)` must broadcast")):
        jax.jit(lambda q: jflash.attention(q, k, v, bias=ones(9, 9)))(q)
    with pytest.raises(ValueError, match=re.escape("(mask=Segments(q_ids=...))`")):
        jax.eval_shape(
            lambda q: jflash.attention(q, k, v, Segments(ones(9, dtype=jnp.int32), k[0, :, 0, 0])), q
        )

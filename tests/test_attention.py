"""Outputs and all gradients of every implementation against the float64 truth, and the edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import assert_as_accurate
from cases import BIASES, MASKS, MODS, SHAPES, Case, inputs
from programs import IMPLEMENTATIONS, QUICK, TILES, assert_accurate, attend, results, tiled

SAMPLES = 32  # of inputs a case: they cost milliseconds, its compilation costs seconds
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16

CASES = {
    Case("mha"): (F32, BF16, F16),
    Case("mha", "segments", bias="B1Tt", bias_dtype=BF16): (BF16,),
    Case("mha", "~window", bias="BHTt", positions=True): (F32,),
    Case("gqa", "window", bias="B1Tt", mods="several", scale="traced", sinks=True): (F32,),
    Case("gqa", "function of heads", bias="1H1t", mods="softcap"): (F16,),
    Case("mqa", "window traced", bias="1HTt", bias_dtype=BF16, mods="softcap traced"): (F32,),
    Case("long", "causal & segments", bias="11Tt"): (BF16,),
    Case("cross", "segments padded", bias="111t", mods="alibi of entries"): (F32,),
    Case("cross", "dense B1Tt", bias="BHTt"): (F32, BF16),
    Case("more queries", "causal", bias="B11t", mods="alibi", sinks=True): (F32,),
    Case("more queries", "window & prefix", bias="BHT1", mods="function", scale="traced"): (F32,),
    Case("one query", "prefix B", bias="HTt", mods="softcap"): (F32,),
    Case("one key", "dense BHT1", sinks=True): (F32,),
    Case("wide keys", "dense BHTt", bias="Tt"): (F16,),
    Case("wide values", "nested", bias=""): (F32,),
    Case("D=1", "segments unsorted", bias="11T1"): (F32,),
    Case("d=1", "causal | prefix", bias="B1Tt", sinks=True): (BF16,),
    Case("no batch", "window 20 0", bias="1HTt", scale=0.3): (F32,),
    Case("two batch axes", "array & causal", bias="B1Tt", rate=0.3, offsets=(3, 2, 5, 7)): (F32,),
}
# Those in which nothing sees some of the keys, and some of the queries see nothing.
HIDING = [
    Case("cross", "segments padded", bias="111t", mods="alibi of entries"),
    Case("more queries", "window & prefix", bias="BHT1", mods="function", scale="traced"),
    Case("one query", "prefix B", bias="HTt", mods="softcap"),
    Case("D=1", "segments unsorted", bias="11T1"),
]

name = lambda x: getattr(x, "__name__", str(x))
by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
by_each = pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "reference"))


def tiles_of(case, implementation):
    """The number of the tiles that a case is tested with; they take turns."""
    return list(CASES).index(case) % len(TILES.get(implementation, "1"))


def test_the_cases_leave_nothing_out():
    elsewhere = {"no queries", "no keys", "no entries", "square", "sixteenth of the square"}
    assert {case.shape for case in CASES} == SHAPES.keys() - elsewhere
    assert {case.bias for case in CASES} - {None} >= set(BIASES)
    assert {case.mods for case in CASES} - {None} == MODS.keys()
    assert {case.mask for case in CASES} <= MASKS.keys()


@pytest.mark.parametrize("case, dtype", [(case, d) for case, ds in CASES.items() for d in ds], ids=name)
@by_implementation
def test_forward_and_gradients(implementation, case, dtype):
    samples = [inputs(case, dtype, seed) for seed in range(SAMPLES)]
    assert all(x.data["visible"].any() for x in samples)
    assert_accurate(case, implementation, samples, tiles_of(case, implementation))


@by_implementation
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name)
def test_peaked_softmax(implementation, dtype):
    case = Case("mha")
    samples = [inputs(case, dtype, seed, heat=8.0) for seed in range(SAMPLES)]
    assert_accurate(case, implementation, samples, tiles_of(case, implementation))


def with_bias(case, dtype, change, **more):
    """Samples of inputs, the bias of each replaced by `change(rng, bias)`."""
    samples = [inputs(case, dtype, seed) for seed in range(SAMPLES)]
    new = lambda seed, x: change(np.random.default_rng(seed), x.floats["bias"])
    return [x._replace(floats=x.floats | dict(bias=new(seed, x)) | more) for seed, x in enumerate(samples)]


@by_implementation
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name)
@pytest.mark.parametrize("rise", [100, -100])
def test_maxima_that_rise_or_fall_from_block_to_block(implementation, dtype, rise):  # D08
    case = Case("cross", "dense B1Tt", bias="BHTt")
    steps = lambda rng, bias: bias + np.float32(rise) * (np.arange(bias.shape[-1]) // 16)
    assert_accurate(case, implementation, with_bias(case, dtype, steps), tiles_of(case, implementation))


@by_implementation
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name)
@pytest.mark.parametrize("tiles", [0, 1])
def test_logits_and_values_of_any_size(implementation, dtype, tiles):
    """Logits that rise along the row to thousands, and values as large as there are."""
    case = Case("mha")
    samples = []
    for seed in range(SAMPLES):
        x = inputs(case, dtype, seed)
        k = x.floats["k"].astype(F32) * np.linspace(1, 1000, 40, dtype=F32)[:, None, None]
        v = x.floats["v"].astype(F32)
        v = v / abs(v).max() * np.float32(jnp.finfo(dtype).max) * (0.25 if seed % 2 else 0.001)
        samples.append(x._replace(floats=x.floats | dict(k=k.astype(dtype), v=v.astype(dtype))))
    outputs = lambda name, tiles=0: {
        key: np.stack([results(case, name, x, tiles)[key] for x in samples]) for key in ("out", "lse")
    }
    got = outputs(implementation, tiles)
    assert_as_accurate(got, [outputs("plain")], outputs("reference"), dtype)


@by_each
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name)
@pytest.mark.parametrize("low", [-1e30, float(np.finfo(np.float32).min)])
def test_any_finite_logit_beats_masked(implementation, dtype, low):
    case = Case("cross", "dense B1Tt", bias="BHTt")
    x = inputs(case, dtype)
    x = x._replace(floats=x.floats | dict(bias=np.full_like(x.floats["bias"], low)))
    got = results(case, implementation, x, tiles_of(case, implementation))
    # q·k vanishes beside such a bias: every visible key counts alike.
    group = SHAPES[case.shape].H // SHAPES[case.shape].h
    v = np.repeat(x.floats["v"].astype(np.float64), group, axis=-2)
    visible = np.broadcast_to(x.data["visible"], x.floats["bias"].shape)
    assert (visible.sum(-1) > 0).all()
    mean = np.einsum("bhTt,bthd->bThd", visible / visible.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got["out"].astype(np.float64), mean, atol=2 * jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got["lse"], low, rtol=1e-6)
    assert all(np.isfinite(g.astype(np.float64)).all() for g in got.values())


@by_implementation
@pytest.mark.parametrize("low", [float(np.finfo(np.float32).min), -np.inf])
def test_bias_that_hides_whole_blocks(implementation, low):  # A03, E09
    case = Case("cross", "dense B1Tt", bias="BHTt")

    def hide(rng, bias):  # the first 20 of 63 keys, and some more
        return np.where((np.arange(63) < 20) | (rng.random(bias.shape) < 0.3), np.float32(low), bias)

    samples = with_bias(case, F32, hide)
    assert_accurate(case, implementation, samples, tiles_of(case, implementation))
    got = results(case, implementation, samples[0], tiles_of(case, implementation))
    assert (got["dbias"][samples[0].floats["bias"] == low] == 0).all()


def hiding(case):
    """Inputs, keys [*batch, t] that nothing sees, and queries [*batch, H, T] that see nothing."""
    batch, T, t, H, *_ = SHAPES[case.shape]
    for seed in range(SAMPLES):
        x = inputs(case, CASES[case][0], seed)
        visible = np.broadcast_to(x.data["visible"], (*batch, H, T, t))
        keys, queries = ~visible.any((-3, -2)), ~visible.any(-1)
        if keys.any() and queries.any() and not queries.all():
            return x, keys, queries
    raise AssertionError(f"{case} hides nothing")


@by_each
@pytest.mark.parametrize("case", HIDING, ids=str)
def test_what_takes_no_part_is_zero(implementation, case):
    x, keys, queries = hiding(case)
    rows = queries.swapaxes(-1, -2)
    got = results(case, implementation, x, tiles_of(case, implementation))
    assert (got["out"][rows] == 0).all() and (got["dq"][rows] == 0).all()
    assert (got["lse"][queries] == -np.inf).all() and np.isfinite(got["lse"][~queries]).all()
    assert (got["dk"][keys] == 0).all() and (got["dv"][keys] == 0).all()


@by_each
@pytest.mark.parametrize("case", HIDING, ids=str)
def test_what_takes_no_part_may_hold_nan(implementation, case):
    x, keys, queries = hiding(case)
    rows = queries.swapaxes(-1, -2)

    def holding(value):
        q, k, v = (x.floats[name].copy() for name in "qkv")
        do, dlse = (y.copy() for y in x.cotangents)
        q[rows], do[rows], dlse[queries], k[keys], v[keys] = (value,) * 5
        changed = x._replace(floats=x.floats | dict(q=q, k=k, v=v), cotangents=(do, dlse))
        got = results(case, implementation, changed, tiles_of(case, implementation))
        return {name: y.tobytes() for name, y in got.items()}

    zeros = holding(0)
    for value in (np.nan, np.inf, -np.inf, 3e38):
        got = holding(value)
        assert [name for name in got if got[name] != zeros[name]] == [], value


@by_implementation
def test_repeats_bitwise(implementation):
    case = Case("gqa", "window", bias="B1Tt", mods="several", scale="traced", sinks=True)
    x, tiles = inputs(case, F32), tiles_of(case, implementation)
    first, *others = (results(case, implementation, x, tiles) for _ in range(5))

    def again(floats, data, cotangents):
        with tiled(implementation, tiles):
            call = lambda floats: attend(case, implementation, floats, data, deterministic=True)
            (out, lse), pull = jax.vjp(call, floats)
            (grads,) = pull(cotangents)
        mods = {f"dmods[{i}]": g for i, g in enumerate(grads.pop("mods"))}
        return dict(out=out, lse=lse) | {f"d{name}": g for name, g in grads.items()} | mods

    others.append(jax.jit(again, compiler_options=QUICK)(*x))
    for other in others:
        assert {name: np.asarray(y).tobytes() for name, y in other.items()} == {
            name: y.tobytes() for name, y in first.items()
        }


@by_each
@pytest.mark.parametrize("shape", ["no queries", "no keys", "no entries"])
def test_nothing_to_attend(implementation, shape):
    case = Case(shape, "causal", bias="11Tt", sinks=True)
    x = inputs(case, F32)
    got = results(case, implementation, x)
    batch, T, t, H, h, D, d = SHAPES[shape]
    assert got["out"].shape == (*batch, T, H, d) and (got["out"] == 0).all()
    assert got["lse"].shape == (*batch, H, T) and (got["lse"] == -np.inf).all()
    for name in ("q", "k", "v", "bias", "sinks"):
        assert got[f"d{name}"].shape == x.floats[name].shape and (got[f"d{name}"] == 0).all()

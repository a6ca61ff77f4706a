"""Public bug reports of other attention kernels, each as a small test that is named by its id.

M to R: sharding, arguments, ALiBi, reproducibility, sizes.
The table of all reports is in README.md.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from failures import (
    BOTH,
    assert_close,
    assert_right,
    causal,
    check,
    check_low_precision,
    cotangents,
    optimised,
    oracle,
    qkv,
    run,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import Alibi, Causal, Dropout, Prefix, Segments, SoftCap, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")


# M: sharding. Values and gradients on meshes are in test_meshes.py.


def collectives(f, *args):
    with optimised():
        text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(
        r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
    )


def pulled(call):
    def gradients(q, k, v, W):
        return jax.vjp(call, q, k, v)[1](W)

    return gradients


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_M02_sharded_attention_communicates_nothing(spec, kind):
    """jax-ml/jax#21855: an all-reduce in the backward pass."""
    axis_type = AxisType.Auto if kind == "shard_map" else AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("x", "unused"), axis_types=(axis_type, axis_type))
    mod = lambda s, b, h, i, j: s * (b + h)
    call = lambda q, k, v: jflash.attention(q, k, v, Causal(), score_mod=mod)
    if kind == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jnp.ones((4, 6, 4, 8))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, spec))
        assert collectives(pulled(call), x, x, x, x) == []


def test_M02_a_replicated_key_head_costs_one_sum():
    """jax-ml/jax#21855: exactly one for dk and dv, and none in the forward pass."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    spec = P(None, None, "x")
    call = jax.shard_map(
        lambda q, k, v: jflash.attention(q, k, v, Causal()),
        mesh=mesh,
        in_specs=(spec, P(), P()),
        out_specs=spec,
    )
    q = jax.device_put(jnp.ones((1, 6, 4, 8)), NamedSharding(mesh, spec))
    k = jax.device_put(jnp.ones((1, 6, 1, 8)), NamedSharding(mesh, P()))
    assert collectives(call, q, k, k) == []
    names = collectives(pulled(call), q, k, k, q)
    assert set(names) == {"all-reduce"} and len(names) <= 2


def test_M03_dk_and_dv_of_replicated_heads_without_check_vma():
    """jax-ml/jax#36886: 1/n or n times. With check_vma=False shard_map itself sums over the devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = qkv(1, 6, 4, 8, h=1)
    W = cotangents(q, v)
    spec = P(None, None, "x")
    for check_vma in (True, False):
        call = jax.shard_map(
            lambda q, k, v: jflash.attention_with_lse(q, k, v, Causal()),
            mesh=mesh,
            in_specs=(spec, P(), P()),
            out_specs=(spec, P(None, "x")),
            check_vma=check_vma,
        )
        got = jax.jit(pulled(call))(q, k, v, W)
        exact = oracle(q, k, v, causal(6, 6), do=W[0], dlse=W[1])[2]
        for name, g in zip("qkv", got):
            assert_close(g, exact[name], 5e-5, name)


def test_M06_arrays_that_are_sharded_over_the_sequence():
    """jax-ml/jax PR#36169: a wrong stride in the backward pass."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = (jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in qkv(2, 16, 2, 8))
    check(q, k, v, Causal(), causal(16, 16))


@pytest.mark.parametrize("shape", [(1, 2, 6, 6), (4, 1, 1, 6)], ids=str)
def test_M07_a_bias_beside_a_sharded_batch(shape):
    """apple/axlearn PR#538: a bias of batch 1 was to be sharded over four devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("x") if x.shape[0] == 4 else P()))
    q, k, v = (put(x) for x in qkv(4, 6, 2, 8))
    check(q, k, v, Causal(), causal(6, 6), bias=put(normal(*shape, seed=5)))


# N: caches wait; what concerns masks and arguments


def test_N03_nan_in_slots_that_a_boolean_mask_hides():
    """vllm-project/vllm#641: NaN + (-inf) is NaN, so a bias of -inf does not protect; a mask does."""
    q, k, v = qkv(1, 3, 2, 8, t=6)
    used = jnp.arange(6) < 4
    nan = lambda x: jnp.where(used[:, None, None], x, jnp.nan)
    bias = jnp.where(used, 0.0, -jnp.inf)
    got = run(q, nan(k), nan(v), used, bias=bias)
    assert_right(got[:2], oracle(q, k, v, np.asarray(used)))
    assert all(np.isfinite(g).all() for g in got[2].values())


def test_N15_every_argument_has_an_effect():
    """Dao-AILab/flash-attention#1788: cache_leftpad was accepted and ignored."""
    q, k, v = qkv(1, 6, 2, 8)
    base, _ = run(q, k, v, Causal(), wanted=())
    positions = jnp.arange(6)[None]
    settings = [
        dict(mask=Causal() & Window(1)),
        dict(bias=normal(6, 6)),
        dict(scale=2.0),
        dict(score_mod=SoftCap(0.5)),
        dict(score_mod=Alibi(jnp.ones(2))),
        dict(sinks=jnp.ones(2)),
        dict(dropout=Dropout(0.5, jax.random.key(0))),
        dict(q_positions=positions + 2),
        dict(k_positions=positions - 2),
    ]
    for changed in settings:
        out, _ = run(q, k, v, wanted=(), **dict(mask=Causal()) | changed)
        assert np.abs(out - base).max() > 1e-2, changed


# O: ALiBi. Rotary embeddings are in test_rotary.py.


def test_O05_alibi_in_training_and_in_decoding():
    """Dao-AILab/flash-attention#907: distances must count from i + t - T."""
    q, k, v = qkv(1, 7, 2, 8)
    mod = Alibi(jnp.array([0.5, 2.0]))
    run_ = functools.partial(run, score_mod=mod, wanted=())
    whole, _ = run_(q, k, v, Causal())
    for rows, t in ((slice(4, 5), 5), (slice(4, 7), 7)):
        assert_close(run_(q[:, rows], k[:, :t], v[:, :t], Causal())[0], whole[:, rows], 1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=str)
def test_O06_alibi_is_a_bias_of_the_distance(shape):
    """Dao-AILab/flash-attention PR#540: -slope * |i - j| without a causal mask, too."""
    q, k, v = qkv(2, 5, 6, 8)
    slopes = jnp.abs(normal(*shape, seed=4))
    distance = np.abs(np.arange(5)[:, None] - np.arange(5))
    bias = -np.asarray(slopes, np.float64)[..., None, None] * distance
    W = cotangents(q, v)
    got = run(q, k, v, score_mod=Alibi(slopes))
    assert_right(got, oracle(q, k, v, bias=bias, do=W[0], dlse=W[1]))
    loss = lambda slopes: (jflash.attention(q, k, v, score_mod=Alibi(slopes)) * W[0]).sum()
    without_lse = oracle(q, k, v, bias=bias, do=W[0], dlse=jnp.zeros((2, 6, 5)))[2]["bias"]
    dslopes = -(without_lse * distance).sum((-1, -2))
    assert_close(jax.jit(jax.grad(loss))(slopes), dslopes.reshape(shape), 1e-4)


# P: the same bits


def test_P01_gradients_are_the_same_from_run_to_run():
    """Dao-AILab/flash-attention#2244: dq differed in 29 of 30 runs, deterministic flag or not."""
    q, k, v = qkv(1, 130, 4, 16, h=1, dtype=jnp.bfloat16)
    again = functools.partial(run, q, k, v, Causal(), deterministic=True, blocks=64)
    first = again()
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, again())


def test_P02_another_sequence_does_not_change_a_row():
    """vllm-project/vllm#51902: an unrelated length altered a row, by its bits."""
    q, k, v = qkv(2, 12, 2, 8)
    results = []
    for other in (9, 10):
        ids = jnp.stack([jnp.repeat(jnp.arange(2), 6), jnp.where(jnp.arange(12) < other, 0, -1)])
        results.append(run(q, k, v, Causal() & Segments(ids), blocks=4))
        unused = (jnp.arange(2)[:, None] == 1) & (jnp.arange(12) >= 6)
        dirty = [jnp.where(unused[..., None, None], jnp.nan, x) for x in (q, k, v)]
        ids = ids.at[1, 6:].set(-1)
        results.append(run(*dirty, Causal() & Segments(ids), blocks=4))
    for other in results[1:]:
        np.testing.assert_array_equal(other[0][0], results[0][0][0])
        for name in "qkv":
            np.testing.assert_array_equal(other[2][name][0], results[0][2][name][0])


def test_P03_twenty_calls_give_the_same():
    """jax-ml/jax#23819: the first call differed."""
    x = qkv(2, 96, 2, 8)
    call = jax.jit(lambda q, k, v: jflash.attention(q, k, v, Causal()))
    first = call(*x)
    assert_close(first, oracle(*x, causal(96, 96))[0], 1e-5)
    for _ in range(20):
        np.testing.assert_array_equal(call(*x), first)


# R: sizes, memory, accuracy, sinks


def sizes(jaxpr):
    """The sizes of all arrays in a jaxpr and in those within it."""
    for eqn in jaxpr.eqns:
        yield from (x.aval.size for x in eqn.outvars if hasattr(x.aval, "size"))
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda y: hasattr(y, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


def test_R02_more_than_two_to_the_31_elements():
    """Dao-AILab/flash-attention#2611: offsets overflowed 32 bits. Here it must at least be traced."""
    x = jax.ShapeDtypeStruct((1, 2**22, 32, 128), jnp.bfloat16)
    loss = lambda q, k, v: jflash.attention(q, k, v, Causal()).astype(jnp.float32).sum()
    grads = jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, x, x)
    assert all(g.shape == x.shape and g.dtype == x.dtype for g in grads)


def test_R03_more_batch_entries_than_a_grid_has():
    """Dao-AILab/flash-attention PR#1500: 65535 blocks along an axis."""
    q, k, v = qkv(70000, 1, 1, 1)
    np.testing.assert_array_equal(run(q, k, v, wanted=())[0], v)


@pytest.mark.parametrize(
    "mask",
    [None, Causal(), Window(64), Segments(jnp.arange(4096) // 100), Causal() | Prefix(10)],
    ids=["none", "causal", "window", "segments", "or"],
)
def test_R05_no_mask_is_materialised(mask):
    """pytorch/pytorch#150054: a mask of 49999^2 elements, forward or backward."""
    x = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)
    loss = lambda q, k, v: jflash.attention(q, k, v, mask).sum()
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    assert 0 < max(sizes(traced.jaxpr)) <= 4096 * 4096 // 8


def test_R06_nothing_grows_from_call_to_call():
    """jax-ml/jax#2072: caches that keep arrays. Compilations are counted in test_compilation.py."""
    q, k, v = qkv(1, 8, 1, 4)
    step = jax.jit(lambda scale, ids: jflash.attention(q, k, v, Causal() & Segments(ids), scale=scale))
    live = []
    for i in range(50):
        step(jnp.float32(i), jnp.arange(8) // (i % 3 + 1)).block_until_ready()
        live.append(len(jax.live_arrays()))
    assert step._cache_size() == 1 and live[-1] <= live[5]


@pytest.mark.parametrize("D, kind", [(320, "normal"), (64, "one dominant key")])
def test_R08_gradients_in_bfloat16(D, kind):
    """Dao-AILab/flash-attention#385: errors of 1.43 in dv."""
    q, k, v = qkv(1, 100, 2, D, dtype=jnp.bfloat16)
    if kind == "one dominant key":
        k = k.at[:, 3].mul(6)
    check_low_precision(q, k, v, Causal(), causal(100, 100), blocks=64)


def test_R08_one_key_gives_no_gradient_of_the_scores():
    """Dao-AILab/flash-attention#1138: dq and dk were not 0."""
    q, k, v = qkv(2, 5, 2, 64, t=1, dtype=jnp.bfloat16)
    W = cotangents(q, v)
    *_, grads = run(q, k, v, W=(W[0], 0 * W[1]))
    assert max(np.abs(grads[name]).max() for name in "qk") < 1e-5  # the rounding of do·v in float32


@BOTH
@pytest.mark.parametrize("sink", [-100.0, 0.0, 100.0])
def test_R09_sinks(sink, implementation):
    """Dao-AILab/flash-attention PR#2752: NaN without keys, inf at 100, no gradient."""
    q, k, v = qkv(3, 6, 2, 8, t=5)
    sinks = sink + normal(2, seed=6)
    lengths = jnp.array([5, 0, 3])
    seen = np.arange(5) < np.asarray(lengths)[:, None, None, None]
    mask = Causal() & Prefix(lengths)
    out, lse, grads = check(q, k, v, mask, seen & causal(6, 5), sinks=sinks, implementation=implementation)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()  # ours leaves the sink out of lse
    if sink == 0:
        assert np.abs(grads["sinks"]).max() > 1e-2


def test_R10_an_implementation_that_cannot_run_is_not_replaced():
    """Derived: asked for by name, it runs or raises. With reasons: test_compilation.py."""
    q, k, v = qkv(1, 4, 1, 8)
    with pytest.raises((ValueError, NotImplementedError), match="mosaic"):
        jflash.attention(q, k, v, implementation="mosaic")
    assert jflash.explain(q, k, v).implementation == "xla"

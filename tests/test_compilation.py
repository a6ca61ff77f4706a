"""What becomes of a call: export, donation, how often it is compiled, which implementation it gets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import FLOATS, T, answer, answer_jit, assert_same, attention, cotangents, operands
from arrays import B, D, H, normal

import jflash
import jflash.xla
from jflash import Causal, Prefix, Segments, Window
from jflash import attention_with_lse as attend

pytestmark = pytest.mark.usefixtures("quick_compilation")


# export, ahead of time, donation


def exported(f, *args, order=0):
    exported = jax.export.export(jax.jit(f))(*args)
    return jax.export.deserialize(exported.serialize(vjp_order=order))


def test_export_round_trip_of_forward_and_vjp():
    x = operands("bias", "ids", "sinks")
    W = cotangents(x)
    floats = {name: x.pop(name) for name in list(x) if name in FLOATS}
    call = lambda floats, x: attention(floats | x)
    back = exported(call, floats, x, order=1)
    (out, lse), grads = answer_jit(floats | x, W)
    assert_same(tuple(back.call(floats, x)), (out, lse))
    # The vjp of an exported function takes its inputs and cotangents flat.
    leaves = jax.tree.leaves((floats, x))
    got = back.vjp().call(*leaves, *W)
    named = dict(zip(sorted(floats), got))
    assert_same({name: named[name] for name in grads}, grads)


@pytest.mark.parametrize("names", [(), ("ids",)], ids=["plain", "segments"])
def test_export_with_a_symbolic_batch(names):
    x = operands(*names, B=3)
    W = cotangents(x)
    b = jax.export.symbolic_shape("b")[0]
    struct = lambda y: jax.ShapeDtypeStruct((b, *y.shape[1:]), y.dtype)
    back = exported(lambda x, W: answer(x, W), *jax.tree.map(struct, (x, W)))
    for n in (1, 3):
        cut = jax.tree.map(lambda y, n=n: y[:n], (x, W))
        assert_same(back.call(*cut), answer_jit(*cut))


def test_donated_inputs_are_reused():
    x = operands(h=H)
    x["v"] = normal(B, T, H, D, seed=3)
    wanted = jax.jit(attention)(x)[0]
    q = jnp.array(x["q"])
    step = jax.jit(lambda q, k, v: attend(q, k, v, Causal())[0], donate_argnums=0)
    assert_same(step(q, x["k"], x["v"]), wanted)  # a buffer that could not be used would warn
    assert q.is_deleted() and not x["k"].is_deleted()


def test_eval_shape_computes_nothing():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    f = functools.partial(attend, mask=Causal())
    # 2^40 scores a head: only the shapes can be asked for.
    out, lse = jax.eval_shape(f, struct(2**20, 8, 64), struct(2**20, 2, 64), struct(2**20, 2, 32))
    assert (out.shape, out.dtype) == ((2**20, 8, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((8, 2**20), jnp.float32)


# Compilations


def test_run_time_operands_do_not_compile_anew():
    x = operands("bias", "scale", "sinks", "slopes", "cap", "ids", "left", "prefix", "q_positions", "key")
    step = jax.jit(lambda x: attention(x))
    base = step(x)[0]
    changes = dict(
        scale=[jnp.float32(0.1), jnp.float32(-2.0)],
        cap=[jnp.float32(0.5)],
        left=[jnp.int32(0), jnp.int32(5)],
        ids=[x["ids"] + 1, x["ids"][::-1]],
        prefix=[x["prefix"] * 0, x["prefix"] * 0 + 1],
        q_positions=[x["q_positions"] + 3, x["q_positions"][:, ::-1]],
        slopes=[x["slopes"] * 3],
        sinks=[x["sinks"] + 1],
        key=[jax.random.key(8)],
    )
    for name, values in changes.items():
        results = [step(x | {name: value})[0] for value in values]
        assert any(not np.allclose(out, base) for out in results), name
    assert step._cache_size() == 1


def test_eager_calls_compile_once():
    """A mask function defined once, new ids, new bounds: no new trace of the inner program."""
    from jflash.rules import _forward

    x = operands("ids", "left")
    every_third = jflash.Function(lambda b, h, q_pos, k_pos: (q_pos - k_pos) % 3 == 0)
    call = lambda ids, left: attend(x["q"], x["k"], x["v"], every_third & Segments(ids) & Window(left))
    call(x["ids"], x["left"])
    before = _forward._cache_size()
    for i in range(3):
        call(x["ids"] + i, x["left"] + i)
    assert _forward._cache_size() == before


def test_interpret_is_part_of_the_key_of_jit():
    q = normal(3, 1, 4)

    def sizes():  # of the cache, after a call outside and one inside
        step = jax.jit(lambda q: jflash.attention(q, q, q))
        outside, size = step(q), step._cache_size()
        with jflash.interpret():
            inside = step(q)
        np.testing.assert_allclose(outside, inside, rtol=1e-5, atol=1e-6)
        return size, step._cache_size(), step(q) is not None and step._cache_size()

    sizes()  # what Pallas loads when it is first used adds to the key of every jit
    assert sizes() == (1, 2, 2)


def test_interpret_ends_where_its_block_ends():
    from jflash.backends import interpreting

    with pytest.raises(KeyError), jflash.interpret():
        assert interpreting()
        raise KeyError
    assert not interpreting()


# Which implementation


def test_explain_names_the_choice_and_the_reasons():
    x = operands()
    record = jflash.explain(x["q"], x["k"], x["v"], Causal())
    assert record.implementation == "xla" and record.platform == "cpu"
    assert record.config == jflash.xla.default_config(record.problem)
    assert "T·t memory" in record.why_not["reference"] and "reference" in record.why_not["reference"]
    text = str(record)
    assert "xla on cpu" in text and "(2, 6, 4, 8)" in text and "not reference" in text
    named = jflash.explain(x["q"], x["k"], x["v"], implementation="reference")
    assert named.implementation == "reference"
    assert "'reference' was asked for" in named.why_not["xla"]


@pytest.mark.parametrize(
    "mask, words",
    [
        (None, "no mask"),
        (Causal(), "arithmetic"),
        (Segments(jnp.arange(6)), "ranges"),
        (Causal() | Prefix(2), "lists"),
    ],
)
def test_explain_tells_the_form_of_the_schedule(mask, words):
    x = operands()
    assert words in jflash.explain(*map(x.get, "qkv"), mask).schedule


def test_explain_takes_shapes():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    record = jflash.explain(struct(1, 2**20, 8, 64), struct(1, 2**20, 2, 64), struct(1, 2**20, 2, 64))
    assert record.implementation == "xla" and record.problem.T == 2**20


def test_explain_in_a_trace():
    seen = []
    jax.eval_shape(lambda x: seen.append(jflash.explain(*map(x.get, "qkv"), Causal())), operands())
    assert seen[0].implementation == "xla"


def test_a_named_implementation_runs_or_raises(monkeypatch):
    x = operands()
    monkeypatch.setattr("jflash.reference.unsupported", lambda problem: "it has a cold")
    with pytest.raises(NotImplementedError, match="reference: it has a cold") as caught:
        jflash.attention(*map(x.get, "qkv"), implementation="reference")
    assert "xla" not in str(caught.value)
    assert jflash.explain(*map(x.get, "qkv")).implementation == "xla"
    monkeypatch.setattr("jflash.xla.unsupported", lambda problem: "it is asleep")
    with pytest.raises(NotImplementedError, match="xla: it is asleep.*reference: it has a cold"):
        jflash.attention(*map(x.get, "qkv"))
    with pytest.raises(NotImplementedError, match="no implementation for this call"):
        jflash.explain(*map(x.get, "qkv"))


def test_the_platform_is_that_of_the_trace():
    from jflash.backends import target

    assert target() == ("cpu", "")
    with jax.default_device(jax.devices("cpu")[2]):
        assert target() == ("cpu", "")
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    abstract = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    x = operands()
    with jax.sharding.use_abstract_mesh(abstract):
        assert target() == ("cuda", "sm_90")
        assert jflash.explain(*map(x.get, "qkv")).platform == "cuda"
    assert target() == ("cpu", "")


def test_lowering_for_other_platforms():
    """From a CPU, without their devices: the program may not depend on what is plugged in."""
    x = operands("ids")
    for name in ("cuda", "tpu"):
        text = jax.jit(attention).trace(x).lower(lowering_platforms=(name,)).as_text()
        assert "stablehlo" in text
    both = jax.export.export(jax.jit(attention), platforms=("cpu", "cuda"))(x)
    assert_same(both.call(x), jax.jit(attention)(x))

"""`jflash.flash_attn` of packed sequences against what PyTorch's attention gave once, and its own rules."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from golden.flash_attn import read

import jflash
from jflash import Causal, Dropout, SoftCap, Window
from jflash.flash_attn import (
    flash_attn_func,
    flash_attn_unpadded_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

H, h, D = 4, 2, 8
CASES = read("packed")
Q = np.array([0, 3, 3, 8], np.int32)
K = np.array([0, 4, 6, 11], np.int32)  # the second sequence has keys only
N, M = 10, 12  # with two rows of padding and with one
PACKED = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"


def qkv():
    return normal(N, H, D), normal(M, h, D, seed=1), normal(M, h, D, seed=2)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_pytorch(name):
    case = CASES[name]
    lengths = [np.diff(case[f"cu_seqlens_{side}"]).max().item() for side in "qk"]

    @jax.jit
    def run(q, k, v, do, *offsets):
        settings = dict(return_attn_probs=True, **case["settings"])
        call = lambda q, k, v: flash_attn_varlen_func(q, k, v, *offsets, *lengths, **settings)
        (out, lse, none), pull = jax.vjp(call, q, k, v)
        assert none is None
        return dict(out=out, lse=lse) | dict(zip(("dq", "dk", "dv"), pull((do, jnp.zeros_like(lse), None))))

    names = ("q", "k", "v", "do", "cu_seqlens_q", "cu_seqlens_k")
    for key, x in run(*(case[name] for name in names)).items():
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, case[key], atol=1e-5, err_msg=key)


def test_packed_arrays():
    q, k, v = qkv()
    settings = dict(causal=True, softcap=2.0)
    wanted = flash_attn_varlen_func(q, k, v, Q, K, 5, 5, **settings)
    got = flash_attn_varlen_kvpacked_func(q, jnp.stack([k, v], 1), Q, K, 5, 5, **settings)
    np.testing.assert_array_equal(got, wanted)
    wanted = flash_attn_varlen_func(q, q + 1, q - 1, Q, Q, 5, 5, **settings)
    got = flash_attn_varlen_qkvpacked_func(jnp.stack([q, q + 1, q - 1], 1), Q, 5, **settings)
    np.testing.assert_array_equal(got, wanted)


def test_each_argument_becomes_one_of_varlen_attention():
    q, k, v = qkv()
    slopes, key = normal(H, seed=4), jax.random.key(3)
    settings = (0.3, 0.4, True, (3, 9), 1.5, slopes, True)
    got = flash_attn_varlen_func(q, k, v, Q, K, 5, 5, *settings, dropout_key=key)
    mods = SoftCap(1.5), jflash.Alibi(slopes)
    settings = dict(scale=0.4, score_mod=mods, dropout=Dropout(0.3, key), deterministic=True)
    wanted = jflash.varlen_attention(q, k, v, Q, K, Causal() & Window(3, 9), **settings)
    np.testing.assert_array_equal(got, wanted)


def test_positional_arguments_are_those_of_the_package():
    names = lambda f: " ".join(
        p.name for p in inspect.signature(f).parameters.values() if p.kind != p.KEYWORD_ONLY
    )
    offsets = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    assert names(flash_attn_varlen_func) == f"q k v {offsets} {PACKED} block_table"
    assert names(flash_attn_varlen_kvpacked_func) == f"q kv {offsets} {PACKED}"
    assert names(flash_attn_varlen_qkvpacked_func) == f"qkv cu_seqlens max_seqlen {PACKED}"
    assert flash_attn_unpadded_func is flash_attn_varlen_func


@pytest.mark.parametrize("of_sequences", [False, True])
def test_A10_more_queries_than_keys_leave_the_first_rows_empty(of_sequences):
    """The package's own example, five queries over two keys, beside another sequence."""
    q, k, v = normal(8, 1, D), normal(4, 1, D, seed=1), normal(4, 1, D, seed=2)
    cu_q, cu_k = np.array([0, 5, 8]), np.array([0, 2, 4])
    slopes = jnp.full((2, 1) if of_sequences else (1,), 0.5)
    settings = dict(causal=True, alibi_slopes=slopes, return_attn_probs=True)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 2, **settings)
    assert (out[:3] == 0).all() and (lse[:, :3] == -np.inf).all()
    for a, b in (((0, 5), (0, 2)), ((5, 8), (2, 4))):
        one = (q[None, slice(*a)], k[None, slice(*b)], v[None, slice(*b)])
        wanted, wanted_lse, _ = flash_attn_func(*one, **settings | dict(alibi_slopes=slopes.reshape(-1)[:1]))
        np.testing.assert_allclose(out[slice(*a)], wanted[0], atol=1e-6)
        np.testing.assert_allclose(lse[:, slice(*a)], wanted_lse[0], atol=1e-6)


def test_slopes_of_sequences_are_slopes_that_are_alike():
    """Gradients, too, and what stands in the padding has no effect."""
    q, k, v = (x.at[-1].set(np.nan) for x in qkv())
    slopes, W = jnp.abs(normal(H, seed=4)), normal(N, H, D, seed=5)

    def total(slopes, q, k, v):
        out = flash_attn_varlen_func(
            q, k, v, Q, K, 5, 5, softcap=2.0, window_size=(3, 1), alibi_slopes=slopes
        )
        return (out * W).sum(), out

    grad = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    (d_slopes, *wanted), out = grad(slopes, q, k, v)
    (d_several, *got), other = grad(jnp.tile(slopes, (3, 1)), q, k, v)
    np.testing.assert_allclose(out, other, atol=1e-6)
    np.testing.assert_allclose(d_several.sum(0), d_slopes, atol=1e-5)
    assert (d_several[1] == 0).all() and (d_several[0] != 0).all()
    for x, y in zip(got, wanted):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_R06_new_lengths_do_not_compile_anew():
    run = jax.jit(lambda offsets: flash_attn_varlen_func(*qkv(), *offsets, 10, 12, causal=True))
    for cut in (1, 5, 8):
        run((jnp.array([0, cut, 10]), jnp.array([0, cut, 12])))
    assert run._cache_size() == 1


def test_rank_promotion_may_be_an_error():
    settings = dict(window_size=(3, 0), softcap=1.0, dropout_key=jax.random.key(0), return_attn_probs=True)

    def run(slopes, *x):
        call = lambda *x: flash_attn_varlen_func(*x, Q, K, 5, 5, 0.1, alibi_slopes=slopes, **settings)
        return jax.vjp(call, *x)[0]

    with jax.numpy_rank_promotion("raise"):
        for slopes in (jnp.ones(H), jnp.ones((3, H))):
            jax.eval_shape(run, slopes, *qkv())


@pytest.mark.parametrize(
    "call, arguments, error, words",
    [
        (flash_attn_varlen_func, dict(causal=1), TypeError, "(causal=...)` must be a Python bool"),
        (
            flash_attn_varlen_func,
            dict(block_table=jnp.ones((3, 4), int)),
            ValueError,
            "(block_table=...)` must be None: pages come with jflash's paged caches ... [M, h, D]",
        ),
        (flash_attn_varlen_func, dict(dropout_p=0.1), ValueError, "(dropout_p=...)` needs a key"),
        (
            flash_attn_varlen_func,
            dict(cu_seqlens_q=np.array([3, 5])),
            ValueError,
            "(cu_seqlens_q=...)` must be integers ... Lengths are not offsets",
        ),
        (
            flash_attn_varlen_func,
            dict(cu_seqlens_k=K[:3]),
            ValueError,
            "(cu_seqlens_q, cu_seqlens_k)` must hold as many sequences",
        ),
        (
            flash_attn_varlen_func,
            dict(q=jnp.ones((1, N, H, D))),
            ValueError,
            "(q, k, v)` must be one row of tokens each",
        ),
        (
            flash_attn_varlen_func,
            dict(alibi_slopes=jnp.ones((3, H)), max_seqlen_k=None),
            TypeError,
            "(max_seqlen_k=...)` must be a Python int where each sequence has its own slopes",
        ),
        (
            flash_attn_varlen_func,
            dict(alibi_slopes=jnp.ones((2, H))),
            ValueError,
            "(score_mod=Alibi)` must be",
        ),
        (flash_attn_varlen_func, dict(return_attn_probs=None), TypeError, "(return_attn_probs=...)` must be"),
        (
            flash_attn_varlen_qkvpacked_func,
            dict(qkv=jnp.ones((3, N, H, D)), cu_seqlens=Q, max_seqlen=5),
            ValueError,
            "(qkv=...)` must be [N, 3, H, D]. Got shape (3, 10, 4, 8)",
        ),
        (
            flash_attn_varlen_kvpacked_func,
            dict(q=qkv()[0], kv=jnp.ones((M, 3, h, D)), cu_seqlens_q=Q, cu_seqlens_k=K)
            | dict(max_seqlen_q=5, max_seqlen_k=5),
            ValueError,
            "(kv=...)` must be [M, 2, h, D]",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", " ".join(x) if isinstance(x, dict) else ""),
)
def test_errors(as_users_run_it, call, arguments, error, words):
    given = dict(zip("qkv", qkv()), cu_seqlens_q=Q, cu_seqlens_k=K, max_seqlen_q=5, max_seqlen_k=5)
    given = given if call is flash_attn_varlen_func else {}
    parts = map(re.escape, words.split(" ... "))
    with pytest.raises(error, match=rf"(?s)^`{call.__name__}" + ".*".join(parts)):
        call(**given | arguments)

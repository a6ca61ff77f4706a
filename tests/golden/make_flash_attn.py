"""Writes flash_attn.npz: what PyTorch's own attention gives, in float64, for the cases of test_flash_attn.py.

    python tests/golden/make_flash_attn.py

Needs torch, which nothing else here does. Masks and slopes are written out as matrices, rotary
embeddings as complex numbers, caches and packed sequences as loops. Of each case the file holds the
settings (JSON), the inputs, out, lse, the cotangent of out and the gradients that it gives, or the caches.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

SLOPES = [0.5, 0.25, 0.1, 0.7], [0.2, 0.0, 0.9, 0.3]
# name: (B, T, t, H, h, D), settings of `flash_attn_func`
CASES = {
    "plain": ((2, 7, 7, 4, 4, 8), {}),
    "grouped": ((2, 6, 9, 4, 2, 8), dict(softmax_scale=0.3)),
    "causal": ((2, 5, 9, 4, 2, 8), dict(causal=True)),
    "window": ((2, 6, 9, 4, 1, 8), dict(window_size=[2, 1])),
    "window left": ((2, 9, 9, 4, 2, 8), dict(window_size=[3, -1])),
    "window right": ((2, 5, 9, 4, 2, 8), dict(window_size=[-1, 0])),
    "window causal": ((2, 5, 9, 4, 2, 8), dict(window_size=[3, 2], causal=True)),
    "softcap": ((2, 6, 6, 4, 2, 8), dict(softcap=1.5, causal=True)),
    "slopes": ((2, 5, 9, 4, 2, 8), dict(alibi_slopes=SLOPES[0])),
    "slopes of entries": ((2, 5, 9, 4, 2, 8), dict(alibi_slopes=SLOPES, softcap=2.0, causal=True)),
}
# name: (lengths of queries, of keys), settings of `flash_attn_varlen_func`; H=4, h=2, D=8, two rows more
PACKED = {
    "plain": (([3, 5, 0, 4], [3, 5, 0, 4]), {}),
    "causal": (([2, 4, 0, 3, 1], [5, 4, 2, 6, 0]), dict(causal=True, softmax_scale=0.3)),
    "window": (([3, 6, 1], [5, 6, 4]), dict(window_size=[2, 1])),
    "softcap": (([1, 4, 3], [7, 4, 5]), dict(window_size=[3, -1], softcap=1.5, causal=True)),
    "slopes": (([3, 1, 4], [3, 6, 5]), dict(alibi_slopes=SLOPES[0], causal=True)),
    "slopes of sequences": (([3, 0, 5], [4, 2, 5]), dict(alibi_slopes=[*SLOPES, SLOPES[0]])),
}
# name: (B, T, entries, S, n, rotary dimension), settings of `flash_attn_with_kvcache`; H=4, h=2, D=8
STEPS = {
    "read": ((2, 1, 2, 9, 0, 0), dict(cache_seqlens=[9, 4])),
    "decode": ((2, 1, 2, 9, 1, 8), dict(cache_seqlens=[3, 6], causal=True)),
    "chunk": ((2, 3, 2, 9, 3, 4), dict(cache_seqlens=[0, 5], causal=True, rotary_interleaved=False)),
    "all at one position": ((2, 3, 2, 9, 3, 8), dict(cache_seqlens=[2, 5])),
    "window": ((2, 3, 2, 9, 3, 4), dict(cache_seqlens=[2, 5], window_size=[2, 0])),
    "entries": ((2, 2, 4, 9, 2, 0), dict(cache_seqlens=[7, 3], cache_batch_idx=[3, 1], causal=True)),
    "left": ((2, 2, 2, 9, 2, 8), dict(cache_seqlens=[6, 4], cache_leftpad=[3, 0], causal=True)),
    "slopes": ((2, 2, 2, 9, 2, 0), dict(cache_seqlens=[6, 4], alibi_slopes=SLOPES[0], softcap=2.0)),
    "number": ((2, 2, 2, 9, 2, 0), dict(cache_seqlens=4, softmax_scale=0.5)),
}


def attend(q, k, v, seen, bias, scale, cap):
    """(out, lse) of q [B, T, H, D], with the pairs `seen` and a bias behind the cap, [B, H, T, t]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = torch.zeros_like(bias).masked_fill(~seen, -math.inf)
    repeat = q.shape[1] // k.shape[1]
    s = scale * q @ k.repeat_interleave(repeat, 1).mT
    s = (cap * torch.tanh(s / cap) if cap else s) + bias + hidden
    lse = torch.logsumexp(s, -1)
    if cap:
        out = torch.softmax(s, -1) @ v.repeat_interleave(repeat, 1)
    else:
        out = scaled_dot_product_attention(q, k, v, bias + hidden, scale=scale, enable_gqa=True)
    # A second opinion of PyTorch's, which has no gradients on a CPU.
    mod = lambda s, b, h, i, j: (cap * torch.tanh(s / cap) if cap else s) + (bias + hidden)[b, h, i, j]
    with torch.no_grad():
        flex = flex_attention(
            q.detach(), k.detach(), v.detach(), mod, scale=scale, enable_gqa=True, return_lse=True
        )
    torch.testing.assert_close(out.detach(), flex[0])
    torch.testing.assert_close(lse.detach(), flex[1].double(), atol=1e-5, rtol=1e-5)
    return out.transpose(1, 2), lse


def matrices(T, t, H, B, settings):
    """(seen, bias): which pairs of T queries and t keys count, and what slopes add, [B, H, T, t]."""
    i, j = torch.arange(T)[:, None] + t - T, torch.arange(t)
    left, right = settings.get("window_size", (-1, -1))
    seen = torch.ones(T, t, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if settings.get("causal"):
        seen &= j <= i
    slopes = torch.tensor(settings.get("alibi_slopes", [0.0] * H), dtype=torch.float64)
    bias = -slopes.reshape(-1, H, 1, 1) * (i - j).abs()
    return seen.expand(B, H, T, t), bias.expand(B, H, T, t)


def of_function(shape, settings, rng):
    B, T, t, H, h, D = shape
    draw = lambda *size: rng.standard_normal(size).astype(np.float32)
    arrays = dict(q=draw(B, T, H, D), k=draw(B, t, h, D), v=draw(B, t, h, D), do=draw(B, T, H, D))
    q, k, v, do = (torch.tensor(x, dtype=torch.float64) for x in arrays.values())
    for x in (q, k, v):
        x.requires_grad_()
    scale = settings.get("softmax_scale", D**-0.5)
    out, lse = attend(q, k, v, *matrices(T, t, H, B, settings), scale, settings.get("softcap", 0))
    (out * do).sum().backward()
    return arrays | dict(out=out.detach(), lse=lse.detach(), dq=q.grad, dk=k.grad, dv=v.grad)


def of_packed(lengths, settings, rng):
    """A loop over the sequences, of which those without queries or keys leave zeros."""
    H, h, D, padding = 4, 2, 8, 2
    draw = lambda lengths, heads: rng.standard_normal((sum(lengths) + padding, heads, D)).astype(np.float32)
    n, m = lengths
    arrays = dict(q=draw(n, H), k=draw(m, h), v=draw(m, h), do=draw(n, H))
    offsets = [np.append(0, np.cumsum(x)).astype(np.int32) for x in lengths]
    q, k, v, do = (torch.tensor(x, dtype=torch.float64) for x in arrays.values())
    for x in (q, k, v):
        x.requires_grad_()
    scale = settings.get("softmax_scale", D**-0.5)
    out, lse = torch.zeros(q.shape, dtype=q.dtype), torch.full((H, len(q)), -math.inf, dtype=q.dtype)
    for i, (T, t) in enumerate(zip(*lengths)):
        if T == 0 or t == 0:
            continue
        rows, keys = (slice(cu[i], cu[i + 1]) for cu in offsets)
        own = dict(settings)
        if np.ndim(own.get("alibi_slopes")) == 2:
            own["alibi_slopes"] = own["alibi_slopes"][i]
        x, y = attend(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            *matrices(T, t, H, 1, own),
            scale,
            settings.get("softcap", 0),
        )
        out[rows], lse[:, rows] = x[0], y[0]
    (out * do).sum().backward()
    arrays |= dict(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    return arrays | dict(out=out.detach(), lse=lse.detach(), dq=q.grad, dk=k.grad, dv=v.grad)


def turned(x, cos, sin, interleaved):
    """One row [heads, D], its first channels turned by the angles of `cos` and `sin` [r / 2]."""
    r = 2 * len(cos)
    pairs = x[:, :r].reshape(len(x), r // 2, 2) if interleaved else x[:, :r].reshape(len(x), 2, r // 2).mT
    z = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
    pairs = torch.view_as_real(z)
    return torch.cat([(pairs if interleaved else pairs.mT).reshape(len(x), r), x[:, r:]], -1)


def of_step(shape, settings, rng):
    B, T, entries, S, n, r = shape
    H, h, D = 4, 2, 8
    draw = lambda *size: rng.standard_normal(size).astype(np.float32)
    arrays = dict(q=draw(B, T, H, D), k_cache=draw(entries, S, h, D), v_cache=draw(entries, S, h, D))
    if n:
        arrays |= dict(k=draw(B, n, h, D), v=draw(B, n, h, D))
    if r:
        angles = np.arange(S + 2)[:, None] * 10.0 ** -np.arange(r // 2)
        arrays |= dict(
            rotary_cos=np.cos(angles, dtype=np.float32), rotary_sin=np.sin(angles, dtype=np.float32)
        )
    x = {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}
    moves = settings.get("causal") or "window_size" in settings
    interleaved = settings.get("rotary_interleaved", True)
    outs, lses = [], []
    for b in range(B):
        used = (
            settings["cache_seqlens"]
            if isinstance(settings["cache_seqlens"], int)
            else settings["cache_seqlens"][b]
        )
        entry = settings.get("cache_batch_idx", range(B))[b]
        start = settings.get("cache_leftpad", [0] * B)[b]
        q = x["q"][b].clone()
        for i in range(n):
            k = x["k"][b, i]
            if r:
                k = turned(k, x["rotary_cos"][used + i], x["rotary_sin"][used + i], interleaved)
            x["k_cache"][entry, used + i], x["v_cache"][entry, used + i] = k, x["v"][b, i]
        for i in range(T if r else 0):
            at = used + i if moves else used
            q[i] = turned(q[i], x["rotary_cos"][at], x["rotary_sin"][at], interleaved)
        keys, values = (x[name][entry, start : used + n][None] for name in ("k_cache", "v_cache"))
        pairs = matrices(T, used + n - start, H, 1, settings)
        scale = settings.get("softmax_scale", D**-0.5)
        out, lse = attend(q[None], keys, values, *pairs, scale, settings.get("softcap", 0))
        outs.append(out), lses.append(lse)
    result = dict(out=torch.cat(outs), lse=torch.cat(lses))
    return arrays | result | dict(new_k_cache=x["k_cache"], new_v_cache=x["v_cache"])


def main():
    rng = np.random.default_rng(0)
    held = {}
    kinds = ("function", CASES, of_function), ("step", STEPS, of_step), ("packed", PACKED, of_packed)
    for kind, cases, make in kinds:
        for name, (shape, settings) in cases.items():
            held[f"{kind}/{name}/settings"] = np.array(json.dumps(settings))
            for key, x in make(shape, settings, rng).items():
                dtype = np.int32 if key.startswith("cu_") else np.float32
                held[f"{kind}/{name}/{key}"] = np.asarray(x, dtype)
    np.savez_compressed(Path(__file__).with_name("flash_attn.npz"), **held)


if __name__ == "__main__":
    main()

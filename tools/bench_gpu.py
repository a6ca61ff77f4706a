"""Times attention on a GPU: jflash beside what JAX itself has, in one process.

    python tools/bench_gpu.py [--names jflash,fa3,cudnn,pallas] [--cases T,B,heads,D,causal ...]

Compare within a run only: the card lowers its clock under load, so the calls take turns. FLOPs as in the
FlashAttention papers: 4·B·H·T²·D forward, half of it causal, 3.5 times with the backward pass.
"""

import argparse
import functools
import math
import statistics
import time
import warnings

import jax
import jax.numpy as jnp

import jflash

CORE = (  # B, T, H, D, causal
    (1, 16384, 16, 128, True),
    (1, 16384, 16, 128, False),
    (1, 16384, 32, 64, True),
    (1, 16384, 32, 64, False),
    (8, 2048, 16, 128, True),
    (8, 2048, 16, 128, False),
    (1, 16384, 8, 256, True),
)
ROUNDS, SECONDS = 7, 0.05  # of each call's batch


def ours(q, k, v, causal, implementation=None):
    return jflash.attention(q, k, v, jflash.Causal() if causal else None, implementation=implementation)


def of_jax(q, k, v, causal, implementation):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


def pallas(q, k, v, causal):
    """JAX's own Pallas kernel by way of Triton, with tiles that it is fast with."""
    from jax.experimental.pallas.ops.gpu import attention

    D = q.shape[-1]
    backward = {f"block_{x}": 64 for x in ("q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    blocks = attention.BlockSizes(block_q=128, block_k=64 if D > 64 else 128, **backward)
    return attention.mha(q, k, v, None, sm_scale=1 / math.sqrt(D), causal=causal, block_sizes=blocks)


def fa3(q, k, v, causal):
    """FlashAttention-3's own kernels, called from JAX by the package dew_flash_attn, if it is there."""
    import dew_flash_attn

    return dew_flash_attn.flash_mha(q, k, v, is_causal=causal, window_size=(-1, -1))


CALLS = {
    "jflash": ours,
    "mosaic": functools.partial(ours, implementation="mosaic"),
    "fa3": fa3,
    "triton": functools.partial(ours, implementation="triton"),
    "xla": functools.partial(ours, implementation="xla"),
    "cudnn": functools.partial(of_jax, implementation="cudnn"),
    "jax.nn": functools.partial(of_jax, implementation="xla"),
    "pallas": pallas,
}


def seconds(calls: dict, arguments: tuple) -> dict[str, float]:
    """The median seconds of each of `calls`, whose batches take turns."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        jax.block_until_ready(call(*arguments))
        begin = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        counts[name] = max(2, round(SECONDS / (time.perf_counter() - begin)))
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[name]):
                result = call(*arguments)
            jax.block_until_ready(result)
            if turn:  # the first heats the card
                times[name].append((time.perf_counter() - begin) / counts[name])
    return {name: statistics.median(x) for name, x in times.items()}


def measure(names: list[str], case: tuple) -> dict[str, tuple[float, float]]:
    """(seconds forward, seconds with the backward pass) of each implementation; prints them."""
    B, T, H, D, causal = case
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (B, T, H, D), jnp.bfloat16) for key in keys)
    calls = {name: functools.partial(CALLS[name], causal=causal) for name in names}
    both = lambda call: lambda q, k, v, do: jax.vjp(call, q, k, v)[1](do)
    forward = seconds({name: jax.jit(call) for name, call in calls.items()}, (q, k, v))
    backward = seconds({name: jax.jit(both(call)) for name, call in calls.items()}, (q, k, v, do))
    flop = 4 * B * H * T * T * D / (2 if causal else 1) / 1e12
    print(f"B {B}, T {T}, H {H}, D {D}, {'causal' if causal else 'full'}")
    for name in names:
        rates = flop / forward[name], 3.5 * flop / backward[name]
        print(f"  {name:8s} {rates[0]:5.0f} TFLOP/s forward, {rates[1]:5.0f} with backward", flush=True)
    return {name: (forward[name], backward[name]) for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--names", default="jflash,triton,pallas,cudnn", help=f"of {', '.join(CALLS)}")
    parser.add_argument("--cases", nargs="*", help="B,T,H,D,causal or full")
    options = parser.parse_args()
    names = options.names.split(",")
    cases = CORE
    if options.cases:
        split = [case.split(",") for case in options.cases]
        cases = [(*map(int, numbers), kind == "causal") for *numbers, kind in split]
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    times = [measure(names, case) for case in cases]
    for other in names[1:]:
        means = [
            statistics.geometric_mean(each[other][i] / each[names[0]][i] for each in times) for i in (0, 1)
        ]
        print(
            f"{names[0]} over {other} (geometric mean): {means[0]:.2f} forward, with backward {means[1]:.2f}"
        )


if __name__ == "__main__":
    main()

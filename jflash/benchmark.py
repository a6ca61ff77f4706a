"""`python -m jflash bench --cpu`: the XLA path against other attention on this machine's CPU.

Each implementation is compiled, checked against the reference, then timed in turn with the others;
what is reported is the median of the ratios of neighbouring runs, since a machine's speed drifts.
No ratio is printed for a result that is wrong.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .api import attention
from .masks import Causal


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: lengths T = t, causal or full, forward or forward and backward."""

    T: int
    causal: bool
    backward: bool
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        what = "forward + backward" if self.backward else "forward"
        return (
            f"T {self.T:5d} {jnp.dtype(self.dtype).name:8s} {'causal' if self.causal else 'full':6s} {what}"
        )


# The ratio to jax.nn's XLA attention below which `--check` fails. Continuous integration runs on
# shared machines whose speed drifts by half, so these stand well below what docs/backends.md reports.
FLOORS = {
    Case(T, causal, backward): floor
    for T, floors in {
        128: (0.6, 0.6, 0.5, 0.5),
        512: (0.6, 0.6, 0.5, 0.5),
        1024: (1.1, 1.3, 0.8, 1.0),
        4096: (1.5, 2.2, 1.0, 1.8),
    }.items()
    for (backward, causal), floor in zip(((False, False), (False, True), (True, False), (True, True)), floors)
}


def arguments(case: Case, B: int = 1, H: int = 8, D: int = 64) -> tuple:
    """Random q, k, v and a cotangent [B, T, H, D]."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (B, case.T, H, D), case.dtype) for key in keys)


def program(case: Case, attend: Callable) -> Callable:
    """The jitted program of a case: `attend(q, k, v)`, or its pullback."""
    if case.backward:
        return jax.jit(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do))
    return jax.jit(lambda q, k, v, do: attend(q, k, v))


def peers(case: Case) -> dict[str, Callable]:
    """What is timed, by name."""
    mask = Causal() if case.causal else None
    return {
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal),
        "jflash": lambda q, k, v: attention(q, k, v, mask),
    }


def torch_peer(case: Case) -> Callable | None:
    """PyTorch's attention on the same number of threads, if PyTorch is installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    dtype = getattr(torch, jnp.dtype(case.dtype).name)
    q, k, v, do = (torch.randn(1, 8, case.T, 64).to(dtype) for _ in range(4))

    def run():
        inputs = [x.detach().requires_grad_(case.backward) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)
        if case.backward:
            out.backward(do)

    return run


def measure(case: Case, seconds: float = 4.0) -> dict[str, list[float]]:
    """Seconds of each run, by name; run i of each name was timed next to run i of the others."""
    inputs = arguments(case)
    runs = {name: program(case, attend) for name, attend in peers(case).items()}
    results = {name: jax.block_until_ready(fn(*inputs)) for name, fn in runs.items()}
    _check(case, results)
    calls = {name: lambda fn=fn: jax.block_until_ready(fn(*inputs)) for name, fn in runs.items()}
    torch = torch_peer(case)
    if torch is not None:
        calls["torch"] = torch
    times = {name: [] for name in calls}
    begin = time.perf_counter()
    while len(times["jflash"]) < 3 or (time.perf_counter() - begin < seconds and len(times["jflash"]) < 200):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in times.items()}


def _check(case: Case, results: dict[str, Any]) -> None:
    eps = float(jnp.finfo(case.dtype).eps)
    for got, want in zip(jax.tree.leaves(results["jflash"]), jax.tree.leaves(results["jax.nn"])):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        error = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        if not error < 64 * eps:
            raise AssertionError(f"{case}: off by {error:.1e} of the largest value; not timed")


def row(case: Case, times: dict[str, list[float]], floor: float | None) -> tuple[str, bool]:
    """The printed line of a case, and whether jflash is at least `floor` times as fast as jax.nn."""
    ratio = lambda name: statistics.median(a / b for a, b in zip(times[name], times["jflash"]))
    parts = [f"{case!s:42s}"]
    parts += [f"{name} {1e3 * statistics.median(each):8.2f}" for name, each in times.items()]
    parts += [f"{name}/jflash {ratio(name):5.2f}" for name in times if name != "jflash"]
    good = floor is None or ratio("jax.nn") >= floor
    return "  ".join(parts if good else [*parts, f"below its floor of {floor}"]), good


def cpu(check: bool = False, dtypes: tuple = (jnp.float32,), seconds: float = 4.0) -> bool:
    """Prints the table; returns whether, with `check`, every float32 ratio is at least its floor."""
    device = jax.devices()[0].device_kind
    print(f"B 1, H 8, D 64, {device}; milliseconds are medians, ratios medians of neighbouring runs")
    good = True
    for dtype in dtypes:
        for base, floor in FLOORS.items():
            case = dataclasses.replace(base, dtype=dtype)
            held = floor if check and dtype == jnp.float32 else None
            line, fits = row(case, measure(case, seconds), held)
            print(line, flush=True)
            if not fits:  # once more: another program may have had the machine
                line, fits = row(case, measure(case, 3 * seconds), held)
                print(line, flush=True)
            good = good and fits
    return good

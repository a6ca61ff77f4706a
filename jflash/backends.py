"""The implementations: the table, which one a call gets, and why.

An implementation is a module with the same few names:

- `unsupported(problem) -> str | None`: why it cannot take a problem, or None;
- `default_config(problem)`, `candidates(problem)`: how it is configured, what tuning may try;
- `forward(problem, operands, config, plan) -> (out, lse)`, where `plan(block_q, block_k, of)` is
  the schedule of the call (`jflash.schedule.make`);
- `backward(problem, operands, config, plan, lse, delta, do, wanted) -> gradients by operand`, or
  None where JAX differentiates `forward` itself.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.problem import Operands, Problem

from . import schedule


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation: `automatic` ones may be chosen, in the table's order."""

    name: str
    module: str
    automatic: bool
    summary: str
    platforms: tuple[str, ...] = ()  # where it runs, if not everywhere; elsewhere it is not even loaded
    interprets: bool = True  # whether it also runs within `interpret()`

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def unsupported(self, problem: Problem) -> str | None:
        if problem.interpret and not self.interprets:
            return "it does not run within jflash.interpret()"
        if self.platforms and problem.platform not in self.platforms and not problem.interpret:
            where = f"it runs on {' and '.join(self.platforms)}"
            slowly = ", or slowly within jflash.interpret()" if self.interprets else ""
            return f"{where}{slowly}, and this is for {problem.platform}"
        return self.load().unsupported(problem)


TABLE = (
    Row(
        "mosaic",
        "pallas_kernels.mosaic",
        True,
        "Pallas kernels for NVIDIA Hopper, linear memory",
        ("cuda",),
        # Pallas's interpreter of them needs ordered callbacks, which attention, a primitive, cannot hold.
        interprets=False,
    ),
    Row(
        "triton",
        "pallas_kernels.triton",
        True,
        "Pallas kernels for NVIDIA and AMD GPUs, linear memory",
        ("cuda", "rocm"),
    ),
    Row("xla", "jflash.xla", True, "loops of XLA operations, linear memory, any platform"),
    Row("reference", "jflash.reference", False, "dense, T·t memory: never chosen by itself"),
)

_interpreting = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Within it, GPU kernels run in Pallas's interpret mode on the CPU: slow, for tests and debugging.

    Part of the key of `jax.jit`, so nothing that was compiled outside is reused inside. Without
    effect on `xla` and `reference`, which run anywhere as they are.
    """
    with _interpreting(True):
        yield


def interpreting() -> bool:
    """Whether the call is made within `interpret()`."""
    return _interpreting.value


# Where no device can be asked (compiling for an absent one), its kind tells. The first that occurs counts.
ARCHITECTURES = {
    "B200": "sm_100",
    "B300": "sm_103",
    "H100": "sm_90",
    "H200": "sm_90",
    "H800": "sm_90",
    "H20": "sm_90",
    "A100": "sm_80",
    "A800": "sm_80",
    "A30": "sm_80",
    "L40": "sm_89",
    "L4": "sm_89",
    "RTX 40": "sm_89",
    "RTX 50": "sm_120",
    "A10": "sm_86",
}


def target() -> tuple[str, str]:
    """What a call is traced for: ("cuda", "sm_90"), ("rocm", "gfx942"), ("cpu", ""), ("tpu", "").

    The device of the abstract mesh, if one is set, else the default device; "" where the
    architecture is not known. A computation that is lowered for another platform afterwards still
    gives the right answer.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        kind = described = str(device.device_kind)
        capability = ""
    else:
        default = jax.config.jax_default_device
        if isinstance(default, str):
            default = jax.devices(default)[0]
        device = default or jax.devices()[0]
        kind, described = device.device_kind, device.client.platform_version
        capability = str(getattr(device, "compute_capability", ""))
    name = device.platform
    if name not in ("gpu", "cuda", "rocm"):
        return name, ""
    if name == "rocm" or "gfx" in kind + capability or "rocm" in described.lower():
        return "rocm", next((x.split(":")[0] for x in (capability, kind) if x.startswith("gfx")), "")
    if capability:
        return "cuda", "sm_" + capability.replace(".", "")
    return "cuda", next((sm for card, sm in ARCHITECTURES.items() if card in kind), "")


def choose(problem: Problem, implementation: str | None) -> tuple[Row, dict[str, str]]:
    """The row that takes the problem, and for each other one why it does not.

    An `implementation` asked for by name runs or raises; nothing falls back.
    """
    why_not = {}
    chosen = None
    for row in TABLE:
        reason = row.unsupported(problem)
        if implementation is not None and row.name != implementation:
            reason = f"implementation={implementation!r} was asked for"
        elif implementation is None and not row.automatic:
            reason = reason or f"{row.summary}; ask for it by implementation={row.name!r}"
        elif reason is None and chosen is not None:
            reason = f"{chosen.name} comes first"
        if reason is None:
            chosen = row
        else:
            why_not[row.name] = reason
    if chosen is None:
        named = why_not if implementation is None else {implementation: why_not[implementation]}
        raise NotImplementedError(
            "no implementation for this call. "
            + " ".join(f"{name}: {reason}." for name, reason in named.items())
        )
    return chosen, why_not


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run and why; print it."""

    implementation: str
    config: Any
    platform: str
    schedule: str
    derivatives: str
    why_not: dict[str, str]
    problem: Problem
    sharding: str = ""

    def __str__(self) -> str:
        p = self.problem
        shape = f"q {(*p.batch, p.T, p.H, p.D)}, k {(*p.batch, p.t, p.h, p.D)}, v {(*p.batch, p.t, p.h, p.d)}"
        lines = [
            f"{self.implementation} on {self.platform}: {shape}, {jax.numpy.dtype(p.dtype).name}",
            f"  config:   {self.config}",
            f"  schedule: {self.schedule}",
            f"  derivatives: {self.derivatives}",
        ]
        lines += [f"  sharding: {self.sharding}"] if self.sharding else []
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.why_not.items()])


def explain(problem: Problem, operands: Operands, implementation: str | None) -> Explanation:
    """The record of what `attend` would run for these operands."""
    row, why_not = choose(problem, implementation)
    config = row.load().default_config(problem)
    return Explanation(
        implementation=row.name,
        config=config,
        platform=problem.platform,
        schedule=_schedule(problem, operands, config),
        derivatives=_derivatives(row),
        why_not=why_not,
        problem=problem,
    )


def _derivatives(row: Row) -> str:
    if row.load().backward is None:
        return "JAX's own, of any order"
    return f"gradient by {row.name}, forward mode and second order by xla"


def _schedule(problem: Problem, operands: Operands, config: Any) -> str:
    if config is None:
        return "every pair is computed, then masked"
    if operands.mask is None:
        return "every block is visited, no mask"
    if schedule.is_arithmetic(problem, operands.mask):
        return "empty blocks are skipped, by arithmetic on the block's index"
    if operands.mask.contiguous:
        return "empty blocks are skipped, by ranges computed from the mask's data at run time"
    return "empty blocks are skipped where the mask tells, by lists of blocks computed at run time"

"""The cards that kernels are compiled for, none of which has to be here.

XLA compiles for a described card where JAX's plugin for its vendor is installed: no driver, no CUDA
and no ROCm. One process compiles for one card: Mosaic and JAX 0.12 keep what they made for another.
"""

import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
from collections import defaultdict

import jax
import numpy as np
from jax.experimental import topologies

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA's plugin stops where cuPTI is missing
jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class Target:
    """One card: what XLA needs to know of it, and what its occupancy follows from."""

    platform: str  # "cuda" or "rocm"
    architecture: str
    kind: str  # as the device's kind
    cores: int  # SMs, CUs
    shared_memory: int  # bytes that one program may have
    shared_memory_per_core: int
    warps_per_core: int
    threads_per_warp: int = 32


TARGETS = {
    "H200": Target("cuda", "sm_90", "NVIDIA H200", 132, 232448, 233472, 64),
    "A100": Target("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 64),
    "L40": Target("cuda", "sm_89", "NVIDIA L40", 142, 101376, 102400, 48),
    "MI300X": Target("rocm", "gfx942", "gfx942", 304, 65536, 65536, 32, 64),
    "MI250": Target("rocm", "gfx90a", "gfx90a", 104, 65536, 65536, 32, 64),
}


def warps(target: Target, threads: int, registers: int, shared_memory: int) -> int:
    """How many warps of a kernel a core (SM, CU) holds at a time, of AMD's a SIMD.

    A core has four parts (SIMDs), each with 512 registers a thread of a warp, given out by eights.
    """
    of_one = threads // target.threads_per_warp
    by_registers = 4 * min(target.warps_per_core // 4, 512 // (-(-registers // 8) * 8))
    reserved = 1024 if target.platform == "cuda" else 0
    by_memory = target.shared_memory_per_core // max(1, shared_memory + reserved)
    held = min(by_registers // of_one, by_memory) * of_one
    return held // 4 if target.platform == "rocm" else held


def mesh(target: Target) -> jax.sharding.Mesh:
    """A mesh of one such card; computations traced under it are compiled for it."""
    if target.platform == "rocm":
        _register_rocm()
    topology = topologies.get_topology_desc(
        platform=target.platform, target_config=_description(target), topology="1x1x1"
    )
    return jax.sharding.Mesh(np.array(topology.devices), ("x",))


def compile_for(mesh: jax.sharding.Mesh, fn, *shapes) -> jax.stages.Compiled:
    """`fn` compiled for operands of these shapes (a pytree of `jax.ShapeDtypeStruct`)."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(fn).trace(*jax.tree.map(place, shapes)).lower()
    return lowered.compile()


def _description(target: Target) -> str:
    if target.platform == "cuda":
        major, minor = re.fullmatch(r"sm_(\d+)(\d)", target.architecture).groups()
        vendor = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        libraries = "dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }"
    else:
        vendor = f'rocm_compute_capability {{ gcn_arch_name: "{target.architecture}:sramecc+:xnack-" }}'
        libraries = "dnn_version_info { major: 3 minor: 5 } runtime_version { major: 7 }"
    # Of the rest, sizes and speeds only steer fusions around the kernels.
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: {target.threads_per_warp}
          shared_memory_per_block: {min(49152, target.shared_memory)}
          shared_memory_per_block_optin: {target.shared_memory}
          shared_memory_per_core: {target.shared_memory_per_core}
          threads_per_core_limit: {target.warps_per_core * target.threads_per_warp}
          core_count: {target.cores} fpus_per_core: 128
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: 4000000000000 l2_cache_size: 52428800 clock_rate_ghz: 2
          device_memory_size: 48000000000
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 {vendor}
        }}
        platform_name: "{target.platform.upper()}" {libraries}
        device_description_str: "{target.kind}"
    """


def _register_rocm() -> None:
    from jax._src import xla_bridge

    spec = importlib.util.find_spec("jax_plugins.xla_rocm7")
    if spec is None:
        raise SystemExit("jax-rocm7-plugin is not installed; `make test-aot` installs it")
    plugin = pathlib.Path(spec.origin).with_name("xla_rocm_plugin.so")
    _stand_in_for_rocm(plugin)
    xla_bridge.register_plugin(
        "rocm", priority=500, library_path=str(plugin), options={"platform_name": "ROCM"}
    )


def _stand_in_for_rocm(plugin: pathlib.Path) -> None:
    """Loads empty libraries in place of those of ROCm that the plugin links to.

    Compiling calls none of them, so functions that return an error (100, no device) are enough.
    """
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", plugin))
    system = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z|numa|elf|drm\w*)\.so|ld-linux")
    missing = [name for name in needed if not system.match(name)]
    symbols = defaultdict(list)  # by their version; "" where they have none
    for line in _output("nm", "-D", "--undefined-only", "--with-symbol-versions", plugin).splitlines():
        kind, name = line.split()[-2:]
        name, _, version = name.replace("@@", "@").partition("@")
        if version or (kind == "U" and not name.startswith("__cxa")):
            symbols[version].append(name)
    homes = {"libamdhip64": "hip_", "libamd_smi": "AMDSMI"}  # a symbol's version tells its library
    rest = next(name for name in missing if name.startswith("librocblas"))
    with tempfile.TemporaryDirectory() as folder:
        for name in missing:
            prefix = homes.get(name.split(".")[0])
            own = {v: s for v, s in symbols.items() if prefix and v.startswith(prefix)}
            own = own or ({"": symbols[""]} if name == rest else {})
            ctypes.CDLL(_empty_library(pathlib.Path(folder), name, own), ctypes.RTLD_GLOBAL)


def _empty_library(folder: pathlib.Path, name: str, symbols: dict[str, list[str]]) -> str:
    source, versions, library = (folder / x for x in ("stand_in.c", "versions", name))
    source.write_text("".join(f"int {s}(void) {{ return 100; }}\n" for own in symbols.values() for s in own))
    blocks = [f"{v} {{ global: {'; '.join(own)}; }};\n" for v, own in sorted(symbols.items()) if v]
    versions.write_text("".join(blocks))
    script = [f"-Wl,--version-script={versions}"] if blocks else []
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *script]
    subprocess.run(["gcc", *options, "-o", library, source], check=True)
    return str(library)


def _output(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

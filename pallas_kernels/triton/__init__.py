"""Kernels by Pallas's Triton lowering: NVIDIA Ampere and later, AMD through ROCm.

JAX has deprecated this lowering (0.11) and will remove it; nothing outside this folder, but for a
row in `jflash.backends`, knows of it. It is the only way of Pallas to AMD.
"""

from .backward import backward
from .config import Block, Config, candidates, default_config, unsupported
from .forward import forward

NAME = "triton"

__all__ = ["NAME", "Block", "Config", "backward", "candidates", "default_config", "forward", "unsupported"]

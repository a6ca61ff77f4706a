"""Kernels by Pallas's Mosaic GPU lowering: NVIDIA Hopper (sm_90)."""

from .backward import backward
from .config import Backward, Config, Forward, candidates, default_config, unsupported
from .forward import forward

NAME = "mosaic"

__all__ = [
    "NAME",
    "Backward",
    "Config",
    "Forward",
    "backward",
    "candidates",
    "default_config",
    "forward",
    "unsupported",
]

"""Kernels by Pallas's Mosaic GPU lowering: NVIDIA Hopper (sm_90)."""

from .config import Config, Forward, candidates, default_config, unsupported
from .forward import forward

NAME = "mosaic"

__all__ = ["NAME", "Config", "Forward", "candidates", "default_config", "forward", "unsupported"]


def backward(problem, *arguments):
    from pallas_kernels import triton

    operands, _, *rest = arguments
    return triton.backward(problem, operands, triton.default_config(problem), *rest)

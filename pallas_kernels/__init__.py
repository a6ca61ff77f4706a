"""Attention kernels: arrays in, arrays out. No user validation, no autodiff rules, no jflash."""

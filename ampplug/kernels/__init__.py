"""Kernels, one file each: launcher, Triton kernel, and the torch reference that it must equal (also the CPU path)."""

"""Kernels of a step: Triton on a GPU, C on a CPU, with plain definitions in torch."""

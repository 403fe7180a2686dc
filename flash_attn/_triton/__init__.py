"""Kernels in Triton, under the names and with the arguments of `_ops`: for GPUs without a compiled kernel."""

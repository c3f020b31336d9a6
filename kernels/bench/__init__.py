"""Benchmarks of the kernels on a GPU, and a dry run of them without one."""

"""Triton kernels, one per file, with a torch reference beside each.

Imported as ``megatron_xorl.kernels``: the folder is mapped in pyproject.toml, so that no installed distribution owns the
top-level name ``kernels``. Imports only torch and triton.
"""

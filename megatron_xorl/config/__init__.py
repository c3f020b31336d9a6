"""Configurations: the model's config.json, the adapter and run YAML, the parallel layout.

Every reader here is strict and every result is frozen. Nothing in this room imports torch or
Megatron-core.
"""

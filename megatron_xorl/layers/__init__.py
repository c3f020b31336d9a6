"""Megatron-core layers of GLM-5.2 whose base is frozen and whose projections carry LoRA factors."""

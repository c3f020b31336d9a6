"""Adapters by logical name: which projections exist, which are targets, which factors train.

Everything here is computed from configurations alone, in plain Python: no torch, no Megatron-core,
no weights.
"""

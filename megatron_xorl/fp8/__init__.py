"""Block-FP8: the format of the checkpoint's frozen weights and what computes with them.

``format`` says what the bytes mean (codes, scales, the block grid, where a tensor may be cut) and
is the only place that quantises or dequantises a whole tensor. Stands on torch alone: no
Megatron-core.
"""

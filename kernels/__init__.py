"""Triton kernels, one a file, with the formula, the rounding points and a plain torch reference beside each.

Imported as ``megatron_xorl.kernels``: the folder is mapped in pyproject.toml, so that no installed distribution owns the
top-level name ``kernels``. Imports only torch and triton.

The wrappers take plain tensors and know nothing of layers:

* quantise: :mod:`.quantize_rows`, :mod:`.quantize_blocks`
* frozen linears: :mod:`.linear`, :mod:`.linear_dx`, :mod:`.grouped_linear`, :mod:`.grouped_dx`, :mod:`.head_matmul`
* LoRA factors: :mod:`.lora_shrink`, :mod:`.lora_gradient`
* indexer: :mod:`.indexer_logits`, :mod:`.topk`, :mod:`.indexer_kl`, :mod:`.indexer_backward`
* sparse attention: :mod:`.sparse_mla`, :mod:`.sparse_mla_backward`, :mod:`.sparse_mla_probs`

Around them: :mod:`.launch` (where kernels start), :mod:`.shapes` and :mod:`.subjects` (every case that tests, compiler and
benchmark go through), :mod:`.aot` (compiling without a GPU), ``bench/`` (on one).
"""

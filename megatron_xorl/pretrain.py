"""``python -m megatron_xorl.pretrain``: see :mod:`megatron_xorl.training.pretrain`."""

from megatron_xorl.training.pretrain import main

if __name__ == "__main__":
    main()

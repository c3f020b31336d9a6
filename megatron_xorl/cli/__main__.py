"""``python -m megatron_xorl.cli`` is ``megatron-xorl``."""

from megatron_xorl.cli import main

if __name__ == "__main__":
    main()

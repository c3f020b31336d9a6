"""Planning from configurations alone: how many bytes a run needs. No torch, no Megatron-core."""

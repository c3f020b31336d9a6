"""Training: chat data, Megatron's loop with our argument table, checkpoints, export and recall."""

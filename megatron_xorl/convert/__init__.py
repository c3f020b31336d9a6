"""Whole-checkpoint tools: making a tiny checkpoint now; import, export and verify join it."""

"""Where a run happens: the CPU platform and the process groups.

``cpu`` makes Megatron-core run without a GPU, ``groups`` starts and ends the process groups. Importing this package
imports neither torch nor Megatron.
"""

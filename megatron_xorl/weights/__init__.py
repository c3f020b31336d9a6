"""The base checkpoint on disk: its names, reading it lazily, checking it, and the slice a rank owns.

``names`` is the one table of Hugging Face tensor names and Megatron names. No Megatron-core here;
``names`` needs no torch either.
"""

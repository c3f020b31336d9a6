"""The command line: ``megatron-xorl <verb>``.

The one idea: a verb parses its arguments, calls one function of the library and prints what it
returned; nothing is computed here. ``--json`` prints one JSON document on stdout and nothing else
there. Exit 0 success, 1 a check failed, 2 bad input; an error is one readable message on stderr,
with a traceback only under ``--debug``. Imports are inside the verbs, so that each starts fast.

``root`` has the program and what all verbs share; ``configs``, ``conversion``, ``runs`` and ``adapter`` have the
verbs, by what they look at.

    megatron-xorl targets glm-5.2 --scope routed_experts
"""

from __future__ import annotations

from megatron_xorl.cli import adapter, configs, conversion, runs
from megatron_xorl.cli.root import app, main, print_json

__all__ = ["adapter", "app", "configs", "conversion", "main", "print_json", "runs"]

"""Kernel tests run in a process of their own.

``TRITON_INTERPRET`` is read when ``@triton.jit`` decorates, Triton's own library included, so it must be set before anything
of the process imports Triton (transformers and torch do, in other rooms) and must not be set where code is compiled: a process
either interprets or compiles. So ``interpreted/`` is collected only where the variable is set already:

    TRITON_INTERPRET=1 python -m pytest -q tests/kernels/interpreted

and everywhere else ``test_interpreted.py`` runs that command once, as a child process, and reports each of its files as a test.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]

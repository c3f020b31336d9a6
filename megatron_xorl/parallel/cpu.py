"""One call that makes Megatron-core and megatron.training run on CPU and gloo.

:func:`use_cpu` applies the named substitutions of :mod:`megatron_xorl.parallel.substitutions`, once, and refuses to where
a GPU is visible: there Megatron needs none of them, and mixing the two would put tensors on two devices.

CPU command: ``python -m pytest tests/parallel/test_cpu_platform.py``
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator

import torch
from packaging.version import Version

from megatron_xorl.errors import PlatformError, nearest

__all__ = ["is_cpu_platform", "use_cpu"]

_applied: set[str] = set()


def is_cpu_platform() -> bool:
    """Say whether :func:`use_cpu` has been called in this process."""
    return bool(_applied)


def use_cpu(*, force: bool = False, skip: frozenset[str] = frozenset()) -> None:
    """Make megatron-core 0.19.2 and megatron.training run on CPU in this process; a second call changes nothing.

    Call it before building anything. ``force`` applies it although a GPU is visible. ``skip`` leaves out substitutions by
    name, which serves to show what each of them is needed for.

    Raises:
        PlatformError: a GPU is visible and ``force`` is false, megatron-core is missing or of another version, ``skip``
            names no substitution, or an object to substitute does not exist in the installed version.
    """
    if torch.cuda.is_available() and not force:
        raise PlatformError(
            "use_cpu() was called where a GPU is visible; it is for machines without one; leave the call out, "
            "hide the GPU (CUDA_VISIBLE_DEVICES=), or pass force=True"
        )
    _check_megatron_version()
    with _quiet_imports():
        from megatron_xorl.parallel.substitutions import SUBSTITUTIONS, substitution_names

        unknown = sorted(skip - set(substitution_names()))
        if unknown:
            raise PlatformError(
                f"skip names {', '.join(unknown)}, which is no substitution; nearest: "
                f"{', '.join(nearest(unknown[0], substitution_names())) or 'none'}; "
                f"choose from {', '.join(substitution_names())}"
            )
        if "jit_fuser" not in skip:
            _import_uncompiled()
        for entry in SUBSTITUTIONS:
            if entry.name not in skip and entry.name not in _applied:
                entry.apply(entry.replaces)
                _applied.add(entry.name)


def _import_uncompiled() -> None:
    """Import Megatron without torch.compile's machinery, which it loads for its fuser: 4 of 11 seconds of start-up.

    The functions that it would compile at import stay plain, as the ``jit_fuser`` substitution makes
    those that were compiled before.
    """
    compiler = torch.compile
    torch.compile = lambda model=None, **_: (
        model if model is not None else lambda function: function
    )
    try:
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.training")
    finally:
        torch.compile = compiler


def repair_megatron() -> None:
    """Apply on a GPU the substitutions that mend faults of the installed Megatron rather than the lack of a GPU.

    ``prebuilt_helpers`` (the wheel has no Makefile and would exit), ``optimizer_load`` (an in-place copy into views of fp32
    parameters), ``per_group_steps`` (one Adam step for all groups) and ``save_queue`` (a spawned process a run).
    :func:`use_cpu` includes them.

    Raises:
        PlatformError: megatron-core is missing or of another version.
    """
    _check_megatron_version()
    from megatron_xorl.parallel.substitutions import SUBSTITUTIONS

    for entry in SUBSTITUTIONS:
        if entry.name in ("prebuilt_helpers", "optimizer_load", "per_group_steps", "save_queue"):
            entry.apply(entry.replaces)


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Silence what Megatron and torch say on import about missing GPU packages: on a CPU that is the intent."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
            yield
    finally:
        logger.setLevel(level)


def _check_megatron_version() -> None:
    """Refuse a megatron-core whose code the substitutions do not describe."""
    from megatron_xorl.parallel.substitutions import MEGATRON_VERSIONS

    lowest, first_refused = MEGATRON_VERSIONS
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise PlatformError(
            f"megatron-core is not installed; expected >={lowest},<{first_refused}; "
            f"run pip install 'megatron-core>={lowest},<{first_refused}'"
        ) from error
    if not Version(lowest) <= Version(found) < Version(first_refused):
        raise PlatformError(
            f"megatron-core {found} is installed; the CPU platform is written for >={lowest},<{first_refused}; "
            f"run pip install 'megatron-core>={lowest},<{first_refused}'"
        )

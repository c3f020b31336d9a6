"""Pairs of a Hugging Face directory and its import, made once; read-only by agreement."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fp8_megatron(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The import of ``tiny_dir``."""
    from megatron_xorl.convert.importer import import_checkpoint

    out = tmp_path_factory.mktemp("fp8") / "megatron"
    import_checkpoint(tiny_dir, out)
    return out


@pytest.fixture(scope="session")
def bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, bf16."""
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("bf16") / "model", block=None)


@pytest.fixture(scope="session")
def bf16_megatron(bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The import of ``bf16_dir``."""
    from megatron_xorl.convert.importer import import_checkpoint

    out = tmp_path_factory.mktemp("bf16m") / "megatron"
    import_checkpoint(bf16_dir, out)
    return out

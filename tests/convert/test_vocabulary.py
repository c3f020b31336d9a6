"""Padding rows of the vocabulary never reach a file: nothing here pads, and what was padded elsewhere is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.config.layout import ParallelLayout, check_layout
from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.errors import ConfigError, LayoutError, WeightsError
from megatron_xorl.weights.keys import key_table
from megatron_xorl.weights.opening import open_checkpoint
from tests.convert.broken import Case, refused
from tests.worlds import run_world

ROWS, PADDED = 320, 384
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_source_with_padding_rows_is_refused(name, tiny_dir, tmp_path, capsys) -> None:
    shutil.copytree(tiny_dir, tmp_path / "source")
    case = Case(tmp_path / "source", tmp_path / "out", "import")
    path = case.shard(name)
    tensors = load_file(path)
    padding = torch.zeros(PADDED - ROWS, tensors[name].shape[1], dtype=tensors[name].dtype)
    save_file(tensors | {name: torch.cat([tensors[name], padding])}, path)
    refused(case, (f"{name} has shape [384, 128], the config gives [320, 128]",), capsys)


def fewer_rows(folder: Path, rows: int) -> Case:
    """Let a checkpoint's config have fewer tokens than its embedding and head have rows, as after padding."""
    case = Case(folder, folder.with_name("out"), "export")
    raw = json.loads((folder / "config.json").read_text()) | {"vocab_size": rows}
    case.replace("config.json", json.dumps(raw).encode())
    return case


def test_a_megatron_checkpoint_with_padding_rows_is_refused(fp8_megatron, tmp_path, capsys) -> None:
    shutil.copytree(fp8_megatron, tmp_path / "padded")
    case = fewer_rows(tmp_path / "padded", 300)
    expected = [
        f"{name} has shape [320, 128], the config gives [300, 128]" for name in (EMBEDDING, HEAD)
    ]
    refused(case, tuple(expected), capsys)
    with pytest.raises(WeightsError, match="2 problems"):
        open_checkpoint(case.source).validate(load_glm_config(case.source))


def test_the_table_has_the_rows_of_the_config_and_no_others(tiny_dir, fp8_megatron) -> None:
    glm = load_glm_config(tiny_dir)
    assert glm.vocab_size == ROWS
    checkpoint = open_checkpoint(fp8_megatron)
    for name in (EMBEDDING, HEAD):
        chunk = key_table(glm)[name]
        assert chunk.shape == chunk.size == checkpoint.shape(name) == (ROWS, 128)


def test_a_tensor_parallel_size_that_would_need_padding_is_refused(tiny_dir) -> None:
    glm = load_glm_config(tiny_dir)
    check_layout(glm, ParallelLayout(tp=2, world=2))
    with pytest.raises(LayoutError, match="319 vocabulary rows are not divisible by it"):
        check_layout(with_rows(glm, 319), ParallelLayout(tp=2, world=2))


def with_rows(glm: GlmConfig, rows: int) -> GlmConfig:
    return dataclasses.replace(glm, vocab_size=rows)


def prepare_padded(directory: str, rows: int) -> str:
    """Load a base into a model of ``rows`` vocabulary rows, and return the error."""
    import megatron_xorl as mx
    from megatron_xorl.training.model import build_model, prepare_model

    mx.use_cpu()
    mx.initialize()
    glm = load_glm_config(directory)
    model = build_model(with_rows(glm, rows), dtype=torch.bfloat16)
    try:
        prepare_model(model, glm, open_checkpoint(directory))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [ROWS, PADDED])
def test_a_model_that_megatron_padded_is_refused(rows: int, fp8_megatron: Path) -> None:
    (said,) = run_world(prepare_padded, 1, str(fp8_megatron), rows)
    if rows == ROWS:  # the control
        assert said == ""
    else:
        assert "built with 384 vocabulary rows, the base has 320" in said
        assert "--make-vocab-size-divisible-by 1" in said

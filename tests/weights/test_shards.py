"""Headers of single safetensors files: a sound one is read as safetensors reads it, each damaged one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.shards import read_header


def write(path: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(
    dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)
) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def pair(w: object, v: object, shape: object = (2,)) -> dict[str, object]:
    """``w`` of two elements and ``v`` of ``shape`` at these offsets."""
    return entry(shape=(2,), offsets=w) | {"v": entry(shape=shape, offsets=v)["w"]}


def test_entries_point_at_the_bytes_of_each_tensor(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "c": torch.tensor([[0.5, 448.0]]).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    data = path.read_bytes()
    for name, tensor in tensors.items():
        assert header[name].shape == tuple(tensor.shape)
        expected = tensor.flatten().view(torch.uint8).numpy().tobytes()
        assert data[header[name].start : header[name].stop] == expected
    assert [header[name].dtype for name in "abc"] == ["F32", "BF16", "F8_E4M3"]


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (entry(offsets=(0, 32)), "x.safetensors is truncated: w ends at byte"),
        (entry(offsets=(-16, 0)), r"w has data_offsets \[-16, 0\], expected 0 <= begin <= end"),
        (entry(offsets=(16, 0)), r"w has data_offsets \[16, 0\]"),
        (entry(offsets=(0.5, 16)), "the header entry of w is damaged"),
        (entry(shape=(2, 3)), r"w has 16 bytes, F32 \[2, 3\] needs 24"),
        (entry(shape=(-2, -2)), r"w has 16 bytes, F32 \[-2, -2\] needs 16"),
        (entry(dtype="F4"), "w has dtype F4, expected one of"),
        (entry(dtype=[1]), "w has dtype"),
        (entry(shape=(2, float("inf"))), "the header entry of w is damaged"),
        (entry(shape="ab"), "the header entry of w is damaged"),
        (entry(offsets=3), "the header entry of w is damaged"),
        ({"w": 3}, "the header entry of w is damaged"),
        (entry(shape=(2, 1), offsets=(0, 8)), "8 bytes follow w, expected the file to end"),
        (entry(shape=(2, 1), offsets=(8, 16)), "w lies 8 bytes behind the header"),
        (pair((0, 8), (4, 12)), "v overlaps w"),
        (pair((0, 8), (0, 8)), "overlaps"),
        (pair((0, 8), (12, 16), shape=(1,)), "v lies 4 bytes behind w"),
        ({}, "16 bytes follow the header"),
        ([1], "the safetensors header is no JSON object"),
        (b"{", "the safetensors header is damaged"),
        (b"\xff\xfe", "the safetensors header is damaged"),
        (b'{"w": 1, "w": 2}', "key 'w' appears twice"),
    ],
    ids=str,
)
def test_a_damaged_header_is_named(tmp_path, header, complaint):
    with pytest.raises(WeightsError, match=complaint):
        read_header(write(tmp_path / "x.safetensors", header))

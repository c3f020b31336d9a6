"""``.metadata`` and tensor containers: what torch and Megatron write is read, what would run code is refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.container import DTYPE_NAMES, container, locate
from megatron_xorl.weights.dcp_metadata import Item, check_pickle, metadata_bytes, read_items


def test_what_torch_writes_is_read_and_its_values_are_found(tmp_path: Path) -> None:
    state = {
        "codes": torch.randn(40, 33).to(torch.float8_e4m3fn),
        "scales": torch.rand(2, 3),
        "norm": torch.randn(7).bfloat16(),
    }
    dcp.save(dict(state), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    items = {item.key: item for item in read_items(tmp_path / ".metadata")}
    assert items.keys() == state.keys()
    for key, item in items.items():
        raw = (tmp_path / item.file).read_bytes()[item.start : item.start + item.length]
        start, stop = locate(key, io.BytesIO(raw), item.dtype, item.size)
        assert raw[start:stop] == bytes(state[key].view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3,), (1, 40, 33), (300, 512)])
def test_a_container_around_values_is_what_torch_loads(dtype, shape, tmp_path: Path) -> None:
    value = torch.randn(shape).to(dtype)
    around = container(DTYPE_NAMES[dtype], shape)
    raw = around.prefix + value.view(torch.uint8).numpy().tobytes() + around.suffix
    loaded = torch.load(io.BytesIO(raw), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
    assert torch.equal(loaded.view(torch.uint8), value.view(torch.uint8))


def test_a_container_of_another_tensor_is_refused() -> None:
    saved = io.BytesIO()
    torch.save(torch.zeros(4, 6), saved)
    assert locate("w", saved, "F32", (4, 6))
    for dtype, shape in (("F32", (6, 4)), ("I32", (4, 6)), ("BF16", (4, 12))):
        with pytest.raises(WeightsError, match=r"w: its container holds torch\.float32"):
            locate("w", saved, dtype, shape)
    transposed = io.BytesIO()
    torch.save(torch.zeros(6, 4).T, transposed)
    with pytest.raises(WeightsError, match="its container holds"):
        locate("w", transposed, "F32", (4, 6))
    with pytest.raises(WeightsError, match="damaged or no saved tensor"):
        locate("w", io.BytesIO(saved.getvalue()[:200]), "F32", (4, 6))


def test_torch_reads_the_metadata_written_here(tmp_path: Path) -> None:
    items = [
        Item("bank", "F8_E4M3", (2, 4, 4), (i, 0, 0), (1, 4, 4), "__0_0.distcp", 64 * i, 60)
        for i in range(2)
    ]
    (tmp_path / ".metadata").write_bytes(metadata_bytes(items))
    assert read_items(tmp_path / ".metadata") == items
    found = FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata["bank"].size == torch.Size([2, 4, 4])
    assert len(found.state_dict_metadata["bank"].chunks) == 2


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_planted_payload_is_refused_before_it_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Payload(f"touch {trace}")))
    with pytest.raises(WeightsError, match=r"names posix\.system"):
        check_pickle(path)
    assert not trace.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()  # the control: torch itself does run it
    assert trace.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"a": 1}), "holds dict, expected torch's checkpoint Metadata"),
        (b"\x80\x04", "is damaged"),
        (b"", "is damaged"),
        (pickle.dumps(torch.nn.Linear), "would be run on reading"),
        (pickle.dumps(getattr), "would be run on reading"),
    ],
)
def test_other_content_is_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(WeightsError, match=said) as caught:
        read_items(tmp_path / ".metadata")
    assert "\n" not in str(caught.value)


def test_a_file_outside_the_checkpoint_and_missing_chunks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(metadata_bytes([Item("w", "F32", (4,), (0,), (4,), "../x.distcp", 0, 9)]))
    with pytest.raises(WeightsError, match="outside the checkpoint"):
        read_items(path)
    path.write_bytes(metadata_bytes([Item("w", "F32", (2, 4), (0, 0), (1, 4), "x", 0, 9)]))
    with pytest.raises(WeightsError, match="do not add up"):
        read_items(path)

"""``.metadata`` and tensor containers: torch reads what is written without it, and what would run code is refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.archive import plain_archive, read_plain
from megatron_xorl.weights.container import TORCH_NAMES, container, locate, torch_dtype
from megatron_xorl.weights.dcp_metadata import Item, metadata_bytes, read_items


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


@pytest.mark.parametrize("dtype", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (1, 40, 33), (300, 512)])
def test_a_container_around_values_is_what_torch_loads(dtype, shape) -> None:
    values = torch.randint(0, 2, shape) if dtype == "BOOL" else torch.randn(shape) * 40
    value = values.to(torch_dtype(dtype))
    around = container(dtype, shape)
    raw = around.prefix + value.reshape(-1).view(torch.uint8).numpy().tobytes() + around.suffix
    assert len(around.prefix) % 64 == 0
    for way in ({"weights_only": True}, {"weights_only": False}):
        loaded = torch.load(io.BytesIO(raw), **way)
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (
            value.dtype,
            value.shape,
            value.stride(),
        )
        assert torch.equal(
            loaded.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )
    if shape:
        start = len(around.prefix)
        assert locate("w", io.BytesIO(raw), dtype, shape) == (start, start + value.nbytes)


def test_a_container_of_more_than_4_gib_is_what_torch_maps(tmp_path: Path) -> None:
    """Sizes behind 32 bits; the file is a hole but for its two ends."""
    around, count = container("F32", (2**30 + 5, 2)), 2**31 + 10
    with open(tmp_path / "large", "wb") as file:
        file.write(around.prefix)
        file.seek(4 * (count - 1), os.SEEK_CUR)
        file.write(torch.tensor([1.5]).numpy().tobytes() + around.suffix)
    loaded = torch.load(tmp_path / "large", mmap=True, weights_only=True)
    assert loaded.shape == (2**30 + 5, 2)
    assert loaded[-1].tolist() == [0.0, 1.5]
    with open(tmp_path / "large", "rb") as file:
        assert locate("w", file, "F32", (2**30 + 5, 2))[1] == len(around.prefix) + 4 * count


def test_plain_values_are_what_torch_loads_and_code_is_refused(tmp_path: Path) -> None:
    value = {"iteration": 0, "checkpoint_version": 3.0, "names": ["a", None, True]}
    assert torch.load(io.BytesIO(plain_archive(value)), weights_only=True) == value
    torch.save(value, tmp_path / "common.pt")
    assert read_plain(tmp_path / "common.pt") == value
    for wrong, said in (
        (Payload(f"touch {tmp_path}/trace"), r"names posix\.system"),
        (torch.zeros(2), "it names torch"),
        ({"path": Path("/")}, "it names pathlib"),
    ):
        torch.save(wrong, tmp_path / "common.pt")
        with pytest.raises(WeightsError, match=said):
            read_plain(tmp_path / "common.pt")
    assert not (tmp_path / "trace").exists()
    (tmp_path / "common.pt").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="is damaged or not what torch"):
        read_plain(tmp_path / "common.pt")


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
    items.append(Item("norm", "BF16", (70_000,), (0,), (70_000,), "__0_1.distcp", 0, 10**11))
    (tmp_path / ".metadata").write_bytes(metadata_bytes(items))
    assert read_items(tmp_path / ".metadata") == items
    assert pickle.loads(metadata_bytes(items)) == by_torch(items)
    assert FileSystemReader(tmp_path).read_metadata().storage_data == by_torch(items).storage_data


def by_torch(items: list[Item]) -> torchs.Metadata:
    """The same metadata of torch's own classes."""
    tensors, places = {}, {}
    for item in items:
        properties = torchs.TensorProperties(dtype=torch_dtype(item.dtype))
        whole = torchs.TensorStorageMetadata(properties, torch.Size(item.shape), [])
        size, offset = torch.Size(item.size), torch.Size(item.offset)
        chunks = tensors.setdefault(item.key, whole).chunks
        chunks.append(torchs.ChunkStorageMetadata(offset, size))
        place = _StorageInfo(item.file, item.start, item.length)
        places[torchs.MetadataIndex(item.key, offset)] = place
    return torchs.Metadata(tensors, None, places, torchs.StorageMeta(), version="1.0.0")


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
        read_items(path)
    assert not trace.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()  # the control: torch itself does run it
    assert trace.exists()


def test_what_torch_pickles_itself_is_read(tmp_path: Path) -> None:
    items = [Item("w", "F32", (4,), (0,), (4,), "x", 7, 9)]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(by_torch(items)))
    assert read_items(tmp_path / ".metadata") == items


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

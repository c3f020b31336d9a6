"""Hashes of the weights on load: every file once a host, one error on all ranks, and ways out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights import hashed_load, manifest
from megatron_xorl.weights.hashed_load import VARIABLE, check_weight_hashes
from megatron_xorl.weights.opening import open_checkpoint
from tests.worlds import run_world


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import of the tiny checkpoint, four files of weights."""
    out = tmp_path_factory.mktemp("whole") / "megatron"
    import_checkpoint(tiny_dir, out)
    return out


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """One byte of one file is another; its size is not."""
    shutil.copytree(whole, tmp_path / "damaged")
    path = tmp_path / "damaged/__0_2.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return tmp_path / "damaged"


def checked(directory: str, hashes: bool | None) -> tuple[str, list[str]]:
    """Return the error of this rank, and the files that it hashed."""
    hashed = []
    original = manifest.file_sha256

    def counted(path: Path, *arguments: object) -> str:
        hashed.append(path.name)
        return original(path, *arguments)

    manifest.file_sha256 = counted
    try:
        check_weight_hashes(Path(directory), hashes)
    except WeightsError as error:
        return str(error), hashed
    return "", hashed


def test_two_ranks_of_a_host_share_the_files_and_both_hear_of_a_fault(whole, damaged) -> None:
    for directory in (whole, damaged):
        (said, first), (also, second) = run_world(checked, 2, str(directory), None)
        assert sorted(first + second) == [f"__0_{n}.distcp" for n in range(4)]
        assert (len(first), len(second)) == (2, 2)
        assert said == also
        assert ("__0_2.distcp has other content" in said) == (directory == damaged)


def test_one_process_hashes_everything(whole: Path, damaged: Path, monkeypatch) -> None:
    monkeypatch.setattr(manifest, "file_sha256", manifest.file_sha256)  # put back afterwards
    said, hashed = checked(str(whole), None)
    assert (said, len(hashed)) == ("", 4)
    with pytest.raises(WeightsError, match=r"__0_2\.distcp has other content.*copy or convert"):
        check_weight_hashes(damaged)


def test_ways_out_pass_a_changed_byte_and_not_a_changed_size(damaged, monkeypatch) -> None:
    check_weight_hashes(damaged, False)
    monkeypatch.setenv(VARIABLE, "1")
    check_weight_hashes(damaged)
    with pytest.raises(WeightsError):
        check_weight_hashes(damaged, True)
    for text in ("0", "", "false", "no", "yes"):  # what is not plainly 1 turns no check off
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(WeightsError):
            check_weight_hashes(damaged)
    (damaged / "__0_2.distcp").write_bytes(b"x")
    with pytest.raises(WeightsError, match="has 1 bytes"):
        open_checkpoint(damaged)


def test_without_manifest_or_hashes_nothing_is_read(tiny_dir, tmp_path, monkeypatch) -> None:
    import_checkpoint(tiny_dir, tmp_path / "out", hashed=False)
    monkeypatch.setattr(manifest, "file_sha256", None)
    check_weight_hashes(tmp_path / "out")
    check_weight_hashes(tiny_dir)
    assert hashed_load.VARIABLE == "MEGATRON_XORL_NO_HASH"

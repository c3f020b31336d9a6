"""The C++ part: bit for bit what torch decodes, whatever the block and the cut; and how it is built and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_xorl.errors import PlatformError
from megatron_xorl.fp8 import native
from megatron_xorl.fp8.format import (
    ACTIVATION_AMAX_FLOOR,
    dequantize_activations,
    quantize_activations,
)
from megatron_xorl.fp8.native import BF16, FP32, FP32_OF_BF16, library
from tests.fp8.weights import frozen

KINDS = {BF16: torch.bfloat16, FP32: torch.float32, FP32_OF_BF16: torch.float32}


def _torch_says(codes: Tensor, scales: Tensor, block: tuple[int, int], kind: int) -> Tensor:
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    value = codes.view(torch.float8_e4m3fn).float() * scales[rows][:, columns]
    return value if kind == FP32 else value.bfloat16() if kind == BF16 else value.bfloat16().float()


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


# 2^-149 and 2^-126 make fp32 subnormals, 1e38 overflows to inf; 300 is more than 2^120 can be folded into.
SCALES = [2.0**-149, 2.0**-126, 1e-30, 0.0123, 1.0, 300.0, 1e30, 1e38]


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_under_every_size_of_scale_has_torch_s_bits(kind: int) -> None:
    codes = torch.arange(256).to(torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes).repeat(len(SCALES), 1)
    scales = torch.tensor(SCALES)[:, None]
    out = torch.empty(codes.shape, dtype=KINDS[kind])
    library().dequantize(
        codes, scales, (1, 256), out, rows=slice(0, len(SCALES)), cols=slice(0, 256), kind=kind
    )
    assert _same_bits(out, _torch_says(codes, scales, (1, 256), kind))


@pytest.mark.parametrize("block", [(128, 128), (32, 16), (16, 32), (7, 5)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_cut_of_any_grid_has_torch_s_bits(
    block: tuple[int, int], kind: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_threads", lambda elements: threads)
    weight, _ = frozen((300, 210), block, torch.float32)
    whole = _torch_says(weight.codes, weight.scales, block, kind)
    for rows in (slice(0, 300), slice(5, 7), slice(31, 97), slice(290, 300)):
        for cols in (slice(0, 210), slice(15, 17), slice(3, 81), slice(200, 210)):
            # A tile inside a wider buffer, so that the row stride counts and nothing beside the tile may change.
            wide = torch.full((rows.stop - rows.start, 230), 7.0, dtype=KINDS[kind])
            tile = wide[:, 4 : 4 + cols.stop - cols.start]
            library().dequantize(
                weight.codes, weight.scales, block, tile, rows=rows, cols=cols, kind=kind
            )
            assert _same_bits(tile.contiguous(), whole[rows, cols]), (rows, cols)
            assert (wide[:, :4] == 7).all() and (wide[:, 4 + tile.shape[1] :] == 7).all()


def test_two_parts_with_a_ragged_grid_each_keep_their_own_scales() -> None:
    weight, exact = frozen((2 * 72, 64), (32, 32), torch.float32, parts=2)
    out = torch.empty(144, 64)
    library().dequantize(
        weight.codes,
        weight.scales,
        (32, 32),
        out,
        rows=slice(0, 144),
        cols=slice(0, 64),
        parts=2,
        kind=FP32,
    )
    assert torch.equal(out, exact.float())
    library().dequantize(
        weight.codes,
        weight.scales,
        (32, 32),
        out,
        rows=slice(0, 144),
        cols=slice(0, 64),
        parts=1,
        kind=FP32,
    )
    assert not torch.equal(out, exact.float())  # one grid over both parts is another weight


@pytest.mark.parametrize("columns", [128, 300, 5])
def test_quantising_activations_in_place_gives_the_values_of_codes_times_scales(
    columns: int,
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, columns, generator=draw) * torch.logspace(-12, 6, 40)[:, None]
    x[3] = 0
    expected = dequantize_activations(*quantize_activations(x), torch.float32)
    library().quantize_round_trip(x, 128, ACTIVATION_AMAX_FLOOR)
    assert torch.equal(x, expected)


# ---- how it is built and kept ---------------------------------------------------------------------

LOAD = "from megatron_xorl.fp8.native import library; print(library().path)"


def _process(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MEGATRON_XORL_CACHE": str(cache)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _path(started: subprocess.Popen[str]) -> Path:
    out, error = started.communicate(timeout=120)
    assert started.returncode == 0, error
    return Path(out.strip())


@pytest.mark.slow
def test_processes_that_start_together_all_get_a_library_and_leave_one_file(tmp_path: Path) -> None:
    started = [_process(tmp_path / "cache") for _ in range(4)]
    paths = {_path(process) for process in started}
    assert [*(tmp_path / "cache").iterdir()] == [*paths] and len(paths) == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_XORL_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built() -> Path:
    """The library of this machine, to be copied where a test needs one that is there already."""
    return library().path


@pytest.mark.parametrize("damage", ["emptied", "cut", "another byte", "no library at all"])
def test_a_damaged_file_is_built_again(
    built: Path, cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = built.read_bytes()
    bad = {"emptied": b"", "cut": good[:-4000], "no library at all": b"hello" * 50}.get(damage)
    path = cache / built.name
    cache.mkdir(mode=0o700)
    path.write_bytes(bad if bad is not None else good[:5000] + b"\0\1\2\3" + good[5004:])
    builds: list[Path] = []
    monkeypatch.setattr(native, "_build", lambda to, _: builds.append(shutil.copy(built, to)))
    assert library().path == path and len(builds) == 1 and native._whole(path)
    native.library.cache_clear()
    assert library().path == path and len(builds) == 1  # a whole one is loaded as it is


def test_a_build_that_was_killed_holds_nobody_up(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    (cache / ".halfway.so").write_bytes(b"\x7fELF")
    (cache / "lock").touch()
    assert library().path.parent == cache


@pytest.mark.parametrize("fault", ["a file in its place", "others may write"])
def test_a_folder_that_cannot_be_used_is_passed_over(
    built: Path, cache: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "a file in its place":
        cache.touch()
    else:
        cache.mkdir()
        cache.chmod(0o777)
    home = tmp_path / "home" / "megatron_xorl"
    home.mkdir(parents=True, mode=0o700)
    shutil.copy(built, home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert library().path.parent == home


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler", "no C\\+\\+ compiler: 'no-such-compiler'.*install g\\+\\+"),
        ("false", "could not build"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_named(
    cache: Path, compiler: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(PlatformError, match=said):
        library()
    assert not cache.exists() or not [*cache.iterdir()]


def test_a_library_that_decodes_otherwise_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = native.SOURCE.read_text(encoding="utf-8")
    truncating = tmp_path / "dequantize.cpp"
    truncating.write_text(source.replace("bits + 0x7fffu +", "bits + 0 * "), encoding="utf-8")
    monkeypatch.setattr(native, "SOURCE", truncating)
    with pytest.raises(PlatformError, match="otherwise than torch"):
        library()

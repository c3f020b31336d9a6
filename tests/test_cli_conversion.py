"""The verbs import, export and verify: exit codes, JSON on stdout alone, lines for people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_xorl.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_round_trip_by_command_with_json_is_equal(tiny_dir: Path, tmp_path: Path, capsys) -> None:
    for verb, a, b in (("import", tiny_dir, "megatron"), ("export", tmp_path / "megatron", "back")):
        code, out, err = run(capsys, verb, a, tmp_path / b, "--workers", 2, "--json")
        assert (code, err) == (0, "")
        report = json.loads(out)
        assert report["tensors"] == 328
        assert report["path"] == str((tmp_path / b).resolve())
        assert report["bytes_per_s"] > 0
        assert (report["resumed"], report["files"] > 4) == (0, True)
    code, out, _ = run(capsys, "verify", tiny_dir, tmp_path / "back", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["equal"] is True
    assert report["metrics"]["compared"] == 328


def test_verify_exits_1_where_they_differ_and_says_where(tiny_dir, tmp_path, capsys) -> None:
    assert (
        run(capsys, "import", tiny_dir, tmp_path / "bf16", "--dtype", "bf16", "--no-hash")[0] == 0
    )
    code, out, _ = run(capsys, "verify", tiny_dir, tmp_path / "bf16")
    assert code == 1
    assert out.startswith("DIFFERENT in bytes: 186 tensors compared (328 and 186)")
    assert "missing in B: model.layers.0.mlp.down_proj.weight_scale_inv" in out
    assert "dtype F8_E4M3 and BF16" in out
    code, out, _ = run(capsys, "verify", tiny_dir, tmp_path / "bf16", "--values")
    assert (code, out.startswith("equal in values")) == (0, True)


def test_verify_of_no_checkpoint_exits_2(tiny_dir, tmp_path, capsys) -> None:
    code, out, err = run(capsys, "verify", tiny_dir, tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err == (
        f"megatron-xorl: {tmp_path}/nothing is not a directory; give the folder of a Hugging Face or Megatron checkpoint\n"
    )


def test_an_import_says_in_one_line_what_it_did(tiny_dir, tmp_path, capsys) -> None:
    code, out, err = run(capsys, "import", tiny_dir, tmp_path / "out")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert "328 tensors" in out
    assert "MiB/s" in out
    code, out, _ = run(capsys, "import", tiny_dir, tmp_path / "out")
    assert code == 0
    assert "files of an earlier run" in out


def test_a_conversion_that_copies_imports_no_torch(tiny_dir: Path, tmp_path: Path) -> None:
    """Torch takes seconds to import. The control: a cast needs it."""
    program = (
        "import sys\nfrom megatron_xorl.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\nprint('imported:', *sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    for source, verb, out, flags, imported in (
        (tiny_dir, "import", "a", [], ""),
        (tmp_path / "a", "export", "b", [], ""),
        (tmp_path / "a", "export", "c", ["--dtype", "bf16"], "numpy torch"),
    ):
        command = [sys.executable, "-c", program, verb, source, tmp_path / out, *flags]
        done = subprocess.run(map(str, command), capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert done.stdout.splitlines()[-1].strip() == f"imported: {imported}".strip()


def test_an_empty_path_is_named(tiny_dir: Path, tmp_path: Path, capsys) -> None:
    for arguments, what in (
        (("import", "", tmp_path / "out"), "source"),
        (("import", tiny_dir, ""), "output"),
        (("export", "", tmp_path / "out"), "source"),
        (("verify", tiny_dir, ""), ""),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"path {f'of the {what} ' if what else ''}is empty, expected" in err


def test_verify_says_what_is_not_there_before_it_reads_or_imports_anything(
    tiny_dir: Path, tmp_path: Path
) -> None:
    program = (
        "import sys\nfrom megatron_xorl.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as left:\n    print(left.code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "verify", str(tiny_dir), str(tmp_path / "nope")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "nope is not a directory" in done.stderr


@pytest.mark.parametrize("given", [None, "1", "0"])
def test_no_hash_of_train_and_recall_is_the_variable_for_as_long_as_they_run(
    given: str | None, monkeypatch
) -> None:
    import os

    from megatron_xorl.cli.runs import _hashes
    from megatron_xorl.weights.hashed_load import VARIABLE

    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    with _hashes(True):
        assert os.environ.get(VARIABLE) == given
    with _hashes(False):
        assert os.environ[VARIABLE] == "1"
    assert os.environ.get(VARIABLE) == given

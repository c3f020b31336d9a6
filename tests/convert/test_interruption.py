"""A conversion that is killed, or that the disk stops, leaves a directory that says so; the same command finishes it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import resource
import time
from pathlib import Path

import pytest

from megatron_xorl.cli import main
from megatron_xorl.convert import files
from megatron_xorl.convert.exporter import export_checkpoint
from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.convert.plan import Options
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.manifest import read_manifest
from megatron_xorl.weights.opening import open_checkpoint
from tests.worlds import run_world, start_world

SIZE = 48 * 2**20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB in twelve shards."""
    out = tmp_path_factory.mktemp("source") / "hf"
    return make_tiny(out, block=128, size=SIZE, shard_bytes=SIZE // 12)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an import gives that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "megatron"
    import_checkpoint(source, out)
    return out


def command(arguments: list[str], limit: int | None = None) -> tuple[int, str]:
    """Run the command line in this process, no file larger than ``limit``; return exit code and stderr."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as left:
            return int(left.code or 0), said.getvalue()
    return 0, said.getvalue()


def hashes(directory: Path) -> dict[str, dict[str, object]]:
    return read_manifest(directory)["files"]


def killed(source: Path, out: Path, verb: str, delay: float) -> int:
    """Start a conversion, kill -9 it ``delay`` seconds after it began to write; return the files that it finished."""
    journal = out / "progress.jsonl"
    before = journal.stat().st_mtime_ns if journal.exists() else 0
    with start_world(command, 1, [verb, str(source), str(out)], process_group=False) as world:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if journal.stat().st_mtime_ns != before:
                    break
            if before and not journal.exists():
                break  # done already
            time.sleep(0.001)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # done before the signal came
            world.kill(0)
        world.processes[0].join()
    return len(journal.read_text().splitlines()) - 1 if journal.exists() else -1


@pytest.mark.parametrize("verb", ["import", pytest.param("export", marks=pytest.mark.slow)])
def test_three_kills_at_random_moments_and_a_resume_give_the_same_hashes(
    verb: str, source: Path, whole: Path, tmp_path: Path
) -> None:
    given, out = (source if verb == "import" else whole), tmp_path / "out"
    start = time.perf_counter()
    convert = import_checkpoint if verb == "import" else export_checkpoint
    convert(given, tmp_path / "whole")
    length = time.perf_counter() - start
    generator = random.Random(int.from_bytes(os.urandom(4)))
    finished = []
    for _ in range(3):
        delay = generator.uniform(0, length / 8)
        finished.append(killed(given, out, verb, delay))
        print(f"killed after {delay:.3f} s of {length:.3f}: {finished[-1]} files done")
        if finished[-1] < 0:  # it was done before the signal came
            break
        with pytest.raises(WeightsError, match="unfinished conversion"):
            open_checkpoint(out)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.*") if path.is_file()}
    report = convert(given, out)
    assert finished == sorted(finished) or finished[-1] < 0
    assert hashes(out) == hashes(tmp_path / "whole")
    open_checkpoint(out, hashes=True)
    if finished[-1] > 0:
        assert report["resumed"] >= finished[-1]
        still = [name for name in times if (out / name).exists()]
        kept = [name for name in still if (out / name).stat().st_mtime_ns == times[name]]
        assert len(kept) >= finished[-1]
    assert not list(out.glob("*.partial"))
    assert not (out / "progress.jsonl").exists()


def test_at_most_the_file_in_hand_is_repeated(source, whole, tmp_path, monkeypatch) -> None:
    """Stopped between a file's rename and its line in the journal, the run repeats that file and no other."""
    out, published = tmp_path / "out", []
    publish = files.OutputFile.publish

    def publish_five(self: files.OutputFile) -> dict[str, object]:
        described = publish(self)
        published.append(self.path.name)
        if len(published) == 5:
            raise KeyboardInterrupt
        return described

    monkeypatch.setattr(files.OutputFile, "publish", publish_five)
    with pytest.raises(WeightsError, match=r"interrupted; .* is incomplete \(5 of 13 files\)"):
        import_checkpoint(source, out)
    monkeypatch.setattr(files.OutputFile, "publish", publish)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.distcp")}
    assert len(before) == 5
    assert import_checkpoint(source, out)["resumed"] == 4
    again = [name for name, t in before.items() if (out / name).stat().st_mtime_ns != t]
    assert again == [published[-1]]
    assert hashes(out) == hashes(whole)


def test_a_torn_journal_line_and_a_cut_file_are_done_again(source, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stop_after(monkeypatch, 6)
    with pytest.raises(WeightsError, match="incomplete"):
        import_checkpoint(source, out)
    monkeypatch.undo()
    journal = out / "progress.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    os.truncate(out / json.loads(lines[1])["file"], 1000)
    assert import_checkpoint(source, out)["resumed"] == len(lines) - 3
    assert hashes(out) == hashes(whole)


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the disk be full when file ``count + 1`` is written."""
    write, opened = os.write, []
    initial = files.OutputFile.__init__

    def counted(self: files.OutputFile, *args: object, **kwargs: object) -> None:
        opened.append(self)
        initial(self, *args, **kwargs)

    def full(handle: int, data: object) -> int:
        if len(opened) > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr(files.OutputFile, "__init__", counted)
    monkeypatch.setattr(files.os, "write", full)


def test_a_full_disk_is_one_line_and_the_rest_is_kept(source, whole, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    stop_after(monkeypatch, 3)
    code, said = command(["import", str(source), str(out)])
    monkeypatch.undo()
    assert code == 2
    assert said.count("\n") == 1
    assert ".distcp.partial: No space left on device (the file system at /" in said
    assert "bytes free)" in said
    assert "is incomplete (3 of 13 files)" in said
    assert not list(out.glob("*.partial"))
    assert not (
        out / "metadata.json"
    ).exists()  # Megatron would not take it for a checkpoint either
    with pytest.raises(WeightsError, match="unfinished conversion"):
        open_checkpoint(out)
    assert import_checkpoint(source, out)["resumed"] == 3
    assert hashes(out) == hashes(whole)


def test_a_limit_of_the_system_on_file_sizes_is_one_line(source: Path, tmp_path: Path) -> None:
    arguments = ["import", str(source), str(tmp_path / "out")]
    ((code, said),) = run_world(command, 1, arguments, 3 * 2**20, process_group=False)
    assert code == 2
    assert said.count("\n") == 1
    assert "File too large" in said
    assert "is incomplete (0 of 13 files)" in said


def test_too_little_space_is_said_before_anything_is_written(source, tmp_path, monkeypatch) -> None:
    from megatron_xorl.convert import stream

    monkeypatch.setattr(stream.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20})())
    code, said = command(["import", str(source), str(tmp_path / "out")])
    assert code == 2
    assert " has 1.0 MiB free; free space or choose another disk" in said
    assert "/out needs 5" in said and "0.00" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where others may not")
def test_a_directory_that_may_not_be_written_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    code, said = command(["import", str(source), str(tmp_path / "closed/out")])
    assert code == 2
    assert said.count("\n") == 1
    assert "Permission denied" in said


def test_a_source_cut_while_it_is_read_is_one_line(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files.os, "pread", lambda *_: b"")
    code, said = command(["import", str(source), str(tmp_path / "out")])
    assert code == 2
    assert "it was cut while it was read" in said
    assert said.count("\n") == 1


def test_an_unfinished_output_is_continued_by_the_same_conversion_alone(
    source, tmp_path, tiny_dir, monkeypatch
) -> None:
    out = tmp_path / "out"
    stop_after(monkeypatch, 2)
    with pytest.raises(WeightsError, match="incomplete"):
        import_checkpoint(source, out)
    monkeypatch.undo()
    for other, options, hashed, named in (
        (
            tiny_dir,
            Options(),
            True,
            r"model-00001-of-00004.safetensors is a new file of the source",
        ),
        (source, Options("bf16"), True, "it has --dtype keep, and this has --dtype bf16"),
        (source, Options(), False, "--no-hash was not given then and is given now"),
    ):
        with pytest.raises(
            WeightsError, match=f"of another source, or with other options: {named}"
        ):
            import_checkpoint(other, out, options, hashed=hashed)


SHARD = "model-0000{}-of-00013.safetensors"


def change(path: Path) -> None:
    """Change one byte and nothing else but the time."""
    flip(path)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("verb", ["import", "export"])
def test_where_only_times_changed_the_content_decides(
    verb: str, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the source has other times: the run continues, and a finished output is accepted, by content."""
    import shutil

    convert = import_checkpoint if verb == "import" else export_checkpoint
    given, out = tmp_path / "given", tmp_path / "out"
    shutil.copytree(source if verb == "import" else whole, given)
    stop_after(monkeypatch, 4)
    with pytest.raises(WeightsError, match="incomplete"):
        convert(given, out)
    monkeypatch.undo()
    shutil.copytree(out, tmp_path / "other")
    for path in given.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    used = SHARD.format(2) if verb == "import" else "__0_1.distcp"
    unused = SHARD.format(9) if verb == "import" else "__0_8.distcp"
    flip(given / used)
    with pytest.raises(WeightsError, match=f"{used} of the source has other content than it had"):
        convert(given, tmp_path / "other")
    flip(given / used)
    if verb == "import":  # nothing was made of it yet, and no manifest knows what it was
        flip(given / unused)
    assert convert(given, out)["resumed"] == 4
    for path in given.rglob("*"):
        os.utime(path, ns=(10**18 + 5, 10**18 + 5))
    report = convert(given, out)
    assert report["resumed"] == report["files"]
    flip(given / used)
    with pytest.raises(WeightsError, match=f"holds a checkpoint already.*{used} of the source has"):
        convert(given, out)


def test_without_hashes_a_changed_time_of_a_used_file_is_named(source, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(source, tmp_path / "given")
    stop_after(monkeypatch, 4)
    with pytest.raises(WeightsError, match="incomplete"):
        import_checkpoint(tmp_path / "given", tmp_path / "out", hashed=False)
    monkeypatch.undo()
    os.utime(tmp_path / "given" / SHARD.format(9), ns=(1, 1))  # not used yet
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    assert import_checkpoint(tmp_path / "given", tmp_path / "again", hashed=False)["resumed"] == 4
    os.utime(tmp_path / "given" / SHARD.format(1), ns=(1, 1))
    with pytest.raises(WeightsError, match=f"{SHARD.format(1)} of the source has another time"):
        import_checkpoint(tmp_path / "given", tmp_path / "out", hashed=False)


def test_a_small_file_or_a_size_that_changed_is_named(source, tmp_path, monkeypatch) -> None:
    import shutil

    shutil.copytree(source, tmp_path / "given")
    stop_after(monkeypatch, 4)
    with pytest.raises(WeightsError, match="incomplete"):
        import_checkpoint(tmp_path / "given", tmp_path / "out")
    monkeypatch.undo()
    change(tmp_path / "given/tokenizer.json")
    with pytest.raises(WeightsError, match=r"tokenizer\.json of the source has other content"):
        import_checkpoint(tmp_path / "given", tmp_path / "out")
    with open(tmp_path / "given/tokenizer.json", "ab") as file:
        file.write(b" ")
    with pytest.raises(WeightsError, match=r"tokenizer\.json of the source had \d+ bytes and has"):
        import_checkpoint(tmp_path / "given", tmp_path / "out")


def test_what_a_file_was_made_of_is_in_the_manifest(source, whole, tmp_path) -> None:
    """The source's hashes, computed while it was read, so that the output says of which bytes it is."""
    made = read_manifest(whole)["conversion"]["source"]
    for path in source.iterdir():
        assert made[path.name]["sha256"] == files.hashlib.sha256(path.read_bytes()).hexdigest()
    import_checkpoint(source, tmp_path / "out", hashed=False)
    unhashed = read_manifest(tmp_path / "out")["conversion"]["source"]
    assert "sha256" not in unhashed[SHARD.format(1)]


def terminated(arguments: list[str]) -> tuple[int, str]:
    """Run the command and send SIGTERM to this process when the second file is begun."""
    import signal
    import threading

    initial, opened = files.OutputFile.__init__, []

    def signalled(self: files.OutputFile, *args: object, **kwargs: object) -> None:
        initial(self, *args, **kwargs)
        opened.append(self)
        if len(opened) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            time.sleep(0.5)  # the signal is another thread's business

    files.OutputFile.__init__ = signalled
    return command(arguments)


def test_sigterm_stops_a_conversion_with_a_line_that_says_how_to_go_on(source, whole, tmp_path):
    out = tmp_path / "out"
    arguments = ["import", str(source), str(out)]
    ((code, said),) = run_world(terminated, 1, arguments, process_group=False)
    assert (code, said.count("\n")) == (2, 1), said
    assert f"ended by SIGTERM; {out} is incomplete (1 of 13 files) and says so; the same" in said
    assert import_checkpoint(source, out)["resumed"] == 1
    assert hashes(out) == hashes(whole)


def test_a_complete_output_is_accepted_once_more_and_refused_for_another_source(
    tiny_dir, fp8_megatron, source
) -> None:
    before = {path: path.stat().st_mtime_ns for path in fp8_megatron.rglob("*")}
    report = import_checkpoint(tiny_dir, fp8_megatron)
    assert report["resumed"] == report["files"]
    with pytest.raises(WeightsError, match="holds a checkpoint already"):
        import_checkpoint(source, fp8_megatron)
    assert before == {path: path.stat().st_mtime_ns for path in fp8_megatron.rglob("*")}


def test_two_conversions_do_not_write_one_output(source: Path, tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    with open(out / "progress.jsonl", "a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)  # before its first line
        with pytest.raises(WeightsError, match="being written by another conversion"):
            import_checkpoint(source, out)
    import_checkpoint(source, out)


@pytest.fixture
def stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An import that the disk stopped after four files."""
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        with pytest.raises(WeightsError, match="incomplete"):
            import_checkpoint(source, tmp_path / "out")
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_kill_while_the_journal_is_opened_forgets_no_finished_file(
    source, stopped, monkeypatch
) -> None:
    """Whatever call it dies at, what the journal held before is still there."""
    from megatron_xorl.convert import journal

    before = (stopped / "progress.jsonl").read_bytes()
    (stopped / "progress.jsonl").write_bytes(before + b'{"file": "__0')
    for name, place in (("sync_directory", journal), ("fsync", os), ("unlink", Path)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda *_, **__: (_ for _ in ()).throw(SystemExit))
            with contextlib.suppress(SystemExit):
                import_checkpoint(source, stopped)
        assert (stopped / "progress.jsonl").read_bytes().startswith(before)
    assert import_checkpoint(source, stopped)["resumed"] == 4


def test_a_first_line_cut_by_a_kill_is_a_new_output(source, whole, stopped, tmp_path) -> None:
    first = (stopped / "progress.jsonl").read_bytes().split(b"\n")[0]
    (tmp_path / "again").mkdir()
    (tmp_path / "again/progress.jsonl").write_bytes(first[:30])
    assert import_checkpoint(source, tmp_path / "again")["resumed"] == 0
    assert hashes(tmp_path / "again") == hashes(whole)


def test_a_foreign_directory_is_refused_by_the_command(source, stopped) -> None:
    (stopped / "progress.jsonl").write_text("epoch 1\n")
    before = contents(stopped)
    code, said = command(["import", str(source), str(stopped)])
    assert code == 2
    assert "no line of a conversion" in said
    assert said.count("\n") == 1
    assert contents(stopped) == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_finished_file_with_a_changed_byte_is_written_again(
    source, whole, stopped, caplog
) -> None:
    flip(stopped / "__0_1.distcp")
    assert import_checkpoint(source, stopped)["resumed"] == 3
    assert "__0_1.distcp is not what it was" in caplog.text
    assert hashes(stopped) == hashes(whole)
    open_checkpoint(stopped, hashes=True)


@pytest.mark.parametrize("name", ["__0_1.distcp", "tokenizer.json"])
def test_a_complete_output_with_a_changed_byte_is_not_accepted(name, source, tmp_path) -> None:
    out = tmp_path / "out"
    import_checkpoint(source, out)
    flip(out / name)
    with pytest.raises(WeightsError, match=f"{name} has other content"):
        import_checkpoint(source, out)


@pytest.mark.parametrize("touch", [change, os.utime], ids=["content", "time"])
@pytest.mark.parametrize("name", ["tokenizer.json", "model-00002-of-00013.safetensors"])
def test_a_source_that_changes_meanwhile_gives_no_manifest(
    name: str, touch, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from megatron_xorl.convert import stream

    shutil.copytree(source, tmp_path / "source")
    write = stream._write_small

    def changed(conversion: stream.Conversion) -> object:
        made = write(conversion)
        touch(tmp_path / "source" / name)
        return made

    monkeypatch.setattr(stream, "_write_small", changed)
    if touch is os.utime:  # the same bytes, so nothing is wrong
        import_checkpoint(tmp_path / "source", tmp_path / "out")
        return
    with pytest.raises(WeightsError, match=f"changed while it was converted: {name} of the source"):
        import_checkpoint(tmp_path / "source", tmp_path / "out")
    with pytest.raises(WeightsError, match="unfinished conversion"):
        open_checkpoint(tmp_path / "out")


def test_files_beside_the_weights_are_counted_and_never_held_whole(
    source, tmp_path, monkeypatch
) -> None:
    import shutil

    from megatron_xorl.convert import stream

    shutil.copytree(source, tmp_path / "source")
    with open(tmp_path / "source/chat.log", "wb") as file:
        file.truncate(64 * 2**20)
    weights = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    free = type("Usage", (), {"free": weights + 32 * 2**20})()
    with monkeypatch.context() as patched:
        patched.setattr(stream.shutil, "disk_usage", lambda _: free)
        with pytest.raises(WeightsError, match="MiB free"):
            import_checkpoint(tmp_path / "source", tmp_path / "out")
    longest, write = [], files.OutputFile.write

    def measured(self: files.OutputFile, piece: bytes) -> None:
        longest.append(len(piece))
        write(self, piece)

    monkeypatch.setattr(files.OutputFile, "write", measured)
    monkeypatch.setattr(Path, "read_bytes", refuse_large(Path.read_bytes))
    import_checkpoint(tmp_path / "source", tmp_path / "out")
    export_checkpoint(tmp_path / "out", tmp_path / "back")
    assert max(longest) <= files.PIECE
    assert (tmp_path / "back/chat.log").stat().st_size == 64 * 2**20


def refuse_large(read):
    def guarded(path: Path) -> bytes:
        assert path.stat().st_size < 32 * 2**20, path
        return read(path)

    return guarded


def test_a_disk_that_is_full_at_the_manifest_is_the_same_line(
    source, whole, tmp_path, monkeypatch
) -> None:
    from megatron_xorl.convert import stream

    def full(out: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "manifest.json.partial"))

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(stream, "write_manifest", full)
        code, said = command(["import", str(source), str(out)])
    assert (code, said.count("\n")) == (2, 1)
    assert "manifest.json.partial: No space left on device (the file system at" in said
    assert "is incomplete (13 of 13 files) and says so; once the cause is gone" in said
    with pytest.raises(WeightsError, match="unfinished conversion"):
        open_checkpoint(out)
    assert import_checkpoint(source, out)["resumed"] == 13
    assert hashes(out) == hashes(whole)


def test_what_is_checked_on_resume_is_counted_as_it_is_read(source, stopped, monkeypatch) -> None:
    from megatron_xorl.convert import stream

    made = []

    class Recorded(stream.Reporter):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stream, "Reporter", Recorded)
    import_checkpoint(source, stopped)
    import_checkpoint(source, stopped)
    labels = [reporter.label.split(" in ")[0] for reporter in made]
    assert labels == ["check what an earlier run finished", "import hf", "check out"]
    assert [reporter.done for reporter in made] == [reporter.total for reporter in made]
    assert 0 < made[0].total < made[1].total


def test_values_that_cannot_be_quantised_promise_no_resume(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hf = make_tiny(tmp_path / "hf", block=None)
    name = "model.layers.1.self_attn.q_a_proj.weight"
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    path = hf / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name][3, 4] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    code, said = command(["import", str(hf), str(tmp_path / "out"), "--quantize"])
    assert (code, said.count("\n")) == (2, 1)
    assert name in said
    assert "repair the source and run the same command again, or convert with other" in said
    assert "continues it" not in said
    tensors[name][3, 4] = 1.0
    save_file(tensors, path, {"format": "pt"})
    assert command(["import", str(hf), str(tmp_path / "out"), "--quantize"])[0] == 0

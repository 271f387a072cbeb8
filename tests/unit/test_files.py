"""Temporary folders are removed with their command, or by the next command if it was killed. Other folders are left
alone. A full disk ends in one sentence.
"""

import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import World, files

from liger_convert.cli import main
from liger_convert.io.files import atomic_dir, disk_errors, scratch_folder, temporary_folder
from liger_convert.pipeline import manifest
from liger_convert.utils import interrupts
from liger_convert.utils.errors import BadInput, LinearizeError

HOLD = """
import sys, time
from pathlib import Path
from liger_convert.io.files import temporary_folder
with temporary_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "weights").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


def holder(parent: Path, prefix: str) -> tuple[subprocess.Popen, Path]:
    """A process with a temporary folder, and that folder."""
    command = [sys.executable, "-c", HOLD, str(parent), prefix]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    process, left = holder(tmp_path, ".out.partial-")
    with atomic_dir(tmp_path / "out"):
        assert (left / "weights").exists()  # it lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.exists()
    with atomic_dir(tmp_path / "out", overwrite=True) as partial:
        assert not left.exists()
        assert partial.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_signal_leaves_no_temporary_folder_half_removed(tmp_path, monkeypatch):
    """SIGTERM rather than SIGINT, which a background job of a shell ignores."""
    real = shutil.rmtree

    def rmtree(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        real(*arguments, **options)

    def write():
        with atomic_dir(tmp_path / "out") as partial:
            (partial / "weights").write_text("x")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(interrupts.Stopped), interrupts.handled(""):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_another_host_writes_on_a_shared_disk_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with temporary_folder(tmp_path, ".out.partial-") as theirs:
        monkeypatch.setattr(socket, "gethostname", lambda: "here")
        # its lock may not be seen from here, as if it held none
        abandoned = theirs.with_name(theirs.name[:-1] + "x")
        abandoned.mkdir()
        ours = abandoned.with_name(abandoned.name.replace("elsewhere", "here"))
        ours.mkdir()
        with atomic_dir(tmp_path / "out"):
            pass
        assert sorted(tmp_path.iterdir()) == sorted([theirs, abandoned, tmp_path / "out"])


def test_a_link_in_the_place_of_a_temporary_folder_is_not_followed(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").touch()
    host = temporary_name(tmp_path)
    (tmp_path / f"{host}00000000").symlink_to(tmp_path / "victim")
    with atomic_dir(tmp_path / "out"):
        pass
    assert (tmp_path / "victim/file").exists()


def temporary_name(folder: Path) -> str:
    """The part of a temporary folder's name that does not change."""
    with temporary_folder(folder, ".out.partial-") as made:
        return made.name[:-8]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_command_that_ends_early_leaves_no_scratch_folder(tmp_path, monkeypatch, error):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def fails() -> None:
        with scratch_folder() as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "weights").touch()
            raise error

    with pytest.raises(error):
        fails()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 44480 vs 44368",
        "open file failed with strerror: No space left on device",
    ],
)
def test_what_torch_says_of_a_full_disk_is_understood(said: str, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match="the disk is full"), disk_errors(tmp_path):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="out of memory"), disk_errors(tmp_path):
        raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("words", [World.run, World.convert], ids=["run", "convert"])
def test_a_full_disk_ends_in_one_sentence_and_leaves_nothing(world, words, monkeypatch, capsys):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = files(world.folder)
    monkeypatch.setattr(os, "fsync", full)
    assert main.main(words(world)) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"error: {world.folder}")
    assert complaint.endswith("the disk is full; free some space and start again")
    assert files(world.folder) == before


# --- file systems that many machines share


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK])
def test_a_file_system_without_locks_can_hold_a_run(code: int, tmp_path: Path, monkeypatch, capsys) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with atomic_dir(tmp_path / "out") as partial:
        (partial / "weights").write_text("x")
    with manifest.lock(tmp_path / "out"):
        assert (tmp_path / "out/weights").exists()
    assert "this file system has no locks" in capsys.readouterr().err


def test_a_locked_run_is_still_refused(tmp_path: Path) -> None:
    with manifest.lock(tmp_path), pytest.raises(BadInput, match="another process is working"), manifest.lock(tmp_path):
        pass


@pytest.mark.parametrize("folders", [True, False])
def test_folders_need_not_be_flushed_but_files_must(folders: bool, tmp_path: Path, monkeypatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    def write() -> None:
        with atomic_dir(tmp_path / "out") as partial:
            (partial / "weights").write_text("x")

    monkeypatch.setattr(os, "fsync", fsync)
    if folders:
        write()
    else:
        with pytest.raises(OSError, match="Invalid argument"):
            write()
    assert (tmp_path / "out/weights").exists() == folders


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_damaged_disk_ends_in_a_sentence(code: int, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=f"cannot be written: .*{os.strerror(code)}"), disk_errors(tmp_path):
        raise OSError(code, os.strerror(code))

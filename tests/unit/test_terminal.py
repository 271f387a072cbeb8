"""Losing the terminal does not end a command. Ctrl-C and SIGTERM end it soon, and no process is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import SUITE, weights, write_home
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from liger_convert.cli import main
from liger_convert.io import templates
from liger_convert.utils import interrupts
from liger_convert.utils.progress import quiet_libraries

LINEARIZE = str(Path(sys.executable).with_name("linearize"))
STAGES: list[dict[str, Any]] = [
    {"kind": "align", "learning_rates": {"mixer": 1e-2}, "save_every": 4},
    {
        "kind": "finetune",
        "loss_on": "all",
        "learning_rates": {"mixer": 1e-3, "lora": 1e-2},
        "lora": {},
        "save_every": 4,
    },
]
# Runs a command in which training says its step on stdout, and takes a while for it.
SLOW = """
import sys, time
from liger_convert.cli.main import main
from liger_convert.training.trainer import _Watch
on_step_end = _Watch.on_step_end
def slow(self, args, state, control, **kwargs):
    print("step", state.global_step, flush=True)
    time.sleep(0.3)
    return on_step_end(self, args, state, control, **kwargs)
_Watch.on_step_end = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_home(folder, STAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def finished(home):
    assert main.main(["run", "recipe.yaml", "--out", "finished"]) == 0
    return weights(home / "finished")


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """Ends what a failed test has started."""
    yield
    while started:
        process = started.pop()
        process.kill()
        process.communicate()


def hear_ctrl_c() -> None:
    """Restores Ctrl-C: shells start background commands with it ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(home: Path, *words: str, script: str = "", **options: object) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *words] if script else [LINEARIZE, *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    process = subprocess.Popen(command, cwd=home, env=os.environ, preexec_fn=hear_ctrl_c, **options)
    started.append(process)
    return process


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    line = command.replace("linearize", LINEARIZE)
    return subprocess.run(
        ["bash", "-c", line], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


# --- streams


STREAMS = ["2>&-", "2>/dev/full", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "| true", "| head -1", "2>&1 >/dev/full | true"]


@pytest.mark.parametrize(
    ("words", "streams"),
    [
        *(("--help", streams) for streams in STREAMS),  # answers at once, as it imports no torch
        *(
            pytest.param("families", streams, marks=[pytest.mark.slow] * (streams != "| head -1"))
            for streams in STREAMS
        ),
    ],
)
def test_a_closed_or_full_terminal_does_not_end_a_command(words, streams):
    found = shell(f"(linearize {words}; echo $? >&9) 9>&3 {streams}".join(["exec 3>&1; ", ""]))
    code = found.stdout.splitlines()[-1]
    assert code == ("1" if ">/dev/full |" in streams else "0")
    assert "Traceback" not in found.stdout + found.stderr
    assert "Exception ignored" not in found.stderr


def test_results_that_could_not_be_written_are_no_success():
    found = shell("linearize families --json > /dev/full")
    assert found.returncode == 1
    assert found.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("families", marks=pytest.mark.slow),
        "mixers --heads 4 --kv-heads 2 --head-size 8",
        "plan default --help",
    ],
)
def test_a_terminal_that_knows_only_ascii_is_no_failure(words):
    found = shell(f"linearize {words}", PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.isascii()


def test_errors_are_shown_where_the_terminal_has_no_width():
    found = shell("linearize plan nothing.yaml", COLUMNS="0")
    assert (found.returncode, found.stderr) == (2, "error: nothing.yaml: there is no such file\n")


def test_bars_of_transformers_are_off_even_where_it_was_imported_before(capfd):
    """With `python -m liger_convert.cli`, which torchrun starts in every process, it is imported before."""
    from transformers.utils import logging

    logging.enable_progress_bar()
    quiet_libraries()
    list(logging.tqdm(range(3), desc="Loading weights"))
    assert capfd.readouterr().err == ""


def test_bars_of_lm_eval_are_off_even_where_tqdm_was_imported_before():
    code = """
import liger_convert
from liger_convert.utils.progress import quiet_libraries
for _ in range(2000):
    quiet_libraries()
from tqdm import tqdm
list(tqdm(range(3)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stderr == ""


def test_json_is_whole_on_a_terminal_that_knows_only_ascii(capsys):
    found = shell("linearize mixers --json", PYTHONIOENCODING="ascii")
    assert main.main(["mixers", "--json"]) == 0
    assert json.loads(found.stdout) == json.loads(capsys.readouterr().out)


# --- signals


def test_sigterm_saves_the_step_and_the_run_goes_on_to_the_same_weights(home, finished):
    command = ["run", "recipe.yaml", "--out", "stopped"]
    process = start(home, *command, script=SLOW)
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(8)]
    assert seen[-1] == "step 2"  # of the second stage
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - asked < 10
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "error: interrupted; the same command with --resume continues stopped"
    saved = [path.name for path in (home / "stopped/steps/2-finetune/checkpoints").iterdir()]
    assert saved == ["checkpoint-2"]  # save_every is 4
    assert main.main([*command, "--resume"]) == 0
    assert weights(home / "stopped") == finished


def children(pid: int) -> set[int]:
    """Those whose command is a worker of Python's multiprocessing."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in status.with_name("cmdline").read_bytes():
                found.add(int(status.parent.name))
        except (OSError, ValueError):
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and runs. A dead one may still exist until its parent has read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_the_processes_of_an_evaluation_end_with_their_parent(home, number):
    (home / "long.yaml").write_text(SUITE.replace("draws: 2", "draws: 1000000"))
    words = ["--set", "eval.suite=long.yaml", "--set", "eval.processes=2", "--set", "stages=[]"]
    process = start(home, "run", "recipe.yaml", "--out", f"long-{number}", *words)
    until = time.monotonic() + 100
    while len(workers := children(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(3)  # they may be importing still, or measuring: both must end
    process.send_signal(number)
    asked = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    while any(alive(worker) for worker in workers) and time.monotonic() < asked + 10:
        time.sleep(0.1)
    assert len(workers) == 2
    assert not any(alive(worker) for worker in workers)
    assert time.monotonic() - asked < 10


def test_a_process_that_cannot_answer_a_signal_is_ended():
    script = """
import hashlib, threading
from liger_convert.utils import interrupts
interrupts.GRACE = 1.0
with interrupts.handled("last words"):
    threading.Timer(0.3, print, ["ready"], {"flush": True}).start()  # once the call below has begun
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # minutes within one call of C
"""
    process = start(Path.cwd(), script=script)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + signal.SIGTERM, "error: last words\n")
    assert time.monotonic() - asked < 5


@pytest.mark.parametrize("code", [0, 130])
def test_a_signal_after_the_work_does_not_change_how_a_command_ends(code):
    script = f"""
import atexit, time
import linearize_command
from liger_convert.cli import main
main.main = lambda: atexit.register(lambda: (print("ready", flush=True), time.sleep(20))) and {code}
raise SystemExit(main.program())
"""
    process = start(Path.cwd(), script=script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == code
    assert time.monotonic() - asked < 5


def test_a_command_does_not_wait_for_pythons_clean_up_of_modules():
    script = """
import sys, time
import linearize_command
from liger_convert.cli import main
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(20)
slow = Slow()
main.main = lambda: sys.stdout.write("result") * 0
raise SystemExit(main.program())
"""
    process = start(Path.cwd(), script=script)
    began = time.monotonic()
    assert process.communicate(timeout=60) == ("result", "")
    assert process.returncode == 0
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(("code", "ends"), [(143, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_after_a_signal_a_thread_that_was_left_behind_does_not_keep_the_process(code, ends):
    script = f"""
import threading, time
import linearize_command
from liger_convert.cli import main
main.interrupts.GRACE = 0.5
main.main = lambda: {code}
threading.Thread(target=time.sleep, args=(6,)).start()
print("ready", flush=True)
raise SystemExit(main.program())
"""
    process = start(Path.cwd(), script=script)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == code
    assert (time.monotonic() - began < 4) is ends


def test_a_signal_waits_for_work_that_saves_itself_but_not_for_long(monkeypatch):
    monkeypatch.setattr(interrupts, "SAVING", 0.2)
    reached = []

    def work(seconds: float) -> None:
        with interrupts.handled(""), interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received() == signal.SIGTERM
            time.sleep(seconds)
            reached.append(seconds)

    for seconds in (0.05, 5):
        with pytest.raises(interrupts.Stopped):
            work(seconds)
    assert reached == [0.05]
    assert interrupts.received() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # how a lost exception would show
def test_a_signal_is_not_lost_while_a_template_is_tried_in_a_fork():
    armed = [signal.SIGTERM]
    os.register_at_fork(after_in_parent=lambda: armed and signal.raise_signal(armed.pop()))
    tokenizer = tiny_tokenizer()
    with pytest.raises(interrupts.Stopped), interrupts.handled(""):
        templates.render(tokenizer, [{"role": "user", "content": "hi"}], "{# a new template #}" + CHAT_TEMPLATE)
    assert armed == []


def test_a_second_signal_does_not_wait():
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has made of it

    def work() -> None:
        with interrupts.handled(""), interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second signal was not raised")

    try:
        with pytest.raises(interrupts.Stopped):
            work()
    finally:
        signal.signal(signal.SIGINT, heard)


def test_a_second_signal_while_the_first_is_reported_shows_no_traceback(monkeypatch):
    def report(sentence: str, code: int) -> int:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the second signal was not raised")

    monkeypatch.setattr(main, "_fail", report)
    monkeypatch.setattr(main, "app", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert main.main(["families"]) == 128 + signal.SIGTERM


def test_handlers_are_put_back(home):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    streams = sys.stdout, sys.stderr
    with interrupts.handled(""), interrupts.deferred():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert main.main(["families"]) == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_random_and_resumed_ends_with_the_same_weights(home, finished, seed):
    """Five kills at moments drawn over the whole run, then to the end."""
    draw = random.Random(seed)
    command = ["run", "recipe.yaml", "--out", f"random-{seed}"]
    for _ in range(5):
        process = start(home, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(2, 20))
        except subprocess.TimeoutExpired:
            process.send_signal(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            process.wait(30)
        if (home / f"random-{seed}/manifest.json").exists() and "--resume" not in command:
            command.append("--resume")
    assert main.main(command) == 0
    assert weights(home / f"random-{seed}") == finished
    left = [path.name for path in home.iterdir() if path.name.startswith(f".random-{seed}.")]
    assert left == []

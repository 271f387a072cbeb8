"""The command `linearize`: its commands in groups, and the handling of all errors.

Each command parses its arguments, calls a few functions and prints their results. torch and everything that needs it
are imported inside the commands, so that `linearize --help` and shell completion respond at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from liger_convert import __version__
from liger_convert.cli import measure_commands, reference_commands, run_commands, serve_commands, step_commands
from liger_convert.cli.help import Command, Group, flowing
from liger_convert.io.files import disk_errors
from liger_convert.utils import interrupts, processes
from liger_convert.utils.errors import BadInput, LinearizeError, first_line, is_panic
from liger_convert.utils.progress import console as stderr
from liger_convert.utils.progress import quiet_libraries
from liger_convert.utils.terminal import safe_streams

app = typer.Typer(
    name="linearize",
    help="Turn a pretrained Hugging Face decoder into a linear-time model with a constant-size memory.",
    epilog="Start with: linearize plan --base HuggingFaceTB/SmolLM2-135M-Instruct",
    cls=Group,
    pretty_exceptions_enable=False,
)
USAGE_ERROR: type[Any] = typer.BadParameter.__bases__[0]  # typer has no public name for it
INTERRUPTED = 130

# The groups of commands that `linearize --help` shows, with the name and function of each command.
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Linearize a model": {"run": run_commands.run, "plan": run_commands.plan},
    "Do one step at a time": {
        "select-layers": step_commands.select_layers,
        "convert": step_commands.convert,
        "calibrate": step_commands.calibrate,
        "train": step_commands.train,
        "merge": step_commands.merge,
        "export": step_commands.export,
    },
    "Measure and try a model": {
        "eval": measure_commands.evaluate,
        "diagnose": measure_commands.diagnose,
        "compare": measure_commands.compare,
        "generate": measure_commands.generate,
        "bench": measure_commands.bench,
    },
    "Serve a model": {"serve": serve_commands.serve},
    "Check files and look things up": {
        "verify": reference_commands.verify,
        "mixers": reference_commands.mixers,
        "families": reference_commands.families,
    },
}
for group, commands in GROUPS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, help=flowing(command.__doc__ or ""), rich_help_panel=group)(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"liger-convert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """`--debug` is taken out by `main`, wherever it stands; it is declared here for the help."""
    if processes.count() > 1 and context.invoked_subcommand != "run":
        many, name = processes.count(), context.invoked_subcommand
        raise BadInput(f"linearize {name}: runs in one process, but a launcher started {many}; start it without one")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Every failure is reported as one sentence on stderr. Returns the exit code: 0 success, 1 failure,
    2 bad input, 130 or 143 stopped by Ctrl-C or SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    quiet_libraries()
    stderr.quiet = not processes.is_first()
    if not stderr.width:  # COLUMNS=0, at which nothing would be shown, not even errors
        os.environ.pop("COLUMNS", None)
        stderr.width = 80
    # Must come before torch is imported. Threads that spin while they wait make training ten times slower on a busy
    # machine, but waking threads for every small op slows decoding down. 2,000 spins bridge most gaps between the ops
    # of a layer.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    last_words = ""
    if processes.is_first() and processes.LAUNCHED not in os.environ:  # else the launcher says it
        last_words = "stopped before it could clean up; continue a run with --resume"
    with safe_streams() as (out, err), interrupts.handled(last_words):
        try:
            code = _command([word for word in words if word != "--debug"], debug="--debug" in words)
            out.flush()
        except KeyboardInterrupt:  # outside the command, such as a second one while the first is being reported
            code = _stopped()
        if out.error is not None and code == 0:
            code = _fail(f"standard output cannot be written: {out.error.strerror}", 1)
        if code and processes.count() > 1:
            err.flush()
            os._exit(code)  # threads of the process group would wait for ended processes
        return code


def program() -> int:
    """`main` as a program, which ends with its exit code whatever signals come after it.

    Leaves out Python's own clean-up of modules, which takes seconds once torch is loaded, and in which a signal would
    end the process as if its work was not done. After a signal to stop, a thread that a library left running can keep
    the process alive for at most GRACE seconds.
    """
    code: int | None = None

    def leave(*_: object) -> None:
        if code is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # before the libraries register what they do at the end, so that it runs last
    code = main()
    for number in interrupts.STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        timer = threading.Timer(interrupts.GRACE, os._exit, [code])
        timer.daemon = True  # does not keep the process alive by itself
        timer.start()
    return code


def _command(words: list[str], debug: bool) -> int:
    try:
        with disk_errors(_current_folder()):
            given = [*words, *["--debug"] * debug]
            code = app(words or ["--help"], prog_name="linearize", standalone_mode=False, obj=given) or 0
        return _fail("interrupted", _stopped()) if code == INTERRUPTED else code
    except (KeyboardInterrupt, typer.Abort) as error:  # a Ctrl-C is one of these or code 130, by typer's version
        if isinstance(error.__cause__, EOFError):  # typer treats it as Ctrl-D at a prompt
            return _bug(error.__cause__, debug)
        return _fail("interrupted", _stopped())
    except processes.Ended as error:
        return error.exit_code
    except LinearizeError as error:
        return _fail(str(error), _stopped() if error.exit_code == INTERRUPTED else error.exit_code)
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "linearize"
        return _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", 2)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return _bug(error, debug)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise BadInput("the current folder has been removed; change to another one") from None


def _stopped() -> int:
    """The exit code of a command that a signal ended."""
    return 128 + (interrupts.received() or signal.SIGINT)


def _bug(error: BaseException, debug: bool) -> int:
    """Reports an unexpected error and where its traceback is. Returns the exit code."""
    code, is_reporter = processes.agree_on_exit_code(1, unexpected=True)
    if not is_reporter:
        return code
    if code > 128:
        return _fail("another process of this run was killed", code)
    if debug:
        raise error
    if processes.is_lost_connection(error):
        return _fail("another process of this run has ended or cannot be reached; --resume continues the run", 1)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported
        return _fail(f"{first_line(error)}; `linearize plan` shows what each step needs and how to need less", 1)
    with tempfile.NamedTemporaryFile("w", prefix="linearize-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    what = f"unexpected {type(error).__name__}: {first_line(error)}"
    return _fail(f"{what}; this is a bug in linearize: please report it (traceback in {log.name}; or use --debug)", 1)


def _fail(sentence: str, code: int) -> int:
    code, is_reporter = processes.agree_on_exit_code(code)
    if not is_reporter:
        return code
    stderr.quiet = False
    # the sentence may quote a file or an option, including line breaks and terminal control codes
    sentence = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    stderr.print(f"error: {sentence}", markup=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Chat templates. They are programs that come with a model, so each one is first tried in a restricted child process.

Jinja's sandbox limits a single `range`, but not nested loops, nor the memory of a multiplied string. Python cannot
interrupt such a call with a timer, and signals only reach the main thread. For a child process, the system enforces
limits of CPU time and memory whatever the template does. The child is a fork, which takes about 20 ms; a fresh
interpreter would spend seconds on imports.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from liger_convert.utils import interrupts
from liger_convert.utils.errors import BadInput, first_line

CPU_SECONDS = 2  # a template takes milliseconds; CPU time, so that a busy machine does not matter
WALL_SECONDS = 20  # for a child that deadlocks, as a fork of a process with threads may; not the template's fault
MEMORY_BYTES = 512 << 20  # on top of what the process already uses
NO_MEMORY = 3  # the child's exit code
# What a template is told of the time where a text may not depend on it. Llama 3.2's templates, which name the day in
# every chat, say this one where they have no clock.
FIXED_DAY = datetime(2024, 7, 26)
# Says FIXED_DAY in the place of transformers' function of this name. A template that begins with it is one line longer.
FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{c}', '{FIXED_DAY:%{c}}')" for c in (*"aAbBcdeHIjmMpSuxXyY", "-d", "-m"))
    + " }}{% endmacro %}\n"
)


class BadTemplate(BadInput):
    """The chat template cannot be used for any conversation."""


_tried: set[tuple[str, tuple[str, ...], bool, bool]] = set()


def file_in(folder: Path) -> Path:
    """The file that contains the chat template of the model in `folder`."""
    return next(iter(sorted(folder.glob("chat_template*"))), folder / "tokenizer_config.json")


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    template: str,
    *,
    ask: bool = False,
    tools: list[dict[str, Any]] | None = None,
    today: bool = True,
) -> str:
    """Renders a conversation as text. ask: append the generation prompt for the assistant's next turn. tools: what the
    assistant may call, if the template shows it. today: whether a template that asks for the day is told today's;
    otherwise FIXED_DAY, so that the text is the same on every day.

    For each new sequence of roles, with and without tools, the template is first tried in a child process. Raises
    BadTemplate if it is not a valid template or exceeds its limits, and BadInput if it fails on these messages or
    refuses them.
    """

    used = FIXED_CLOCK + template if "strftime_now" in template and not today else template

    def rendered() -> str:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=used, tokenize=False, add_generation_prompt=ask
        )

    key = template, tuple(message["role"] for message in messages), ask, tools is not None
    if key not in _tried:
        _try(rendered)
        _tried.add(key)
    try:
        text = rendered()
    except TemplateSyntaxError as error:
        raise BadTemplate(f"the chat template has an error in line {error.lineno} ({first_line(error)})") from None
    except TemplateError as error:
        raise BadInput(f"the chat template refuses these messages ({first_line(error)})") from None
    except Exception as error:  # it is a program: it may divide by zero, exceed the sandbox's range, …
        what = f"{type(error).__name__}: {first_line(error)}"
        raise BadInput(f"the chat template fails on these messages ({what})") from None
    if not isinstance(text, str):
        raise BadInput("the chat template returns no text")
    return text


def _try(work: Callable[[], object]) -> None:
    """Runs `work` in a child process. Raises BadTemplate if it exceeds its limits. Other errors of `work` are ignored
    here, since they will occur again in this process."""
    # Python loses an exception that a signal raises in the hooks around a fork, so the signal waits until after it
    with interrupts.deferred(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forking with threads; see WALL_SECONDS
        child = os.fork()
        if child == 0:
            _end_with(work)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM:
        raise BadTemplate(f"the chat template does not finish (it was stopped after {CPU_SECONDS} s)")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NO_MEMORY:
        raise BadTemplate(f"the chat template asks for more than {MEMORY_BYTES >> 20} MiB of memory")


def _end_with(work: Callable[[], object]) -> NoReturn:
    """Does `work` within limits and ends this process, the child."""
    code = 0
    try:
        _bound_resources()
        work()
    except MemoryError:
        code = NO_MEMORY
    except BaseException:
        pass
    finally:
        os._exit(code)


def _bound_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))

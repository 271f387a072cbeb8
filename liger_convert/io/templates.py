"""Chat templates. They are programs that come with a model, so each is tried where it can do no harm before it is used.

Jinja's sandbox bounds a single `range`, but neither loops in loops nor what a product of a text takes. No timer reaches
into such a call from Python, and signals only reach the main thread. A child process can be given bounds of CPU time
and memory by the system, whatever the template does. It is a fork, which costs some 20 ms, where a fresh interpreter
would import for seconds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from liger_convert.utils.errors import BadInput, first_line

CPU_SECONDS = 2  # a template takes milliseconds; CPU time, so that a busy machine condemns none
WALL_SECONDS = 20  # for a child that waits: a fork of a process with threads may, and that is no fault of the template
MEMORY_BYTES = 512 << 20  # beyond what the process has
NO_MEMORY = 3  # the child's exit code


class BadTemplate(BadInput):
    """It can be used for no conversation."""


_tried: set[tuple[str, tuple[str, ...], bool]] = set()


def file_in(folder: Path) -> Path:
    """Where the chat template of the model in `folder` stands."""
    return next(iter(sorted(folder.glob("chat_template*"))), folder / "tokenizer_config.json")


def render(tokenizer: Any, messages: Sequence[dict[str, str]], template: str, *, ask: bool = False) -> str:
    """The conversation as text; with `ask`, what asks for the assistant's next turn behind it.

    A template is tried first for every new sequence of roles. Raises BadTemplate when it is no template or does not
    come to an end, BadInput when it refuses the messages.
    """

    def rendered() -> str:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=ask
        )

    key = template, tuple(message["role"] for message in messages), ask
    if key not in _tried:
        _try(rendered)
        _tried.add(key)
    try:
        text = rendered()
    except TemplateSyntaxError as error:
        raise BadTemplate(f"the chat template has an error in line {error.lineno} ({first_line(error)})") from None
    except TemplateError as error:
        raise BadInput(f"the chat template refuses these messages ({first_line(error)})") from None
    except Exception as error:  # it is a program: a division by zero, a range too big for the sandbox, …
        what = f"{type(error).__name__}: {first_line(error)}"
        raise BadInput(f"the chat template fails on these messages ({what})") from None
    if not isinstance(text, str):
        raise BadInput("the chat template returns no text")
    return text


def _try(work: Callable[[], object]) -> None:
    """Does `work` in a child process. Raises BadTemplate when it takes too much; what it raises is found out again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of a fork beside threads; see WALL_SECONDS
        child = os.fork()
    if child == 0:
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
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM:
        raise BadTemplate(f"the chat template does not finish (it was stopped after {CPU_SECONDS} s)")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NO_MEMORY:
        raise BadTemplate(f"the chat template asks for more than {MEMORY_BYTES >> 20} MiB of memory")


def _bound_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))

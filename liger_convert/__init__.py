"""liger-convert: turns a pretrained decoder into a linear-time model with a constant-size memory.

Importing this package makes transformers' Auto classes know the linearized models. Saved again, they keep their code.
"""

import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The program `linearize` registers the models where it needs them, see linearize_command.py. Registering later, by a
# hook on transformers' imports, meets them half imported.
if "linearize_command" not in sys.modules:
    from liger_convert.model.modeling import LinearizedInit

    def _write_code(folder: Path, config: Any) -> None:
        from liger_convert.pipeline.shipped_code import code_files, used_mixers, write_code  # takes a second to import

        write_code(folder, code_files(used_mixers(config.linearization)))

    LinearizedInit.write_code = staticmethod(_write_code)

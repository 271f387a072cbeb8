"""liger-convert: turns a pretrained decoder into a linear-time model with a constant-size memory.

Importing this package makes transformers' Auto classes know the linearized models.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"

# The command line asks for the models where it needs them: importing torch and transformers takes seconds, which
# `linearize --help` must not. Registering later, by a hook on transformers' imports, meets them half imported.
if not sys.argv or Path(sys.argv[0]).name != "linearize":
    import liger_convert.model  # noqa: F401

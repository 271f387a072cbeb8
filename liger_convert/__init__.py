"""liger-convert: turns a pretrained decoder into a linear-time model with a constant-size memory.

Importing this package makes transformers' Auto classes know the linearized models.
"""

import sys

__version__ = "0.1.0"

# The program `linearize` registers the models where it needs them, see linearize_command.py. Registering later, by a
# hook on transformers' imports, meets them half imported.
if "linearize_command" not in sys.modules:
    import liger_convert.model  # noqa: F401

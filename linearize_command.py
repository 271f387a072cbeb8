"""The program `linearize`.

It stands outside of the package, since it has to be imported before it. `import liger_convert` registers the models
with transformers' Auto classes, for which it imports torch and transformers. That takes seconds, and `linearize --help`
and the completion of a shell should answer at once. So the package leaves it out where this module is loaded; a command
that needs the models imports them itself.
"""

from liger_convert.cli.main import app, main, program

__all__ = ["app", "main", "program"]

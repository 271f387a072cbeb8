"""`python -m liger_convert.cli` is `linearize`."""

from liger_convert.cli.main import program

raise SystemExit(program())

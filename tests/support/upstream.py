"""The test mixins that transformers has for its own models, from the sources of the installed version.

Its wheel has no tests; `make transformers-tests` unpacks the sdist, which has `ModelTesterMixin`. The sdist leaves out
the folders below tests/, and with them `GenerationTesterMixin`: that one is found in a checkout of the same version,
whose root TRANSFORMERS_SOURCE names.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import transformers

SOURCE = Path(os.environ.get("TRANSFORMERS_SOURCE", Path(__file__).parents[2] / ".venv/transformers-source"))
# of test_modeling_common's imports, those that an sdist does not have
LEFT_OUT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def missing() -> str | None:
    """Why the mixins cannot be had, in a sentence, or None."""
    version_file = SOURCE / "src/transformers/__init__.py"
    if not version_file.exists() or not (SOURCE / "tests/test_modeling_common.py").exists():
        return f"transformers' own tests are not in {SOURCE}; `make transformers-tests` fetches them from PyPI"
    found = re.search(r'^__version__ = "(.*)"', version_file.read_text(), re.MULTILINE)
    if found is None or found[1] != transformers.__version__:
        has = "no version" if found is None else found[1]
        return f"{SOURCE} has the tests of {has}, but transformers {transformers.__version__} is installed"
    if find_spec("parameterized") is None:
        return "transformers' own tests need the package parameterized; `make install` installs it"
    return None


def mixins() -> tuple[type, type | None]:
    """`ModelTesterMixin` and `GenerationTesterMixin`, the latter None where the sources have none."""
    with _as_package("tests", SOURCE / "tests"):  # its own name for itself
        for module, mixin in LEFT_OUT.items():
            if not (SOURCE / "tests" / module.replace(".", "/")).with_suffix(".py").exists():
                folder, placeholder = module.split(".")[0], ModuleType(f"tests.{module}")
                sys.modules[f"tests.{folder}"] = ModuleType(f"tests.{folder}")
                setattr(placeholder, mixin, type(mixin, (), {}))
                sys.modules[f"tests.{module}"] = placeholder
        common = importlib.import_module("tests.test_modeling_common")
    generates = hasattr(common.GenerationTesterMixin, "test_greedy_generate")
    return common.ModelTesterMixin, common.GenerationTesterMixin if generates else None


@contextmanager
def _as_package(name: str, folder: Path) -> Iterator[None]:
    """Makes `folder` the package `name`, and what has that name here what it was again afterwards."""
    ours = {key: module for key, module in sys.modules.items() if key.split(".")[0] == name}
    for key in ours:
        del sys.modules[key]
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(folder)]
    try:
        yield
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(ours)

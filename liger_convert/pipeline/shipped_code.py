"""The code that is shipped with an export: the model's module, the modules of its mixers, and what these import.

The files are flattened into one folder, because transformers loads remote code from a single folder. Only their import
lines change. At its end, the model's module imports the mixers, which thereby register themselves, and has transformers
copy the code wherever the model is saved.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_convert.mixers import MIXERS, make_spec, register_mixer
from liger_convert.mixers.base import Mixer
from liger_convert.utils.errors import BadInput

ENTRY = "liger_convert.model.modeling"
ENTRY_FILE = "modeling_linearized"
OURS = ("liger_convert", "gated_kernels")
PROVIDED = sys.stdlib_module_names | {"torch", "transformers"}  # present wherever an export is loaded
# transformers does so itself only for classes that are not registered with its Auto classes yet, and these are
SAVED_WITH_CODE = """
# `save_pretrained` copies this code beside the weights of classes that have an Auto class of their own
for _model_type, (_, _backbone, _lm) in CLASSES.items():
    for _auto, _cls in {"AutoModel": _backbone, "AutoModelForCausalLM": _lm, **HEAD_CLASSES[_model_type]}.items():
        _cls.register_for_auto_class(_auto)
"""
INTERNAL_IMPORT = re.compile(r"^(\s*from )((?:liger_convert|gated_kernels)[\w.]*)( import )", re.MULTILINE)


def used_mixers(linearization: dict[str, Any]) -> list[str]:
    """The names of all mixers that the layers use, including those inside others. Raises BadInput."""
    used: dict[str, None] = {}
    for spec in linearization["mixers"].values():
        used |= dict.fromkeys((spec["type"], *make_spec(spec).inner_types()))
    return list(used)


def code_files(mixers: Sequence[str]) -> dict[str, str]:
    """The source files of a model with these mixers, by their flat file names, found by following imports.

    Raises BadInput for a mixer of another package whose code cannot be shipped, see `_check_plugin`.
    """
    classes = [MIXERS[name] for name in mixers]
    for name, cls in zip(mixers, classes):
        if not _is_ours(cls.__module__):
            _check_plugin(name, cls.__module__)
    texts: dict[str, str] = {}
    waiting = [ENTRY, *(cls.__module__ for cls in classes)]
    while waiting:
        module = waiting.pop()
        if _flat(module) + ".py" in texts:
            continue
        text = _source(module)
        waiting += [match[2] for match in INTERNAL_IMPORT.finditer(text)]
        texts[_flat(module) + ".py"] = INTERNAL_IMPORT.sub(lambda m: f"{m[1]}.{_flat(m[2])}{m[3]}", text)
    texts[ENTRY_FILE + ".py"] += _registration(dict(zip(mixers, classes)))
    return texts


def write_code(folder: Path, code: dict[str, str]) -> None:
    """Writes what `code_files` returns to a model's folder."""
    for file, text in code.items():
        (folder / file).write_text(text, encoding="utf-8")


def _registration(classes: dict[str, type[Mixer]]) -> str:
    """The lines at the end of the model's module that register its mixers, and its classes as code to be saved."""
    lines = ["", "# the mixers of this model register themselves when they are imported"]
    lines += [f"from .{_flat(cls.__module__)} import {cls.__name__}  # noqa: E402, F401" for cls in classes.values()]
    if others := {name: cls for name, cls in classes.items() if not _is_ours(cls.__module__)}:
        lines += [f"from .{_flat(register_mixer.__module__)} import register_mixer  # noqa: E402", ""]
        lines += [f"register_mixer({name!r})({cls.__name__})" for name, cls in others.items()]
    return "\n".join([*lines, SAVED_WITH_CODE])


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _flat(module: str) -> str:
    """A flat file name: gated_kernels.swa.chunk -> gated_kernels_swa_chunk, the entry -> modeling_linearized.

    Modules of other packages get the prefix `plugin_`, so that no name collides with one of ours.
    """
    if module == ENTRY:
        return ENTRY_FILE
    return ("" if _is_ours(module) else "plugin_") + module.removeprefix("liger_convert.").replace(".", "_")


def _check_plugin(name: str, module: str) -> None:
    """Raises BadInput unless the module of a mixer from another package can be shipped: a single Python file that
    imports only from our modules, torch, transformers and the standard library."""
    what = f"mixer {name!r}: its module {module} cannot be copied into an export"
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or spec.submodule_search_locations:
        raise BadInput(f"{what}, because it is not a single Python file; put the mixer into one")
    for node in ast.walk(ast.parse(_source(module))):
        for needed in _imported(node):
            if needed.partition(".")[0] not in PROVIDED:
                raise BadInput(
                    f"{what}, because it imports {needed}; it may only import from the standard library, torch and "
                    "transformers, and by `from liger_convert.<module> import <name>`"
                )


def _imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports, without modules of ours that an export ships."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = node.module or ""
    if node.level or not _is_ours(module):
        return ["." * node.level + module]
    return [f"{module}.{alias.name}" for alias in node.names if _is_module(f"{module}.{alias.name}")]


def _is_module(name: str) -> bool:
    """Whether a name imported from one of our modules is itself a module. `from package import module` cannot be
    rewritten to a flat file name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False

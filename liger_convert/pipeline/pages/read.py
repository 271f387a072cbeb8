"""Reads and checks the report.json files of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from liger_convert.config.recipe_errors import sentence
from liger_convert.io.files import read_json
from liger_convert.utils.errors import BadInput

FILE = "report.json"
# names of models in older reports, and the names in `common.TITLES` that replaced them
RENAMED = {
    "window_untrained": "window_only_untrained",
    "linearized_window_only": "memory_ablated",
    "linearized_memory_only": "window_ablated",
}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class _Measured(_Part):
    value: float | None
    stderr: Annotated[float, Field(ge=0)] | None
    n: int | None


_Column = dict[str, _Measured]


class _Models(_Part):
    base: _Column
    window_only_untrained: _Column
    linearized: _Column
    memory_ablated: _Column
    __pydantic_extra__: dict[str, _Column]


class _Cache(_Part):
    base: Annotated[int, Field(gt=0, le=10**18)]
    linearized: Annotated[int, Field(gt=0, le=10**18)]


class _Linearization(_Part):
    layers: list[str]


class _Plan(_Part):
    cache_bytes: dict[str, _Cache]
    linearization: _Linearization


class _Verdict(_Part):
    compared: dict[str, dict[str, str]] = Field(default_factory=dict)  # which older reports do not have


class _Report(_Part):
    """The fields that every reader of a report relies on."""

    name: str
    base: str
    models: _Models
    plan: _Plan
    verdict: _Verdict = Field(default_factory=_Verdict)


def read_report(path: Path) -> dict[str, Any]:
    """The content of the report.json at `path`, a file or the folder of a run, with the current names of the models.

    Raises BadInput, naming the field, if it is not the report of a run.
    """
    folder = os.path.isdir(path)  # also False for names that are not valid paths
    file = path / FILE if folder else path
    if folder and not os.path.lexists(file):
        raise BadInput(f"{path}: has no {FILE}, which a run writes last; finish the run with --resume")
    report = read_json(file)
    if isinstance(models := report.get("models"), dict):
        report["models"] = {RENAMED.get(name, name): measured for name, measured in models.items()}
    try:
        _Report.model_validate(report)
    except ValidationError as error:
        raise BadInput(f"{file}: {sentence(error, _Report, report)}") from None
    return report

"""The models that the conformance tests run on."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import MODELS, is_quick
from tiny_models import shared_model


@pytest.fixture(params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny model that several tests share; a test that changes it has to undo that. `make test` runs some pairs."""
    return shared_model(*request.param)


@pytest.fixture(params=MODELS, ids="-".join)
def every_model(request: pytest.FixtureRequest) -> Any:
    """Like `model`, but `make test` runs all of them."""
    return shared_model(*request.param)


@pytest.hookimpl(tryfirst=True)  # before those marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what pairs of family, mixer and check do not need."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("model") not in MODELS:  # some files have their own fixture of that name
            continue
        others = [str(value) for name, value in params.items() if name != "model"]
        if not is_quick(*params["model"], f"{item.originalname}[{'-'.join(others)}]"):
            item.add_marker(pytest.mark.slow)

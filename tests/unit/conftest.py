"""Fixtures of several files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_tiny_base
from worlds import World


@pytest.fixture(scope="session")
def sound_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def world(tmp_path: Path, sound_base: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, sound_base)

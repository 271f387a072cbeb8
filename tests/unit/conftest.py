"""Fixtures that several test files use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
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


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Fails a test that tries to reach another machine, even if the code catches the error and goes on."""
    sought: list[object] = []

    def seek(*args: object, **_: object) -> None:
        sought.append(args)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", seek)
    monkeypatch.setattr(socket, "create_connection", seek)
    monkeypatch.setattr(socket.socket, "connect", seek)
    yield sought
    assert not sought

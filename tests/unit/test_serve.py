"""`linearize serve` says what a server will be, or refuses; the plugin needs little of the package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import free_port
from tiny import save_tiny_base
from tiny_models import build, logits

from liger_convert.cli.main import main
from liger_convert.io.checkpoint import load_config
from liger_convert.model.bases import context_length
from liger_convert.serving import launch
from liger_convert.serving.settings import base_layer_types, mark_layers

OPTIONS = launch.ServerOptions("127.0.0.1", 8000, None, 64, "auto", None)
HYBRID = ["main", "softmax", "main"]
NEEDS = """
import sys
import liger_convert.serving.layer, liger_convert.serving.launch, liger_convert.serving.settings
import liger_convert.cli.main
assert not {"peft", "datasets", "lm_eval"} & sys.modules.keys()
"""

REFUSING = """
from pydantic import field_validator
from pydantic.dataclasses import dataclass
from liger_convert.utils.errors import BadInput

@dataclass
class Settings:
    length: int

    @field_validator("length")
    def positive(cls, length):
        if length < 0:
            raise ValueError("length: must be positive")

"""


def save(folder: Path, layers: list[str] = HYBRID, **spec: object) -> Path:
    build("llama", layers, **spec).save_pretrained(folder)
    return folder


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = launch.importlib.util.find_spec
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))


def test_serve_says_how_many_requests_run_at_a_time(tmp_path: Path) -> None:
    said = launch.describe(save(tmp_path / "export", type="gla"), OPTIONS)
    assert said.startswith("export: 2 of 3 layers linear, in bfloat16, at http://127.0.0.1:8000/v1.")
    assert "up to 64 run at a time" in said


@pytest.mark.parametrize("mixer", ["gla", "gated-deltanet", "window"])
@pytest.mark.parametrize("layers", [HYBRID, ["main"] * 3])
def test_the_memory_of_a_request_is_that_of_a_cache_with_one_row(mixer: str, layers: list[str]) -> None:
    model = build("llama", layers, type=mixer, window=5)
    tokens = torch.arange(3, 60)[None]
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits(model, tokens, past_key_values=cache, use_cache=True)
    held = sum(
        tensor.nbytes
        for name, layer in zip(layers, cache.layers)
        for tensor in (
            (layer.keys, layer.values)
            if name == "softmax"
            else [x for group in (layer.ring, layer.sinks, layer.states) for x in group.values()]
        )
    )
    assert launch.request_memory(model.config, torch.float32).of(tokens.shape[1]) == held


def test_without_vllm_it_says_how_to_install_it(
    tmp_path: Path, no_vllm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(save(tmp_path / "export", type="gla"))]) == 2
    assert "vllm is not installed here" in capsys.readouterr().err


def test_a_base_is_left_to_vllm_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(save_tiny_base("llama", tmp_path / "base"))]) == 2
    assert "which vLLM serves by itself" in capsys.readouterr().err


def test_a_mixer_without_a_page_is_refused_before_vllm_is_looked_for(
    tmp_path: Path, no_vllm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(save(tmp_path / "export", type="forgetting"))]) == 2
    assert "mixer 'forgetting': its unlimited window" in capsys.readouterr().err


def test_a_dtype_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(save(tmp_path / "export", type="gla")), "--dtype", "int3"]) == 2
    assert "--dtype: 'int3' cannot be served" in capsys.readouterr().err


def test_the_server_is_started_with_these_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "check_installed", lambda: None)
    monkeypatch.setattr(launch, "start", lambda command: started.append(command))
    export = save(tmp_path / "export", type="gla")
    port = str(free_port())
    assert main(["serve", str(export), "--port", port, "--max-len", "99", "--name", "x", "--vllm=--api-key=K"]) == 0
    words = started[0]
    assert words[1:5] == ["-m", launch.SERVER, "--model", str(export)]
    for option, value in {"--port": port, "--max-model-len": "99", "--served-model-name": "x"}.items():
        assert words[words.index(option) + 1] == value
    assert words[-1] == "--api-key=K"


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save(tmp_path / "export", type="gla"))
    assert launch.describe(Path(), OPTIONS).startswith("export: ")
    words = launch.server_command(Path(), OPTIONS)
    assert words[words.index("--served-model-name") + 1] == "export"


def test_more_tokens_than_the_base_supports_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = save(tmp_path / "export", type="gla")
    most = context_length(load_config(export))
    assert most is not None
    assert main(["serve", str(export), "--max-len", str(most + 1)]) == 2
    assert f"--max-len: {most + 1} is more than the {most} tokens" in capsys.readouterr().err
    longer = replace(OPTIONS, max_len=most + 1)
    launch.describe(export, replace(OPTIONS, max_len=most))
    monkeypatch.setenv(launch.LONGER, "1")
    launch.describe(export, longer)


@pytest.mark.parametrize("host", ["127.0.0.1", "not.a.host.invalid", "", "192.0.2.1"])
def test_an_address_on_which_nobody_can_listen_is_refused(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "check_installed", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        export = save(tmp_path / "export", type="gla")
        assert main(["serve", str(export), "--host", host, "--port", port]) == 2
    assert f"--host {host} --port {port}: cannot listen there" in capsys.readouterr().err
    launch.check_address("127.0.0.1", int(port))


def serve_by(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the server's own process with a module of this source instead of vLLM's server."""
    (folder / "standing_in.py").write_text(source)
    command = "from liger_convert.serving import server; server.SERVER = 'standing_in'; raise SystemExit(server.main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise BadInput('enable_lora: is not supported')", "error: enable_lora: is not supported"),
        ("Settings(length=-1)", "error: vllm: length: must be positive"),
    ],
)
def test_a_refusal_of_the_server_is_one_sentence(statement: str, said: str, tmp_path: Path) -> None:
    found = serve_by(REFUSING + statement, tmp_path)
    assert (found.returncode, found.stderr.strip()) == (2, said)


def test_a_fault_of_the_server_keeps_its_traceback(tmp_path: Path) -> None:
    found = serve_by("raise ValueError('a fault')", tmp_path)
    assert found.returncode == 1
    assert "Traceback" in found.stderr


def test_layers_are_marked_for_vllm_and_restored_for_transformers(tmp_path: Path) -> None:
    build("qwen2", HYBRID, type="gla").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    before = list(config.layer_types)
    mark_layers(config)
    mark_layers(config)
    assert config.layer_types == ["linear_attention", before[1], "linear_attention"]
    assert base_layer_types(config) == before


def test_what_is_served_needs_no_package_for_training_or_tasks() -> None:
    subprocess.run([sys.executable, "-c", NEEDS], check=True)

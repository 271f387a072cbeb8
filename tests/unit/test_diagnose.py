"""The diagnosis measures the models it says it measures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import SECONDS, free_port
from tiny import save_tiny_base, tiny_tokenizer

from liger_convert.data.documents import Document
from liger_convert.eval import ablation, evaluation
from liger_convert.eval.ablation import NAMES, diagnose, measure_along, window_control
from liger_convert.eval.evaluation import evaluate_model
from liger_convert.eval.generation import load_model
from liger_convert.eval.suites import CopyMeasure, Suite
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.mixers import resolve_spec
from liger_convert.model import set_branches
from liger_convert.model.loading import linearize_base
from liger_convert.utils import processes
from liger_convert.utils.errors import LinearizeError

CPU = torch.device("cpu")
SUITE = Suite.model_validate(
    {
        "name": "test",
        "description": "a test",
        "text": [{"window": 32, "windows": 3}],
        "copying": [{"length": 12, "draws": 3}],
    }
)
IDS = np.random.default_rng(0).integers(3, 101, 200, dtype=np.int32)
OPTIONS: dict[str, Any] = {"held_out": [Document(IDS, np.ones(200, bool), 200)], "precision": "float32"}
LAYERS = ["main", "softmax", "main"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


def linearized(base: Path, folder: Path, *, trained: bool = False, **spec: Any) -> Path:
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 6, "sinks": 2, **spec})}, "layers": LAYERS}
    model = linearize_base(base, plan)
    if trained:
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_each_column_measures_the_model_that_it_names(base: Path, tmp_path: Path) -> None:
    folder = linearized(base, tmp_path, trained=True)
    found = diagnose(folder, base, SUITE, device=CPU, prompts=["a", "b"], **OPTIONS)
    assert tuple(found["models"]) == NAMES
    control = {"type": "window", "window": 6, "sinks": 2}
    plan = {"format": 2, "mixers": {"main": resolve_spec(control)}, "layers": LAYERS}
    expected = {"base": load_model(base, CPU, "float32"), "window_only_untrained": linearize_base(base, plan)}
    for name, branches in (
        ("linearized", "both"),
        ("memory_ablated", "window"),
        ("window_ablated", "memory"),
    ):
        expected[name] = load_model(folder, CPU, "float32")
        set_branches(expected[name], branches)
    for name, model in expected.items():
        assert found["models"][name] == evaluate_model(model, tiny_tokenizer(), SUITE, **OPTIONS), name
    values = [found["models"][name]["text_ppl"]["value"] for name in NAMES]
    assert len(set(values)) == len(values)
    assert [set(row) for row in found["continuations"]] == [{"prompt", "base", "linearized"}] * 2
    (note,) = found["notes"]
    assert note.startswith(
        f"the base's perplexity on held-out text is {values[NAMES.index('base')]:.4g}, where the freq"
    )


def test_progress_is_that_of_all_models(base: Path, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    agreement = {"prompts": 2, "prompt_tokens": 8, "tokens": 4, "source": "held_out"}
    suite = Suite.model_validate(SUITE.model_dump() | {"agreement": agreement})
    report = lambda done, total, note="": told.append((done / total, note.split(":")[0]))  # noqa: E731
    diagnose(linearized(base, tmp_path, trained=True), base, suite, device=CPU, report=report, **OPTIONS)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {name: max(done for done, note in told if note == name) for name in NAMES} == {
        name: pytest.approx(i / len(NAMES)) for i, name in enumerate(NAMES, 1)
    }


def test_side_by_side_the_models_measure_what_they_do_one_by_one(base: Path, tmp_path: Path) -> None:
    folder = linearized(base, tmp_path, trained=True)
    found = diagnose(folder, base, SUITE, device=CPU, prompts=["a"], processes=2, **OPTIONS)
    assert found == diagnose(folder, base, SUITE, device=CPU, prompts=["a"], **OPTIONS)


def share(rank: int, port: int, options: dict[str, Any], dies: bool, claims_all: bool, told: Any) -> None:
    """Measures as process `rank` of two. Tells which parts of which models it measured, and the first what was found.
    dies: the second process ends before it has measured anything. claims_all: each may measure what the other does."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(address | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    measured: list[tuple[str, str]] = []
    write = ablation.write_checked

    def noted(path: Path, value: Any) -> None:
        if path.parent.suffix == ".begun":
            measured.append((path.parent.stem, path.name))
        write(path, value)

    ablation.write_checked = evaluation.write_checked = noted
    if claims_all:
        ablation.claim = lambda name: True
    if rank == 0:
        with contextlib.suppress(processes.Ended):
            found = diagnose(**options, call_others=lambda: processes.announce({}))
            told.put((measured, found))
            processes.barrier()
    else:
        next(processes.tasks())
        if dies:
            processes.agree_on_exit_code(1)
            told.put(None)
            return
        measure_along(**options)
        told.put((measured, None))
        processes.barrier()


@pytest.fixture
def shared(base: Path, tmp_path: Path) -> Any:
    """A function that measures in two processes: what each of them told. Beside it the options of the measurement."""
    agreement = {"prompts": 2, "prompt_tokens": 8, "tokens": 4, "source": "held_out"}
    suite = Suite.model_validate(SUITE.model_dump() | {"agreement": agreement})
    options: dict[str, Any] = {"model_dir": linearized(base, tmp_path / "model", trained=True), "base_dir": base}
    options |= {"suite": suite, "device": CPU, "prompts": ["a"], "keep": tmp_path / "keep"}
    options |= OPTIONS | {"other": None, "data_dir": None, "limit": None, "batch_size": 4}
    (tmp_path / "keep").mkdir()

    def run(dies: bool = False, claims_all: bool = False) -> list[Any]:
        port, spawn = free_port(), multiprocessing.get_context("spawn")
        told = spawn.Queue()
        begun = [spawn.Process(target=share, args=(rank, port, options, dies, claims_all, told)) for rank in (0, 1)]
        for process in begun:
            process.start()
        try:
            return [told.get(timeout=2 * SECONDS) for _ in (begun[1:] if dies else begun)]
        finally:
            for process in begun:
                process.join(SECONDS)
                process.kill()

    return run, options


def test_the_processes_of_a_run_measure_what_one_does_each_part_once(shared: Any) -> None:
    run, options = shared
    told = run()
    (found,) = [results for _, results in told if results is not None]
    assert found == diagnose(**options | {"keep": None})
    parts = [part for measured, _ in told for part in measured]
    assert len(parts) == len(set(parts)) == 3 * len(NAMES) + 2
    assert all(measured for measured, _ in told)
    assert {path.stem for path in options["keep"].iterdir()} == {*NAMES, "base_rows"}


def test_a_part_that_nobody_claims_alone_is_measured_twice(shared: Any) -> None:
    """The control of the test above."""
    parts = [part for measured, _ in shared[0](claims_all=True) for part in measured]
    assert len(parts) > len(set(parts))


def test_what_one_process_measured_is_kept_when_another_ends(shared: Any) -> None:
    run, options = shared
    assert run(dies=True) == [None]
    begun = {path.stem: len(list(path.iterdir())) for path in options["keep"].glob("*.begun")}
    assert begun, "the first process had measured"
    assert not [path for path in options["keep"].glob("*.json") if path.stem in NAMES]
    told = run()
    (found,) = [results for _, results in told if results is not None]
    assert found == diagnose(**options | {"keep": None})
    assert sum(len(measured) for measured, _ in told) == 3 * len(NAMES) + 2 - sum(begun.values())


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_measures_taken_before_a_model_fails_are_kept(base: Path, tmp_path: Path, processes: int) -> None:
    folder, keep, aside = linearized(base, tmp_path / "model"), tmp_path / "keep", tmp_path / "aside"
    keep.mkdir()
    folder.rename(aside)
    folder.mkdir()
    for file in aside.iterdir():
        if not file.name.startswith("model"):  # its weights are gone, the tokenizer is there
            (folder / file.name).write_bytes(file.read_bytes())
    options = OPTIONS | {"processes": processes, "keep": keep}
    with pytest.raises((OSError, LinearizeError)):
        diagnose(folder, base, SUITE, device=CPU, **options)
    assert {path.stem for path in keep.iterdir()} == {"base", "window_only_untrained"}
    for path in keep.iterdir():
        measures, said = read_checked(path)
        write_checked(path, [measures | {"mark": measures["text_ppl"]}, said])
    found = diagnose(aside, base, SUITE, device=CPU, **options)["models"]
    assert [name for name in NAMES if "mark" in found[name]] == ["base", "window_only_untrained"]
    assert found.keys() == set(NAMES)


def test_measures_taken_before_a_measure_fails_are_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_convert.eval import evaluation as module

    folder, keep = linearized(base, tmp_path / "model"), tmp_path / "keep"
    keep.mkdir()

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of time")

    with monkeypatch.context() as patches:
        patches.setattr(module, "copy_loss", fails)
        with pytest.raises(RuntimeError, match="out of time"):
            diagnose(folder, base, SUITE, device=CPU, keep=keep, **OPTIONS)
    assert [path.name for path in keep.iterdir()] == ["base.begun"]
    with monkeypatch.context() as patches:
        measured = []
        plain = module.text_perplexity
        patches.setattr(module, "text_perplexity", lambda *a, **o: measured.append(1) or plain(*a, **o))
        found = diagnose(folder, base, SUITE, device=CPU, keep=keep, **OPTIONS)
    assert len(measured) == len(SUITE.text) * (len(NAMES) - 1)
    assert found == diagnose(folder, base, SUITE, device=CPU, **OPTIONS)
    assert {path.stem for path in keep.iterdir()} == set(NAMES)


def test_without_its_base_a_model_is_measured_by_its_branches(base: Path, tmp_path: Path) -> None:
    found = diagnose(linearized(base, tmp_path), None, SUITE, device=CPU, **OPTIONS)
    assert tuple(found["models"]) == NAMES[2:]
    assert len(found["verdict"]["sentences"]) == 1


def test_a_model_that_is_its_window_is_told_that_it_has_no_memory(base: Path, tmp_path: Path) -> None:
    found = diagnose(linearized(base, tmp_path, type="window"), base, SUITE, device=CPU, **OPTIONS)
    assert found["verdict"]["memory_used"] is False
    assert found["verdict"]["sentences"][0].startswith("THE MODEL HAS NO MEMORY: ")
    assert found["models"]["memory_ablated"] == found["models"]["linearized"]
    assert "NO BETTER than the untrained base" in found["verdict"]["sentences"][1]


@pytest.mark.parametrize(("window", "known"), [(28, True), (29, False)])
def test_a_memory_that_no_text_is_long_enough_for_is_not_called_unused(
    base: Path, tmp_path: Path, window: int, known: bool
) -> None:
    """The longest text has 32 tokens, and behind its last one nothing is scored."""
    found = diagnose(linearized(base, tmp_path, window=window), base, SUITE, device=CPU, **OPTIONS)
    values = [found["models"][name]["text_ppl"]["value"] for name in ("linearized", "memory_ablated")]
    assert (values[0] != values[1]) is known
    assert (found["verdict"]["memory_used"] is not None) is known
    assert ("IS NOT KNOWN" in found["verdict"]["sentences"][0]) is not known


def test_the_verdict_is_not_about_what_is_longer_than_the_base_takes(tmp_path: Path) -> None:
    """Beyond its context, a base fails, so a model with a window would seem better than it."""
    short = save_tiny_base("llama", tmp_path / "base", max_position_embeddings=64)
    suite = SUITE.model_copy(update={"copying": [CopyMeasure(length=33, draws=3)]})
    found = diagnose(linearized(short, tmp_path / "model"), short, suite, device=CPU, **OPTIONS)
    assert "copy_nll_33" in found["models"]["linearized"]
    assert found["verdict"]["compared"]["against_base"].keys() == {"text_ppl"}


def test_the_control_keeps_windows_sinks_and_layers_and_nothing_else() -> None:
    mixers = {"main": resolve_spec({"window": 64, "sinks": 4}), "paper": resolve_spec({"type": "liger-paper"})}
    control = window_control({"format": 2, "mixers": mixers, "layers": ["main", "softmax", "paper"]})
    assert control["layers"] == ["main", "softmax", "paper"]
    assert [(spec["type"], spec["window"], spec["sinks"]) for spec in control["mixers"].values()] == [
        ("window", 64, 4),
        ("window", mixers["paper"]["window"], mixers["paper"]["sinks"]),
    ]

"""The output of `linearize bench` is complete and comes after its check. It names what it cannot measure."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import save_tiny_base, tiny_config
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama

from liger_convert.benchmark import bench, limits, page, shapes, sides
from liger_convert.cli import main
from liger_convert.mixers.base import Mixer

CPU = torch.device("cpu")
LENGTHS = [24, 150]  # the second beyond the default window
WORDS = ["--lengths", "150,24", "--decode-steps", "3", "--repeats", "3", "--device", "cpu", "--precision", "float32"]
OPTIONS = bench.Options(LENGTHS, 2, 3, 2, CPU, torch.float32)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shapes.SHAPES["smollm2-135m"]
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape | sizes | heads)
    monkeypatch.setattr(limits, "COPIED", 1 << 20)
    monkeypatch.setattr(limits, "SIDE", 64)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main.main(["bench", *words]) == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(run(capsys, *words, *WORDS, "--json"))


def side(model: Any, name: str = "linearized") -> sides.Side:
    return sides.Side(name, model, sides.dynamic_caches(model), sides.decode)


def test_a_shape_is_measured_beside_its_base_and_all_of_it_is_written(capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run_json(capsys, "tiny", "--batch-size", "2", "--out", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out/bench.json").read_text()) == found
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert {"torch", "transformers", "python"} <= found["machine"]["versions"].keys()
    assert found["machine"]["device"]
    assert (found["kernels"], found["decoding"]) == ("torch", "fixed steps, fused")
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40
    assert (found["dtype"], found["batch_size"], found["decode_steps"]) == ("float32", 2, 3)
    assert found["check"]["error"] <= found["check"]["allowed"]
    assert [(row["model"], row["tokens"]) for row in found["rows"]] == [
        (name, tokens) for name in ("linearized", "base") for tokens in LENGTHS
    ]
    for row in found["rows"]:
        for kind, tokens in (("prefill", row["tokens"]), ("decode", 1)):
            times = row[f"{kind}_ms"]
            assert 0 < times["q1"] <= times["median"] <= times["q3"]
            assert times["n"] == 3
            assert row[f"{kind}_tokens_per_s"] == pytest.approx(2 * tokens * 1000 / times["median"])
        assert ("ratio" in row) == (row["model"] == "base")
    assert {by for name, by in found["limits"].items() if name.endswith("_by")} == {
        "a copy in this run",
        "a matrix product in this run",
    }
    ours, base = found["rows"][1], found["rows"][3]
    assert base["ratio"]["decode_ms"] == base["decode_ms"]["median"] / ours["decode_ms"]["median"]
    assert base["cache_bytes"] == 2 * 2 * 2 * 2 * 8 * 4 * (150 + 1 + 3)  # rows, layers, k and v, heads, size, bytes
    assert base["ratio"]["cache_bytes"] == base["cache_bytes"] / ours["cache_bytes"]
    assert found["memory"] == "cache_bytes"
    assert base["peak_bytes"] is None
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(page.render(found))
    shown = console.export_text()
    assert "…" not in shown, "cut off"
    assert shown.count("limit") == shown.count("tokens/s") == 2, "once for prefill, once for decoding"


def test_without_prefill_a_long_context_is_there_without_being_read(capsys, monkeypatch, tmp_path: Path) -> None:
    real, read = sides.prefill, []

    def counted(model: Any, cache: Any, ids_BT: torch.Tensor) -> torch.Tensor:
        read.append(ids_BT.shape[1])
        return real(model, cache, ids_BT)

    monkeypatch.setattr(bench, "prefill", counted)
    words = ["--no-prefill", "--lengths", "24,5000", "--out", str(tmp_path / "out")]
    found = json.loads(run(capsys, "tiny", *WORDS, *words, "--json"))
    assert max(read) <= 64 + 4 + bench.CHECKED
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert found["prompts"] == "filled"
    for row in found["rows"]:
        assert (row["prefill_ms"], row["prefill_tokens_per_s"]) == (None, None)
        assert row["decode_ms"]["median"] > 0
    ours, base = found["rows"][1], found["rows"][3]
    assert base["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * (5000 + 1 + 3), "one row; all tokens, k and v of 2 layers"
    assert ours["cache_bytes"] < base["cache_bytes"] / 10
    assert base["ratio"].keys() == {"decode_ms", "cache_bytes"}
    assert "Prompts were not read" in run(capsys, "tiny", *WORDS, "--no-prefill")


@torch.no_grad()
def test_a_filled_cache_is_as_long_as_one_that_was_read() -> None:
    model = shapes.random_model("tiny", None, CPU, torch.float32)
    for caches in (sides.dynamic_caches(model), sides.static_caches(model)):
        cache = caches(50)()
        sides.prefill(model, cache, torch.arange(3, 33)[None])
        sides.fill(cache, 15)
        assert int(cache.get_seq_length()) == 45
        assert all(layer.keys[:, :, :45].abs().amin(-1).all() for layer in cache.layers)
        sides.decode(model, cache, torch.ones(1, 1, dtype=torch.long), 2)
        assert int(cache.get_seq_length()) == 47


def test_a_cache_that_keeps_every_token_is_not_filled(capsys) -> None:
    assert main.main(["bench", "tiny", *WORDS, "--no-prefill", "--mixer", "forgetting"]) == 2
    assert "unlimited windows" in capsys.readouterr().err


def test_what_was_measured_before_a_run_was_stopped_is_kept(monkeypatch, tmp_path: Path) -> None:
    real, out = bench.measure, tmp_path / "new/out"

    def stopped(side: sides.Side, tokens: int, options: bench.Options) -> dict[str, Any]:
        if side.name == bench.BASE and tokens == 150:
            raise KeyboardInterrupt
        return real(side, tokens, options)

    monkeypatch.setattr(bench, "measure", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main.main(["bench", "tiny", *WORDS, "--out", str(out)]))
    kept = json.loads((tmp_path / "new/out.partial.json").read_text())
    assert [(row["model"], row["tokens"]) for row in kept["rows"]] == [
        ("linearized", 24),
        ("linearized", 150),
        ("base", 24),
    ]
    assert not out.exists()


def test_the_table_names_every_row_and_the_peers_that_are_missing(capsys) -> None:
    said = " ".join(run(capsys, "tiny", *WORDS).split())
    assert all(word in said for word in ("24", "150", "linearized", "base", "decoding equals prefill"))
    assert "Missing: base, compiled: transformers compiles a static cache for a GPU" in said
    assert "a peak is only known of a GPU" in said
    assert said.count("limit") == 2
    assert re.search(r"Limit: what reading the weights takes at [\d.]+ GB/s \(a copy in this run\), or their", said)


def test_models_are_measured_with_the_baseline_that_was_given_or_none(capsys, tmp_path: Path) -> None:
    base = str(save_tiny_base("llama", tmp_path / "base"))
    alone = run_json(capsys, base)
    assert {row["model"] for row in alone["rows"]} == {"model"}
    assert "--baseline" in alone["missing"]["base"]
    assert main.main(["convert", base, str(tmp_path / "converted"), "--window", "8"]) == 0
    beside = run_json(capsys, str(tmp_path / "converted"), "--baseline", base)
    assert [row["model"] for row in beside["rows"]] == ["linearized"] * 2 + ["base"] * 2
    sizes = [row["cache_bytes"] for row in beside["rows"]]
    assert sizes[0] == sizes[1], "beyond the window the cache does not grow"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_base_has_the_attention_that_was_asked_for(attention: str, capsys, monkeypatch) -> None:
    asked: list[object] = []
    eager = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *x, **y: asked.append(x) or eager(*x, **y))
    found = run_json(capsys, "tiny", "--attention", attention)
    assert found["base_attention"] == attention
    assert "base" not in found["missing"]
    assert bool(asked) == (attention == "eager")
    assert f"base: {attention} attention" in re.sub(r"\s+", " ", run(capsys, "tiny", *WORDS, "--attention", attention))


def test_an_attention_that_there_is_not_is_refused_before_anything_is_loaded(capsys, monkeypatch) -> None:
    monkeypatch.setattr(shapes, "random_model", lambda *_: pytest.fail("a model was made"))
    assert main.main(["bench", "tiny", *WORDS, "--attention", "flash"]) == 2
    assert "error: --attention: 'flash' is not known; use eager or sdpa" in capsys.readouterr().err


def test_without_matplotlib_the_command_says_how_to_get_curves(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    said = " ".join(run(capsys, "tiny", *WORDS, "--out", str(tmp_path / "out")).split())
    assert "Missing: curves: matplotlib draws them, so pip install 'liger-convert[bench]'" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bench.json"]


def test_a_model_whose_decoding_is_wrong_is_not_timed(capsys, monkeypatch, tmp_path: Path) -> None:
    real = sides.decode_as_generated

    def forgetful(model: Any) -> sides.Decode:
        def forgets(model: Any, cache: Any, token_B1: torch.Tensor, steps: int) -> Any:
            cache.layers[0].states["state"] = torch.zeros_like(cache.layers[0].states["state"])
            return whole(model, cache, token_B1, steps)

        whole = real(model)
        return forgets

    monkeypatch.setattr(bench, "decode_as_generated", forgetful)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("timed"))
    for precision in ("float32", "bfloat16"):
        words = ["bench", "tiny", *WORDS, "--precision", precision, "--out", str(tmp_path / "out")]
        assert main.main(words) == 1
        (complaint,) = capsys.readouterr().err.splitlines()
        assert complaint.startswith("error: linearized: decoding differs from prefill by")
        assert complaint.endswith("so nothing is timed")
        assert not (tmp_path / "out").exists()


def test_a_peer_whose_check_is_red_or_that_does_not_run_is_named_and_the_rest_stands(capsys, monkeypatch) -> None:
    real = sides.prefill

    def breaks(model: Any, *inputs: Any) -> torch.Tensor:
        if not hasattr(model.config, "linearization"):
            raise RuntimeError("no such kernel\nand a long trace")
        return real(model, *inputs)

    monkeypatch.setattr(bench, "prefill", breaks)
    found = run_json(capsys, "tiny")
    assert found["missing"]["base"] == "no such kernel"
    assert {row["model"] for row in found["rows"]} == {"linearized"}


def test_a_length_that_does_not_fit_into_memory_is_told_in_its_row_and_the_others_are_measured(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    real = sides.prefill

    def small(model: Any, cache: Any, ids_BT: torch.Tensor) -> torch.Tensor:
        if ids_BT.shape[1] == 150 and not hasattr(model.config, "linearization"):
            raise torch.OutOfMemoryError("too large")
        return real(model, cache, ids_BT)

    monkeypatch.setattr(bench, "prefill", small)
    found = run_json(capsys, "tiny", "--out", str(tmp_path / "out"))
    *_, sound, full = found["rows"]
    assert "prefill_ms" in sound
    assert (full["model"], full["error"], full["ratio"]) == ("base", "out of memory", None)
    assert "out of memory" in run(capsys, "tiny", *WORDS)


def test_a_base_that_does_not_fit_into_memory_costs_no_other_number(capsys, monkeypatch) -> None:
    real = shapes.random_model

    def small(shape: str, mixer: str | None, *where: Any) -> Any:
        if mixer is None:
            raise torch.OutOfMemoryError("too large")
        return real(shape, mixer, *where)

    monkeypatch.setattr(shapes, "random_model", small)
    found = run_json(capsys, "tiny")
    assert found["missing"][bench.BASE] == "out of memory"
    assert [row["tokens"] for row in found["rows"]] == LENGTHS


@pytest.mark.parametrize("mixer", ["gla", "gated-deltanet", "window"])
def test_a_shape_takes_any_mixer_in_every_layer_and_keeps_it_in_float32(mixer: str) -> None:
    model = shapes.random_model("tiny", mixer, CPU, torch.bfloat16)
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    assert [module.name for module in mixers] == [mixer] * 2
    assert {p.dtype for name, p in model.named_parameters() if ".mixer." in name} <= {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if ".mixer." not in name} == {torch.bfloat16}
    bench.check(side(model), bench.Options([8], 2, 1, 1, CPU, torch.bfloat16))


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_every_shape_can_be_built(shape: str) -> None:
    with torch.device("meta"):
        model = shapes.random_model(shape, None, torch.device("meta"), torch.bfloat16)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    named = {"smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.711, "llama-3.2-1b": 1.236}
    named |= {"llama-3.2-3b": 3.213, "llama-3-8b": 8.030, "mistral-7b": 7.248}
    assert billions == pytest.approx(named[shape], abs=6e-4)


def test_computing_in_float32_leaves_the_weights_as_they_were() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.bfloat16).eval()
    wide = AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.float32).eval()
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        narrow = model(ids).logits
        with bench.in_float32(model):
            found = model(ids).logits
        torch.testing.assert_close(found, wide(ids).logits)
        assert torch.equal(model(ids).logits, narrow)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_the_bytes_of_a_cache_are_those_its_tensors_hold() -> None:
    model = shapes.random_model("tiny", "gla", CPU, torch.float32)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        sides.prefill(model, cache, torch.arange(3, 90)[None])
    assert all(sides.cache_bytes(SimpleNamespace(layers=[layer])) == layer.nbytes() for layer in cache.layers)
    small = sides.cache_bytes(cache)
    cache.layers[0].ring["more"] = torch.zeros(1, 1000)[:, :1]
    assert sides.cache_bytes(cache) == small + 4000, "a view holds what it is a view of"


@pytest.mark.filterwarnings("ignore")
def test_the_static_cache_of_the_base_gives_what_its_dynamic_one_does(monkeypatch) -> None:
    model = shapes.random_model("tiny", None, CPU, torch.float32)
    monkeypatch.setattr(model, "get_compiled_call", lambda config: model.__call__)  # the compiler is not what is tested
    static = sides.Side(bench.STATIC, model, sides.static_caches(model), sides.decode_compiled)
    with torch.no_grad():
        assert bench.check(static, OPTIONS)["error"] < bench.LARGEST
        empty, ids = static.caches(40), torch.randint(3, 101, (2, 30))
        for _ in range(2):
            cache, other = empty(), DynamicCache(config=model.config)
            token = sides.prefill(model, cache, ids)
            chosen, logits = static.decode(model, cache, token, 5)
            expected, same = sides.decode(model, other, sides.prefill(model, other, ids), 5)
            assert torch.equal(chosen, expected)
            torch.testing.assert_close(logits, same)
    caches = sides.static_caches(model)
    assert caches(40)() is caches(40)(), "what is compiled for a cache is compiled once"
    assert caches(41)() is not caches(40)()


def test_the_limit_is_the_weights_read_once_and_each_products_done_once() -> None:
    config = tiny_config("llama", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    embedding, head = model.get_input_embeddings().weight.numel(), model.lm_head.weight.numel()
    everything = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    work = limits.work_of(model)
    assert work == (2 * (everything - embedding), everything - embedding - head - norms, head)
    device = limits.Limits(bandwidth=1e9, peak=1e12, bandwidth_by="", peak_by="")
    assert limits.least_ms(work, device, batch=1) == pytest.approx(work.weight_bytes / 1e6), "a step reads"
    products = 2 * 4 * (10**6 * work.weights + head)
    assert limits.least_ms(work, device, batch=4, tokens=10**6) == pytest.approx(products / 1e9), "a prompt multiplies"


def test_a_tied_embedding_is_read_as_the_head_and_of_experts_those_that_are_taken() -> None:
    tied = shapes.random_model("tiny", None, CPU, torch.float32)
    assert limits.work_of(tied).weight_bytes == 4 * sum(p.numel() for p in tied.parameters())
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.float32)
    config, total = model.config, limits.work_of(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    config.num_experts_per_tok, taken = config.num_local_experts, config.num_experts_per_tok
    idle = experts * (1 - taken / config.num_local_experts)
    assert idle > 0
    assert limits.work_of(model).weights - total.weights == pytest.approx(idle)
    assert limits.work_of(model).weight_bytes - total.weight_bytes == pytest.approx(4 * idle)


@pytest.mark.parametrize(("dtype", "measured"), [(torch.bfloat16, 0), (torch.float32, 1)])
def test_a_known_gpu_has_the_figures_of_its_data_sheet_and_what_is_not_known_is_measured(
    monkeypatch, dtype: torch.dtype, measured: int
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(limits, "_least_seconds", lambda *work: asked.append(work) or 1.0)
    monkeypatch.setattr(limits, "GPU_SIDE", 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: None)
    found = limits.limits_of(torch.device("cuda"), dtype)
    assert (found.bandwidth, found.bandwidth_by, len(asked)) == (4.8e12, "data sheet", measured)
    assert found.peak == (2 * 8**3 if measured else 989e12)
    here = limits.limits_of(CPU, dtype)
    assert (here.bandwidth, here.peak, len(asked)) == (2.0 * limits.COPIED, 2.0 * 64**3, measured + 2)


def test_what_a_copy_and_a_product_measure_is_a_rate_of_this_machine() -> None:
    found = limits.limits_of(CPU, torch.float32)
    assert 1e7 < found.bandwidth < 1e14
    assert 1e6 < found.peak < 1e14

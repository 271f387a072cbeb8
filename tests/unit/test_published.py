"""The published Liger layers and recipes, exactly: each layer against a plain loop of its own in float64, and what a
stage of each recipe is trained with, read off its trainer.

Shapes: B batch, T tokens, C hidden size, H query heads, G key-value heads, D head size, M slots.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SUITE, write_home
from tiny import save_tiny_base
from torch import Tensor

from liger_convert.cli import main
from liger_convert.config import recipe
from liger_convert.mixers import MIXERS, resolve_spec
from liger_convert.mixers.base import Mixer
from liger_convert.mixers.trained import BEHIND_WINDOW, BUDGET, WINDOW
from liger_convert.model.loading import linearize_base
from liger_convert.model.sequence import SequenceMetadata
from liger_convert.training import stage as training

B, T, H, G, D = 2, 43, 4, 2, 8
Memory = Callable[[Tensor, Tensor, Tensor, int], Tensor]
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PUBLISHED = ["smollm2-135m-liger-gla", "smollm2-135m-liger-hgrn2", "smollm2-135m-liger-gsa", "smollm2-135m-liger-gla-h"]
# rows of a micro-batch, and micro-batches of a step
MICRO_BATCHES = dict.fromkeys(PUBLISHED, (8, 1)) | {
    "llama-3-8b-liger-paper": (4, 2),
    "llama-3.2-1b-liger-paper": (8, 1),
    "mistral-7b-liger-paper": (4, 2),
}


# --- the layers


def liger_gla(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, slots: int) -> Tensor:
    S_DD, rows = torch.zeros(D, D).double(), []
    for q, k, v in zip(q_TD, k_TD, v_TD):
        a = (1 / (1 + (-k).exp())) ** (1 / 16)
        S_DD = a[:, None] * S_DD + torch.outer(k.exp() / k.exp().sum(), v)
        rows.append(q.exp() / q.exp().sum() @ S_DD)
    return torch.stack(rows)


def liger_hgrn2(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, slots: int) -> Tensor:
    S_DD, rows = torch.zeros(D, D).double(), []
    for q, k, v in zip(q_TD, k_TD, v_TD):
        a = 1 / (1 + (-k).exp())
        S_DD = a[:, None] * S_DD + torch.outer(1 - a, v)
        rows.append(q.exp() / q.exp().sum() @ S_DD)
    return torch.stack(rows)


def liger_gsa(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, slots: int) -> Tensor:
    K_MD, V_MD, rows, wide = torch.zeros(slots, D).double(), torch.zeros(slots, D).double(), [], D // slots
    for q, k, v in zip(q_TD, k_TD, v_TD):
        pooled = torch.stack([k[m * wide : (m + 1) * wide].sum() / wide for m in range(slots)])
        a = (1 / (1 + (-pooled).exp())) ** (1 / 16)
        K_MD = a[:, None] * K_MD + torch.outer(1 - a, k)
        V_MD = a[:, None] * V_MD + torch.outer(1 - a, v)
        p = (K_MD @ q).exp()
        rows.append(p / p.sum() @ V_MD)
    return torch.stack(rows)


def turned(x_TD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    left, right = x_TD.chunk(2, 1)
    return x_TD * cos_TD + torch.cat((-right, left), 1) * sin_TD


def windowed(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, window: int) -> Tensor:
    rows = []
    for t in range(T):
        seen = slice(max(0, t - window + 1), t + 1)
        p = (k_TD[seen] @ q_TD[t] / math.sqrt(D)).exp()
        rows.append(p / p.sum() @ v_TD[seen])
    return torch.stack(rows)


def layer(memory: Memory, attention: Any, x_BTC: Tensor, angles: Any, window: int, slots: int) -> Tensor:
    """The layer's output [B,T,C] from its weights, one sequence and one head at a time."""
    x_BTC, (cos_TD, sin_TD) = x_BTC.double(), (angle[0].double() for angle in angles)
    q, k, v = (getattr(attention, f"{name}_proj").weight.double() for name in "qkv")
    rows = []
    for x_TC in x_BTC:
        heads = []
        for h in range(H):
            g = h // (H // G)
            q_TD = x_TC @ q[h * D : (h + 1) * D].T
            k_TD, v_TD = (x_TC @ weight[g * D : (g + 1) * D].T for weight in (k, v))
            seen = windowed(turned(q_TD, cos_TD, sin_TD), turned(k_TD, cos_TD, sin_TD), v_TD, window)
            heads.append((memory(q_TD, k_TD, v_TD, slots) + seen) / 2)
        rows.append(torch.cat(heads, 1) @ attention.o_proj.weight.double().T)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"), tokenizer=False)


@torch.no_grad()
def error(
    base: Path, memory: Callable[..., Tensor], spec: dict[str, Any], *, window: int = 16, slots: int = D
) -> float:
    """The relative error of a layer with the mixer `spec`, compared with the loop."""
    plan = {"format": 2, "mixers": {"main": resolve_spec({"window": 16, **spec})}, "layers": ["main"] * 3}
    model = linearize_base(base, plan, dtype=torch.float32, attn_implementation="eager").eval()
    attention, x_BTC = (
        model.model.layers[1].self_attn,
        torch.randn(B, T, 32, generator=torch.Generator().manual_seed(0)),
    )
    positions = torch.arange(T)[None]
    angles = model.model.rotary_emb(x_BTC, positions)
    got_BTC, _ = attention(x_BTC, angles, metadata=SequenceMetadata.build(x_BTC, positions, None))
    expected_BTC = layer(memory, attention, x_BTC, angles, window, slots)
    return float((got_BTC - expected_BTC).norm() / expected_BTC.norm())


# T sums of a few roundings each, were they all to add up
EXACT = 10 * T * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("memory", "spec", "slots"),
    [
        (liger_gla, {"type": "liger-paper"}, D),
        (liger_hgrn2, {"type": "liger-hgrn2"}, D),
        (liger_gsa, {"type": "liger-gsa"}, D),
        (liger_gsa, {"type": "liger-gsa", "slots": 4}, 4),
    ],
    ids=["gla", "hgrn2", "gsa", "gsa, pooled"],
)
def test_a_published_layer_is_the_papers_loop(base: Path, memory: Memory, spec: dict[str, Any], slots: int) -> None:
    assert error(base, memory, spec, slots=slots) <= EXACT


NEAREST = {"scope": "all", "sinks": 0, "combine": "fixed", "gate_bias": 0.0}


@pytest.mark.parametrize(
    ("memory", "spec", "changes"),
    [
        (liger_hgrn2, {"type": "hgrn2", "lower_bound": 0.0, **NEAREST}, {}),
        (liger_gsa, {"type": "gsa", "slots": D, **NEAREST}, {}),
        (liger_hgrn2, {"type": "liger-paper"}, {}),
        (liger_hgrn2, {"type": "liger-hgrn2", "combine": "memory"}, {}),
        (lambda q, *rest: liger_gsa(q / math.sqrt(D), *rest), {"type": "liger-gsa"}, {}),
        (liger_gsa, {"type": "liger-gsa", "slots": 4}, {}),
        (liger_gsa, {"type": "liger-gsa"}, {"window": 17}),
        (liger_hgrn2, {"type": "liger-hgrn2", "scope": "evicted"}, {}),
    ],
    ids=["norm", "slots divided", "other gate", "no window", "scaled", "other slots", "other window", "evicted"],
)
def test_any_other_layer_is_told_from_the_papers(base: Path, memory: Memory, spec: Any, changes: Any) -> None:
    assert error(base, memory, spec, **changes) > 1e-3


@torch.no_grad()
def test_gates_that_are_all_shut_or_all_open_leave_finite_reads(base: Path) -> None:
    tokens = torch.randint(3, 101, (B, 200), generator=torch.Generator().manual_seed(0))
    for kind in ("liger-hgrn2", "liger-gsa"):
        plan = {"format": 2, "mixers": {"main": resolve_spec({"type": kind})}, "layers": ["main"] * 3}
        model = linearize_base(base, plan, dtype=torch.float32, attn_implementation="eager").eval()
        for attention in (each.self_attn for each in model.model.layers):
            attention.k_proj.weight *= 100
        assert model(tokens).logits.isfinite().all()


# --- what is left out

# whose output gate is a SiLU
SWISH = ("gla", "retnet", "gated-retention", "mamba", "mamba2", "gated-deltanet", "mom", "rwkv6")
# whose gates come from the layer's input
PROJECTED = ("gla", "gated-rfa", "mlstm", "mamba2", "rwkv6", "rwkv7", "deltanet", "gated-deltanet", "kda", "titans")
OF_A_PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


def has_paper(mixer: type[Mixer]) -> bool:
    return OF_A_PAPER.search(sys.modules[mixer.__module__].__doc__ or "") is not None


def test_every_mixer_of_a_paper_says_what_of_its_layer_it_has_not() -> None:
    silent = [name for name, mixer in MIXERS.items() if has_paper(mixer) and not vars(mixer).get("left_out")]
    assert silent == []
    assert [name for name, mixer in MIXERS.items() if not has_paper(mixer)] == ["window"]
    assert not MIXERS["window"].left_out


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("gla", "output norm"),
        *[(name, "`output_gate` with `output_gate_activation: silu`") for name in SWISH],
        ("lightning", "a rotation in the first layer"),
        ("kda", "`gate_proj` (of full rank instead of low rank)"),
        ("kda", "`output_gate` (of full rank, too)"),
        ("mlstm", "`conv_activation: silu` (of values, too)"),
        ("mamba", "a normalizer are added"),
        ("mamba2", "one query and one key for all heads"),
        ("mom", "separate projections"),
        ("mom", "`short_conv` with `conv_activation: silu` (before the router divides the tokens), `output_norm`"),
        ("s4", "a normalizer is added"),
        ("gateloop", "`output_gate`"),
        ("gsa", "output norm"),
        ("abc", "projection"),
        ("gateloop", "projection from the layer's input to the gate's angle"),
        ("hgrn2", "projection"),
        *[(name, "`gate_proj`") for name in PROJECTED],
        ("deltanet", "`short_conv` with `conv_activation: silu`"),
        ("gated-deltanet", "`output_norm`, `output_gate`"),
        ("rwkv7", "token shift"),
        ("rwkv7", "`bonus`"),
        ("rwkv6", "`token_shift`"),
        ("titans", "memory as layer"),
        ("titans", "off by default: `persistent`, `combine: gate`"),
        ("titans", "`model: mlp`"),
        ("ttt", "`inner_norm` (with the residual), `mini_batch: 16`"),
        ("s4", "skip"),
        ("mamba2", "`skip`"),
        ("forgetting", "`kv_shift`, `qk_norm`"),
    ],
)
def test_a_piece_that_is_left_out_is_told(name: str, piece: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["mixers", "--json"]) == 0
    assert piece in json.loads(capsys.readouterr().out)[name]["left_out"]
    page = (ROOT / "docs/mixers.md").read_text()
    assert f"| `{name}` | {MIXERS[name].left_out} |" in page


def test_mixers_that_lost_to_the_window_alone_say_so_and_at_which_budget(capsys: pytest.CaptureFixture[str]) -> None:
    table = (ROOT / "docs/results.md").read_text().partition("## Every mixer at equal tokens")[2].partition("###")[0]
    text = {name: float(ppl) for name, ppl in re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", table, re.M)}
    assert text.keys() == MIXERS.keys(), "the table of results has a row for every mixer"
    assert text["window"] == WINDOW
    assert {name: ppl for name, ppl in text.items() if ppl > WINDOW} == BEHIND_WINDOW
    assert main.main(["mixers", "--json"]) == 0
    told = {name: about["caution"] for name, about in json.loads(capsys.readouterr().out).items() if about["caution"]}
    assert told.keys() == BEHIND_WINDOW.keys()
    page = (ROOT / "docs/mixers.md").read_text()
    for name, sentence in told.items():
        assert BUDGET in sentence
        assert f"{text[name]:.2f}, with `window` {WINDOW}" in sentence
        assert f"- `{name}`: {sentence}\n" in page
    assert main.main(["mixers"]) == 0
    assert capsys.readouterr().out.count("  caution ") == len(told)


IN_WORDS = {
    "short_conv": "short convolution",
    "output_gate": "output gate",
    "output_norm": "output norm",
    "skip": "skip",
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_piece_that_is_an_option_is_told_by_its_name(name: str) -> None:
    missing, _, off = MIXERS[name].left_out.partition("off by default: ")
    options = asdict(MIXERS[name].Spec())
    for option in re.findall(r"`(\w+)`", off):
        assert options[option] in (0, False, "none"), f"{option} is on by default"
    assert [option for option, words in IN_WORDS.items() if option in options and words in missing] == []


# --- the recipes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_asks_for_the_released_numbers(name: str) -> None:
    loaded = recipe.load(RECIPES / f"{name}.yaml")
    mixer = {"gla": "liger-paper", "hgrn2": "liger-hgrn2", "gsa": "liger-gsa"}[name.split("-")[3]]
    assert resolve_spec(loaded.mixer.to_dict()) == resolve_spec({"type": mixer})  # all published values
    softmax = [i for i, kind in enumerate(loaded.layer_names(30)) if kind == "softmax"]
    assert softmax == ([7, 15, 23] if name.endswith("-h") else [])
    assert loaded.when_worse == "warn"
    (stage,) = loaded.stages
    assert stage.tokens == 2 * 5_573_269  # two epochs of what Alpaca's rows are to this tokenizer
    assert stage.steps == 1360
    (source,) = loaded.data.values()
    assert (source.id, source.format) == ("tatsu-lab/alpaca", "alpaca")
    for window in (16, 256):
        changed = recipe.load(RECIPES / f"{name}.yaml", [f"mixer.window={window}"])
        assert resolve_spec(changed.mixer.to_dict())["window"] == window


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_a_stage_of_a_published_recipe_is_trained_with_the_released_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_home(tmp_path, [])
    save_tiny_base("llama", tmp_path / "base", num_hidden_layers=9)
    rows = [{"instruction": f"Count to {i}.", "input": "", "output": " ".join(map(str, range(i)))} for i in range(60)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    (tmp_path / "suite.yaml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    trainers: list[Any] = []

    class Watched(training.StageTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    monkeypatch.setattr(training, "StageTrainer", Watched)
    changes = ["base=base", "device=cpu", "eval={suite: suite.yaml}", "stages[0].tokens=1024", "stages[0].seq_len=64"]
    changes += ["data.alpaca={source: file, path: alpaca.json, format: alpaca, held_out: 0.1}"]
    words = [word for change in changes for word in ("--set", change)]
    assert main.main(["run", str(RECIPES / f"{name}.yaml"), "--out", "out", *words]) == 0
    (trainer,) = trainers
    args, groups = trainer.args, trainer.optimizer.param_groups
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == MICRO_BATCHES[name]
    assert (args.warmup_steps, args.max_steps, args.lr_scheduler_type) == (0, 2, "constant_with_warmup")
    assert args.max_grad_norm >= 1e9
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0.01)]
    assert groups[0]["betas"] == (0.9, 0.999)
    dataset = trainer.train_dataset
    assert dataset.concat_documents
    assert dataset.responses_only
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (8, 8, 0)
    trained = {key.split(".lora_")[0].rpartition(".")[2] for key in trainer._trained()}
    assert trained == {"q_proj", "k_proj", "v_proj"}
    assert sum(".lora_A." in key for key in trainer._trained()) == 3 * 9  # softmax layers' too, as released

import inspect
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from liger_convert.config import recipe, recipe_errors, yaml_file
from liger_convert.config.fields import Strict
from liger_convert.config.recipe import Recipe
from liger_convert.config.sources import PydocSource
from liger_convert.config.stages import FinetuneStage
from liger_convert.eval import suites
from liger_convert.utils.errors import BadInput

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = """
version: 1
name: test
base: some/base
mixer: {type: gla, window: 64, sinks: 4, feature_map: hedgehog}
mixers: {other: {type: liger-paper}}
layers: LLN
data:
  text: {source: pydoc, held_out: 0.1}
  chat: {source: file, path: chat.json, format: alpaca}
stages:
  - {kind: align, data: text, tokens: 1e5, learning_rates: {mixer: 1e-2}}
  - {kind: finetune, data: chat, tokens: 50_000, learning_rates: {mixer: 1E-4, lora: 2e-4}, lora: {}}
eval: {text: text}
"""


def refusal(*overrides: str, text: str = RECIPE) -> str:
    with pytest.raises(BadInput) as error:
        recipe.parse(text, overrides, where="r.yaml")
    return str(error.value)


def test_defaults_are_filled_and_steps_counted():
    parsed = recipe.parse(RECIPE)
    align, finetune = parsed.stages
    assert (align.tokens, align.seq_len, align.batch_size) == (100_000, 512, 4)
    assert align.steps == 100_000 // (512 * 4)
    assert align.learning_rates.trained() == {"mixer": 0.01}
    assert isinstance(finetune, FinetuneStage)
    assert finetune.loss_on == "responses"
    assert finetune.lora is not None
    assert finetune.lora.targets == "attention"


def test_numbers_in_scientific_notation_are_numbers():
    rates = recipe.parse(RECIPE, ["stages[0].learning_rates={mixer: 1e-4, attention: 2E-05}"]).stages[0].learning_rates
    assert (rates.mixer, rates.attention) == (1e-4, 2e-5)


def test_a_dumped_recipe_reads_back_as_the_same_recipe():
    parsed = recipe.parse(RECIPE)
    assert recipe.Recipe.model_validate(parsed.dump()) == parsed
    assert parsed.dump()["mixers"] == {"other": {"type": "liger-paper"}}


def test_fingerprint_follows_the_meaning_and_not_the_writing():
    parsed = recipe.parse(RECIPE)
    assert (
        recipe.parse(RECIPE.replace("layers: LLN", "layers: LLN  # a comment\nseed: 0")).fingerprint()
        == parsed.fingerprint()
    )
    assert recipe.parse(RECIPE, ["seed=1"]).fingerprint() != parsed.fingerprint()


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("seed=7", lambda r: r.seed, 7),
        ("stages[0].tokens=2048", lambda r: r.stages[0].tokens, 2048),
        ("stages[1].lora.rank=2", lambda r: r.stages[1].lora.rank, 2),
        ("eval.limit=10", lambda r: r.eval.limit, 10),
        ("base_options.trust_remote_code=true", lambda r: r.base_options.trust_remote_code, True),
        ("layers={softmax_every: 4}", lambda r: r.layers.softmax_every, 4),
        ("layers={softmax_auto: 4}", lambda r: r.dump()["layers"]["softmax_auto"], 4),
        ("layers={softmax_auto: 4e0}", lambda r: repr(r.softmax_auto), "4"),
        ("layers={softmax_auto: 0.25}", lambda r: r.softmax_auto, 0.25),
        ("mixer.sinks=0", lambda r: r.mixer.sinks, 0),
        ("data.more={source: pydoc}", lambda r: r.data["more"].source, "pydoc"),
        ("base=a=b", lambda r: r.base, "a=b"),
    ],
)
def test_set_overrides_one_field(override, get, value):
    assert get(recipe.parse(RECIPE, [override])) == value


def test_set_does_not_reach_through_a_yaml_anchor():
    shared = RECIPE.replace("learning_rates: {mixer: 1e-2}", "learning_rates: &rates {mixer: 1e-2}")
    shared = shared.replace("eval:", "  - {kind: distill, data: text, tokens: 1e5, learning_rates: *rates}\neval:")
    parsed = recipe.parse(shared, ["stages[0].learning_rates.mixer=0.5"])
    assert [stage.learning_rates.mixer for stage in parsed.stages] == [0.5, 1e-4, 0.01]


def test_a_misspelt_key_is_named_with_its_path_and_the_nearest_right_name():
    assert (
        refusal("stages[1].learning_rates.mixr=1")
        == "r.yaml (after --set): stages[1].learning_rates.mixr: unknown key; did you mean 'mixer'?"
    )


def test_a_misplaced_key_is_told_where_it_belongs():
    assert "window: this key belongs to mixer.window, not here" in refusal("window=64")
    assert "stages[0].rank: this key belongs to stages[…].lora.rank, not here" in refusal("stages[0].rank=8")
    assert "kl_weight of kind distill" in refusal("stages[0].kl_weight=1")
    assert "stages[…].temperature of kind distill" in refusal("stages[0].temperature=1")
    assert "tokens: this key belongs to stages[…].tokens, not here" in refusal("tokens=1e6")
    assert refusal("data.text.path=x").endswith(
        "data.text.path: this key belongs to data.NAME.path of source file, not here; "
        "write a source of another kind as a whole: data.text={source: file, …}"
    )


def test_a_yaml_mistake_is_named_with_its_line():
    assert refusal(text="version: 1\nname: [a\n").startswith("r.yaml: line 3: not valid YAML")
    assert (
        refusal(text="version: 1\nname: a\nversion: 2\n")
        == "r.yaml: line 3: not valid YAML: the key 'version' appears twice"
    )


@pytest.mark.parametrize("written", ["010", "-010", "00", "0_10", "1:30", "-1:30", "1:30.5"])
def test_a_number_that_yaml_reads_in_another_base_is_refused_by_its_field(written):
    octal = "octal in YAML; write it without the zero, or in quotes"
    what = "in base 60 in YAML; write it in quotes" if ":" in written else octal
    assert refusal(text=f"version: 1\nseed: {written}\n").startswith(
        f"r.yaml: line 2: not valid YAML: seed: {written} is {what}"
    )
    assert f"{written} is {what}" in refusal(f"seed={written}")
    assert yaml_file.parse(f"[0, -0, 0.5, 0x10, 1e-05, '{written}', 089]", "") == [0, 0, 0.5, 16, 1e-5, written, "089"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages[0].learning_rates={}", "every group is frozen"),
        ("stages[0].learning_rates.lora=1e-3", "stages[0].learning_rates.lora: this stage has no `lora:` section"),
        (
            "stages[1].learning_rates={mixer: 1e-3}",
            "stages[1].learning_rates.lora: the `lora:` section needs a learning rate",
        ),
        ("stages[1].learning_rates.body=1e-5", "stages[1].learning_rates.body: with `lora:`"),
        ("stages[0].learning_rates.body=1e-5", "stages[0].learning_rates.body: alignment gives it no gradient"),
        ("stages[0].tokens=100", "stages[0].tokens: 100 is less than one optimizer step"),
        (
            "stages[0].mixed_seq_lens=[{seq_len: 100, fraction: 0.3}]",
            "stages[0].mixed_seq_lens[0].seq_len: 100 is not a proper divisor of seq_len",
        ),
        (
            "stages[0].mixed_seq_lens=[{seq_len: 512, fraction: 0.3}]",
            "stages[0].mixed_seq_lens[0].seq_len: 512 is not a proper divisor of seq_len",
        ),
        (
            "stages[0].mixed_seq_lens=[{seq_len: 64, fraction: 0.5}, {seq_len: 32, fraction: 0.5}]",
            "stages[0].mixed_seq_lens: its fractions leave no row of seq_len (512)",
        ),
        ("stages[1].copy_fraction=0.3", "stages[1].copy_fraction: copied text does not mark its responses"),
        ("stages[0].data=txt", "stages[0].data: 'txt' is not a source under `data:`; did you mean 'text'?"),
        ("stages[1].data=text", "stages[1].loss_on: source 'text' is text without responses"),
        ("stages[0].data={text: 0.7, chta: 0.3}", "stages[0].data.chta: 'chta' is not a source under `data:`; did you"),
        ("stages[0].data={text: 0.7, chat: 0.2}", "stages[0].data: its fractions add up to 0.9 and should add up to 1"),
        ("stages[0].data={text: 1.0, chat: 0}", "stages[0].data.text: should be a fraction of the tokens, above 0 and"),
        ("stages[0].data={text: 0.5, chat: .nan}", "stages[0].data.chat: should be a fraction of the tokens, above 0"),
        ("stages[0].data={text: 1.5, chat: -0.5}", "stages[0].data.text: should be a fraction of the tokens, above 0"),
        ("stages[0].data={text: half, chat: 0.5}", "stages[0].data.text: should be a fraction of the tokens, above 0"),
        ("stages[0].data={}", "stages[0].data: its fractions add up to 0"),
        ("stages[0].data=[text, chat]", "stages[0].data: should be the name of a source, or fractions by name"),
        ("stages[1].data={text: 0.5, chat: 0.5}", "stages[1].loss_on: source 'text' is text without responses"),
        ("data.own={source: teacher, tokens: 1e4, prompts: txt}", "data.own.prompts: 'txt' is not a source under"),
        ("data.own={source: teacher, tokens: 1e4, prompts: own}", "data.own.prompts: source 'own' is written by the"),
        ("data.own={source: teacher, tokens: 1e4, prompts: text, prompt: [A]}", "data.own.prompts: `prompt` already"),
        ("data.own={source: teacher, tokens: 1e4, prompts: text, prompt_tokens: 512}", "data.own.prompt_tokens: 512"),
        ("eval.text=chat", "eval.text: source 'chat' holds nothing out"),
        ("eval.text=books", "eval.text: 'books' is not a source"),
        ("eval.other_text=books", "eval.other_text: 'books' is not a source"),
        ("eval.other_text=text", "eval.other_text: source 'text' is text that the run reads as 'text'"),
        ("eval.other_text=chat", "eval.other_text: source 'chat' is text that the run reads as 'chat'"),
        ("data.chat.field=text", "data.chat.field: Alpaca rows have fixed columns"),
        ("data.chat={source: file, path: a, validation: b, held_out: 0.1}", "data.chat.held_out: validation already"),
        ("data.own={source: teacher, tokens: 100}", "data.own.tokens: 100 is less than one document"),
        ("data.own={source: teacher, tokens: 1e3, held_out: 0.1}", "data.own.held_out: holds out all documents"),
        ("data.text={source: teacher, tokens: 1e6}", "eval.text: source 'text' holds nothing out"),
        ("layers={repeat: [main, sofmax]}", "layers.repeat[1]: 'sofmax' is not a name; did you mean 'softmax'?"),
        ("layers=[main, sofmax, other]", "layers[1]: 'sofmax' is not a name; did you mean 'softmax'?"),
        ("layers={linear: [0], softmax: [1]}", "layers: give exactly one of"),
        ("layers=NNN", "layers: 'NNN' is not a pattern"),
        ("layers=3", "layers: should be all, letters such as LLLN, a list of names, or a mapping such as"),
        ("mixer.join=learned", "mixer.join: is called combine now"),
        ("mixers.other={type: gla, join: learned}", "mixers.other.join: is called combine now"),
        ("mixer={type: mom, inner: {type: gla, join: fixed}}", "mixer.inner.join: is called combine now"),
        ("mixers.main={type: gla}", "mixers.main: this name is reserved"),
        ("stages[1].lora.variant=dorra", "stages[1].lora.variant: 'dorra' is not a choice"),
        (
            "stages[1].lora={variant: pissa, dropout: 0.1}",
            "stages[1].lora.dropout: would drop parts of the base itself, which pissa's adapters start from",
        ),
        ("stages[1].lora.targets=body", "stages[1].lora.targets: should be attention, linearized, all, or a list"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(override, says):
    assert says in refusal(override)


@pytest.mark.parametrize("asks", ["stages[0].lora.variant=pissa", "adapt.lora_variant=pissa"])
def test_weight_decay_is_refused_where_adapters_hold_a_part_of_the_base(asks):
    decays = ["stages[0].weight_decay=0.1", "stages[0].learning_rates={mixer: 1e-3, attention: 1e-3}"]
    section = "adapt={hidden_size: 64}"
    if asks.startswith("stages"):
        decays[1], section = "stages[0].learning_rates={mixer: 1e-3, lora: 1e-3}", "stages[0].lora={}"
    assert refusal(section, asks, *decays).endswith(
        "stages[0].weight_decay: would shrink the base itself, which pissa's adapters start from, so set it to 0"
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=true", "seed: should be a whole number, not true"),
        ("stages[0].tokens=1.5", "stages[0].tokens: should be a whole number, not 1.5"),
        ("stages[0].learning_rates.mixer=.nan", "stages[0].learning_rates.mixer: should be a finite number"),
        ("stages[0].kind=algn", "stages[0].kind: 'algn' is not a kind; did you mean 'align'?"),
        ("stages[0]=3", "stages[0]: should be a mapping of fields, not 3"),
        ("mixer=gsa", 'mixer: should be a mapping of fields, such as {type: gsa}, not "gsa"'),
        ("data.text={}", "data.text: the field 'source' is required and missing"),
        ("precision=fp16", "precision: 'fp16' is not a choice; use one of auto, float32, bfloat16"),
        ("stages[0].copy_fraction=1.0", "stages[0].copy_fraction: should be less than 1, not 1.0"),
        ("data.own={source: teacher, tokens: 1e6, top_p: 0}", "data.own.top_p: should be greater than 0, not 0"),
        ("data.own={source: teacher, tokens: 1e6, prompt: []}", "data.own.prompt: list should have at least 1 item"),
        ("data.own={source: teacher, tokens: 1e6, prompt: A}", "data.own.prompt: should be a list"),
        ("version=2", "version: should be 1, not 2"),
        ("version=true", "version: should be 1, not true"),
        ("mixer.window=-1", "mixer.window: should be from 0 to 100,000,000, not -1"),
        ("base_options.revision=12", "base_options.revision: should be a string, not 12"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(override, says):
    assert says in refusal(override)


def test_true_is_no_number_in_any_field_of_a_recipe_or_a_suite() -> None:
    def sections(section: type[Strict]) -> Iterator[type[Strict]]:
        for inner in section.__subclasses__():
            yield inner
            yield from sections(inner)

    fields = [
        (section, name)
        for section in sections(Strict)
        for name, field in section.model_fields.items()
        if "bool" not in str(field.annotation) and not inspect.isabstract(section)
    ]
    assert {(Recipe, "version"), (suites.Task, "shots")} <= set(fields)
    for section, name in fields:
        with pytest.raises(ValidationError) as found:
            section.model_validate({name: True})
        assert name in {error["loc"][0] for error in found.value.errors() if error["loc"]}, (section, name)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "--set seed: write it as field=value"),
        ("a..b=1", "--set a..b=1: write it as field=value"),
        ("stages[9].tokens=1", "--set stages[9].tokens=1: [9] does not exist"),
        ("base.x=1", "--set base.x=1: 'x' does not exist"),
        ("seed=[", "--set seed=[: line 1: not valid YAML"),
    ],
)
def test_an_override_that_points_nowhere_is_refused(override, says):
    assert refusal(override).startswith(says)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_and_name_their_own_command(path):
    loaded = recipe.load(path)
    assert loaded.name == path.stem
    assert f"linearize run recipes/{path.name} --out runs/" in path.read_text()


def test_the_default_recipe_is_that_of_the_other_hybrids():
    default = recipe.load(RECIPES / "default.yaml").dump()
    for name in ("llama-3.2-1b", "llama-3-8b", "mistral-7b", "qwen3-1.7b", "qwen3-8b"):
        hybrid = recipe.load(RECIPES / f"{name}-hybrid.yaml").dump()
        assert {field for field in hybrid if default[field] != hybrid[field]} == {"name", "base"}
        linear = recipe.load(RECIPES / f"{name}-gla.yaml").dump()
        assert {field for field in linear if hybrid[field] != linear[field]} == {"name", "layers"}


@pytest.mark.parametrize(
    ("ablation", "mixer", "stage"),
    [
        ("windows of 16 to 256", {"window": 128}, {}),
        ("no window", {"combine": "memory"}, {}),
        ("random gates", {"gate": "random"}, {"learning_rates.mixer": 1e-3}),
        ("a feature map", {"feature_map": "hedgehog"}, {"learning_rates.mixer": 1e-3}),
        ("no LoRA", {}, {"learning_rates.lora": None, "learning_rates.attention": 1e-4, "lora": None}),
    ],
)
def test_an_ablation_in_the_header_of_the_published_recipe_changes_what_it_names_and_nothing_else(
    ablation, mixer, stage
):
    path = RECIPES / "smollm2-135m-liger-gla.yaml"
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("#   --set") and ablation in line]
    words = shlex.split(line.removeprefix("#").removesuffix(ablation))
    assert set(words[::2]) == {"--set"}
    expected = recipe.load(path).dump()
    expected["mixer"] |= mixer
    (trained,) = expected["stages"]
    for field, value in stage.items():
        section, _, key = field.rpartition(".")
        (trained[section] if section else trained)[key] = value
    assert recipe.load(path, words[1::2]).dump() == expected


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages[0].joined=true", "stages[0].joined: is called concat_documents now"),
        ("stages[0].shorter=[]", "stages[0].shorter: is called mixed_seq_lens now"),
        ("stages[0].repeats=0.5", "stages[0].repeats: is called copy_fraction now"),
        ("stages[0].rates.mixer=1e-3", "stages[0].rates: is called learning_rates now"),
        ("stages[1].clip=1.0", "stages[1].clip: is called max_grad_norm now"),
        ("stages[1].warmup=0.1", "stages[1].warmup: is called warmup_ratio now"),
        (
            "stages[0].mixed_seq_lens=[{seq_len: 128, share: 0.5}]",
            "stages[0].mixed_seq_lens[0].share: is called fraction now",
        ),
        ("mixer.join=shared", "mixer.join: is called combine now"),
    ],
)
def test_a_field_by_its_old_name_is_told_the_new_one(override, says):
    assert refusal(override) == f"r.yaml (after --set): {says}"


def test_every_field_is_described():
    models = [recipe.Recipe]
    for model in models:
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            models += [child for child in recipe_errors._models(field.annotation) if child not in models]
    assert len(models) > 15


def test_recipes_are_read_without_importing_torch():
    code = "import linearize_command, liger_convert.config.recipe, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


OTHER = "data.far={source: file, path: far.jsonl}"
OWN = "data.own={source: teacher, tokens: 1e4, prompts: far}"


def test_text_of_another_kind_is_the_one_that_is_named_or_pythons_documentation():
    named = recipe.parse(RECIPE, [OTHER, "eval.other_text=far"])
    assert named.other_source == named.data["far"]
    assert recipe.parse(RECIPE).other_source is None  # it trains on the documentation
    text = "data.text={source: file, path: a.jsonl, held_out: 0.1}"
    assert recipe.parse(RECIPE, [text]).other_source == PydocSource()
    assert recipe.parse(RECIPE, [text, "data.unread={source: pydoc}"]).other_source == PydocSource()
    assert (
        recipe.parse(RECIPE, [text, "data.read={source: pydoc, held_out: 0.1}", "eval.text=read"]).other_source is None
    )


def test_layers_are_not_chosen_on_text_of_another_kind():
    before = RECIPE.replace("  text: {source", "  far: {source: file, path: far.jsonl}\n  text: {source")
    auto = ["layers={softmax_auto: 1}"]
    assert recipe.parse(before, auto).given_texts[0] == "far"
    assert recipe.parse(before, [*auto, "eval.other_text=far"]).given_texts[0] == "text"


def test_layers_are_chosen_on_chats_only_where_there_is_no_plain_text():
    auto = ["layers={softmax_auto: 1}", "data.text={source: file, path: a.jsonl, format: messages, held_out: 0.1}"]
    assert recipe.parse(RECIPE, auto).given_texts[0] == "text"
    assert recipe.parse(RECIPE, [*auto, "data.plain={source: file, path: b.txt}"]).given_texts[0] == "plain"


@pytest.mark.parametrize(
    "source",
    [
        "{source: file, path: ./chat.json, format: alpaca}",
        "{source: file, path: other.json, validation: chat.json}",
        "{source: pydoc, format: messages}",
        "{source: teacher, tokens: 1e6}",
    ],
)
def test_text_that_is_trained_on_under_another_name_is_no_text_of_another_kind(source):
    said = refusal(f"data.far={source}", "eval.other_text=far")
    assert "eval.other_text: source 'far' is " in said
    assert recipe.parse(RECIPE, ["data.far={source: hub, id: a/b, split: test}", "eval.other_text=far"])


def test_a_file_of_a_folder_that_is_trained_on_is_no_text_of_another_kind():
    trained = "data.chat={source: file, path: texts, format: alpaca}"
    inside = "data.far={source: file, path: texts/far.jsonl}"
    assert "eval.other_text: source 'far' is " in refusal(trained, inside, "eval.other_text=far")
    assert recipe.parse(RECIPE, [trained, inside.replace("texts/", "texts2/"), "eval.other_text=far"])


HELD_OUT = "data.text={source: file, path: texts, held_out: 0.1}"
BOTH = "stages[0].data={text: 0.5, more: 0.5}"


@pytest.mark.parametrize(
    ("measured", "more"),
    [
        (HELD_OUT, "{source: file, path: ./texts}"),
        (HELD_OUT, "{source: file, path: texts, held_out: 0.05}"),
        (HELD_OUT, "{source: file, path: texts/a.jsonl}"),
        (HELD_OUT, "{source: file, path: texts, held_out: 0.1, field: body}"),
        ("data.text={source: file, path: a.jsonl, validation: b.jsonl}", "{source: file, path: b.jsonl}"),
        ("data.text={source: hub, id: a/b, validation: test}", "{source: hub, id: a/b, split: test, held_out: 0.5}"),
        ("seed=0", "{source: pydoc, format: messages}"),
    ],
)
def test_what_is_held_out_to_be_measured_is_not_trained_on_under_another_name(measured, more):
    said = refusal(measured, f"data.more={more}", BOTH)
    assert "data.more: the run would also read what source 'text' holds out to be measured (eval.text)" in said


@pytest.mark.parametrize(
    ("measured", "more"),
    [
        (HELD_OUT, "{source: file, path: texts, held_out: 0.2}"),
        (HELD_OUT, "{source: file, path: texts2}"),
        ("data.text={source: file, path: a.jsonl, validation: b.jsonl}", "{source: file, path: a.jsonl}"),
        (
            "data.text={source: file, path: a.jsonl, validation: b.jsonl}",
            "{source: file, path: c, validation: b.jsonl}",
        ),
        ("data.text={source: hub, id: a/b, validation: test}", "{source: hub, id: a/b}"),
        ("seed=0", "{source: pydoc, format: messages, held_out: 0.1}"),
        ("data.text={source: teacher, tokens: 1e4, held_out: 0.1}", "{source: teacher, tokens: 1e4}"),
    ],
)
def test_sources_that_share_a_text_may_hold_out_the_same_part_of_it(measured, more):
    assert recipe.parse(RECIPE, [measured, f"data.more={more}", BOTH])


def test_text_that_a_trained_source_continues_is_not_of_another_kind() -> None:
    trained = "stages[0].data={text: 0.5, own: 0.5}"
    said = refusal(OTHER, OWN, trained, "eval.other_text=far")
    assert "eval.other_text: source 'far' is text that the run reads as 'far'" in said
    assert recipe.parse(RECIPE, [OTHER, OWN, "eval.other_text=far"]).stages[0].data == "text"

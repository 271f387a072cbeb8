"""Bases that are broken on purpose: configs, tokenizers, chat templates and GGUF files. A command must refuse each with
one sentence, quickly, in little memory, and leave nothing on the disk. The cases are commands as a user would type
them."""

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import DEEP, DIGITS, ROW, check_refusal, hostile
from safetensors.torch import load_file
from tiny import save_tiny_base
from transformers import AutoModelForCausalLM
from worlds import World, after, case, files, wrote

from liger_convert.cli import main


def config(**changes: object) -> Callable[[World], list[str]]:
    return after(lambda w: w.config(**changes), World.run)


def tokenizer(**changes: object) -> Callable[[World], list[str]]:
    """`model__vocab` stands for the field vocab of model."""

    def change(w: World) -> None:
        path = w.base / "tokenizer.json"
        data = json.loads(path.read_text())
        for name, value in changes.items():
            *outer, last = name.split("__")
            (data[outer[0]] if outer else data)[last] = value
        path.write_text(json.dumps(data))

    return after(change, World.run)


def template(text: str) -> Callable[[World], list[str]]:
    return after(wrote("base/chat_template.jinja", text), lambda w: ["generate", str(w.base), "--prompt", "hi"])


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(
    fields: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0)
) -> Callable[[World], list[str]]:
    """counts: of tensors and of fields, as the header says."""
    data = b"GGUF" + struct.pack("<IQQ", 3, *counts) + fields + tensors
    return after(wrote("x.gguf", data), lambda w: w.run("base=x.gguf"))


def configured(changes: dict[str, object]) -> Callable[[World], object]:
    return lambda w: w.config(**changes)


def settings(written: dict[str, object]) -> Callable[[World], object]:
    return wrote("base/generation_config.json", json.dumps(written))


def sharded(**fields: object) -> Callable[[World], object]:
    """The weights become one shard with an index, which has these fields besides its weight_map."""

    def change(w: World) -> None:
        names = load_file(w.base / "model.safetensors")
        (w.base / "model.safetensors").rename(w.base / "one.safetensors")
        index = {"weight_map": dict.fromkeys(names, "one.safetensors"), **fields}
        (w.base / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def generate(w: World) -> list[str]:
    return ["generate", str(w.base), "--prompt", "hi"]


def evaluate(w: World) -> list[str]:
    return ["eval", str(w.base), "--text", "text.jsonl"]


CONFIGS = [
    case("ten million layers", "num_hidden_layers should be from 1 to 1,024", config(num_hidden_layers=10**7)),
    case("a vocabulary of 10^12", "vocab_size should be from", config(vocab_size=10**12)),
    case("a context of 1", "max_position_embeddings should be from 2 to", config(max_position_embeddings=1)),
    *(
        case(f"rotary parameters: {says}", f"config.json: {says}", config(**{name: written}))
        for name, written, says in [
            ("rope_parameters", "linear", 'rope_parameters should be a mapping with a rope_type, not "linear"'),
            ("rope_scaling", [2.0], "rope_scaling should be a mapping with a rope_type, not [2.0]"),
            ("rope_scaling", {"type": "linear", "factor": "2"}, "rope_scaling.factor should be a number above 0"),
            ("rope_parameters", {"rope_type": None}, "rope_type None is unknown"),
            *(
                ("rope_parameters", {"rope_type": kind, name: value}, f"rope_parameters.{name} should be {wanted}")
                for kind, name, value, wanted in [
                    ("linear", "factor", [2], "a number above 0, not [2]"),
                    ("yarn", "factor", None, "a number above 0, not null"),
                    ("yarn", "attention_factor", "1", 'a number above 0, not "1"'),
                    ("llama3", "original_max_position_embeddings", 0, "a number above 0, not 0"),
                    ("longrope", "long_factor", [1.0, 0.0], "a list of numbers above 0, not [1.0, 0.0]"),
                    ("longrope", "short_factor", [], "a list of numbers above 0, not []"),
                    ("default", "rope_theta", None, "a number above 0, not null"),
                    ("default", "partial_rotary_factor", 2.0, "a fraction of a head, at most 1, not 2.0"),
                ]
            ),
        ]
    ),
    case(
        "rotary parameters of one kind of layer",
        "config.json: rope_parameters.full_attention.factor should be a number above 0, not true",
        config(rope_parameters={"full_attention": {"rope_type": "linear", "factor": True}}),
    ),
    *(
        case(f"a window of {size}", f"sliding_window should be from 1 to {1 << 40:,}", config(sliding_window=size))
        for size in (0, -1)
    ),
    *(
        case(
            f"sliding layers without a window: {says}",
            f"config.json: layer_types has sliding_attention, but {says}; give a size",
            after(
                configured({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3, **fields}), World.convert
            ),
        )
        for fields, says in [
            ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is null"),
            ({"use_sliding_window": False, "sliding_window": 8}, "use_sliding_window is false"),
        ]
    ),
    *(
        case(
            f"no scale of queries, for {command.__name__}",
            "config.json: rope_parameters.llama_4_scaling_beta should be a number, by which ministral3 scales its",
            after(
                lambda w: save_tiny_base("ministral3", w.base, rope_parameters={"rope_type": "default"}),
                command,
            ),
        )
        for command in (World.convert, generate)
    ),
    case(
        "an encoder",
        "config.json: is_encoder_decoder is true, but a decoder alone",
        after(configured({"is_encoder_decoder": True}), World.convert),
    ),
    *(
        case(
            f"a head size that attention ignores, for {command.__name__}",
            "config.json: head_dim is 16, but stablelm computes with 8, hidden_size / num_attention_heads",
            after(lambda w: save_tiny_base("stablelm", w.base, head_dim=16), command),
        )
        for command in (World.run, World.convert, generate)
    ),
    case("no hidden size", "hidden_size should be from", config(hidden_size=0)),
    case("negative heads", "num_attention_heads should be from", config(num_attention_heads=-4)),
    case("a string for a size", 'intermediate_size should be a whole number, not "48"', config(intermediate_size="48")),
    case("a fraction for a size", "head_dim should be a whole number", config(head_dim=8.5)),
    case("a NaN", "rms_norm_eps should be a finite number, not nan", config(rms_norm_eps=float("nan"))),
    case("heads that do not divide", "is not a multiple of num_key_value_heads", config(num_key_value_heads=3)),
    case("a list", "config.json: must hold a JSON object", after(wrote("base/config.json", "[]"), World.run)),
    case(
        "deep",
        "config.json: cannot be read as JSON: it is nested",
        after(wrote("base/config.json", DEEP), World.convert),
    ),
    case(
        "digits",
        "it contains an integer with thousands",
        after(wrote("base/config.json", f'{{"a": {DIGITS}}}'), World.convert),
    ),
    *(
        case(f"{name} for {command.__name__}", f"config.json: {says}", after(configured({name: value}), command))
        for command in (World.run, generate)
        for name, value, says in (
            ("sliding_window", 8, "sliding_window is no setting of llama, yet transformers would shorten its cache"),
            ("layer_types", ["full_attention"] * 3, "layer_types is no setting of llama"),
        )
    ),
    case(
        "for generate as well",
        "num_hidden_layers should be",
        after(lambda w: w.config(num_hidden_layers=10**7), lambda w: ["generate", str(w.base), "--prompt", "hi"]),
    ),
    case(
        "generation config",
        "generation_config.json: must hold",
        after(wrote("base/generation_config.json", "[]"), World.convert),
    ),
]
WEIGHTS = [
    case(
        f"an index whose metadata is {metadata}, for {command.__name__}",
        "model.safetensors.index.json: has no metadata, without which transformers fails",
        after(sharded(**metadata), command),
    )
    for command in (World.convert, generate)
    for metadata in ({}, {"metadata": None})
] + [
    case(
        "an index that places a tensor in no file",
        "weight_map places lm_head.weight in '', which is not the name of a file beside it",
        after(sharded(metadata={}, weight_map={"lm_head.weight": ""}), World.convert),
    ),
    case(
        "an index with a byte order mark",
        "model.safetensors.index.json: transformers cannot load it: Unexpected UTF-8 BOM",
        after(
            sharded(metadata={}),
            lambda w: (index := w.base / "model.safetensors.index.json").write_text("\ufeff" + index.read_text()),
            generate,
        ),
    ),
]
GENERATION = [
    case(f"{name}, for {command.__name__}", f"generation_config.json: {says}", after(settings(written), command))
    for command in (World.convert, generate, evaluate)
    for name, written, says in (
        ("settings that contradict", {"num_return_sequences": 2}, "transformers cannot read it: Greedy methods"),
        ("a limit of nothing", {"max_new_tokens": 0}, "transformers cannot read it: `max_new_tokens` must be"),
        ("an end that is a word", {"eos_token_id": ["x"]}, "eos_token_id is 'x'; it should be the id of one of the"),
        ("an end beyond the tokens", {"eos_token_id": 101}, "eos_token_id is 101; it should be the id of one of the"),
    )
]
TOKENIZERS = [
    *(
        case(
            f"file of {text[:9]!r}",
            "base: its tokenizer cannot be used",
            after(wrote("base/tokenizer.json", text), World.run),
        )
        for text in ("", "{}", "[]", "3", DEEP)
    ),
    case("wrong types", "tokenizer cannot be used", tokenizer(model=3)),
    case(
        "panic in a normalizer",
        "tokenizer cannot be used",
        tokenizer(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    ),
    case(
        "panic while loading",
        "tokenizer cannot be used",
        tokenizer(model__continuing_subword_prefix="####", model__merges=[["!", "!"]]),
    ),
    case(
        "panic in a template",
        "tokenizer cannot be used",
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "z", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
    ),
    case(
        "no vocabulary",
        "no usable vocabulary",
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
    ),
    case(
        "another model's",
        "its tokenizer has 70 tokens beyond the model's 29 embeddings",
        after(lambda w: w.config(vocab_size=29), lambda w: ["generate", str(w.base), "--prompt", "hi"]),
    ),
    case(
        "text with a token beyond the model",
        "text.jsonl line 2: contains '<picture>', token 99, but the model has 99 embeddings",
        after(
            wrote("text.jsonl", ROW + '{"text": "a <picture> of it"}\n'),
            lambda w: w.config(vocab_size=99),
            tokenizer(
                added_tokens=[
                    {
                        "id": 7000,
                        "content": "<picture>",
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": True,
                    }
                ]
            ),
        ),
    ),
    case(
        "a config of nonsense",
        "tokenizer cannot be used",
        after(wrote("base/tokenizer_config.json", '{"tokenizer_class": 5}'), World.run),
    ),
    case(
        "a config that is no object",
        "tokenizer_config.json: must hold",
        after(wrote("base/tokenizer_config.json", "3"), World.run),
    ),
    case("a config that is deep", "it is nested too deeply", after(wrote("base/added_tokens.json", DEEP), World.run)),
]
TEMPLATES = [
    case("syntax error", "the chat template has an error in line 1", template("{% for %}")),
    case(
        "loops",
        "does not finish",
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ),
    case(
        "one long loop",
        "the chat template fails on these messages (OverflowError",
        template("{% for i in range(10**12) %}{% endfor %}"),
    ),
    case("a power", "does not finish", template("{{ 9 ** (9 ** 9) }}")),
    case("a long text", "asks for more than 512 MiB", template("{{ 'a' * messages|length * 10 ** 10 }}")),
    case(
        "a text that doubles",
        "asks for more than 512 MiB",
        template("{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"),
    ),
    *(
        case(f"no content: {text[:30]}", "the chat template does not show the text of a message", template(text))
        for text in (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}",
            "{% for m in messages %}{{ m.value }}</s>{% endfor %}",
        )
    ),
    case("a division by zero", "fails on these messages (ZeroDivisionError", template("{{ 1 / 0 }}")),
    case("brackets", "the chat template", template("{{" + "(" * 5_000 + "1" + ")" * 5_000 + "}}")),
]
KEY = string(b"key")
GGUFS = [
    case("2^60 tensors", "says that it has 1,152,921,504,606,846,976 tensors", gguf(counts=(2**60, 0))),
    case("2^60 fields", "1,152,921,504,606,846,976 fields", gguf(counts=(0, 2**60))),
    case(
        "string of 2^60",
        "a field's name has 1,152,921,504,606,846,976 bytes",
        gguf(struct.pack("<Q", 2**60) + bytes(9), counts=(0, 1)),
    ),
    case(
        "value of 2^60",
        "key has 1,152,921,504,606,846,976 bytes",
        gguf(KEY + struct.pack("<IQ", 8, 2**60), counts=(0, 1)),
    ),
    case(
        "array of 2^40", "1,099,511,627,776 items in key", gguf(KEY + struct.pack("<IIQ", 9, 4, 2**40), counts=(0, 1))
    ),
    case("array of 2^40 strings", "items in key", gguf(KEY + struct.pack("<IIQ", 9, 8, 2**40), counts=(0, 1))),
    case(
        "arrays inside arrays",
        "arrays inside arrays",
        gguf(KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(200), counts=(0, 1)),
    ),
    case("a type that there is not", "has the unknown type 77", gguf(KEY + struct.pack("<I", 77), counts=(0, 1))),
    case("a field twice", "it has the field 'key' twice", gguf((KEY + struct.pack("<II", 4, 1)) * 2, counts=(0, 2))),
    case("cut off", "is cut off", gguf(KEY + b"\4", counts=(0, 1))),
    case(
        "a tensor beyond the file",
        "its tensors would end at byte",
        gguf(tensors=string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 2**40), counts=(1, 0)),
    ),
    case(
        "a tensor of 2^60",
        "its tensors would end at byte",
        gguf(tensors=string(b"t") + struct.pack("<IQIQ", 1, 2**60, 0, 0), counts=(1, 0)),
    ),
    case(
        "alignment",
        "is not a power of two",
        gguf(string(b"general.alignment") + struct.pack("<II", 4, 3), counts=(0, 1)),
    ),
    case(
        "ten million layers",
        "num_hidden_layers should be from 1 to 1,024",
        gguf(string(b"llama.block_count") + struct.pack("<II", 4, 10**7), counts=(0, 1)),
    ),
    case(
        "layers without tensors",
        "says that it has 9 layers, but has tensors for 0",
        gguf(string(b"llama.block_count") + struct.pack("<II", 4, 9), counts=(0, 1)),
    ),
    case(
        "version 9",
        "cannot be read as a GGUF model",
        after(wrote("x.gguf", b"GGUF" + struct.pack("<IQQ", 9, 0, 0)), lambda w: w.run("base=x.gguf")),
    ),
]


@hostile(
    {
        "configs": CONFIGS,
        "weights": WEIGHTS,
        "generation": GENERATION,
        "tokenizers": TOKENIZERS,
        "templates": TEMPLATES,
        "gguf": GGUFS,
    }
)
def test_a_hostile_base_is_refused_in_one_sentence_and_nothing_is_left(world, words, says, code, capfd):
    check_refusal(world, words, says, code, capfd)


def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


# what a user without rights sees, for root too, who may read everything
CLOSED = {
    "weights for convert": (
        "liger_convert.io.checkpoint.safe_open",
        refused,
        World.convert,
        "model.safetensors: cannot be read (Permission denied)",
    ),
    "a file for run": (
        "liger_convert.pipeline.recorded_inputs.sha256_file",
        refused,
        World.run,
        ": cannot be read (Permission denied)",
    ),
    "a folder for convert": (
        "os.access",
        lambda *_, **__: False,
        World.convert,
        "base: this folder cannot be read (Permission denied)",
    ),
}


@pytest.mark.parametrize("what", CLOSED)
def test_what_the_user_may_not_read_is_no_damage_and_no_trouble_with_the_disk(world, what, monkeypatch, capfd):
    place, instead, words, says = CLOSED[what]
    monkeypatch.setattr(place, instead)
    check_refusal(world, words, says, 2, capfd)


@pytest.mark.parametrize("damage", [Path.unlink, lambda shard: os.truncate(shard, 100)], ids=["removed", "cut off"])
def test_weights_that_change_while_they_are_read_are_no_bug(world, damage, monkeypatch, capfd):
    def spoil_then_load(folder: Path, **options: object) -> object:
        damage(world.base / "one.safetensors")
        return load(folder, **options)

    load = AutoModelForCausalLM.from_pretrained
    sharded(metadata={})(world)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spoil_then_load)
    before = files(world.folder)
    assert main.main(generate(world)) == 2
    assert f"error: {world.base}: transformers cannot load it: " in capfd.readouterr().err
    assert files(world.folder) <= before


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 2}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (
            "llama",
            {"rope_parameters": ROPE | LISTS},
            "long_factor should have 4 numbers, one for each pair of channels",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the number of experts, 4"),
        (
            "gemma2",
            {"attn_logit_softcapping": 0.0},
            "attn_logit_softcapping should be a number above 0, or null, not 0.0",
        ),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar should be a number above 0, or null, not -4"),
    ],
    ids=["longrope", "experts", "softcap", "scalar"],
)
def test_a_config_that_only_fails_once_it_runs_is_refused_by_convert(
    family: str, changes: dict[str, object], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, out = save_tiny_base(family, tmp_path / "base"), tmp_path / "out"
    assert main.main(["convert", str(base), str(out), "--window", "8"]) == 0, "without the change"
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))
    capfd.readouterr()
    assert main.main(["convert", str(base), str(tmp_path / "other"), "--window", "8"]) == 2
    assert says in capfd.readouterr().err
    assert not (tmp_path / "other").exists()

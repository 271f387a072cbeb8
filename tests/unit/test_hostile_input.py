"""Data, configs, tokenizers and files that are broken on purpose: one sentence, quickly, in little memory, and nothing
left on the disk. The cases are commands as a user would type them."""

import gzip
import json
import lzma
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import World, after, case, files, wrote

from liger_convert.cli import main
from liger_convert.config import yaml_file

ROW = '{"text": "a line of text that is long enough"}\n'
DEEP = "[" * 100_000
DIGITS = "9" * 5_000


def rows(text: str | bytes, name: str = "text.jsonl") -> Callable[[World], list[str]]:
    return after(wrote(name, text), lambda w: w.run(f"data.text.path={name}"))


def recipe(text: str | bytes) -> Callable[[World], list[str]]:
    return after(wrote("recipe.yaml", text), World.run)


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


def task(name: str, *docs: object) -> Callable[[World], list[str]]:
    """A suite of one task, whose local file has these rows."""
    metric = "contains" if name.startswith(("squad", "niah")) else "acc"
    stem = {"squad_ctx": "squad_1k"}.get(name, name)
    suite = f"description: x\ntasks: [{{name: {name}, metrics: [{metric}]}}]\n"
    return after(
        wrote("s.yaml", suite),
        wrote(f"{stem}.jsonl", "".join(json.dumps(doc) + "\n" for doc in docs)),
        lambda w: ["eval", str(w.base), "--suite", "s.yaml", "--data", str(w.folder)],
    )


ROWS = [
    case(
        "lone surrogate", r"text.jsonl line 2: cannot be used: it contains \ud800", rows(ROW + '{"text": "\\ud800"}\n')
    ),
    case("integer of 5,000 digits", "line 1: cannot be used: it contains an integer", rows(f'{{"text": {DIGITS}}}\n')),
    case("deep nesting", "line 1: cannot be used: it is nested too deeply", rows(f'{{"text": {DEEP}\n')),
    case("deep .json", "x.json line 1: cannot be used: it is nested too deeply", rows(DEEP, "x.json")),
    case(
        "surrogate in .json", "x.json line 2: cannot be used", rows('[{"text": "a"},\n{"text": "\\udfff"}]', "x.json")
    ),
    case(".json that goes on", "x.json line 3: is not JSON (Extra data", rows('[{"text": "a"}]\n\n{}', "x.json")),
    case(".json that ends early", "x.json line 1: is not JSON", rows('[{"text": "a"}, {"text": "b', "x.json")),
    case("NUL bytes", "line 1: is not UTF-8 text (it contains a NUL", rows(b"\0" * 100)),
    case("UTF-16", "line 1: is not UTF-8 text", rows(ROW.encode("utf-16"))),
    case("UTF-16 without a mark", "it contains a NUL, as UTF-16 does", rows(ROW.encode("utf-16-le"), "x.txt")),
    case("invalid UTF-8", "line 2: is not UTF-8 text", rows(ROW.encode() + b'{"text": "\xff"}\n')),
    case("only blank lines", "text.jsonl: is empty", rows("\r\n \n\t\n")),
    case("a mark and nothing else", "text.jsonl: is empty", rows("\ufeff")),
    case("a row that is no object", "line 1: is a JSON list", rows("[1]\n")),
    case("cut .gz", "x.jsonl.gz: cannot be read", rows(gzip.compress(ROW.encode() * 9)[:-9], "x.jsonl.gz")),
    case(
        "corrupt .xz", "x.jsonl.xz: cannot be read", rows(lzma.compress(ROW.encode())[:-20] + b"x" * 20, "x.jsonl.xz")
    ),
    case("no .gz at all", "x.txt.gz: cannot be read", rows(ROW, "x.txt.gz")),
]
RECIPES = [
    case("integer of 5,000 digits", "a number with 5,000 digits", recipe(f"name: a\nseed: {DIGITS}\n")),
    case("hexadecimal bomb", "a number with 5,002 digits", lambda w: w.plan("seed=0x" + "f" * 5_000)),
    case("digits in a path", "write it as field=value", lambda w: w.plan(f"stages[{DIGITS}].tokens=1")),
    case("deep nesting", "nested too deeply", recipe(DEEP)),
    case("deep mappings", "nested too deeply", recipe("{a: " * 100_000)),
    case("NUL bytes", "unacceptable character", recipe("name: a\0b\n")),
    case("UTF-16", "save it as UTF-8", recipe("name: a\n".encode("utf-16"))),
    case("tabs", "line 2: not valid YAML", recipe("mixer:\n\ttype: gla\n")),
    case("a tag that runs code", "line 1: not valid YAML", recipe("name: !!python/object/apply:os.system [ls]\n")),
    case("a date that is none", "line 1: not valid YAML: this is not a valid timestamp", recipe("name: 2024-13-45\n")),
    case("lone surrogate", "half of a surrogate pair", recipe('name: "\\ud800"\n')),
    case("a key that is a list", "line 1: not valid YAML: a key that is a list", recipe("? [a]\n: b\n")),
    case("a key that is a number", "line 1: not valid YAML: the key 1 is not a string", recipe("1: b\n")),
    case("an alias of itself", "an alias inside the value that it refers to", recipe("a: &a [*a]\n")),
    case(
        "billion laughs",
        "more than 20,000 values",
        recipe(
            "a: &a [x]\n"
            + "".join(
                f"{b}: &{b} [{'*' + a + ',' * 9}]\n".replace(",", f", *{a}") for a, b in zip("abcdefgh", "bcdefghi")
            )
        ),
    ),
    case(
        "merges of merges",
        "more than 20,000 values",
        recipe(
            "a: &a {x: 1}\n"
            + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in zip("abcdefghijklmno", "bcdefghijklmnop"))
        ),
    ),
    case("a list of a million", "more than 20,000 values", recipe("[" + "a," * 400_000 + "]")),
    case("more than a megabyte", "is too large", recipe("#" * (yaml_file.MAX_BYTES + 1))),
    case(
        "suite that is a bomb", "nested too deeply", after(wrote("s.yaml", DEEP), lambda w: w.run("eval.suite=s.yaml"))
    ),
]
STAGE = "stages[0]"
BOUNDS = [
    case(value, f"{value.partition('=')[0]}: should be from", lambda w, value=value: w.run(value))
    for value in (
        *(f"{STAGE}.tokens={x}" for x in ("1e30", "0", "-1")),
        f"{STAGE}.seq_len=1000000000",
        f"{STAGE}.batch_size=1000000000",
        f"{STAGE}.grad_accumulation=1e9",
        *(f"{STAGE}.learning_rates.mixer={x}" for x in ("1e30", "1e-300", "0", "-1")),
        f"{STAGE}.max_grad_norm=0",
        f"{STAGE}.weight_decay=1e300",
        "mixer.window=1000000000000",
        "mixer.sinks=1000000000",
        "mixer.codes=1000000000",
        *(f"seed={x}" for x in ("-1", str(2**80), str(2**31))),
        *(f"eval.limit={x}" for x in ("0", "-1", "1000000000000")),
        "eval.processes=1000000",
        "eval.batch_size=1000000000",
    )
] + [
    case(
        "LoRA rank",
        "stages[0].lora.rank: should be from 1 to 65,536",
        lambda w: w.run(f"{STAGE}.lora={{rank: 1000000000}}"),
    ),
    case(
        "teacher's temperature",
        "data.own.temperature: should be from 0.001 to 1,000",
        lambda w: w.run("data.own={source: teacher, tokens: 99, temperature: 1e-300}"),
    ),
    case(
        "option of an inner mixer",
        "mixer.inner.codes: should",
        lambda w: w.run("mixer={type: mom, inner: {codes: 1e9}}"),
    ),
    case("seed of convert", "--seed", lambda w: w.convert("--seed", str(2**80))),
    case("negative seed of convert", "--seed", lambda w: w.convert("--seed", "-1")),
    case("window of convert", "mixer.window: should be", lambda w: w.convert("--window", "1000000000000")),
    case("limit of eval", "--limit", lambda w: ["eval", str(w.base), "--limit", str(10**12)]),
    case(
        "temperature of generate",
        "temperature: should be 0, or from",
        lambda w: ["generate", str(w.base), "--prompt", "hi", "--temperature", "1e-300"],
    ),
    case(
        "top_p of generate", "top_p: should be", lambda w: ["generate", str(w.base), "--prompt", "hi", "--top-p", "0"]
    ),
    case("prompt that is no text", "not UTF-8 text", lambda w: ["generate", str(w.base), "--prompt", "\udcff"]),
    case("length of bench", "--lengths", lambda w: ["bench", str(w.base), "--lengths", DIGITS]),
]
CONFIGS = [
    case("ten million layers", "num_hidden_layers should be from 1 to 1,024", config(num_hidden_layers=10**7)),
    case("a vocabulary of 10^12", "vocab_size should be from", config(vocab_size=10**12)),
    case("no hidden size", "hidden_size should be from", config(hidden_size=0)),
    case("negative heads", "num_attention_heads should be from", config(num_attention_heads=-4)),
    case("a string for a size", "intermediate_size should be a whole number, not '48'", config(intermediate_size="48")),
    case("a fraction for a size", "head_dim should be a whole number", config(head_dim=8.5)),
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
PIQA = {"goal": "a", "sol1": "b", "sol2": "c", "label": 1}
HELLASWAG = {
    "ind": 1,
    "activity_label": "a",
    "ctx_a": "b",
    "ctx_b": "c",
    "ctx": "b c",
    "endings": ["d", "e"],
    "label": "1",
}
TASKS = [
    case(
        "hidden label",
        "piqa.jsonl line 2: does not fit task piqa: its label -1",
        task("piqa", PIQA, PIQA | {"label": -1}),
    ),
    case("label beyond the choices", "line 1: does not fit task piqa: IndexError", task("piqa", PIQA | {"label": 2})),
    case(
        "empty label",
        "hellaswag.jsonl line 3: does not fit task hellaswag: ValueError",
        task("hellaswag", HELLASWAG, HELLASWAG, HELLASWAG | {"label": ""}, HELLASWAG),
    ),
    case(
        "letter that is no choice",
        "arc_easy.jsonl line 1: does not fit",
        task("arc_easy", {"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "Z"}),
    ),
    case(
        "field that is missing",
        "squad_1k.jsonl line 1: does not fit task squad_ctx",
        task("squad_ctx", {"context": "a", "question": "b"}),
    ),
    case(
        "answers that are a text",
        "line 1: does not fit task squad_ctx",
        task("squad_ctx", {"context": "a", "question": "b", "answers": "c"}),
    ),
    case(
        "no answer",
        "line 2: does not fit task squad_ctx",
        task(
            "squad_ctx",
            {"context": "a", "question": "b", "answers": ["x"]},
            {"context": "a", "question": "b", "answers": []},
        ),
    ),
    case("integer beyond 64 bits", "piqa", task("piqa", PIQA | {"label": 2**80})),
    case("row with a surrogate", "piqa.jsonl line 1: cannot be used", task("piqa", PIQA | {"goal": "\ud800"})),
]
PLACES: dict[str, Callable[[World, str], list[str]]] = {
    "data": lambda w, path: w.run(f"data.text.path={path}"),
    "recipe": lambda w, path: ["plan", path],
    "suite": lambda w, path: w.run(f"eval.suite={path}"),
    "text": lambda w, path: ["eval", str(w.base), "--text", path],
    "base": lambda w, path: w.run(f"base={path}"),
}


def open_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # in the current folder: a socket's path may have 107 bytes


MADE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": open_socket,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nothing"),
    "link loop": lambda path: path.symlink_to(path.name),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
}
SUFFIX = {"data": ".jsonl", "text": ".txt", "base": ".gguf"}


def special(kind: str, place: str):
    name = f"x{SUFFIX.get(place, '.yaml')}"
    return case(
        f"{kind} for a {place}", name, after(lambda w: MADE[kind](w.folder / name), lambda w: PLACES[place](w, name))
    )


FILES = [
    *(special(kind, place) for kind in MADE for place in PLACES),
    *(
        case(
            f"{kind} for {name}",
            name,
            after(
                lambda w, name=name: (w.base / name).unlink(missing_ok=True),
                lambda w, kind=kind, name=name: MADE[kind](w.base / name) if kind != "socket" else None,
                lambda w: ["generate", str(w.base), "--prompt", "hi"],
            ),
        )
        for kind in ("pipe", "dangling link", "link to /dev/zero")
        for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
    ),
    case("/dev/zero for data", "a data file ends in", lambda w: w.run("data.text.path=/dev/zero")),
    case("/dev/zero for a suite", "is unknown", lambda w: w.run("eval.suite=/dev/zero")),
    case("/dev/zero for a base", "/dev/zero: is neither", lambda w: w.run("base=/dev/zero")),
    case("a name that is too long", "File name too long", lambda w: w.run("base=" + "x" * 300)),
    case("the home of nobody", "cannot be looked up", lambda w: w.run("base=~nobody-of-that-name/x")),
]
CASES = {
    "rows": ROWS,
    "recipes": RECIPES,
    "bounds": BOUNDS,
    "configs": CONFIGS,
    "tokenizers": TOKENIZERS,
    "templates": TEMPLATES,
    "gguf": GGUFS,
    "tasks": TASKS,
    "files": FILES,
}


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [pytest.param(*entry.values, id=f"{topic}: {entry.id}") for topic, cases in CASES.items() for entry in cases],
)
def test_hostile_input_ends_in_one_sentence_and_leaves_nothing(world, words, says, code, capfd):
    arguments = words(world)
    before = files(world.folder)
    capfd.readouterr()
    assert main.main(arguments) == code
    error = capfd.readouterr().err
    complaints = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, error
    assert error.rstrip().endswith(complaints[0])
    assert says in complaints[0]
    assert "Traceback" not in error
    assert "panicked" not in error
    assert files(world.folder) == before

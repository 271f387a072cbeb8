"""Data, recipes, options, task files and special files that are broken on purpose. A command must refuse each with one
sentence, quickly, in little memory, and leave nothing on the disk. The cases are commands as a user would type them.
test_hostile_base.py does the same for bases."""

import gzip
import json
import lzma
import os
import socket
from collections.abc import Callable
from pathlib import Path

from hostile import DEEP, DIGITS, ROW, check_refusal, hostile
from worlds import World, after, case, wrote

from liger_convert.config import yaml_file


def rows(text: str | bytes, name: str = "text.jsonl") -> Callable[[World], list[str]]:
    return after(wrote(name, text), lambda w: w.run(f"data.text.path={name}"))


def recipe(text: str | bytes) -> Callable[[World], list[str]]:
    return after(wrote("recipe.yaml", text), World.run)


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
    case("an escaped NUL", "a NUL, which no text holds", lambda w: w.plan(r'data.text.path="a\0b"')),
    *(
        case(f"{value} layers for {field}", f"{field}: should be a whole number of layers above 0", change)
        for value in ("inf", "nan")
        for field, change in {
            "layers.softmax_auto": lambda w, value=value: w.plan(f"layers={{softmax_auto: .{value}}}"),
            "layers.long_windows.layers": lambda w, value=value: w.plan(
                f"layers={{softmax: [], long_windows: {{layers: .{value}, window: 16}}}}"
            ),
        }.items()
    ),
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
    *(
        case(f"nothing for {option}, which the suite does not read", f"nowhere: there is no such {what}", words)
        for option, what in {"--text": "file", "--other-text": "file", "--data": "folder"}.items()
        for words in [
            after(
                wrote("suite.yaml", "description: tiny\ncopying: [{length: 8, tokens: uniform}]\n"),
                lambda w, option=option: ["eval", str(w.base), "--suite", "suite.yaml", option, "nowhere"],
            )
        ]
    ),
    case(
        "a text whose name is not UTF-8",
        "error: --text: \\udcff.txt: contains bytes that are not UTF-8 text",
        after(wrote("\udcff.txt", "text"), lambda w: ["eval", str(w.base), "--text", "\udcff.txt"]),
    ),
    case(
        "a --set that is not UTF-8",
        "contains bytes that are not UTF-8 text",
        lambda w: w.run("data.text.path=\udcff.txt"),
    ),
    case("/dev/zero for data", "a data file ends in", lambda w: w.run("data.text.path=/dev/zero")),
    case("/dev/zero for a suite", "is unknown", lambda w: w.run("eval.suite=/dev/zero")),
    case("/dev/zero for a base", "/dev/zero: is neither", lambda w: w.run("base=/dev/zero")),
    case("a name that is too long", "File name too long", lambda w: w.run("base=" + "x" * 300)),
    case("the home of nobody", "cannot be looked up", lambda w: w.run("base=~nobody-of-that-name/x")),
]


@hostile({"rows": ROWS, "recipes": RECIPES, "bounds": BOUNDS, "tasks": TASKS, "files": FILES})
def test_hostile_input_is_refused_in_one_sentence_and_nothing_is_left(world, words, says, code, capfd):
    check_refusal(world, words, says, code, capfd)

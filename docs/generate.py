"""Writes the pages of docs/ that are made from the code: recipes.md, cli.md and mixers.md, and the pictures.

    python docs/generate.py             writes them
    python docs/generate.py --check     says which of them are out of date, and exits with 1 then
    python docs/generate.py --missing   lists the fields of a recipe that nothing describes

A field of a recipe is described by `Field(description=…)`, or in the docstring of its class by a paragraph or a line
`name: what it is.` A continued line is indented or not; the next `name:` of a field ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import draw
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MADE = "<!-- Made by docs/generate.py; change what it reads, not this page. -->"


# --- recipes.md ------------------------------------------------------------------------------------------------------


def recipe_models() -> dict[type[BaseModel], list[str]]:
    """Every model that a recipe is made of, the recipe first, and where in a recipe it may stand: `stages[0]`."""
    from liger_convert.config.recipe import Recipe

    found: dict[type[BaseModel], list[str]] = {}

    def visit(annotation: Any, path: str) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation not in found:
                for parent in _parents(annotation):
                    visit(parent, "")
                found[annotation] = []
                for name, field in annotation.model_fields.items():
                    visit(field.annotation, f"{path}.{name}".strip(".") if path or annotation is Recipe else "")
            if path and path not in found[annotation]:
                found[annotation].append(path)
        inside = {list: "[0]", dict: ".NAME"}.get(typing.get_origin(annotation), "") if path else ""
        for part in typing.get_args(annotation):
            visit(part, path + inside)

    visit(Recipe, "")
    return found


def _parents(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models with fields that this one is derived from."""
    return [base for base in model.__bases__ if issubclass(base, BaseModel) and base.model_fields]


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that a model writes down itself, but for those that only fix the value of an inherited one."""
    inherited = {name for parent in _parents(model) for name in parent.model_fields}
    return {
        name: field
        for name, field in model.model_fields.items()
        if name in model.__annotations__ and not (name in inherited and _is_tag(field))
    }


def _is_tag(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is typing.Literal and len(typing.get_args(field.annotation)) == 1


def _tag(model: type[BaseModel]) -> str:
    """`kind: align` of a model that such a field tells from its siblings; empty for others."""
    own = own_fields(model)
    tags = [name for name, field in model.model_fields.items() if name not in own and _is_tag(field)]
    return " ".join(f"`{name}: {model.model_fields[name].default}`." for name in tags)


def _docs_of(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """What a class's docstring says in general, and what it says of each field."""
    general: list[str] = []
    fields: dict[str, list[str]] = {}
    current = general
    for line in inspect.cleandoc(model.__dict__.get("__doc__") or "").splitlines():
        start = re.match(r"`?(\w+)`?:\s+(.*)", line.strip())
        if start and start[1] in model.model_fields:
            current = fields.setdefault(start[1], [])
            line = start[2]
        elif not line.strip():
            current = general
        current.append(line.strip())
    return " ".join(filter(None, general)), {name: " ".join(lines) for name, lines in fields.items()}


def description(model: type[BaseModel], name: str) -> str:
    """One field in words, by its own description or a docstring of its class or of one that it is made from."""
    field = model.model_fields[name]
    if field.description:
        return field.description
    for parent in model.__mro__:
        if issubclass(parent, BaseModel) and parent is not BaseModel and name in parent.model_fields:
            described = parent.model_fields[name].description or _docs_of(parent)[1].get(name)
            if described:
                return described
    return ""


def _bounds(field: FieldInfo) -> str:
    """`1 to 10`, of the validators and constraints of a field."""
    low = high = ""
    for part in _metadata(field.annotation, list(field.metadata)):
        check = getattr(part, "func", None)
        if check is not None and inspect.isfunction(check):
            limits = inspect.getclosurevars(check).nonlocals
            if {"low", "high"} <= set(limits):
                low, high = f"from {_number(limits['low'])}", f"to {_number(limits['high'])}"
        for sign, words in (("ge", "at least"), ("gt", "above")):
            if (limit := getattr(part, sign, None)) is not None:
                low = f"{words} {_number(limit)}"
        for sign, words in (("le", "at most"), ("lt", "below")):
            if (limit := getattr(part, sign, None)) is not None:
                high = f"{words} {_number(limit)}"
    return (" " if low.startswith("from") else " and ").join(filter(None, (low, high)))


def _number(value: float) -> str:
    """A bound as people write it: 0.001, 65,536, 1e12."""
    if value == 0 or 1e-3 <= abs(value) < 1e10:
        return f"{value:,.0f}" if value == int(value) else f"{value:g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}")


def _metadata(annotation: Any, found: list[Any]) -> list[Any]:
    """All that stands in `Annotated[…]`, also below `… | None`; not below lists, whose bounds are of their items."""
    if typing.get_origin(annotation) is typing.Annotated:
        found += annotation.__metadata__
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            _metadata(part, found)
    return found


WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def _type_words(annotation: Any) -> str:
    """A type as people say it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if origin is typing.Annotated:
        return _type_words(parts[0])
    if origin is typing.Literal:
        return " or ".join(f"`{_yaml(part)}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        said = [_type_words(part) for part in parts if part is not type(None)]
        return (", or " if any(kind.startswith("list") for kind in said) else " or ").join(dict.fromkeys(said))
    if origin is list:
        item = _type_words(parts[0])
        return f"list of {item}s" if item in ("text", "whole number", "number") else f"list of {item}"
    if origin is dict:
        return f"names, each with {_type_words(parts[1])}"
    return getattr(annotation, "__name__", str(annotation))


def _yaml(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{_yaml(value)}`"


def recipes_page() -> str:
    """Every field of a recipe, class by class."""
    lines = [
        "# Recipes",
        "",
        MADE,
        "",
        "A recipe is a YAML file that says what to convert, how to train it and how to measure it.",
        "The shipped recipes are in `recipes/`; each begins with the command that runs it. The package has them, too:",
        "a command takes `recipes/smollm2-135m-quick.yaml` or, in any folder, the name `smollm2-135m-quick`.",
        "`--set FIELD=VALUE` changes one field from the command line, for example `--set stages[0].tokens=4e6`.",
        "A field that is unknown, misspelt or out of bounds is refused with a message that names it.",
        "",
        "The smallest recipe names a base and a mixer:",
        "",
        "```yaml",
        "version: 1",
        "name: first",
        "base: HuggingFaceTB/SmolLM2-135M-Instruct",
        "mixer: {type: gla, window: 64, sinks: 4}",
        "```",
        "",
        "A mixer has more options than `type`, `window` and `sinks`: [Mixers](mixers.md) lists them.",
    ]
    for model, places in recipe_models().items():
        general = " ".join(filter(None, (_tag(model), _plain(_docs_of(model)[0]))))
        lines += ["", f"## {model.__name__}", *(["", textwrap.fill(general, 118)] if general else [])]
        if places:
            lines += ["", f"Used at {' and '.join(f'`{place}`' for place in places)}."]
        if parents := _parents(model):
            links = " and ".join(f"[{parent.__name__}](#{parent.__name__.lower()})" for parent in parents)
            lines += ["", f"It has the fields of {links}" + (", and:" if own_fields(model) else ".")]
        if not own_fields(model):
            continue
        lines += ["", "| field | value | default | description |", "| --- | --- | --- | --- |"]
        for name, field in own_fields(model).items():
            annotation = field.annotation
            value = ", ".join(filter(None, (_type_words(annotation), _bounds(field))))
            cells = (f"`{name}`", value, _default(field), _plain(description(model, name)))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A docstring's text as a sentence of a page."""
    text = re.sub(r"\s+", " ", text).strip()
    return text[:1].upper() + text[1:] if text[:1].isalpha() else text


def missing_fields() -> list[str]:
    """Fields that no description and no docstring explains."""
    return [
        f"{model.__name__}.{name}"
        for model in recipe_models()
        for name in own_fields(model)
        if not description(model, name)
    ]


# --- cli.md ----------------------------------------------------------------------------------------------------------

# Examples that the tests do not run, and why (tests/unit/test_docs.py knows the reasons).
NOT_RUN = {"bench": "gpu", "serve": "install"}


def _command_line() -> Any:
    """The module of the command `linearize`; torch is imported only by what needs it."""
    return importlib.import_module("liger_convert.cli.main")


def _help(command: Any) -> tuple[str, list[str]]:
    """What a command says of itself, and its examples."""
    said = (command.help or "").split("\n\n")  # one line for each paragraph, see cli/help.py
    examples = [text.removeprefix("Example: ") for text in said if text.startswith("Example: ")]
    told = (textwrap.fill(text, 118) for text in said if text and not text.startswith("Example: "))
    return "\n\n".join(told), examples


def _option_rows(command: Any) -> Iterator[str]:
    for option in command.params:
        if "--help" in option.opts:
            continue
        is_option = option.opts[0].startswith("-")
        names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        more = "..." * (option.nargs != 1)
        name = names if is_option else f"`{(option.metavar or option.name).upper().strip('[]')}{more}`"
        cells = (name, _shown_default(option), (getattr(option, "help", None) or "").strip())
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown_default(option: Any) -> str:
    shown, value = getattr(option, "show_default", None), option.default
    if option.required:
        return "required"
    if isinstance(shown, str):
        return shown
    if value is None or value is False or value == () or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    return f"`{'on' if value is True else value}`"


def cli_page() -> str:
    """Every command with its arguments, options and examples."""
    group = typer.main.get_command(_command_line().app)
    lines = [
        "# The command line",
        "",
        MADE,
        "",
        "`linearize COMMAND --help` shows the same in a terminal.",
        "",
        "- A base or a model is a folder, a hub id, a `.gguf` file, or `package:MODULE/FILE`.",
        "- With `--json`, a command that has this option prints JSON instead of a table.",
        "- Exit codes: 0 done, 1 failed, 2 bad input, 130 and 143 stopped by Ctrl-C or SIGTERM.",
        "- An error message is one sentence that says what is wrong and where.",
        "- Ctrl-C and SIGTERM save the training step reached so far if that takes less than 6 seconds.",
        "  The command ends within 10 seconds. Closing the terminal does not end it.",
    ]
    for name, command in group.commands.items():
        said, examples = _help(command)
        lines += ["", f"## linearize {name}", "", said, "", "| argument or option | default | description |"]
        lines += ["| --- | --- | --- |", *_option_rows(command)]
        reason = NOT_RUN.get(name)
        for example in examples:
            lines += ["", f"<!-- needs: {reason} -->" if reason else "<!-- run -->", "```bash", example, "```"]
    return "\n".join(lines) + "\n"


# --- mixers.md -------------------------------------------------------------------------------------------------------


def _described_mixers() -> dict[str, dict[str, Any]]:
    """What `linearize mixers --json` prints for the layers of SmolLM2-135M."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = _command_line().main(["mixers", "--heads", "9", "--kv-heads", "3", "--head-size", "64", "--json"])
    if code:
        raise SystemExit(f"linearize mixers failed with exit code {code}")
    return json.loads(printed.getvalue())


COMBINED = {
    "shared": "a shared denominator",
    "learned": "a learned mix",
    "fixed": "the mean",
    "memory": "only the memory",
    "gate": "the memory as a gate",
    "context": "the memory as context",
}


def mixers_page() -> str:
    """The table of mixers, and every option with its default."""
    mixers = _described_mixers()
    lines = [
        "# Mixers",
        "",
        MADE,
        "",
        "A mixer replaces softmax attention with a memory, combined with a window that keeps sinks.",
        "Choose one with `mixer: {type: NAME}` in a recipe. A recipe may use several, see [Recipes](recipes.md).",
        "`linearize mixers` prints this list for the heads of your own model.",
        "",
        "State sizes are for one layer of SmolLM2-135M (9 query heads, 3 key-value heads of size 64) in float32.",
        "",
        "The gate is the factor by which the state decays at a token, with default options. In its formula:",
        "",
        "- k is the token's key, and x the layer's input.",
        "- pool(k) averages the key's channels, or repeats them, to as many values as the gate has.",
        "- bias is learned. It starts at the option `gate_bias`, if the mixer has one.",
        "- tau, gamma and slope are the options `gate_normalizer`, `lower_bound` and `slope`.",
        "- g is the number of a key-value head, from 1 to G (in `retnet` from 0 to G - 1).",
        "- W, P, A and rate are learned parameters.",
        "",
        "| mixer | what it is | recurrence | gate | combined with the window by | state, KB |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for name, about in mixers.items():
        options = about["options"]
        combined = COMBINED.get(options.get("combine"), "–") if about["state"] else "–"
        state = f"{about['state_bytes'] / 1000:,.0f}" if about["state"] else "0"
        cells = (f"`{name}`", about["summary"], about["recurrence"], about["gate"], combined, state)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += [
        "",
        "The recurrences (each is one op with a plain reference):",
        "",
        "- **gla**: S ← diag(a) S + kᵀv",
        "- **delta_rule**: S ← (I − b kᵀk) a S + b kᵀv",
        "- **momentum**: Z ← m Z + step of the delta rule, S ← a S + Z",
        "- **inner_model**: gradient steps of a small model, which may have a norm, a hidden layer, momentum and decay",
        "- **slots**: softmax attention over a fixed number of slots, each a running mean of keys and values",
        "- **elementwise**: S ← A ⊙ S + kᵀv",
        "- **routed**: several memories of another mixer; each token writes and reads a few of them",
        "",
        "`ttt` and `titans` use `inner_model` if `model`, `mini_batch` or `inner_norm` is not at its default.",
        "",
        "Every mixer with a memory can hold all tokens or only those that have left the window (`scope`). The options",
        "`rope` and `feature_map`, where a mixer has them, say whether its memory uses rotary, and which feature map.",
        "With `forget: true`, the weights of any window fade with distance, by a learned gate.",
        "",
        "Some parts of the papers' layers are optional and off by default. The following start as the identity, so a",
        "model is the same with them until it is trained:",
        "",
        "- `short_conv: 4`: a causal convolution over that many tokens for each channel of the memory's queries, keys",
        "  and values. `conv_bias: true` adds a bias, which starts at 0.",
        "- `gate_proj: true`: adds W x to the logits of every gate, where x is the layer's input. W starts at 0.",
        "- `decay_scale: true` (`gated-deltanet`, `gated-deltanet-2`, `kda`): multiplies the log of the decay by e^A,",
        "  with one A per head that starts at 0.",
        "- `output_gate: true`: multiplies what is read from the memory by 2 sigmoid(W x). W starts at 0.",
        "- `skip: true`: adds d ⊙ v of the query's own token to the read. d is learned and starts at 0. It has a value",
        "  per channel, in `mamba2` per head.",
        "- `bonus: true` (`rwkv6`, `rwkv7`): adds the query's own token to the read, with a learned weight per key",
        "  channel. In `rwkv6` with `scope: all`, this is always on and its weights start at 1.",
        "- `token_shift: true` (`rwkv6`): mixes queries, keys and values with those of the previous token, in the",
        "  window as well. A low-rank map of the layer's input gives the share of each channel.",
        "- `kv_shift: true` (`forgetting`): mixes keys and values with those of the previous token. A linear map of",
        "  the layer's input gives the share of each head.",
        "- `gate: learned` and `gate: fixed` (`forgetting`): the gate is a bias per head, which does not depend on the",
        "  token. `fixed` does not train it.",
        "- `persistent: N` (`titans`): every query also sees N learned key-value pairs. They start without weight.",
        "- `combine: gate` and `combine: context` (`titans`): the memory's output multiplies the window's, or is one",
        "  more value that attention sees. Both start as the window alone.",
        "",
        "The following change the model even before training:",
        "",
        "- `conv_activation: silu`: applies a SiLU to the convolved queries, keys and values, as the papers do.",
        "- `output_gate_activation: silu`: the output gate is silu(W x), as in most papers. W starts at random.",
        "- `output_norm: rms`: applies an RMS norm to each head's read, with a learned scale per channel.",
        "- `qk_norm: true` and `rope: false` (`forgetting`): normalize queries and keys, or leave out rotary.",
        "- `shortest` and `longest` (`forgetting`): heads start with different gates.",
        "- `model: mlp` (`ttt`, `titans`): the model trained on the tokens has a hidden layer.",
        "- `mini_batch: 16` (`ttt`, `titans`): 16 tokens in a row take their gradients at the same weights.",
        "- `inner_norm: true` (`ttt`): the model has a residual and a layer norm, as published.",
        "",
        "[Results](results.md#every-mixer-at-equal-tokens) has every mixer trained on the same text, and",
        "[eval/reports/mixers.md](../eval/reports/mixers.md) how close most come to the base's attention in alignment.",
        "",
        "## Worse than a window alone",
        "",
        "At equal tokens, these ended behind `window`. [Results](results.md#what-helps) has Liger as published.",
        "",
        *(f"- `{name}`: {about['caution']}" for name, about in mixers.items() if about["caution"]),
        "",
        "## What is left out",
        "",
        "Some parts of a paper's layer are missing, mostly because a checkpoint has no weights for them. Those",
        "listed as off by default are options of the mixer.",
        "",
        "| mixer | what it lacks from its paper's layer |",
        "| --- | --- |",
        *(f"| `{name}` | {about['left_out']} |" for name, about in mixers.items() if about["left_out"]),
        "",
        "## Options and defaults",
        "",
        "Each mixer's file in `liger_convert/mixers/` describes its own options, in the docstring of its `Spec` class.",
        "Every mixer has these options:",
        "",
    ]
    common = {
        "window": "how many of the most recent tokens softmax attention sees",
        "sinks": "how many of a document's first tokens stay visible after they have left the window",
        "scope": "which tokens are written to the memory: those `evicted` from the window, or `all`",
        "combine": "how the outputs of window and memory become one: `shared`, `learned`, `fixed` or `memory`, in "
        "`titans` also `gate` or `context`, see [Concepts](concepts.md#how-window-and-memory-combine)",
        "forget": "whether the window's attention weights fade with distance, by a learned gate",
    }
    first = next(iter(mixers.values()))["options"]
    lines += [f"- `{option}` (`{_yaml(first[option])}` by default): {what}" for option, what in common.items()]
    lines += ["", "| mixer | its own options | different defaults of the common options |", "| --- | --- | --- |"]
    for name, about in mixers.items():
        own = _options(about["options"], lambda option, _: option not in common)
        other = _options(about["options"], lambda option, value: option in common and value != first.get(option))
        lines.append(f"| `{name}` | {own} | {other} |")
    return "\n".join(lines) + "\n"


def _options(options: dict[str, Any], wanted: Callable[[str, Any], bool]) -> str:
    return ", ".join(f"`{name}: {_yaml(value)}`" for name, value in options.items() if wanted(name, value))


PAGES: dict[str, Callable[[], str]] = {"recipes.md": recipes_page, "cli.md": cli_page, "mixers.md": mixers_page}


def main(words: list[str]) -> int:
    if "--missing" in words:
        print("\n".join(missing_fields()))
        return 0
    check, stale = "--check" in words, []
    for name, make in PAGES.items():
        path, page = DOCS / name, make()
        if not check:
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            stale.append(path.relative_to(ROOT))
    for path in stale:
        print(f"{path} is out of date; run: python docs/generate.py", file=sys.stderr)
    return max(draw.main(words), 1 if stale else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Makes docs/mixers.md: the table of mixers and every option, from the registry of mixers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

from page_parts import MADE, table_row, yaml_value

from liger_convert.cli.main import main

HEADS = ("--heads", "9", "--kv-heads", "3", "--head-size", "64")  # of SmolLM2-135M

INTRODUCTION = f"""\
# Mixers

{MADE}

A mixer replaces softmax attention with a memory, combined with a window that keeps sinks.
Choose one with `mixer: {{type: NAME}}` in a recipe. A recipe may use several, see [Recipes](recipes.md).
`linearize mixers` prints this list for the heads of your own model.

State sizes are for one layer of SmolLM2-135M (9 query heads, 3 key-value heads of size 64) in float32.

The gate is the factor by which the state decays at a token, with default options. In its formula:

- k is the token's key, and x the layer's input.
- pool(k) averages the key's channels, or repeats them, to as many values as the gate has.
- bias is learned. It starts at the option `gate_bias`, if the mixer has one.
- tau, gamma and slope are the options `gate_normalizer`, `lower_bound` and `slope`.
- g is the number of a key-value head, from 1 to G (in `retnet` from 0 to G - 1).
- W, P, A and rate are learned parameters."""

EXPLANATIONS = """\
The recurrences (each is one op with a plain reference):

- **gla**: S ← diag(a) S + kᵀv
- **delta_rule**: S ← (I − b kᵀk) a S + b kᵀv
- **momentum**: Z ← m Z + step of the delta rule, S ← a S + Z
- **inner_model**: gradient steps of a small model, which may have a norm, a hidden layer, momentum and decay
- **slots**: softmax attention over a fixed number of slots, each a running mean of keys and values
- **elementwise**: S ← A ⊙ S + kᵀv
- **routed**: several memories of another mixer; each token writes and reads a few of them

`ttt` and `titans` use `inner_model` if `model`, `mini_batch` or `inner_norm` is not at its default.

Every mixer with a memory can hold all tokens or only those that have left the window (`scope`). The options
`rope` and `feature_map`, where a mixer has them, say whether its memory uses rotary, and which feature map.
With `forget: true`, the weights of any window fade with distance, by a learned gate.

Some parts of the papers' layers are optional and off by default. The following start as the identity, so a
model is the same with them until it is trained:

- `short_conv: 4`: a causal convolution over that many tokens for each channel of the memory's queries, keys
  and values. `conv_bias: true` adds a bias, which starts at 0.
- `gate_proj: true`: adds W x to the logits of every gate, where x is the layer's input. W starts at 0.
- `decay_scale: true` (`gated-deltanet`, `gated-deltanet-2`, `kda`): multiplies the log of the decay by e^A,
  with one A per head that starts at 0.
- `output_gate: true`: multiplies what is read from the memory by 2 sigmoid(W x). W starts at 0.
- `skip: true`: adds d ⊙ v of the query's own token to the read. d is learned and starts at 0. It has a value
  per channel, in `mamba2` per head.
- `bonus: true` (`rwkv6`, `rwkv7`): adds the query's own token to the read, with a learned weight per key
  channel. In `rwkv6` with `scope: all`, this is always on and its weights start at 1.
- `token_shift: true` (`rwkv6`): mixes queries, keys and values with those of the previous token, in the
  window as well. A low-rank map of the layer's input gives the share of each channel.
- `kv_shift: true` (`forgetting`): mixes keys and values with those of the previous token. A linear map of
  the layer's input gives the share of each head.
- `gate: learned` and `gate: fixed` (`forgetting`): the gate is a bias per head, which does not depend on the
  token. `fixed` does not train it.
- `persistent: N` (`titans`): every query also sees N learned key-value pairs. They start without weight.
- `combine: gate` and `combine: context` (`titans`): the memory's output multiplies the window's, or is one
  more value that attention sees. Both start as the window alone.

The following change the model even before training:

- `conv_activation: silu`: applies a SiLU to the convolved queries, keys and values, as the papers do.
- `output_gate_activation: silu`: the output gate is silu(W x), as in most papers. W starts at random.
- `output_norm: rms`: applies an RMS norm to each head's read, with a learned scale per channel.
- `qk_norm: true` and `rope: false` (`forgetting`): normalize queries and keys, or leave out rotary.
- `shortest` and `longest` (`forgetting`): heads start with different gates.
- `model: mlp` (`ttt`, `titans`): the model trained on the tokens has a hidden layer.
- `mini_batch: 16` (`ttt`, `titans`): 16 tokens in a row take their gradients at the same weights.
- `inner_norm: true` (`ttt`): the model has a residual and a layer norm, as published.

[Results](results.md#every-mixer-at-equal-tokens) has every mixer trained on the same text, and
[eval/reports/mixers.md](../eval/reports/mixers.md) how close most come to the base's attention in alignment."""

WORSE = """\
## Worse than a window alone

At equal tokens, these ended behind `window`. [Results](results.md#what-helps) has Liger as published."""

LEFT_OUT = """\
## What is left out

Some parts of a paper's layer are missing, mostly because a checkpoint has no weights for them. Those
listed as off by default are options of the mixer."""

OPTIONS = """\
## Options and defaults

Each mixer's file in `liger_convert/mixers/` describes its own options, in the docstring of its `Spec` class.
Every mixer has these options:"""

COMBINED = {
    "shared": "a shared denominator",
    "learned": "a learned mix",
    "fixed": "the mean",
    "memory": "only the memory",
    "gate": "the memory as a gate",
    "context": "the memory as context",
}

COMMON = {
    "window": "how many of the most recent tokens softmax attention sees",
    "sinks": "how many of a document's first tokens stay visible after they have left the window",
    "scope": "which tokens are written to the memory: those `evicted` from the window, or `all`",
    "combine": "how the outputs of window and memory become one: `shared`, `learned`, `fixed` or `memory`, in "
    "`titans` also `gate` or `context`, see [Concepts](concepts.md#how-window-and-memory-combine)",
    "forget": "whether the window's attention weights fade with distance, by a learned gate",
}

Mixers = dict[str, dict[str, Any]]  # what `linearize mixers --json` prints of each, by name


def mixers_page() -> str:
    """The table of mixers, what their options do, and every option with its default."""
    mixers = _described_mixers()
    parts = [INTRODUCTION, _table(mixers), EXPLANATIONS, WORSE, _cautions(mixers), LEFT_OUT, _left_out(mixers)]
    parts += [OPTIONS, _common_options(mixers), _own_options(mixers)]
    return "\n\n".join(parts) + "\n"


def _described_mixers() -> Mixers:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["mixers", *HEADS, "--json"])
    if code:
        raise SystemExit(f"linearize mixers failed with exit code {code}")
    return json.loads(printed.getvalue())


def _table(mixers: Mixers) -> str:
    lines = [
        "| mixer | what it is | recurrence | gate | combined with the window by | state, KB |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for name, about in mixers.items():
        combined = COMBINED.get(about["options"].get("combine"), "–") if about["state"] else "–"
        state = f"{about['state_bytes'] / 1000:,.0f}" if about["state"] else "0"
        lines.append(table_row((f"`{name}`", about["summary"], about["recurrence"], about["gate"], combined, state)))
    return "\n".join(lines)


def _cautions(mixers: Mixers) -> str:
    """The mixers that did worse than no memory."""
    return "\n".join(f"- `{name}`: {about['caution']}" for name, about in mixers.items() if about["caution"])


def _left_out(mixers: Mixers) -> str:
    """What each mixer lacks from its paper's layer."""
    lines = ["| mixer | what it lacks from its paper's layer |", "| --- | --- |"]
    lines += [table_row((f"`{name}`", about["left_out"])) for name, about in mixers.items() if about["left_out"]]
    return "\n".join(lines)


def _common_options(mixers: Mixers) -> str:
    """The options that all mixers have, with the defaults of the first one."""
    first = next(iter(mixers.values()))["options"]
    return "\n".join(
        f"- `{option}` (`{yaml_value(first[option])}` by default): {what}" for option, what in COMMON.items()
    )


def _own_options(mixers: Mixers) -> str:
    """The other options of each mixer, and where its defaults differ from those of the first one."""
    first = next(iter(mixers.values()))["options"]
    lines = ["| mixer | its own options | different defaults of the common options |", "| --- | --- | --- |"]
    for name, about in mixers.items():
        own = _listed(about["options"], lambda option, _: option not in COMMON)
        other = _listed(about["options"], lambda option, value: option in COMMON and value != first.get(option))
        lines.append(f"| `{name}` | {own} | {other} |")
    return "\n".join(lines)


def _listed(options: dict[str, Any], wanted: Callable[[str, Any], bool]) -> str:
    return ", ".join(f"`{name}: {yaml_value(value)}`" for name, value in options.items() if wanted(name, value))

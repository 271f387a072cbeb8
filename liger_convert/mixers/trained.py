"""Which mixers ended behind a window without a memory when all were trained on the same tokens, and at which budget.

The figures are those of docs/results.md ("Every mixer at equal tokens"): SmolLM2-135M-Instruct with every layer linear,
trained with recipes/smollm2-135m-mixers.yaml, perplexity on wikitext-2. More tokens or another recipe may change the
order, so a caution names the budget.
"""

from __future__ import annotations

BUDGET = "3M tokens"
WINDOW = 36.55  # the mixer `window`: 64 tokens and 4 sinks, trained like the others
BEHIND_WINDOW = {"liger-paper": 43.89, "liger-hgrn2": 50.70, "liger-gsa": 41.52, "forgetting": 42.95}
SETTINGS = {"forgetting": " with a window of 64 instead of all tokens"}


def caution(mixer: str) -> str:
    """A sentence about a mixer that was worse than a window alone; empty for all others."""
    if mixer not in BEHIND_WINDOW:
        return ""
    return (
        f"after {BUDGET}{SETTINGS.get(mixer, '')}, worse than the mixer `window`, which has no memory: perplexity "
        f"{BEHIND_WINDOW[mixer]:.2f}, with `window` {WINDOW:.2f} (SmolLM2-135M, every layer, wikitext-2)"
    )

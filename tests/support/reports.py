"""Contents of a report.json with all that its pages draw: several lengths, chosen layers, stages, and hostile text."""

from __future__ import annotations

from typing import Any

from liger_convert.eval.verdict import verdict

HOSTILE = '<script>alert(1)</script> <img src=http://x.test/y.png> & "quoted" `code`'
FACTORS = {  # of every loss, and of the share of what the base finds
    "base": (1.0, 1.0),
    "window_only_untrained": (1.5, 0.05),
    "linearized": (1.05, 0.8),
    "memory_ablated": (1.4, 0.06),
    "window_ablated": (2.5, 0.0),
}


def measured(value: float | None, stderr: float | None = 0.01, n: int = 64) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "n": n}


def column(loss: float, found: float) -> dict[str, Any]:
    """The measures of one model."""
    ppls = {"text_ppl": measured(20 ** (loss**0.5), 0.5), "text_byte_ppl": measured(2 * loss)}
    copies = {f"copy_nll_{length}": measured(0.2 + 3 * (loss - 1) * length / 512) for length in (64, 256, 512)}
    needles = {f"niah_s1_{length}/contains": measured(found * 1024 / length) for length in (1024, 4096)}
    positions = {f"text_nll_at_{end}": measured(3 * loss - end / 8192) for end in (256, 1024, 4096)}
    return ppls | copies | needles | positions | {"piqa/acc": measured(0.64), "odd": measured(None, None)}


def report(name: str = "demo", worse: bool = False, **changes: Any) -> dict[str, Any]:
    """A report of a model of six layers, two of them softmax; with `worse`, worse than its untrained window."""
    models = {model: column(*factors) for model, factors in FACTORS.items()}
    if worse:
        models["linearized"]["text_ppl"] = measured(500.0)
    spec = {"type": "gla", "window": 64, "sinks": 4}
    losses = {"copy_nll": 3.2, "text_nll": 3.5}
    stage = {"tokens": 40_960, "trained_parameters": 1234, "seconds": 60.5, "steps": 40}
    curve = [[step, 5 / step] for step in range(1, 41)]
    return {
        "name": name,
        "base": "org/model",
        "suite": {"name": "quick", "description": "a first look"},
        "models": models,
        "verdict": verdict(models),
        "continuations": [{"prompt": HOSTILE, "base": HOSTILE, "linearized": f"def f():\n    return 1\n{HOSTILE}"}],
        "plan": {
            "linearization": {
                "mixers": {"main": spec, "recall": spec | {"window": None}},
                "layers": ["main", "main", "softmax", "recall", "main", "softmax"],
            },
            "state_bytes": 1_536_000,
            "growing_bytes": 1024,
            "cache_bytes": {
                str(tokens): {"base": 23_040 * tokens, "linearized": 1_536_000 + 5000 * tokens}
                for tokens in (4096, 32768, 131072)
            },
            "warnings": [f"something is odd: {HOSTILE}"],
        },
        "selection": {
            "softmax_layers": [2, 5],
            "base": losses,
            "linear": losses,
            "path": [{"layer": 5, **losses}, {"layer": 2, "copy_nll": 0.3, "text_nll": None}],
        },
        "training": [
            stage
            | {"name": "1-align", "loss": curve}
            | {"align_error": {"before": [0.9, 0.5, 0.1, 0.02], "after": [0.1, 0.08, 0.01, 0.002]}},
            stage | {"name": "2-distill", "loss": [[40, 0.5]]},
        ],
        "reproduce": {
            "command": f"linearize run demo.yaml --set 'x={HOSTILE}'",
            "seed": 1,
            "device": "CPU: one",
            "threads": 2,
            "kernels": "torch",
            "platform": "Linux",
            "versions": {"python": "3.11", "torch": "2.13.0"},
        },
    } | changes

"""Draws the pictures of README.md and docs/ as SVG into docs/images. The figures come from eval/reports.

    python docs/draw.py            writes them
    python docs/draw.py --check    says which of them are out of date, and exits with 1 then

Every picture has a background of its own, so that it is readable on light and on dark pages.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328 }
  .title { font-size: 15px; font-weight: bold }
  .soft { fill: #59636e; font-size: 12px }
  .line { stroke: #59636e; stroke-width: 1.4; fill: none }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .dash { stroke: #bc4c00; stroke-width: 1.6; stroke-dasharray: 6 4 }
  .head { fill: #59636e }
  .window { fill: #54aeff; stroke: #0969da }
  .sink { fill: #4ac26b; stroke: #1a7f37 }
  .past { fill: #eaeef2; stroke: #afb8c1 }
  .memory { fill: #fff1c2; stroke: #bf8700 }
  .box { fill: #f6f8fa; stroke: #8c959f }
  .query { fill: #0550ae; stroke: #0550ae }
  .exact { fill: #ddf4ff; stroke: #0969da }
  .label { stroke: #ffffff; stroke-width: 4px; paint-order: stroke }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
    .soft { fill: #9198a1 }
    .line { stroke: #9198a1 }
    .grid { stroke: #30363d }
    .dash { stroke: #f0883e }
    .head { fill: #9198a1 }
    .window { fill: #1f6feb; stroke: #58a6ff }
    .sink { fill: #238636; stroke: #3fb950 }
    .past { fill: #21262d; stroke: #484f58 }
    .memory { fill: #4b3a06; stroke: #d29922 }
    .box { fill: #161b22; stroke: #6e7681 }
    .query { fill: #a5d6ff; stroke: #a5d6ff }
    .exact { fill: #0c2d4d; stroke: #58a6ff }
    .label { stroke: #0d1117 }
  }
"""


class Drawing:
    """An SVG picture; x and y are pixels from its upper left corner."""

    def __init__(self, width: int, height: int, about: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>',
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, "page", radius=8)

    def rect(self, x: float, y: float, width: float, height: float, look: str, radius: float = 3) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{look}"/>'
        )

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "start", turn: bool = False) -> None:
        turned = f' transform="rotate(-90 {x:g} {y:g})"' if turn else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{anchor}"{turned}>{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "line", arrow: bool = False) -> None:
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{look}"{tip}/>')

    def dot(self, x: float, y: float, look: str, size: float = 6) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{size:g}" class="{look}"/>')

    def box(self, x: float, y: float, width: float, height: float, look: str, *lines: str) -> None:
        """A box with centred lines of text, the first in the ink of the text and the others softer."""
        self.rect(x, y, width, height, look, radius=6)
        top = y + height / 2 - 8 * (len(lines) - 1) + 4
        for i, words in enumerate(lines):
            self.text(x + width / 2, top + 16 * i, words, "soft" if i else "", "middle")

    def tokens(self, x: float, y: float, looks: list[str], size: float = 20, gap: float = 4) -> None:
        for i, look in enumerate(looks):
            self.rect(x + i * (size + gap), y, size, size, look)

    def render(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def _report(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "eval" / "reports" / f"smollm2-135m-{name}" / "report.json").read_text(encoding="utf-8"))


def _far_ppl(report: dict[str, Any], model: str) -> float:
    return report["models"][model]["text_far_ppl"]["value"]


def overview() -> Drawing:
    """What becomes of a layer, and what is left of the base's perplexity at which cache size."""
    drawing = Drawing(900, 340, "A linearized layer, and its perplexity against the size of its cache")
    _layer(drawing)
    drawing.line(425, 20, 425, 320, "grid")
    _recovery(drawing)
    return drawing


def _layer(drawing: Drawing) -> None:
    drawing.text(20, 32, "What becomes of an attention layer", "title")
    drawing.text(20, 52, "The tokens of a text, and what the newest one reads:", "soft")
    drawing.tokens(20, 84, ["sink"] * 2 + ["past"] * 8 + ["window"] * 5 + ["query"])
    drawing.text(42, 76, "sinks", "soft", "middle")
    drawing.text(160, 76, "left the window", "soft", "middle")
    drawing.text(330, 76, "window", "soft", "middle")
    drawing.line(160, 110, 160, 156, arrow=True)
    drawing.text(168, 136, "written once", "soft")
    drawing.box(80, 160, 160, 48, "memory", "memory", "one size at any length")
    drawing.line(330, 110, 330, 156, arrow=True)
    drawing.box(260, 160, 140, 48, "exact", "softmax attention", "window + sinks")
    drawing.line(160, 210, 196, 250, arrow=True)
    drawing.line(330, 210, 284, 250, arrow=True)
    drawing.box(150, 254, 180, 44, "box", "one output", "weights learned per head")
    drawing.text(20, 324, "The cache stops growing: ring, sinks and memory have fixed sizes.", "soft")


def _recovery(drawing: Drawing) -> None:
    linear, hybrid, paper = _report("gla"), _report("hybrid"), _report("liger-paper")
    drawing.text(445, 32, "Perplexity beyond 3,072 tokens, against cache", "title")
    drawing.text(445, 52, "SmolLM2-135M; cache of one sequence of 131,072 tokens; lower is better", "soft")
    left, right, top, bottom = 495, 870, 76, 284
    low, high, least, most = 24.0, 36.0, 1e6, 1e10

    def place(size: float, value: float) -> tuple[float, float]:
        across = math.log(size / least) / math.log(most / least)
        return left + across * (right - left), bottom - (value - low) / (high - low) * (bottom - top)

    for value in range(24, 37, 2):
        y = place(least, value)[1]
        drawing.line(left, y, right, y, "grid")
        drawing.text(left - 8, y + 4, str(value), "soft", "end")
    for size, label in ((1e6, "1 MB"), (1e7, "10 MB"), (1e8, "100 MB"), (1e9, "1 GB"), (1e10, "10 GB")):
        drawing.text(place(size, low)[0], bottom + 18, label, "soft", "middle")
    window = _far_ppl(linear, "window_untrained")
    y = place(least, window)[1]
    drawing.line(left, y, right, y, "dash")
    drawing.text(right, y - 7, f"window only, untrained {window:.2f}", "soft", "end")
    drawing.text((left + right) / 2, 324, "cache (log scale)", "soft", "middle")
    points: list[tuple[str, dict[str, Any], str, str, str, float]] = [
        ("every layer linear", linear, "linearized", "window", "middle", 20),
        ("7 of 30 softmax", hybrid, "linearized", "sink", "end", -14),
        ("base", linear, "base", "query", "end", -34),
        ("Liger's layer", paper, "linearized", "memory", "start", 24),
    ]
    for label, report, model, look, anchor, above in points:
        side = "base" if model == "base" else "linearized"
        x, y = place(report["plan"]["cache_bytes"]["131072"][side], _far_ppl(report, model))
        drawing.dot(x, y, look)
        drawing.text(x, y + above, f"{label} {_far_ppl(report, model):.2f}", "label", anchor)


def window() -> Drawing:
    """Which tokens three queries see."""
    drawing = Drawing(760, 230, "Which tokens a query sees: its window, the sinks, and the memory of the others")
    drawing.text(20, 30, "What a query reads", "title")
    drawing.text(20, 50, "window 5, 2 sinks; each row is one step of decoding", "soft")
    for row, tokens in enumerate((6, 10, 14)):
        looks = ["window"] * (tokens - 1) + ["query"]
        for i in range(tokens - 5):
            looks[i] = "past"
        looks[:2] = ["sink"] * 2
        drawing.tokens(20, 72 + 40 * row, looks)
        held = max(tokens - 7, 0)
        said = f"{held} tokens are in the memory" if held else "the memory is empty"
        drawing.text(20 + 14 * 24 + 16, 87 + 40 * row, said, "soft")
    legend = (("sink", "sink: always visible"), ("past", "in the memory"), ("window", "window"), ("query", "the query"))
    for i, (look, words) in enumerate(legend):
        drawing.rect(20 + 180 * i, 198, 14, 14, look)
        drawing.text(40 + 180 * i, 210, words, "soft")
    return drawing


def memory() -> Drawing:
    """How a memory is written and read."""
    drawing = Drawing(760, 210, "A token that leaves the window is written into the state; every query reads the state")
    drawing.text(20, 30, "A memory is a state of one size", "title")
    drawing.box(20, 80, 150, 56, "past", "token leaves window", "key k, value v")
    drawing.line(172, 108, 216, 108, arrow=True)
    drawing.box(220, 62, 260, 92, "memory", "S ← diag(a) S + kᵀ v", "n ← diag(a) n + kᵀ", "a: how much is kept")
    drawing.line(482, 108, 526, 108, arrow=True)
    drawing.box(530, 80, 210, 56, "box", "q S / q n", "what a query reads")
    drawing.text(20, 190, "q and k pass a feature map first. S and n are float32 and do not grow.", "soft")
    return drawing


def calibration() -> Drawing:
    """Calibration in three boxes."""
    drawing = Drawing(760, 190, "Calibration fits a new layer to the base's attention without training")
    drawing.text(20, 30, "Calibration: a good start in closed form", "title")
    drawing.box(20, 66, 200, 70, "box", "base, one batch of text", "its keys, queries", "and attention weights")
    drawing.line(222, 101, 266, 101, arrow=True)
    drawing.box(270, 66, 220, 70, "memory", "fitted, not trained", "codes, decays,", "weight of the memory")
    drawing.line(492, 101, 536, 101, arrow=True)
    drawing.box(540, 66, 200, 70, "exact", "first training step", "starts near the base's", "own attention")
    drawing.text(20, 170, "Training then moves what is left: align, distill, finetune.", "soft")
    return drawing


def softmax_layers() -> Drawing:
    """Where the softmax layers of the hybrid are, and what the cache of each kind does."""
    layers = _report("hybrid")["plan"]["linearization"]["layers"]
    drawing = Drawing(760, 170, "The layers of SmolLM2-135M that stay softmax in the hybrid recipe")
    drawing.text(20, 30, "Softmax layers, chosen by measurement", "title")
    kept = layers.count("softmax")
    drawing.text(20, 50, f"smollm2-135m-hybrid: {kept} of {len(layers)} layers stay softmax", "soft")
    drawing.tokens(20, 70, ["sink" if layer == "softmax" else "memory" for layer in layers], size=20, gap=4)
    for i in range(0, len(layers), 5):
        drawing.text(30 + 24 * i, 106, str(i), "soft", "middle")
    for x, look, words in (
        (20, "sink", "softmax: its cache grows with the text"),
        (300, "memory", "linear: its cache has one size"),
    ):
        drawing.rect(x, 130, 14, 14, look)
        drawing.text(x + 20, 142, words, "soft")
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "overview": overview,
    "window": window,
    "memory": memory,
    "calibration": calibration,
    "softmax-layers": softmax_layers,
}


def main(words: list[str]) -> int:
    check, stale = "--check" in words, []
    for name, draw in PICTURES.items():
        path, drawn = IMAGES / f"{name}.svg", draw().render()
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
                stale.append(path.relative_to(ROOT))
        else:
            IMAGES.mkdir(exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
    for path in stale:
        print(f"{path} is out of date; run: python docs/draw.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

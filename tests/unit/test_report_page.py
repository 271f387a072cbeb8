"""report.html: one file that needs nothing beside itself, with every number of report.md, and quotations escaped."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import HOSTILE, measured, report

from liger_convert.pipeline import report as written
from liger_convert.pipeline.pages.charts import Axis, Series, draw
from liger_convert.pipeline.pages.common import TITLES, cell, lower_is_better, recovery
from liger_convert.pipeline.pages.read import read_report
from liger_convert.pipeline.pages.rendering import unbroken_markup
from liger_convert.pipeline.pages.report_page import page
from liger_convert.utils.errors import LinearizeError

REPORTS = Path(__file__).parents[2] / "eval" / "reports"
VOID = {"meta", "br", "img", "link", "input", "hr"}
OUTSIDE = re.compile(r"\b(?:https?|ftp|file|data|javascript):|//\w|@import|url\(", re.I)


class Read(HTMLParser):
    """The text, the elements and the attributes of a page; whether every element was ended."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def outside(html: str) -> list[str]:
    """What a page would fetch: elements and attributes that load something, and addresses in its styles."""
    read = Read(html)
    loading = [tag for tag, _ in read.elements if tag in ("script", "link", "img", "iframe", "object", "image", "use")]
    named = [
        value
        for _, attributes in read.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "xlink:href", "action", "style") or name.startswith("on")
    ]
    styles = OUTSIDE.findall(html[html.index("<style>") : html.index("</style>")])
    return [*loading, *map(str, named), *styles]


@pytest.fixture(scope="module")
def html() -> str:
    return page(report())


def test_the_page_needs_nothing_from_elsewhere(html):
    assert outside(html) == []
    assert "default-src 'none'" in str(Read(html).all("meta"))


@pytest.mark.parametrize(
    "planted", ["<script>1</script>", "<img src='x.png'>", "<p onclick='1'></p>", "<a href='https://x.test'>x</a>"]
)
def test_what_would_be_fetched_is_found(html, planted):
    assert outside(html.replace("</main>", f"{planted}</main>"))


def test_what_a_style_would_fetch_is_found(html):
    assert outside(html.replace("<style>", "<style>@font-face { src: url(https://x.test/f) }"))


def test_every_element_is_ended_and_every_picture_has_a_name(html):
    read = Read(html)
    assert read.open == []
    pictures = [svg for svg in read.all("svg") if svg.get("aria-hidden") != "true"]
    assert len(pictures) > 10
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in pictures)
    assert all(th.get("scope") in ("col", "row") for th in read.all("th"))
    assert read.all("html") == [{"lang": "en"}]


def test_a_report_says_which_cache_sizes_are_beyond_the_bases_context():
    found = report()
    found["plan"]["context"] = 4096
    said = "The base supports 4,096 tokens. Sizes beyond that only show how a cache grows."
    assert said in written.page(found)
    shown = Read(page(found)).text
    assert said in shown
    assert "cache at 4,096 tokens" in shown
    for context in (None, 131_072):
        found["plan"]["context"] = context
        assert "Sizes beyond that" not in written.page(found)
        assert "cache at 32,768 tokens" in Read(page(found)).text


def test_every_measure_of_every_model_stands_on_the_page_as_in_the_markdown(html):
    text = Read(html).text.replace("\xa0", " ")
    for name, column in report()["models"].items():
        assert TITLES[name] in text
        for metric, value in column.items():
            assert f" {metric} " in text
            assert cell(value) in text, (name, metric)


def test_markup_in_names_answers_and_warnings_is_text(html):
    named = page(report(name=HOSTILE))
    for made in (html, named):
        read = Read(made)
        assert read.all("script") == read.all("img") == []
        assert "<script>alert(1)</script> <img src=http://x.test/y.png>" in read.text
    assert f"<title>{HOSTILE}" not in named


def test_the_verdict_comes_first_and_a_model_worse_than_its_untrained_window_says_so_in_red(html):
    def first(made: str) -> tuple[str, str]:
        look = re.search(r'<section class="verdict (\w+)"', made)
        assert look is not None
        assert made.index("<section") == look.start()
        return look[1], Read(made).text

    assert first(html)[0] == "good"
    look, text = first(page(report(worse=True)))
    assert look == "bad"
    assert "THE MODEL IS WORSE IN PART than the untrained base" in text
    unused = report()
    unused["verdict"] |= {"memory_used": False, "worse_than_untrained": False}
    assert first(page(unused))[0] == "doubtful"
    unused["verdict"] = {"memory_used": None, "worse_than_untrained": None, "sentences": ["No verdict."]}
    assert first(page(unused))[0] == "plain"


def test_metrics_at_several_lengths_are_drawn_as_curves_and_those_at_one_are_not(html):
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert titles[:3] == ["Copying text", "Needle niah_s1", "Loss by position, text"]
    copying = next(svg["aria-label"] for svg in Read(html).all("svg") if "Copying text" in str(svg.get("aria-label")))
    assert "linearized: 0.219 at 64, 0.275 at 256, 0.350 at 512" in str(copying)
    few = report()
    for column in few["models"].values():
        for metric in [metric for metric in column if re.search(r"_(64|256|1024|4096)\b", metric)]:
            del column[metric]
    assert "How far it reaches" not in page(few)


def test_each_layer_has_a_cell_with_its_kind_and_the_errors_of_its_alignment(html):
    cells = re.findall(r'<li class="(mixer-0|mixer-1|softmax)"><b>(\d+)</b> <span>(\w+)</span>\n(<svg.*?</svg>)?', html)
    assert [(look, kind) for look, _, kind, _ in cells] == [
        ("mixer-0", "gla"),
        ("mixer-0", "gla"),
        ("softmax", "softmax"),
        ("mixer-1", "recall"),
        ("mixer-0", "gla"),
        ("softmax", "softmax"),
    ]
    assert [bool(svg) for *_, svg in cells] == [True, True, False, True, True, False]
    assert "error 0.9 before alignment, 0.1 after" in cells[0][3]
    assert "error 0.1 before alignment, 0.01 after" in cells[3][3]
    unaligned = report()
    del unaligned["training"][0]["align_error"]
    assert "before alignment" not in page(unaligned)


def test_a_report_without_training_choice_or_continuations_has_no_such_sections():
    bare = report(training=[], continuations=[])
    del bare["selection"], bare["plan"]["warnings"]
    text = Read(page(bare)).text
    for heading in ("Training", "Continuations", "Why these layers", "Why this layer", "Warning"):
        assert heading not in text
    assert "How to reproduce it" in text


def test_a_stage_that_was_left_out_or_trained_at_lower_rates_says_so(html):
    checked = report()
    checked["training"][0] |= {"kept": True, "rates": 0.25}
    checked["training"][1] |= {"kept": False, "rates": 0.25}
    text = Read(page(checked)).text
    assert "1-align at 0.25 times its learning rates" in text
    assert "2-distill left out: it made the model worse" in text
    assert "its rates" not in html
    assert "left out" not in html


def test_the_model_after_each_stage_and_what_was_adapted_are_shown(html):
    def measures(text, copying):
        return {
            name: {"value": value, "stderr": 0.1, "n": 8}
            for name, value in (("other_ppl", text), ("copy_nll", copying))
        }

    checked = report(check={"base": measures(16.1, 0.2), "window_only_untrained": measures(18.2, 1.3)})
    checked["training"][1]["check"] = measures(17.4, 0.3)
    checked["plan"]["adapted"] = ["stages[0].seq_len: 2,048 in place of 4,096"]
    text = Read(page(checked)).text
    for shown in ("16.10 ± 0.10", "18.20 ± 0.10", "17.40 ± 0.10", "stages[0].seq_len: 2,048 in place of 4,096"):
        assert shown in text
    assert "after each stage" not in html


def test_what_was_left_out_of_the_suite_is_listed(html):
    assert "<li>text_far: longer than the base" in page(report(notes=["text_far: longer than the base's context"]))
    assert "Notes on the measures" not in html


def test_no_line_ends_within_an_option_or_a_value():
    assert unbroken_markup("<b> 1.0 ± 0.1, see --include-path") == (
        '&lt;b&gt; 1.0&nbsp;±&nbsp;0.1, see <span class="option">--include-path</span>'
    )


@pytest.mark.parametrize("name", ["gla", "hybrid", "liger-paper"])
def test_reports_of_before_can_be_drawn(name):
    made = page(read_report(REPORTS / f"smollm2-135m-{name}"))
    assert Read(made).open == []
    assert "window only, untrained" in made


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("text_far_ppl", True),
        ("lambada_openai/perplexity", True),
        ("copy_uniform_nll_64", True),
        ("text_nll_at_512", True),
        ("lambada_openai/acc", False),
        ("niah_s1_1024/contains", False),
    ],
)
def test_which_way_is_better(metric, lower):
    assert lower_is_better(metric) is lower


@pytest.mark.parametrize(
    ("metric", "values", "share"),
    [
        ("niah/contains", (0.5, 0.0, 1.0), 0.5),
        ("copy_nll_256", (1.0, 3.0, 0.0), 2 / 3),
        ("text_ppl", (20.0, 40.0, 10.0), 0.5),  # by logarithms
        ("text_ppl", (60.0, 40.0, 10.0), -0.29),
        ("copy_nll_256", (0.2, 0.25, 0.2), None),  # less than 0.1 nats apart
        ("piqa/acc", (0.66, 0.64, 0.66), None),  # less than two errors apart
        ("piqa/acc", (0.5, 0.7, 0.5), None),  # the window is the better one
        ("text_ppl", (None, 40.0, 10.0), None),
        ("text_ppl", (20.0, 0.0, 10.0), None),
    ],
)
def test_recovery_is_the_share_of_the_gap_between_window_and_base(metric, values, share):
    found = recovery(metric, *(measured(value) for value in values))
    assert found is share if share is None else math.isclose(found, share, abs_tol=0.01)


@pytest.mark.parametrize("x_log", [True, False])
@pytest.mark.parametrize("y_log", [True, False])
@pytest.mark.parametrize(
    "points",
    [
        [(1, 1), (2, 2)],
        [(64, 0.5)],
        [(1, 5), (2, 5), (3, 5)],
        [(1, 1e-9), (1e6, 1e9)],
        [(1, 0.251), (1000, 0.249)],
        [(1, -2), (2, 0), (3, 7)],
    ],
    ids=str,
)
def test_a_chart_stays_in_its_frame(points, x_log, y_log):
    made = draw("t", [Series("s", "base", points)], Axis("x", log=x_log), Axis("y", log=y_log))
    places = [float(value) for value in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy)="(.*?)"', made)]
    assert places
    assert all(0 <= place <= 360 for place in places)
    assert made.count('class="grid"') >= 2
    assert made.count('class="tick"') >= 3


def test_between_two_steps_of_a_training_there_is_no_tick():
    made = draw("t", [Series("s", "base", [(1, 0.3), (2, 0.4)])], Axis("step"), Axis("loss", show=lambda _: "y"))
    assert sorted(re.findall(r"<text class=\"tick\".*?>(\d.*?)</text>", made)) == ["1", "2"]


def test_what_cannot_be_drawn_is_left_out():
    points = [(1, math.inf), (2, 3), (0, 4)]
    assert "s: 3 at 2." in draw("t", [Series("s", "base", points)], Axis("x", log=True), Axis("y"))
    assert draw("t", [Series("s", "base", [(0, 4)])], Axis("x", log=True), Axis("y")) == ""


def test_the_files_of_a_report_appear_together_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "build", lambda results, manifest: report())
    written.write_report(tmp_path, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert (tmp_path / "report.html").read_text() == page(report())
    assert json.loads((tmp_path / "report.json").read_text()) == report()

    def fails(_: Any) -> str:
        raise LinearizeError("no page")

    (tmp_path / "new").mkdir()
    monkeypatch.setattr(written.report_page, "page", fails)
    with pytest.raises(LinearizeError, match="no page"):
        written.write_report(tmp_path / "new", {}, {})
    assert list((tmp_path / "new").iterdir()) == []

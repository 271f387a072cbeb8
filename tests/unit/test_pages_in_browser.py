"""The pages in a real browser, on a phone and a desk, light and dark: nothing sticks out, everything can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from reports import report

from liger_convert.pipeline.pages import compare_page, report_page
from liger_convert.pipeline.pages.compare import compare

pytestmark = pytest.mark.skipif(browser.find() is None, reason="there is no Chromium on this machine")
A4 = 718  # pixels of an inch's 96 between margins of a centimetre
SIZES = [(360, 740), (390, 844), (1280, 900)]
# WCAG 2.1, level AA: 4.5 for text, 3 for what is drawn
CONTRAST = """
(() => {
  const parts = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = color => {
    const [r, g, b] = parts(color).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor, [, , , alpha = 1] = parts(color);
      if (alpha > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (color, element) => {
    const [low, high] = [light(color), light(behind(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title, style")) continue;
    const style = getComputedStyle(element), color = element.closest("svg") ? style.fill : style.color;
    if (ratio(color, element) < 4.5) weak.push([walker.currentNode.data.trim(), ratio(color, element)]);
  }
  for (const drawn of document.querySelectorAll("svg polyline, svg circle, svg rect, svg .spread")) {
    const style = getComputedStyle(drawn), color = style.stroke === "none" ? style.fill : style.stroke;
    if (ratio(color, drawn) < 3) weak.push([drawn.outerHTML, ratio(color, drawn)]);
  }
  return weak;
})()
"""
WIDE = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > {width} && "
WIDE += "!e.closest('.scroll')).map(e => e.outerHTML.slice(0, 80))"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.started(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    names = ["poor", "other", "a-run-with-a-rather-long-name-that-nobody-would-choose", *"abcdef"]  # every color
    files = [folder / f"{i}.json" for i in range(len(names))]
    for name, file in zip(names, files, strict=True):
        file.write_text(json.dumps(report(name, worse=name == "poor", base="org/b" if name == "other" else "org/a")))
    colorful = report(name="a-model-with-a-name-as-long-as-they-are-in-practice-135m")
    linearization = colorful["plan"]["linearization"]
    linearization["mixers"] |= dict.fromkeys(("third", "fourth"), linearization["mixers"]["main"])
    linearization["layers"] = ["main", "third", "softmax", "recall", "fourth", "softmax"]
    made = {
        "report": report_page.page(colorful),
        "poor report": report_page.page(report(worse=True)),
        "comparison": compare_page.page(compare(files)),
    }
    paths = {name: folder / f"{name}.html" for name in made}
    for name, path in paths.items():
        path.write_text(made[name])
    return paths


def overflow(page: browser.Page, width: int) -> list[str]:
    """What reaches beyond the window, other than inside of a part that scrolls by itself."""
    wide = page.evaluate("document.scrollingElement.scrollWidth") > width
    found: list[str] = page.evaluate(WIDE.format(width=width))
    return found + ["the page"] * wide


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", ["report", "poor report", "comparison"])
def test_a_page_fits_its_window_loads_nothing_and_can_be_read(chromium, pages, name, width, height, scheme):
    page = chromium.open(pages[name].as_uri(), width, height, scheme)
    assert page.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
    assert overflow(page, width) == []
    assert page.evaluate(CONTRAST) == []
    assert page.problems == []
    assert page.requests == [pages[name].as_uri()]


def test_the_tables_of_a_report_are_whole_on_a_phone(chromium, pages):
    page = chromium.open(pages["report"].as_uri(), 390, 844, "light")
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    assert page.evaluate(cut) == []


def test_dark_is_dark_and_paper_is_light_and_wide_enough(chromium, pages):
    background = "getComputedStyle(document.body).backgroundColor"
    page = chromium.open(pages["report"].as_uri(), A4, 1000, "dark")
    assert page.evaluate(background) == "rgb(23, 22, 20)"
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert page.evaluate(background) == "rgb(252, 251, 248)"
    assert overflow(page, A4) == []
    assert page.evaluate("document.querySelector('.measures').scrollWidth") <= A4


def test_what_would_be_wrong_with_a_page_is_found(chromium, pages, tmp_path):
    wrong = tmp_path / "wrong.html"
    planted = "<p style='width: 900px'>wide</p><p style='color: #ccc'>faint</p><script>1</script>"
    wrong.write_text(pages["report"].read_text().replace("</main>", f"{planted}</main>"))
    page = chromium.open(wrong.as_uri(), 390, 844, "light")
    assert any("wide" in part for part in overflow(page, 390))
    assert [text for text, _ in page.evaluate(CONTRAST)] == ["faint"]
    assert any("Content Security Policy" in problem for problem in page.problems)

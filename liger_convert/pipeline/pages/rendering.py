"""Renders the templates of the pages. Every value is escaped unless it is Markup."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from liger_convert.pipeline.pages.common import cell, lower_is_better


class Column(NamedTuple):
    """A model in the table of measures. look: the CSS class of its cells. number, run: a run's number among several,
    and the CSS class of that number. recovered: by metric, text below the value."""

    name: str
    measures: Mapping[str, Any]
    look: str = ""
    number: int | None = None
    run: str = ""
    recovered: Mapping[str, str] = {}

    @property
    def label(self) -> str:
        """The label of its cells on a narrow screen."""
        return self.name if self.number is None else f"{self.number} {self.name}"

    @property
    def attributes(self) -> Markup:
        return Markup(' class="{}"').format(self.look) if self.look else Markup()


def render(template: str, **values: Any) -> str:
    """The page made from `template`, a file in templates/, and `values`."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("liger_convert.pipeline.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"cell": cell_markup, "code": code_markup, "unbroken": unbroken_markup}
    environment.globals["lower_is_better"] = lower_is_better
    return environment


def cell_markup(measured: Any) -> Markup:
    """`common.cell` as markup, with the standard error in small type."""
    value, sign, stderr = cell(measured).partition(" ± ")
    return escape(value) + (Markup(" <small>±&nbsp;{}</small>").format(stderr) if sign else "")


def code_markup(markdown: str) -> Markup:
    """A sentence of Markdown as markup. Only backticks are interpreted."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(markdown))))


def unbroken_markup(sentence: str) -> Markup:
    """A sentence as markup in which no line ends within an option, or between a value and its standard error."""
    text = re.sub(r"--[\w-]+", r'<span class="option">\g<0></span>', str(escape(sentence)))
    return Markup(text.replace(" ± ", "&nbsp;±&nbsp;"))

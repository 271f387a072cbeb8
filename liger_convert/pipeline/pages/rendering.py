"""The templates of the pages: everything that is put into one is escaped, unless it was made as markup here."""

from __future__ import annotations

import functools
import re
from typing import Any

import jinja2
from markupsafe import Markup, escape

from liger_convert.pipeline.pages.common import cell, lower_is_better


def render(template: str, **values: Any) -> str:
    """The page that `template`, a file in templates/, makes of `values`."""
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
    environment.filters |= {"cell": cell_markup, "code": code_markup}
    environment.globals["lower_is_better"] = lower_is_better
    return environment


def cell_markup(measured: Any) -> Markup:
    """`common.cell` with the error on a line of its own."""
    value, sign, stderr = cell(measured).partition(" ± ")
    return escape(value) + (Markup(" <small>±&nbsp;{}</small>").format(stderr) if sign else "")


def code_markup(markdown: str) -> Markup:
    """A sentence of Markdown whose only marks are backticks."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(markdown))))

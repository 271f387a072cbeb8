"""The model card of an export: its README.md, whose front matter the hub reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData, try_to_load_from_cache

from liger_convert import __version__
from liger_convert.config import yaml_file
from liger_convert.io.checkpoint import LICENSES
from liger_convert.io.files import atomic_write
from liger_convert.mixers.reach import reaches
from liger_convert.model import linear_layers
from liger_convert.pipeline.quantization_report import rows
from liger_convert.utils.errors import BadInput

CARD = "README.md"
FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)
MOST = 2**20  # characters that are read of a card to find its front matter
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FIGURES = "## What it is worth\n"  # the heading of the same section of report.md
LICENSE = "## License\n"
# by whether a mixer has a memory, and whether every window is limited
REPLACEMENTS = {
    (True, True): "a recurrent memory and a sliding window",
    (True, False): "a recurrent memory and a sliding window, or by other attention over all tokens",
    (False, True): "a sliding window",
    (False, False): "other attention over all tokens",
}

BODY = jinja2.Template(
    """\
# {{ title }}, linearized

{% if layers == 1 %}The only attention layer
{%- else %}{{ "All" if linear == layers else linear ~ " of the" }} {{ layers }} attention layers{% endif %}
{%- if base %} of [{{ base }}](https://huggingface.co/{{ base }}){% endif %}
{{- " is" if linear == 1 else " are" }} replaced by {{ replacement }}
{%- if constant %}: {{ "its" if linear == 1 else "their" }} cache has the same size at any length
{%- if linear < layers %}, while the other
{{- " layer keeps its" if layers - linear == 1 else " layers keep their" }} softmax attention{% endif %}{% endif %}.
Made by liger-convert {{ version }}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {{ path }}
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)  # or: import liger_convert, and without it
tokenizer = AutoTokenizer.from_pretrained(path)
```

{% if scheme %}
## Quantized weights

The {{ weights }} weights of attention's and the feed-forward's linear maps are {{ scheme }}, in the format of
compressed-tensors (`pip install compressed-tensors`): one scale per row, rounded to nearest, without calibration. The
inputs of these maps are quantized as the model runs, token by token. Embeddings, head, norms and memories are not
quantized.

{% if loss %}
Measured on {{ loss.kl.n }} windows of held-out text, in float32.

{% endif %}
| | |
|---|---:|
{% for label, figure in figures %}
| {{ label }} | {{ figure }} |
{% endfor %}

{% endif %}
{{ license_heading }}
The weights are derived from those of the base, whose license applies to them
{%- if license %}: {{ license }}{% endif %}
{%- if files %} (see {% for file in files %}[{{ file }}]({{ file }}){{ ", " if not loop.last }}{% endfor %}){% endif %}.
The Python files in this folder are part of liger-convert, under the Apache License 2.0.
""",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


def write_card(
    folder: Path,
    config: Any,
    name: str,
    load_from: str,
    *,
    hub_base: str | None,
    base_dir: Path | None,
    written: dict[str, Any],
) -> None:
    """Writes the card of the export in `folder`, whose other files are there already.

    config: the linearized config. name: the export's name. load_from: its hub id or folder. hub_base: the base's hub
    id; None if the base is a folder or file. base_dir: the base's folder, whose own card names its license; None if it
    is not available. written: what `export_model` returns. A license that is not known is left out of the front matter.
    """
    files = sorted({path.name for pattern in LICENSES for path in folder.glob(pattern)})
    license = base_license(base_dir, files)
    mixers = {mixer for mixer in config.linearization["layers"] if mixer in config.linearization["mixers"]}
    constant = all(config.linearization["mixers"][mixer]["window"] for mixer in mixers)
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["linear-attention", "liger-convert", *(["compressed-tensors"] if "scheme" in written else [])],
        base_model=hub_base,
        **license,
    )
    said = license.get("license_name", license.get("license"))
    body = BODY.render(
        title=name.rpartition("/")[2],
        path=json.dumps(load_from),
        base=hub_base,
        linear=len(linear_layers(config)),
        layers=config.num_hidden_layers,
        constant=constant,
        replacement=REPLACEMENTS[bool(reaches(config.linearization)), constant],
        version=__version__,
        license_heading=LICENSE,
        license=None if said == "other" else ", ".join([said] if isinstance(said, str) else said or []),
        files=files,
        **({"figures": rows(written), **written} if "scheme" in written else {"scheme": None}),
    )
    (folder / CARD).write_text(f"---\n{front.to_yaml()}\n---\n\n{body}", encoding="utf-8")


def cached_folder(repo: str) -> Path | None:
    """The local cache folder with the card of a hub repository; None if the card has not been downloaded."""
    found = try_to_load_from_cache(repo, CARD)
    return Path(found).parent if isinstance(found, str) else None


def base_license(base_dir: Path | None, files: list[str]) -> dict[str, Any]:
    """`license`, `license_name` and `license_link`, as far as the card in `base_dir` has them.

    If the card names no license, or cannot be read, but there is a license file (one of the export's `files`), the
    license is `other` with a link to that file.
    """
    front = {} if base_dir is None else _front_matter(base_dir / CARD)
    license = front.get("license")
    named = isinstance(license, list) and license and all(isinstance(one, str) for one in license)
    if isinstance(license, str) or named:
        found = {"license": license}
        if isinstance(name := front.get("license_name"), str):
            found["license_name"] = name
        link = front.get("license_link")
        if isinstance(link, str) and (link in files or link.startswith(("https://", "http://"))):
            found["license_link"] = link
        return found
    texts = [file for file in files if not file.startswith(("NOTICE", "USE_POLICY"))]
    return {"license": "other", "license_link": texts[0]} if texts else {}


def add_figures(folder: Path, report: str) -> None:
    """Puts the figures of `report`, the text of a report.md, into the card of the export in `folder`, replacing older
    ones. Does nothing if the report has none. Raises LinearizeError when the card cannot be written."""
    figures = _section(report, FIGURES)
    card = (folder / CARD).read_text(encoding="utf-8")
    if not figures:
        return
    if old := _section(card, FIGURES):
        card = card.replace(old, "")
    before, heading, after = card.partition(LICENSE)
    atomic_write(folder / CARD, f"{before.rstrip()}\n\n{figures.rstrip()}\n\n{heading}{after}".rstrip() + "\n")


def _front_matter(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        with open(path, encoding="utf-8-sig") as file:
            match = FRONT_MATTER.match(file.read(MOST))
        front = yaml_file.parse(match[1], str(path)) if match else {}
    except (BadInput, OSError, ValueError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def _section(text: str, heading: str) -> str:
    """A section of a Markdown text with its heading, up to the next `## ` heading; empty if there is none."""
    _, found, rest = text.partition(heading)
    return found + re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0] if found else ""

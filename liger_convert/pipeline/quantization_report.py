"""What quantising cost and saved, in words: for the model card and the terminal."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from liger_convert.pipeline.pages.common import cell


def rows(written: dict[str, Any]) -> list[tuple[str, str]]:
    """A label and a figure for each thing that is known of an export whose weights are quantised. written: what
    `export_model` returns."""
    scheme, loss = written["scheme"], written["loss"]
    found = [
        ("all tensors, unquantised", decimal(written["unquantized_bytes"])),
        (f"all tensors, {scheme}", decimal(written["bytes"])),
    ]
    if loss is not None:
        found += [
            ("perplexity, unquantised", cell(loss["ppl_before"])),
            (f"perplexity, {scheme}", cell(loss["ppl"])),
            ("added loss, nats per token", _small(loss["loss_added"])),
            ("KL from the unquantised model, nats per token", _small(loss["kl"])),
            ("tokens on which both agree", cell(loss["same_token"])),
        ]
    return found


def _small(measured: dict[str, Any]) -> str:
    """As `cell`, for numbers far below one."""
    if measured["value"] is None:
        return "not finite"
    stderr = "" if measured["stderr"] is None else f" ± {measured['stderr']:.5f}"
    return f"{measured['value']:.5f}{stderr}"

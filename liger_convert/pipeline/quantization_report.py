"""The costs and savings of quantization as labeled figures, for the model card and the terminal."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from liger_convert.pipeline.pages.common import cell


def rows(written: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, figure) for everything that is known about an export with quantized weights. written: what `export_model`
    returns."""
    scheme, loss = written["scheme"], written["loss"]
    found = [
        ("all tensors, unquantized", decimal(written["unquantized_bytes"])),
        (f"all tensors, {scheme}", decimal(written["bytes"])),
    ]
    if loss is not None:
        found += [
            ("perplexity, unquantized", cell(loss["ppl_before"])),
            (f"perplexity, {scheme}", cell(loss["ppl"])),
            ("added loss, nats per token", _small(loss["loss_added"])),
            ("KL from the unquantized model, nats per token", _small(loss["kl"])),
            ("tokens on which both agree", cell(loss["same_token"])),
        ]
    return found


def _small(measured: dict[str, Any]) -> str:
    """Same as `cell`, for numbers far below one."""
    if measured["value"] is None:
        return "not finite"
    stderr = "" if measured["stderr"] is None else f" ± {measured['stderr']:.5f}"
    return f"{measured['value']:.5f}{stderr}"

"""Text that the base writes itself, sampled once and kept in a file: training on it needs no data set.

Shapes: N documents, T tokens of a document, B batch, P tokens of its longest prompt.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import GenerationConfig

from liger_convert.config.sources import TeacherSource
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.io.files import disk_errors
from liger_convert.io.tokenizer import check_ids
from liger_convert.model.loading import load_base
from liger_convert.utils.device import compute_dtype
from liger_convert.utils.errors import BadInput, refusing
from liger_convert.utils.progress import Report, console

FILE = "tokens.u32"


def encode_prompts(source: TeacherSource, tokenizer: Any) -> list[list[int]]:
    """The tokens that documents begin with, in turn: of each text of `source.prompt`; without, the token that begins a
    text, or the first special one. Raises BadInput when there is none, and for a prompt that fills a document."""
    if source.prompt is None:
        special = [i for i in (tokenizer.bos_token_id, *tokenizer.all_special_ids) if i is not None]
        if not special:
            raise BadInput(
                "data: the tokenizer has no special token to begin a document with; give `prompt` some texts"
            )
        return [special[:1]]
    with refusing("data: the tokenizer fails on a prompt"):
        found = tokenizer(source.prompt)["input_ids"]
    for text, ids in zip(source.prompt, found):
        check_ids(tokenizer, ids, f"data: the prompt {text!r}")
        if not 0 < len(ids) < source.document_tokens:
            room = f"of a document of {source.document_tokens} (document_tokens)"
            raise BadInput(f"data: the prompt {text!r} takes {len(ids)} tokens {room}; it should leave room behind it")
    return found


def write(
    source: TeacherSource,
    path: Path,
    *,
    prompts: list[list[int]],
    base_dir: Path,
    device: torch.device,
    precision: str = "auto",
    seed: int = 0,
    progress: Report | None = None,
) -> None:
    """Makes the file `path`, unless it is there: `source.documents` documents behind each other, little-endian uint32.

    Each has exactly `source.document_tokens` tokens, its prompt included. The token that ends a text ends no document:
    what follows is what the base writes after it, as in the stream that it was pretrained on. Nothing in the base's
    own generation config has a say in the sampling.
    Every batch has its own seed, so a call that was killed goes on after its last whole batch and ends with the same
    bytes. Until then `path`.partial holds what there is, and `path`.state its sha256. Raises LinearizeError when the
    disk is full.
    """
    state = path.with_name(f"{path.name}.state")
    if path.exists():
        state.unlink(missing_ok=True)
        return
    model = load_base(base_dir, device, compute_dtype(device, precision))
    sampling = {"temperature": source.temperature, "top_p": source.top_p, "top_k": 0}
    model.generation_config = GenerationConfig(do_sample=True, **sampling)
    size, partial = source.document_tokens, path.with_name(f"{path.name}.partial")
    with disk_errors(path):
        with open(partial, "a+b") as file:
            whole, digest = _whole_documents(file, state, size)
            started = time.monotonic()
            for first in range(whole, source.documents, source.batch_size):
                last = min(first + source.batch_size, source.documents)
                torch.manual_seed(int(np.random.default_rng((seed, first)).integers(2**63)))
                made_BT = _sample(model, [prompts[i % len(prompts)] for i in range(first, last)], size)
                tokens = made_BT.astype("<u4").tobytes()
                file.write(tokens)
                file.flush()
                digest.update(tokens)
                write_checked(state, {"documents": last, "sha256": digest.hexdigest()})
                if progress is not None:
                    speed = size * (last - whole) / (time.monotonic() - started)
                    progress(size * last, source.written_tokens, f"{speed:,.0f} tokens/s")
            os.fsync(file.fileno())
        partial.replace(path)
        state.unlink()


def _whole_documents(file: BinaryIO, state: Path, size: int) -> tuple[int, Any]:
    """Of what a killed call left in `file`, the number of documents that `state` vouches for, and their sha256 to go on
    with. The file is cut behind them: behind none when they are not what was written."""
    known = read_checked(state) or {"documents": 0, "sha256": hashlib.sha256().hexdigest()}
    file.seek(0)
    written = file.read(4 * size * known["documents"])
    digest = hashlib.sha256(written)
    documents: int = known["documents"]
    if digest.hexdigest() != known["sha256"]:
        console.print(f"warning: {file.name}: is damaged; it is written again", markup=False, soft_wrap=True)
        documents, digest = 0, hashlib.sha256()
    file.truncate(4 * size * documents)
    file.seek(0, os.SEEK_END)
    return documents, digest


def _sample(model: Any, prompts: list[list[int]], tokens: int) -> np.ndarray:
    """[B,T]: each prompt continued to so many tokens; in the batch the prompts end together, padded on the left."""
    sizes = [len(prompt) for prompt in prompts]
    ids_BP = torch.tensor([[0] * (max(sizes) - len(prompt)) + prompt for prompt in prompts])
    mask_BP = torch.tensor([[0] * (max(sizes) - size) + [1] * size for size in sizes])
    made = model.generate(
        input_ids=ids_BP.to(model.device),
        attention_mask=mask_BP.to(model.device),
        max_new_tokens=tokens - min(sizes),
    )
    return np.stack([row[max(sizes) - size :][:tokens] for row, size in zip(made.cpu().numpy(), sizes)])

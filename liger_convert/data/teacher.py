"""Training text sampled from the base itself, written to a file once, so that training needs no dataset.

Shapes: N documents, T tokens of a document, B batch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from liger_convert.config.sources import TeacherSource
from liger_convert.data.documents import Document
from liger_convert.data.sampling import Sampler
from liger_convert.io.checksums import read_checked, write_checked
from liger_convert.io.files import disk_errors
from liger_convert.io.tokenizer import check_ids, closes_texts
from liger_convert.model.loading import load_pretrained
from liger_convert.model.placing import place
from liger_convert.utils.device import compute_dtype, out_of_memory
from liger_convert.utils.errors import BadInput, refusing
from liger_convert.utils.progress import Report, console

FILE = "tokens.u32"


def encode_prompts(source: TeacherSource, tokenizer: Any) -> list[list[int]]:
    """The token ids of the prompts that documents begin with, in rotation.

    They are those of the texts in `source.prompt`. Without it, the only prompt is the beginning-of-text token, or else
    the first special token. Raises BadInput if there is no special token, and for a prompt that is empty or leaves no
    room in a document.
    """
    if source.prompt is None:
        special = [i for i in (tokenizer.bos_token_id, *tokenizer.all_special_ids) if i is not None]
        if not special:
            raise BadInput(
                "data: the tokenizer has no special token to begin a document with; give `prompt` some texts"
            )
        return [special[:1]]
    with refusing("data: the tokenizer fails on a prompt"):
        found = tokenizer(source.prompt)["input_ids"]
        if closes_texts(tokenizer):
            found = [ids[:-1] for ids in found]
    for text, ids in zip(source.prompt, found):
        check_ids(tokenizer, ids, f"data: the prompt {text!r}")
        if not 0 < len(ids) < source.document_tokens:
            room = f"of a document of {source.document_tokens} (document_tokens)"
            raise BadInput(
                f"data: the prompt {text!r} takes {len(ids)} tokens {room}; it should leave room for the text"
            )
    return found


def beginnings(source: TeacherSource, documents: Sequence[Document], seed: int) -> list[list[int]]:
    """Prompts taken from the beginnings of `documents`, in an order drawn from `seed`.

    Each is the first `source.prompt_tokens` tokens of a document; in a chat, only what precedes the first response, if
    that is shorter. Documents that are not longer than their prompt are left out. There are at most `source.documents`
    prompts. Raises BadInput if there are none.
    """
    found = [(document.ids, _asked(document, source.prompt_tokens)) for document in documents]
    longer = [ids[:size] for ids, size in found if len(ids) > size]
    if not longer:
        longest = max(len(ids) for ids, _ in found)
        what = f"no document of {source.prompts} has more than {source.prompt_tokens} tokens (prompt_tokens)"
        raise BadInput(f"data: {what}; the longest has {longest}")
    order = np.random.default_rng((seed, len(longer))).permutation(len(longer))[: source.documents]
    return [longer[i].tolist() for i in order]


def _asked(document: Document, most: int) -> int:
    """The number of tokens before a chat's first response, at most `most`. For plain text, whose loss mask begins with
    its first token, `most`."""
    first = int(document.loss.argmax())
    return min(first, most) if first else most


def write(
    source: TeacherSource,
    path: Path,
    *,
    prompts: list[list[int]],
    base_dir: Path,
    device: torch.device,
    precision: str = "auto",
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    progress: Report | None = None,
) -> None:
    """Writes `source.documents` documents to the file `path`, concatenated, as little-endian uint32. Does nothing if
    the file exists.

    part: (i, n) writes only the documents of part i of n, to a file of its own, from which `join` makes the whole.

    Each document has exactly `source.document_tokens` tokens, including its prompt. prompts: token ids, used in
    rotation. End-of-text tokens do not end a document: the base goes on writing, as in its pretraining stream. The
    base's own generation config is ignored.

    Layers of the base that do not fit on the GPU stay in host memory, see `place`. Every document has its own random
    numbers. So a killed call can resume after its last complete batch with the same result, and a batch that does not
    fit on the GPU is halved. Until the file is complete, `path`.partial holds the documents so far and `path`.state
    their number and sha256. Raises LinearizeError if the disk is full.
    """
    if path.exists():
        _state(path).unlink(missing_ok=True)
        return
    documents = _numbers(source, part)
    path = part_file(path, part)
    state = _state(path)
    if path.exists():
        state.unlink(missing_ok=True)
        return
    model = place(load_pretrained(base_dir, dtype=compute_dtype(device, precision)), device).requires_grad_(False)
    batches = _Batches(model, source, prompts, seed)
    size, partial = source.document_tokens, path.with_name(f"{path.name}.partial")
    with disk_errors(path):
        with open(partial, "a+b") as file:
            whole, digest = _whole_documents(file, state, size)
            started, last = time.monotonic(), whole
            while last < len(documents):
                made_BT = batches.next(documents[last:])
                last += len(made_BT)
                tokens = made_BT.astype("<u4").tobytes()
                file.write(tokens)
                file.flush()
                digest.update(tokens)
                write_checked(state, {"documents": last, "sha256": digest.hexdigest()})
                if progress is not None:
                    speed = size * (last - whole) / (time.monotonic() - started)
                    progress(size * last, size * len(documents), f"{speed:,.0f} tokens/s")
            os.fsync(file.fileno())
        partial.replace(path)
        state.unlink(missing_ok=True)


def join(path: Path, parts: int) -> None:
    """Makes the file `path` of the files of so many parts, unless it exists, and removes them and all that killed calls
    left beside it."""
    if not path.exists():
        with disk_errors(path):
            partial = path.with_name(f"{path.name}.partial")
            with open(partial, "wb") as whole:
                for i in range(parts):
                    with open(part_file(path, (i, parts)), "rb") as one:
                        shutil.copyfileobj(one, whole)
                whole.flush()
                os.fsync(whole.fileno())
            partial.replace(path)
    for file in path.parent.glob(f"{path.name}.*"):
        file.unlink()


def part_file(path: Path, part: tuple[int, int]) -> Path:
    """The file of part (i, n); `path` itself if there is only one."""
    return path if part == (0, 1) else path.with_name(f"{path.name}.{part[0] + 1}-of-{part[1]}")


def _state(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


def _numbers(source: TeacherSource, part: tuple[int, int]) -> range:
    """The numbers of the documents of part (i, n). Parts begin with a batch, so that batches are those of one part."""
    batches, (i, n) = -(-source.documents // source.batch_size), part
    first, last = (batches * j // n * source.batch_size for j in (i, i + 1))
    return range(first, min(last, source.documents))


class _Batches:
    """Samples documents in batches of `source.batch_size`, or fewer if these do not fit on the GPU."""

    def __init__(self, model: Any, source: TeacherSource, prompts: list[list[int]], seed: int):
        self.model, self.source, self.prompts, self.seed = model, source, prompts, seed
        self.rows, self.sampler = source.batch_size, self._sampler()

    def next(self, documents: range) -> np.ndarray:
        """[B,T]: the first batch of the documents with these numbers."""
        while True:
            numbers = documents[: self.rows]
            try:
                prompts = [self.prompts[i % len(self.prompts)] for i in numbers]
                return self.sampler(prompts, [(self.seed, i) for i in numbers])
            except RuntimeError as error:
                if self.rows == 1 or not out_of_memory(error):
                    raise
            # outside the handler, because the exception keeps the tensors that did not fit alive
            self.rows //= 2
            self.sampler = self._sampler()
            torch.cuda.empty_cache()
            console.print(f"note: there is room for fewer documents at a time: {self.rows}", markup=False)

    def _sampler(self) -> Sampler:
        return Sampler(self.model, self.source.document_tokens, self.source.temperature, self.source.top_p)


def _whole_documents(file: BinaryIO, state: Path, size: int) -> tuple[int, Any]:
    """The number of complete documents that a killed call left in `file`, and their running sha256.

    The file is truncated after the documents recorded in `state`, or to nothing if their hash does not match.
    """
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

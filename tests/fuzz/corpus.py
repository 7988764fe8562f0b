"""Findings of past campaigns as small text files, each with what it did and how it is used.

A file of ``tests/fuzz/corpus`` is a model in the text format of protocol buffers, which can express any damage that still
parses; ``.b64`` holds the bytes of one that does not. Its first lines say, behind ``#``, ``why``, ``use`` (a name of
:data:`tests.fuzz.uses.USES`), ``output``, and ``feed NAME DTYPE SIZES`` for each feed, which is all ones.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from tests.fuzz.seeds import Seed
from tests.fuzz.uses import use

FOLDER = Path(__file__).with_name("corpus")
TEXT, BYTES = ".textproto", ".b64"


@dataclass(frozen=True)
class Finding:
    """A file that once ended in a fault.

    Attributes:
        why: what happened, in a line.
        how: the use of the file.
        content: its bytes.
        seed: what it is fed, and the output that the loss reads.
    """

    why: str
    how: str
    content: bytes
    seed: Seed

    def work(self) -> None:
        use(self.content, self.seed, self.how)


def files() -> Iterator[Path]:
    return (path for path in sorted(FOLDER.iterdir()) if path.suffix in (TEXT, BYTES))


def read(path: Path) -> Finding:
    lines = path.read_text().splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    facts = dict(line.partition(": ")[::2] for line in comments if not line.startswith("feed "))
    feeds = {}
    for line in comments:
        if line.startswith("feed "):
            _, name, dtype, *sizes = line.split(" ")
            feeds[name] = np.ones([int(size) for size in sizes], dtype)
    rest = "\n".join(line for line in lines if not line.startswith("#"))
    if path.suffix == TEXT:
        content = text_format.Parse(rest, onnx.ModelProto()).SerializeToString()
    else:
        content = base64.b64decode(rest)
    return Finding(facts["why"], facts["use"], content, Seed(path.stem, onnx.ModelProto(), feeds, facts["output"]))


def write(folder: Path, name: str, finding: Finding) -> Path:
    """Write a finding in the form of the corpus; returns its path."""
    head = [f"# why: {' '.join(finding.why.split())[:200]}", f"# use: {finding.how}", f"# output: {finding.seed.output}"]
    head += [f"# feed {name} {a.dtype} {' '.join(map(str, a.shape))}".rstrip() for name, a in finding.seed.feeds.items()]
    try:
        model = onnx.ModelProto.FromString(finding.content)
        text, suffix = text_format.MessageToString(model), TEXT
        if text_format.Parse(text, onnx.ModelProto()).SerializeToString() != model.SerializeToString():
            raise ValueError
    except (DecodeError, ValueError, text_format.ParseError):
        text, suffix = base64.encodebytes(finding.content).decode(), BYTES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{suffix}"
    path.write_text("\n".join([*head, text]))
    return path

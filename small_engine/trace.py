"""Reader of a trace: one JSON object per line, validated line by line.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

Lengths are in tokens; `hash_ids` has one id per block of 512 prompt tokens, the last one possibly
partial. Other fields are ignored. The file may be compressed with gzip, under any name.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .request import BLOCK_TOKENS, WorkloadRequest

_GZIP = b"\x1f\x8b"
_LINE_BYTES_MAX = 16 << 20
"""Maximum length of a line in bytes, so that a file cannot exhaust memory. The limit is enough for the
hash ids of a prompt of some hundred million tokens."""


class _Line(msgspec.Struct):
    """The fields of a trace line that a replay reads."""

    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...]


_DECODER = msgspec.json.Decoder(_Line)


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[WorkloadRequest]:
    """Yield at most `limit` requests of the trace, in order, while reading the file.

    Blank lines are skipped. Raises `ConfigError` that names file, line and field: at the first `next`
    if the file cannot be read or has no request, later for a malformed line.
    """
    index = 0
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and index >= limit:
            return
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        yield _parse(line, index, where)
        index += 1
    if index == 0:
        raise ConfigError(f"the trace {path} has no requests; it needs one JSON object a line")


def _lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a plain or compressed file, with only one line in memory at a time."""
    read = 0
    try:
        with Path(path).open("rb") as plain, _unpacked(plain) as lines:
            while line := lines.readline(_LINE_BYTES_MAX + 1):
                read += 1
                if len(line) > _LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{path}, line {read}: longer than {_LINE_BYTES_MAX >> 20} MiB, the"
                        " limit of a request"
                    )
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"the trace {path} is truncated or damaged: after line {read} the gzip data ends or is"
            f" wrong: {error}; fetch it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from error


def _unpacked(file: BinaryIO) -> BinaryIO | gzip.GzipFile:
    packed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    return gzip.open(file) if packed else file


def _parse(line: bytes, index: int, where: str) -> WorkloadRequest:
    try:
        read = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not a request in JSON: {error}") from error
    blocks = -(-read.input_length // BLOCK_TOKENS)
    if len(read.hash_ids) < blocks:
        raise ConfigError(
            f"{where}: {len(read.hash_ids)} hash_ids are too few for input_length"
            f" {read.input_length}, which needs {blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    return WorkloadRequest(
        index=index,
        prompt_length=read.input_length,
        output_length=read.output_length,
        hash_ids=read.hash_ids[:blocks],
    )

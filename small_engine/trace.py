"""Reading a trace: one JSON object a line, checked line by line.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

Lengths are in tokens; `hash_ids` has one id for each block of 512 prompt tokens, the last of which
may be partial. The timestamp and other fields are ignored. The file may be compressed with gzip,
whatever its name.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import ConfigError
from .request import BLOCK_TOKENS, WorkloadRequest

_GZIP = b"\x1f\x8b"
_LINE_BYTES_MAX = 16 << 20
"""A longer line is refused, so that no file fills the memory; so much holds the ids of a prompt of some
hundred million tokens."""


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[WorkloadRequest]:
    """Yield the requests of the trace in order, at most `limit` of them, as the file is read.

    A file that begins as gzip does is read as such. Raises `ConfigError` that names the file, the line
    and the field: at the first `next` if the file cannot be read or has no request, later at a
    malformed line. Blank lines are skipped.
    """
    index = 0
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and index >= limit:
            return
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        yield _parse(_decoded(line, where), index, where)
        index += 1
    if index == 0:
        raise ConfigError(f"the trace {path} has no requests; it needs one JSON object a line")


def _lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file, plain or compressed, of which only one is in memory at a time."""
    read = 0
    try:
        with Path(path).open("rb") as plain, _unpacked(plain) as lines:
            while line := lines.readline(_LINE_BYTES_MAX + 1):
                read += 1
                if len(line) > _LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{path}, line {read}: longer than {_LINE_BYTES_MAX >> 20} MiB, which no"
                        " request is"
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


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text: {error.reason}") from error


def _parse(line: str, index: int, where: str) -> WorkloadRequest:
    try:
        record: object = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {_kind(record)}")
    fields = cast("dict[str, object]", record)
    prompt_length = _whole_number(fields, "input_length", 1, where)
    output_length = _whole_number(fields, "output_length", 0, where)
    hash_ids = _hash_ids(fields, where)
    blocks = -(-prompt_length // BLOCK_TOKENS)
    if len(hash_ids) < blocks:
        raise ConfigError(
            f"{where}: {len(hash_ids)} hash_ids are too few for input_length {prompt_length}, "
            f"which needs {blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    return WorkloadRequest(
        index=index,
        prompt_length=prompt_length,
        output_length=output_length,
        hash_ids=hash_ids[:blocks],
    )


def _whole_number(fields: dict[str, object], name: str, minimum: int, where: str) -> int:
    if name not in fields:
        raise ConfigError(f"{where}: {name} is missing")
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {name} must be a whole number, found {_kind(value)}")
    if value < minimum:
        raise ConfigError(f"{where}: {name} is {value}, must be {minimum} or more")
    return value


def _hash_ids(fields: dict[str, object], where: str) -> tuple[int, ...]:
    if "hash_ids" not in fields:
        raise ConfigError(f"{where}: hash_ids is missing")
    value = fields["hash_ids"]
    if not isinstance(value, list):
        raise ConfigError(f"{where}: hash_ids must be a list, found {_kind(value)}")
    ids: list[int] = []
    for item in cast("list[object]", value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise ConfigError(f"{where}: hash_ids must hold whole numbers, found {_kind(item)}")
        if not 0 <= item < 1 << 64:
            raise ConfigError(f"{where}: hash_ids holds {item}, must be from 0 to 2**64 - 1")
        ids.append(item)
    return tuple(ids)


def _kind(value: object) -> str:
    """Name the JSON type of `value`, with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""Traces: reading them, and the requests and token ids derived from them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.small_engine.request import (
    BLOCK_TOKENS,
    OUTPUT_TOKENS_FROM,
    WorkloadRequest,
    block_tokens,
    output_tokens,
)
from lockstep.small_engine.trace import read_trace
from lockstep.small_engine.workload import REQUESTS_DEFAULT, requests_of, synthetic_requests

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def changed(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


def test_a_line_becomes_a_request_and_blank_lines_and_other_fields_are_skipped(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path, json.dumps(GOOD), "", changed(extra=[1], timestamp="?"))

    assert list(read_trace(path)) == [
        WorkloadRequest(index=0, prompt_length=700, output_length=3, hash_ids=(7, 8)),
        WorkloadRequest(index=1, prompt_length=700, output_length=3, hash_ids=(7, 8)),
    ]


def test_a_trace_that_is_compressed_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}".encode()))

    assert [each.index for each in read_trace(path)] == [0, 1]
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: not a request in JSON"):
        list(read_trace(packed(tmp_path, f"{json.dumps(GOOD)}\n{{\n".encode())))


def packed(folder: Path, content: bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(gzip.compress(content))
    return path


@pytest.mark.parametrize("damage", [slice(0, 60), slice(0, 12), slice(0, 2)])
def test_a_compressed_trace_that_is_cut_off_is_refused_in_one_line(
    tmp_path: Path, damage: slice
) -> None:
    path = packed(tmp_path, b"\n".join(changed(output_length=n).encode() for n in range(100)))
    path.write_bytes(path.read_bytes()[damage])

    with pytest.raises(ConfigError, match=r"trace\.jsonl is truncated or damaged: after line \d+ "):
        list(read_trace(path))


@pytest.mark.parametrize("at", [3, 30, -6])
def test_a_compressed_trace_with_wrong_bytes_is_refused_in_one_line(
    tmp_path: Path, at: int
) -> None:
    path = packed(tmp_path, b"\n".join(changed(output_length=n).encode() for n in range(100)))
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"^[^\n]*trace\.jsonl"):
        list(read_trace(path))


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path, b" " * (20 << 20))

    with pytest.raises(ConfigError, match="line 1: longer than 16 MiB"):
        list(read_trace(path))


def test_reading_stops_at_the_limit_and_does_not_look_at_what_follows(tmp_path: Path) -> None:
    path = write_lines(tmp_path, json.dumps(GOOD), "broken")

    assert len(list(read_trace(path, limit=1))) == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (without("input_length"), "required field `input_length`"),
        (changed(input_length="12"), "Expected `int`, got `str` - at `$.input_length`"),
        (changed(input_length=-1), "Expected `int` >= 1 - at `$.input_length`"),
        (changed(output_length=-5), "Expected `int` >= 0 - at `$.output_length`"),
        (changed(hash_ids=[1, "2"]), "at `$.hash_ids[1]`"),
        (changed(hash_ids=[1, -2]), "Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (changed(hash_ids=[7]), "1 hash_ids are too few for input_length 700"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line_number(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = write_lines(tmp_path, json.dumps(GOOD), line)

    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))

    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("absent", "No such file"),
        ("directory", "Is a directory"),
        ("empty", "has no requests"),
        ("binary", "line 1: not a request in JSON"),
    ],
)
def test_a_missing_file_a_directory_an_empty_file_and_binary_are_refused_by_name(
    tmp_path: Path, name: str, complaint: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match=complaint) as caught:
        list(read_trace(tmp_path / name))

    assert str(tmp_path / name) in str(caught.value)


def test_requests_that_share_ids_share_exactly_those_tokens() -> None:
    first = block_tokens((1, 2, 3), 3 * BLOCK_TOKENS)
    second = block_tokens((1, 2, 4), 3 * BLOCK_TOKENS)

    assert first.dtype == np.int32
    assert np.array_equal(first[: 2 * BLOCK_TOKENS], second[: 2 * BLOCK_TOKENS])
    assert not np.array_equal(first[2 * BLOCK_TOKENS :], second[2 * BLOCK_TOKENS :])


def test_output_tokens_are_never_prompt_tokens_and_differ_between_requests() -> None:
    prompts = block_tokens(tuple(range(200)), 200 * BLOCK_TOKENS)
    outputs = output_tokens(3, 500)

    assert prompts.min() >= 0
    assert prompts.max() < OUTPUT_TOKENS_FROM <= outputs.min()
    assert np.array_equal(outputs[:10], output_tokens(3, 10))
    assert not np.array_equal(outputs, output_tokens(4, 500))


def test_the_built_in_workload_repeats_for_a_seed_and_only_for_it() -> None:
    once = list(synthetic_requests(1, 50))

    assert once == list(synthetic_requests(1, 50))
    assert once != list(synthetic_requests(2, 50))
    assert len(list(requests_of(None, 0, None))) == REQUESTS_DEFAULT


def test_the_built_in_workload_shares_system_prompts_and_grows_conversations() -> None:
    requests = list(synthetic_requests(0))
    grown = sum(
        any(
            later.hash_ids[: len(earlier.hash_ids) - 1] == earlier.hash_ids[:-1]
            and later.prompt_length > earlier.prompt_length
            and later.hash_ids[2:3] == earlier.hash_ids[2:3]
            for earlier in requests[: later.index]
        )
        for later in requests
    )

    assert len({request.hash_ids[:2] for request in requests}) == 3
    assert grown > len(requests) // 3
    assert [len(request.hash_ids) for request in requests] == [
        -(-request.prompt_length // BLOCK_TOKENS) for request in requests
    ]

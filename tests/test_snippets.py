"""Every code block of the README and the docs runs as printed, or says why it does not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.snippets import Block, Mark, all_blocks, blocks_of, indented_blocks, pages
from tests.kit.source_tree import ROOT

SMALLER = (
    ("--seeds 0:1000", "--seeds 0:3"),
    ("--requests 300", "--requests 4"),
    ("--requests 100", "--requests 4"),
    ("--requests 40", "--requests 4"),
    ("--requests 20", "--requests 4"),
    ("lockstep replay --profile", "lockstep replay --requests 4 --profile"),
    ("for rank in 0 1 2 3", "for rank in 3"),
    ("bench storage ", "bench storage --bytes 16MiB "),
    ("bench path ", "bench path --bytes 32MiB "),
    ("bench handoff ", "bench handoff --bytes 16MiB --rounds 1 "),
    ("bench agreement ", "bench agreement --blocks 1 "),
    ("benchmarks.copies", "benchmarks.copies --megabytes 16"),
    ("bench tree", "bench tree --tokens 1024 --nodes 1000 --page-tokens 64 --repetitions 3"),
)
"""Replacements that make slow commands of the docs shorter."""

STORES = ("mnt/kv", *(f"disk{rank}/kv" for rank in range(4)))
"""Store paths that the docs assume on an operator's machine."""

BLOCKS = all_blocks()
RUN = (Mark.PLAIN, Mark.SLOW)
NOT_RUN_PAGE = ROOT / "docs" / "not-run.md"


def to_be_run(language: str) -> list[object]:
    return [
        pytest.param(
            block, id=block.place, marks=[pytest.mark.slow] if block.mark is Mark.SLOW else []
        )
        for block in BLOCKS
        if block.language == language and block.mark in RUN
    ]


def before(block: Block) -> Iterator[Block]:
    return (each for each in BLOCKS if each.page == block.page and each.line < block.line)


def script_of(block: Block) -> str:
    """Return a script of a block's commands; each must exit with its documented status, or 0."""
    lines = ["set -u"]
    for command in block.commands:
        named = re.search(r"#.*exit status (\d+)", command)
        expected = named[1] if named else "0"
        lines += [command, f'[ $? -eq {expected} ] || {{ echo "failed: $LINENO" >&2; exit 99; }}']
    return "\n".join(lines)


def prepare(folder: Path, block: Block) -> None:
    """Create the files that a docs page assumes: its readers' saved files, traces, store folders."""
    for each in before(block):
        if each.mark is Mark.SAVED_AS:
            (folder / each.note).write_text(moved(each.text, folder))
    requests = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 4, "hash_ids": [0, n % 3]}
        for n in range(40)
    ]
    trace = "".join(f"{json.dumps(each)}\n" for each in requests)
    for name in ("TRACE", "trace.jsonl", "conversation_trace.jsonl"):
        (folder / name).write_text(trace)
    for directory in ("tmp", "dev/shm", *(f"{store}/objects" for store in STORES)):
        (folder / directory).mkdir(parents=True)


def moved(text: str, folder: Path) -> str:
    """Replace paths of an operator's machine by paths below the test's folder."""
    return re.sub(r"(?<=file://)(?=/(?:mnt|tmp|dev/shm|disk\{rank\})/)", str(folder), text)


def run(folder: Path, *command: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.distributed
@pytest.mark.parametrize("block", to_be_run("python"))
def test_a_program_of_the_docs_runs_as_it_stands_there(block: Block, tmp_path: Path) -> None:
    prepare(tmp_path, block)

    run(tmp_path, sys.executable, "-W", "error", "-c", moved(block.text, tmp_path))


@pytest.mark.distributed
@pytest.mark.parametrize("block", to_be_run("bash"))
def test_the_commands_of_a_block_run_as_they_stand_there(block: Block, tmp_path: Path) -> None:
    prepare(tmp_path, block)
    script = script_of(block)
    for long, short in SMALLER:
        script = script.replace(long, short)

    run(tmp_path, "bash", "-c", moved(script, tmp_path))


def test_every_block_names_its_language() -> None:
    languages = {"python", "bash", "console", "text", "json"}

    assert [block.place for block in BLOCKS if block.language not in languages] == []
    assert [place for page in pages() for place in indented_blocks(page)] == []


def test_what_is_not_run_says_why_and_what_is_run_elsewhere_says_where() -> None:
    unexplained = [block.place for block in BLOCKS if block.mark is Mark.NOT_RUN and not block.note]
    elsewhere = [block for block in BLOCKS if block.mark is Mark.RUN_BY]
    output = [b.place for b in BLOCKS if b.language == "console" and b.mark is Mark.PLAIN]

    assert unexplained == []
    assert [block.place for block in elsewhere if not (ROOT / block.note).is_file()] == []
    assert output == []


def test_a_file_of_a_page_is_run_by_a_command_of_that_page() -> None:
    saved = [block for block in BLOCKS if block.mark is Mark.SAVED_AS]
    used = {
        (block.page, word)
        for block in BLOCKS
        if block.language == "bash" and block.mark in RUN
        for word in block.text.split()
    }

    assert [block.place for block in saved if (block.page, block.note) not in used] == []


def test_every_target_of_make_that_the_docs_name_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    named = {
        target
        for block in BLOCKS
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", block.text, re.MULTILINE)
    }

    assert named - targets == set()


def test_one_page_lists_all_blocks_that_no_test_runs() -> None:
    rows = [
        f"| {block.page} | `{block.first_line}` | {block.note} |"
        for block in BLOCKS
        if block.mark is Mark.NOT_RUN
    ]

    page = NOT_RUN_PAGE.read_text(encoding="utf-8")
    assert page.partition("|---|---|---|\n")[2] == "".join(f"{row}\n" for row in rows)


def test_a_block_is_read_with_its_language_its_mark_and_without_its_indentation() -> None:
    page = "a\n\n  <!-- not run: no GPU -->\n  ```bash\n  one \\\n    two  # exit status 1\n  ```\n"

    (block,) = blocks_of("page.md", page)

    assert block == Block(
        page="page.md",
        line=4,
        language="bash",
        text="one \\\n  two  # exit status 1",
        mark=Mark.NOT_RUN,
        note="no GPU",
    )
    assert script_of(block).splitlines()[1:] == [
        "one two  # exit status 1",
        '[ $? -eq 1 ] || { echo "failed: $LINENO" >&2; exit 99; }',
    ]

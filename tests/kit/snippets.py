"""Reads the code blocks of README and docs, with the comments that say whether a test runs them.

Every fence names its language. Blocks in `python` and `bash` are run, blocks in `text` and `json` are
not. A comment directly before the fence, such as

    <!-- not run: it needs a GPU -->

changes this:

- `not run`: no test runs the block; the reason follows;
- `run by`: the named test runs the block;
- `saved as`: the block is saved as a file of this name, which later commands of the document use;
- `slow`: the block is run as a slow test.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.kit.source_tree import ROOT

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
_MARK = re.compile(r"^ *<!-- (?P<mark>not run|run by|saved as|slow)(?:: (?P<note>.+))? -->$")
_INDENTED = re.compile(r"^ {4}\S")
_LISTED = re.compile(r"^\s*(?:[-*]|\d+\.) ")


class Mark(Enum):
    """How a test treats a code block, as given by the comment before the block's fence."""

    PLAIN = ""
    NOT_RUN = "not run"
    RUN_BY = "run by"
    SAVED_AS = "saved as"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced code block of a document."""

    page: str
    """Path of the document, relative to the root."""
    line: int
    """Line number of the opening fence."""
    language: str
    text: str
    mark: Mark = Mark.PLAIN
    note: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        """Return the block's first line, with which test names and errors identify the block."""
        return self.text.split("\n", 1)[0]

    @property
    def commands(self) -> list[str]:
        """Return the commands of a shell block, with continuation lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_blocks() -> list[Block]:
    return [
        block
        for page in pages()
        for block in blocks_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    lines = text.split("\n")
    opened: tuple[int, str, str] | None = None
    for at, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is not None and opened is None:
            opened = (at, fence["indent"], fence["language"])
        elif fence is not None and opened is not None:
            start, indent, language = opened
            body = "\n".join(each.removeprefix(indent) for each in lines[start + 1 : at])
            mark = _MARK.match(lines[start - 1])
            yield Block(
                page=page,
                line=start + 1,
                language=language,
                text=body,
                mark=Mark(mark["mark"]) if mark else Mark.PLAIN,
                note=(mark["note"] or "") if mark else "",
            )
            opened = None


def indented_blocks(page: Path) -> list[str]:
    """Return the locations of indented code blocks, which are errors because they name no language."""
    found: list[str] = []
    inside, listed, before = False, False, ""
    for at, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            listed = bool(_LISTED.match(line)) or (listed and (not line or line.startswith(" ")))
            if _INDENTED.match(line) and not before and not listed:
                found.append(f"{page.name}:{at}")
        before = line
    return found

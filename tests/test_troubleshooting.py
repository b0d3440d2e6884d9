"""The troubleshooting table quotes log lines and errors as the code has them."""

import ast
import re
from collections.abc import Iterator

from tests.kit.source_tree import ROOT, read_library

VARIABLE = re.compile(r"%[-+.\d]*[sdrgf]|\{\d\}|\.\.\.")
"""Matches a placeholder of a message's format string, or the `...` that the docs put in its place."""


def quoted() -> list[str]:
    """Return the log lines in the first column of the docs' troubleshooting table."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n## Troubleshooting\n")[2].partition("\n### ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return [line for cell in cells for line in re.findall(r"`([^`]+)`", cell) if " " in line]


def messages() -> Iterator[str]:
    """Yield all string literals of the library, with `...` for each placeholder."""
    for module in read_library():
        for node in ast.walk(module.parse()):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "..." for each in node.values
                ]
                yield VARIABLE.sub("...", "".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield VARIABLE.sub("...", node.value)


def test_the_table_quotes_log_lines_as_they_are_printed() -> None:
    known = "\n".join(messages())

    missing = [
        f"{line}: no message has {part!r}"
        for line in quoted()
        for part in filter(None, (each.strip(" .:,") for each in line.split("...")))
        if part not in known
    ]

    assert quoted()
    assert missing == []

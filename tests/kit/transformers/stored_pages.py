"""Finds and corrupts pages in a store's folder."""

from pathlib import Path

RECORD_BYTES_MAX = 8192
"""Files in a folder of pages that are at most this long are records, not pages.

A manifest can be longer, but is in a separate folder.
"""


def pages_in(store: Path) -> list[Path]:
    """Return the page files in a folder of `file://` that one model has written."""
    folders = [
        [each for each in folder.rglob("*") if each.is_file()]
        for folder in (store / "objects").iterdir()
    ]
    return sorted(each for each in max(folders, key=len) if each.stat().st_size > RECORD_BYTES_MAX)


def flip(page: Path) -> None:
    content = bytearray(page.read_bytes())
    content[-100] ^= 1
    page.write_bytes(content)

"""Finds and corrupts the page files in a file store's directory."""

from pathlib import Path

RECORD_BYTES_MAX = 8192
"""Largest size in bytes of a record in a namespace's folder. Longer files in this folder are pages.

The manifest can be longer, but it is in another folder.
"""


def pages_in(store: Path) -> list[Path]:
    """Return the page files of the only model in a file store's directory."""
    folders = [
        [each for each in folder.rglob("*") if each.is_file()]
        for folder in (store / "objects").iterdir()
    ]
    return sorted(each for each in max(folders, key=len) if each.stat().st_size > RECORD_BYTES_MAX)


def flip(page: Path) -> None:
    content = bytearray(page.read_bytes())
    content[-100] ^= 1
    page.write_bytes(content)

"""What becomes of the pages in a store's folder."""

from pathlib import Path

RECORD_BYTES_MAX = 8192
"""A record beside pages that is longer is a manifest, which has a folder of its own."""


def pages_in(store: Path) -> list[Path]:
    """Return the files of pages in a folder of `file://`, where one model has written."""
    folders = [
        [each for each in folder.rglob("*") if each.is_file()]
        for folder in (store / "objects").iterdir()
    ]
    return sorted(each for each in max(folders, key=len) if each.stat().st_size > RECORD_BYTES_MAX)


def flip(page: Path) -> None:
    """Change one bit of the bytes of a page."""
    content = bytearray(page.read_bytes())
    content[-100] ^= 1
    page.write_bytes(content)

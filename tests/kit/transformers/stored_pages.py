"""What becomes of the pages in a store's folder."""

from pathlib import Path


def pages_in(store: Path) -> list[Path]:
    """Return the files of pages in a folder of `file://`; a page is larger than any record."""
    files = [each for each in (store / "objects").rglob("*") if each.is_file()]
    largest = max(each.stat().st_size for each in files)
    return sorted(each for each in files if each.stat().st_size == largest)


def flip(page: Path) -> None:
    """Change one bit of a page's bytes; done twice, it is as before."""
    content = bytearray(page.read_bytes())
    content[-100] ^= 1
    page.write_bytes(content)

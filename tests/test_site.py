"""The documentation site builds without warnings, loads nothing remote, and has a full reference."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from tests.kit.source_tree import ROOT

pytestmark = pytest.mark.slow
FETCHED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="https?://[^"]*|<link[^>]+stylesheet[^>]+https?:[^>]*'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        build,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    pages = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}

    assert pages - {page.name for page in site.glob("*.html")} == set()


def test_the_reference_has_every_exported_name(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")

    named = set(re.findall(r'id="lockstep\.(?:[a-z_]+\.)*(\w+)"', page))

    assert {name for name in lockstep.__all__ if name != "__version__"} - named == set()


def test_links_to_files_of_the_repository_lead_to_their_text(site: Path) -> None:
    example = site / "sources" / "examples" / "disagreeing_stores.html"

    assert 'href="sources/examples/disagreeing_stores.html"' in (site / "index.html").read_text()
    assert "kv_connector" in example.read_text(encoding="utf-8")


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = [
        f"{page.name}: {found}"
        for page in site.rglob("*.html")
        for found in FETCHED.findall(page.read_text(encoding="utf-8"))
    ]

    assert fetched == []


def test_pictures_have_a_title_their_text_as_text_and_colours_for_the_dark() -> None:
    pictures = {
        each.name: each.read_text("utf-8") for each in (ROOT / "docs/pictures").glob("*.svg")
    }

    lacking = [
        f"{name} has no {part}"
        for name, picture in pictures.items()
        for part in ("<title", "<text", "prefers-color-scheme: dark")
        if part not in picture
    ]

    assert lacking == []

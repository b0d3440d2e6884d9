"""MkDocs hooks: add pages to the documentation site for files outside `docs/`.

Pages of the docs link to files of the repository by relative paths. On the site, each linked file gets
a page with its text. `README.md` is the start page; `CONTRIBUTING.md` and `CHANGELOG.md` are ordinary
pages.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
AS_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = "sources"
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)]*)?(\))")
_LANGUAGES = {".py": "python", ".md": "markdown", ".json": "json", ".toml": "toml", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages in `AS_PAGES`, and a page for each file of the repository that a page links to."""
    for name, page in AS_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    linked = {
        target
        for file in list(files)
        if file.is_documentation_page()
        for _, path, _, _ in _LINK.findall(file.content_string)
        if (target := _from_the_root(path, file.src_uri)) is not None
        and _page_of(target) is None
        and (ROOT / target).exists()
    }
    for target in sorted(linked):
        shown = File.generated(config, _source_page(target), content=_shown(target))
        shown.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite links that leave `docs/`, so that they lead to the site's page for the linked file."""
    if page.file.src_uri.startswith(f"{SOURCES}/"):
        return markdown

    def follow(link: re.Match[str]) -> str:
        before, path, anchor, after = link.groups()
        here = _from_the_root(path, page.file.src_uri)
        target = None if here is None else _page_of(here)
        if here is not None and target is None and (ROOT / here).exists():
            target = _source_page(here)
        if target is None:
            return link[0]
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{before}{relative}{anchor or ''}{after}"

    return _LINK.sub(follow, markdown)


def _from_the_root(path: str, source: str) -> str | None:
    """Return a link's target as a path from the repository's root; None for a URL."""
    if ":" in path:
        return None
    folder = (
        "" if source in AS_PAGES.values() else posixpath.join("docs", posixpath.dirname(source))
    )
    return posixpath.normpath(posixpath.join(folder, path))


def _page_of(target: str) -> str | None:
    """Return the docs page of a path from the repository's root; None if it is not a docs page."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return AS_PAGES.get(target)


def _source_page(target: str) -> str:
    return f"{SOURCES}/{target}.md" if not target.endswith(".md") else f"{SOURCES}/{target}"


def _shown(target: str) -> str:
    """Return the markdown of a page that shows a file, or all files of a folder."""
    path = ROOT / target
    shown = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    parts = [f"# {target}"]
    for file in shown:
        language = _LANGUAGES.get(file.suffix, "text")
        heading = [] if path.is_file() else [f"## {file.name}"]
        body = file.read_text(encoding="utf-8").rstrip("\n")
        parts += [*heading, f"`````{language}\n{body}\n`````"]
    return "\n\n".join(parts) + "\n"

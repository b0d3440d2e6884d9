"""What the documentation site has beside the files of this folder.

Pages of the docs link to files of the repository, as a reader of the repository follows them. On the
site each of those is a page of its own with the file in it. The README is where the site begins, and
`CONTRIBUTING.md` and `CHANGELOG.md` are pages like all others.
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
    """Add the pages that lie elsewhere in the repository, and the files that pages link to."""
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
    """Let links out of this folder lead to the pages that stand for what they name."""
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
    """The path from the repository's root of what a page links to; None for another site."""
    if ":" in path:
        return None
    folder = (
        "" if source in AS_PAGES.values() else posixpath.join("docs", posixpath.dirname(source))
    )
    return posixpath.normpath(posixpath.join(folder, path))


def _page_of(target: str) -> str | None:
    """The page among the docs that a path from the root is; None for another file."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return AS_PAGES.get(target)


def _source_page(target: str) -> str:
    return f"{SOURCES}/{target}.md" if not target.endswith(".md") else f"{SOURCES}/{target}"


def _shown(target: str) -> str:
    """A page with a file in it, or with all files of a folder."""
    path = ROOT / target
    shown = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    parts = [f"# {target}"]
    for file in shown:
        language = _LANGUAGES.get(file.suffix, "text")
        heading = [] if path.is_file() else [f"## {file.name}"]
        body = file.read_text(encoding="utf-8").rstrip("\n")
        parts += [*heading, f"`````{language}\n{body}\n`````"]
    return "\n\n".join(parts) + "\n"

"""A browser without a window, which opens a page and tells what came of it."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium (tests/install/stores.sh)"
)
DARK = "--blink-settings=preferredColorScheme=0"

PROBE = """<script>
const shown = [...document.querySelectorAll("svg.plot")].map((svg) => {
  const marks = [...svg.querySelectorAll(".line, .bar")].map((each) => each.getBBox());
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove",
    { clientX: box.left + box.width / 2, clientY: box.top + 40 }));
  const figure = svg.closest("figure");
  return {
    title: figure.querySelector("h3").textContent,
    marks: marks.filter((each) => each.width > 0).length,
    right: Math.max(...marks.map((each) => each.x + each.width)),
    tip: figure.querySelector(".tip").textContent,
    at: figure.querySelector(".tip").offsetLeft,
    cut: [...svg.querySelectorAll("text")].filter((each) => each.getBBox().x < 0).length,
  };
});
const told = document.body.appendChild(document.createElement("p"));
told.id = "probe";
told.textContent = JSON.stringify({
  paper: getComputedStyle(document.body).backgroundColor,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  shown,
});
</script>"""
"""Runs after the page's own script, and points at the middle of each plot."""


@dataclass(frozen=True)
class Shown:
    """What a page has shown."""

    plots: list[dict[str, Any]]
    """Of each: its title, how many marks have a width, how far right they reach, what a pointer over
    its middle is told and where, and how many texts are cut off."""
    paper: str
    """The colour behind everything."""
    is_too_wide: bool
    console: list[str]
    """Lines that the page, or the browser because of it, wrote to the console."""


def shown(page: Path, scratch: Path, *options: str) -> Shown:
    """Open a page with the probe at its end."""
    probed = scratch / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    done = _chromium(scratch, [*options, "--dump-dom", probed.as_uri()])
    (found,) = re.findall(r'<p id="probe">(.*?)</p>', done.stdout, re.DOTALL)
    record = json.loads(unescape(found))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Shown(record["shown"], record["paper"], record["wide"], console)


def _chromium(scratch: Path, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            "chromium",
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", f"--user-data-dir={scratch / 'browser'}"),
            *("--virtual-time-budget=2000", "--window-size=1280,2400"),
            *arguments,
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )

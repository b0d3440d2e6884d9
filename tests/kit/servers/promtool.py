"""Prometheus's own checker of rules and settings."""

import shutil
import subprocess
from pathlib import Path

import pytest


def checked_by_promtool(what: str, file: Path) -> "subprocess.CompletedProcess[str]":
    """Return what `promtool check` says of a file."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    arguments = [promtool, "check", what, str(file)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)

"""Checks Prometheus rules and settings with promtool, and evaluates alerts."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.top.group_sample import Key
from lockstep.launch.top.window import Window

MINUTES = 60
"""Length in minutes of each of a test's two periods. Metrics are constant in the first and change in
the second.
"""


def run_promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `promtool` and return the result; skip the test if promtool is not installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    return subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)


def require_alerts(rules: Path, window: Window, expected: set[str], folder: Path) -> None:
    """Fail unless the window's metric changes fire every alert in `expected` and no other alert."""
    samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(expected)]
    test = {
        "interval": "1m",
        "input_series": [*_series(window)],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{2 * MINUTES}m",
                "exp_samples": samples,
            }
        ],
    }
    file = folder / "alerts-test.yml"
    # The file is JSON, because JSON is a subset of the YAML that promtool reads.
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": [test]}), encoding="utf-8")
    checked = run_promtool("test", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _series(window: Window) -> Iterator[dict[str, str]]:
    """Yield the window's metrics as promtool's series.

    Values are constant in the first period. In the second, counters grow and gauges have the new value.
    """
    assert window.before is not None
    for rank, before in window.before.ranks.items():
        now = window.now.ranks.get(rank, {})
        up = f"1+0x{MINUTES} {int(bool(now))}+0x{MINUTES}"
        yield {"series": f'up{{job="lockstep",instance="{rank}"}}', "values": up}
        for key in {**before, **now}:
            name, labels = key
            words = {**dict(labels), "job": "lockstep", "instance": str(rank)}
            text = ",".join(f"{label}={json.dumps(value)}" for label, value in words.items())
            values = _values(key, before.get(key), now.get(key), window.seconds / 60)
            yield {"series": f"{name}{{{text}}}", "values": values}


def _values(key: Key, before: float | None, now: float | None, minutes: float) -> str:
    if now is not None and key[0].endswith(("_total", "_bucket", "_sum", "_count")):
        start, end = before or 0.0, now
        return f"{start:f}+0x{MINUTES} {start:f}+{(end - start) / minutes:f}x{MINUTES}"
    parts = (
        f"_x{MINUTES + 1}" if each is None else f"{each:f}+0x{MINUTES}" for each in (before, now)
    )
    return " ".join(parts)

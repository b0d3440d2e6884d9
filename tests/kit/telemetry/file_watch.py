"""Reads the Prometheus queries of the Grafana dashboard and of the alert rules."""

import json
import re

from tests.kit.source_tree import ROOT

WATCHING = ROOT / "examples" / "watching"
NAME = re.compile(r"\blockstep_\w+")
PARTS = re.compile(r"_(bucket|sum|count)$")
"""The suffixes that Prometheus adds to a histogram's name."""


def texts() -> dict[str, str]:
    """Return the Prometheus queries of the dashboard and of the rules, by file name."""
    dashboard = json.loads((WATCHING / "grafana.json").read_text(encoding="utf-8"))
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [each["query"]["query"] for each in variables if each["type"] == "query"]
    return {
        "grafana.json": "\n".join(queries),
        "alerts.yml": (WATCHING / "alerts.yml").read_text(encoding="utf-8"),
    }


def metrics_asked_for() -> set[str]:
    """Return the names of all metrics in the dashboard and the rules, without histogram suffixes."""
    return {PARTS.sub("", name) for text in texts().values() for name in NAME.findall(text)}

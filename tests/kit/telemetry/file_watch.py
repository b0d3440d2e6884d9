"""The Prometheus queries of the Grafana dashboard and the alert rules."""

import json
import re

from tests.kit.source_tree import ROOT

WATCHING = ROOT / "examples" / "watching"
NAME = re.compile(r"\blockstep_\w+")
PARTS = re.compile(r"_(bucket|sum|count)$")
"""The suffixes that Prometheus adds to a histogram's name."""


def texts() -> dict[str, str]:
    """Return the queries of each file by file name."""
    dashboard = json.loads((WATCHING / "grafana.json").read_text(encoding="utf-8"))
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [each["query"]["query"] for each in variables if each["type"] == "query"]
    return {
        "grafana.json": "\n".join(queries),
        "alerts.yml": (WATCHING / "alerts.yml").read_text(encoding="utf-8"),
    }


def metrics_asked_for() -> set[str]:
    """Return the metric names used in all files, with histogram suffixes removed."""
    return {PARTS.sub("", name) for text in texts().values() for name in NAME.findall(text)}

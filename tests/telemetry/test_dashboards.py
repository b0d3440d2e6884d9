"""The dashboard and alerts use only metrics that a group exposes, and Prometheus accepts the rules."""

import re

import pytest

from lockstep.telemetry.families import FAMILIES, Type
from tests.kit.servers.promtool import run_promtool
from tests.kit.source_tree import ROOT
from tests.kit.telemetry import file_watch
from tests.kit.telemetry.file_watch import NAME, WATCHING

LABELS = re.compile(r"\b(lockstep_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)(?:=~|=)")
PARTS = ("_bucket", "_sum", "_count")
FROM_THE_SCRAPE = {"rank", "job", "le"}


def exposed() -> dict[str, set[str]]:
    names = {each.full_name: set(each.labels) for each in FAMILIES}
    parts = {
        f"{each.full_name}{part}": set(each.labels)
        for each in FAMILIES
        if each.type is Type.HISTOGRAM
        for part in PARTS
    }
    return {**names, **parts}


def texts() -> dict[str, str]:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    return {**file_watch.texts(), "monitoring.md": page}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml", "monitoring.md"])
def test_every_metric_that_is_named_is_one_that_a_group_exposes(name: str) -> None:
    named = set(NAME.findall(texts()[name]))

    assert named
    assert named - set(exposed()) == set()


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_every_label_that_is_asked_for_is_one_that_the_metric_has(name: str) -> None:
    known = exposed()
    queried = {
        (metric, label)
        for metric, labels in LABELS.findall(texts()[name])
        for label in LABEL.findall(labels)
    }

    assert {each for each in queried if each[1] not in known[each[0]] | FROM_THE_SCRAPE} == set()


def test_the_page_for_operators_explains_every_metric() -> None:
    documented = set(NAME.findall(texts()["monitoring.md"]))

    assert {each.full_name for each in FAMILIES} - documented == set()


@pytest.mark.parametrize(("what", "file"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_prometheus_itself_finds_nothing_wrong_with_the_files(what: str, file: str) -> None:
    checked = run_promtool("check", what, str(WATCHING / file))

    assert checked.returncode == 0, checked.stdout + checked.stderr

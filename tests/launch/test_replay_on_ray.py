"""A replay by Ray actors: on a cluster of two nodes, and on an embedded Ray."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.launch.ray_clusters import TwoNodes
from tests.kit.launch.replays import COMMAND, Running, needs_ray, replay, run, start

pytestmark = [pytest.mark.distributed, needs_ray]

RAY = ("--launcher", "ray")
FOUR_ON_TWO_NODES = ("--ranks", 4, "--ranks-per-node", 2)
ACTOR = "ReplayRankActor"


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    return tmp_path / "errors"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """An exit stack that kills a test's commands after the test."""
    with ExitStack() as stack:
        yield stack


def begin(opened: ExitStack, errors: Path, *arguments: object) -> Running:
    stderr = opened.enter_context(errors.open("w+", encoding="utf-8"))
    command = start(stderr, *COMMAND, *RAY, *arguments)
    opened.callback(command.kill)
    return command


def test_the_ranks_of_a_replay_are_on_two_nodes_where_no_node_may_have_all(
    tmp_path: Path, two_nodes: TwoNodes
) -> None:
    options = (*RAY, "--ray-address", two_nodes.address, *FOUR_ON_TWO_NODES)

    report = replay(tmp_path / "report.json", "--requests", 8, *options)

    assert (report["ranks"], report["requests"], report["pages_corrupt"]) == (4, 8, 0)
    assert len(set(report["digests"])) == 1
    assert two_nodes.actors(ACTOR) == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_rank_on_either_node(
    opened: ExitStack, errors: Path, two_nodes: TwoNodes
) -> None:
    replaying = begin(opened, errors, "--ray-address", two_nodes.address, *FOUR_ON_TWO_NODES)
    replaying.wait_until(lambda: len(two_nodes.actors(ACTOR)) == 4)
    nodes = two_nodes.actors(ACTOR)
    replaying.process.send_signal(signal.SIGINT)
    status = replaying.process.wait(60)

    assert [nodes.count(node) for node in sorted(set(nodes))] == [2, 2]
    assert (status, replaying.survivors_after(10)) == (130, [])
    assert replaying.output_so_far() == "lockstep: interrupted\n"
    assert two_nodes.actors(ACTOR) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 4), "4 ranks on one node need 4 CPUs, but"),
        (
            ("--ranks", 8, "--ranks-per-node", 2),
            "8 ranks need 8 CPUs, but the cluster has",
        ),
    ],
)
@pytest.mark.slow
def test_ranks_that_the_cluster_has_no_room_for_are_refused_in_one_line(
    two_nodes: TwoNodes, options: tuple[object, ...], message: str
) -> None:
    ended = run(*COMMAND, *RAY, "--ray-address", two_nodes.address, *options)

    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"lockstep: {message}")


@pytest.mark.slow
def test_without_a_cluster_one_is_embedded_and_gone_at_the_end(
    opened: ExitStack, errors: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"

    replaying = begin(opened, errors, "--requests", 8, "--report", report)
    replaying.wait_until(report.exists, 200)
    status = replaying.process.wait(60)

    assert (status, replaying.survivors_after(10), replaying.output_so_far()) == (0, [], "")

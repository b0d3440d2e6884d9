"""Groups of Ray actors serve a workload, on one machine and on two nodes of a cluster."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.launch.ray_clusters import TwoNodes
from tests.kit.launch.replays import COMMAND, needs_ray, replay, run, start
from tests.launch.serving.test_serve_sim import SERVE, SMALL, assert_sound, serve

pytestmark = [pytest.mark.distributed, needs_ray]

RAY = ("--launcher", "ray", "--ray-address")


def test_two_groups_on_two_nodes_hand_every_request_over(
    tmp_path: Path, two_nodes: TwoNodes
) -> None:
    report = serve(tmp_path / "report.json", *RAY, two_nodes.address, "--profile", "hybrid-all")

    assert_sound(report)
    assert report["handoffs"]["ok"] >= 11
    assert [each["transport"].partition(":")[0] for each in report["groups"].values()] == [
        "shm"
    ] * 2
    assert two_nodes.actors("GroupRankActor") == []


@pytest.mark.slow
def test_each_group_has_a_node_of_its_own_and_ctrl_c_leaves_nothing_of_them(
    tmp_path: Path, two_nodes: TwoNodes
) -> None:
    with ExitStack() as opened:
        errors = opened.enter_context((tmp_path / "errors").open("w+", encoding="utf-8"))
        serving = start(errors, *SERVE, *RAY, two_nodes.address)
        opened.callback(serving.kill)
        serving.wait_until(lambda: len(two_nodes.actors("GroupRankActor")) == 4)
        nodes = two_nodes.actors("GroupRankActor")
        serving.process.send_signal(signal.SIGINT)
        status = serving.process.wait(60)
        survivors, said = serving.survivors_after(10), serving.said()

    assert [nodes.count(node) for node in sorted(set(nodes))] == [2, 2]
    assert (status, survivors, said) == (130, [], "lockstep: interrupted\n")
    assert two_nodes.actors("GroupRankActor") == two_nodes.actors("DirectoryActor") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill", "1x4"), "a group has 4 ranks on one node, each with a CPU of its own, and"),
        (("--prefill", "2x2"), "there are 6 ranks, each with a CPU of its own, and the whole"),
    ],
)
@pytest.mark.slow
def test_groups_that_the_cluster_has_no_room_for_are_refused_in_one_line(
    two_nodes: TwoNodes, options: tuple[str, ...], said: str
) -> None:
    ended = run(*SERVE, *SMALL, *RAY, two_nodes.address, *options)

    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"lockstep: {said}")


@pytest.mark.slow
def test_requests_of_a_killed_group_of_actors_are_served_all_the_same(
    tmp_path: Path, two_nodes: TwoNodes
) -> None:
    shapes = ("--prefill", "2x1", "--decode", "1x2", "--kill", "prefill-0@4")
    report = serve(tmp_path / "report.json", *RAY, two_nodes.address, *shapes)

    assert_sound(report)
    assert report["groups_lost"] == ["prefill-0"]


@pytest.mark.slow
def test_the_ranks_of_a_replay_are_on_two_nodes_where_no_node_may_have_all(
    tmp_path: Path, two_nodes: TwoNodes
) -> None:
    options = ("--requests", 8, "--ranks", 4, "--ranks-per-node", 2)
    report = replay(tmp_path / "report.json", *options, *RAY, two_nodes.address, start=COMMAND)

    assert (report["ranks"], report["requests"], report["pages_corrupt"]) == (4, 8, 0)
    assert len(set(report["digests"])) == 1


@pytest.mark.slow
def test_without_a_cluster_one_is_embedded_and_gone_at_the_end(tmp_path: Path) -> None:
    with ExitStack() as opened:
        errors = opened.enter_context((tmp_path / "errors").open("w+", encoding="utf-8"))
        report = tmp_path / "report.json"
        serving = start(errors, *SERVE, *SMALL, "--launcher", "ray", "--report", report)
        opened.callback(serving.kill)
        serving.wait_until(report.exists, 200)
        status = serving.process.wait(60)
        survivors, said = serving.survivors_after(10), serving.said()

    assert (status, survivors, said) == (0, [], "")


@pytest.mark.slow
def test_ctrl_c_ends_an_embedded_cluster_with_all_that_it_has_started(tmp_path: Path) -> None:
    with ExitStack() as opened:
        errors = opened.enter_context((tmp_path / "errors").open("w+", encoding="utf-8"))
        serving = start(errors, *SERVE, "--launcher", "ray")
        opened.callback(serving.kill)
        serving.wait_until(lambda: any("GroupRankActor" in e for e in serving.survivors()), 200)
        serving.process.send_signal(signal.SIGINT)
        status = serving.process.wait(60)
        survivors, said = serving.survivors_after(10), serving.said()

    assert (status, survivors, said) == (130, [], "lockstep: interrupted\n")

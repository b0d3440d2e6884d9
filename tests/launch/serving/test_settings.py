"""What is asked of groups that serve together is refused in one line where it makes no sense."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.errors import ConfigError
from lockstep.launch.command import app
from lockstep.launch.serving.directories import open_directory
from lockstep.launch.serving.settings import GroupSettings, Kill, ServeSettings, Shape
from lockstep.launch.settings import ReplaySettings

REPLAY = ReplaySettings(device_pages=64, host_pages=64)


@pytest.mark.parametrize("text", ["", "2", "x", "1x", "x2", "2 x 2", "-1x2", "ax2"])
def test_a_shape_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prefill is .* must be GROUPSxRANKS, as 1x2"):
        Shape.parse(text, "--prefill")


@pytest.mark.parametrize("text", ["0x1", "1x0", "65x1", "1x1025"])
def test_a_shape_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--decode is .* must be 1 to 64 groups of 1 to 1024 ranks"
    ):
        Shape.parse(text, "--decode")


def test_groups_are_named_by_role_and_number_and_have_their_ranks() -> None:
    settings = ServeSettings(replay=REPLAY, prefill=Shape(2, 4), decode=Shape(1, 2))

    groups = settings.groups("where", "secret")

    assert [each.name for each in groups] == ["prefill-0", "prefill-1", "decode-0"]
    assert [each.replay.ranks for each in groups] == [4, 4, 2]
    assert GroupSettings.from_json(groups[0].to_json()) == groups[0]


def test_only_groups_that_hand_over_directly_serve_their_memory() -> None:
    settings = ServeSettings(replay=REPLAY, prefill=Shape(1, 1), decode=Shape(1, 1))
    direct = settings.groups("where", "0123456789abcdef")[0].cache_config("10.0.0.1")

    assert direct.peers is not None
    assert (direct.peers.address, direct.peers.secret) == ("10.0.0.1:0", "0123456789abcdef")


def test_groups_that_are_to_hand_over_by_a_transfer_engine_insist_on_it() -> None:
    shape = Shape(1, 1)
    settings = ServeSettings(replay=REPLAY, prefill=shape, decode=shape, transfer="mooncake")
    peers = settings.groups("where", "0123456789abcdef")[0].cache_config("10.0.0.1").peers

    assert peers is not None
    assert (peers.transfer, peers.insists) == ("mooncake", True)


@pytest.mark.parametrize("text", ["", "prefill-0", "@5", "prefill-0@", "prefill-0@x"])
def test_what_is_no_group_to_kill_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be GROUP@N, as prefill-0@50"):
        Kill.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kill", "prefill-7@1"], "there is no group 'prefill-7'; there are prefill-0, decode-0"),
        (["--kill", "prefill-0@9", "--requests", "9"], "the run, which has 9"),
        (["--speed", "0"], "--speed is 0, must be more than 0"),
        (["--speed", "nan"], "--speed is nan, must be more than 0"),
        (["--token-us", "-1"], "--token-us is -1.0, must be 0 or more"),
        (["--patience-s", "0"], "--patience-s is 0, must be more than 0"),
        (["--prefill", "1x3"], "--prefill is 1x3: "),
        (["--store", "memory://"], "groups need a --store that all reach, and 'memory://' is"),
        (["--store", "metrics+memory://a"], "and 'metrics+memory://a' is each process's own"),
        (
            ["--store", "peer://127.0.0.1:1"],
            "which takes no pages: it is what another group serves",
        ),
        (["--transfer", "nixl"], "--transfer is 'nixl', must be one of: tcp, mooncake"),
        (["--transfer", "mooncake", "--store", "memory://a"], "give --direct as well"),
        (["--groups-from", "g.db", "--transfer", "mooncake"], "--transfer is for groups that"),
        (["--store", "/var/kv"], "--store is '/var/kv', which is not a URI"),
        (["--directory", "zk://host"], "--directory is 'zk://host', must be a path"),
        (
            ["--directory", "/nowhere/at/all.db"],
            "the directory /nowhere/at/all.db cannot be opened",
        ),
        (["--device-pages", "99999999"], "the pools of all groups need"),
        (["--groups-from", "g.db", "--launcher", "ray"], "--launcher ray is for groups that"),
        (["--groups-from", "g.db", "--directory", "h.db"], "--directory is for groups that"),
        (["--groups-from", "g.db", "--kill", "prefill-0@1"], "--kill is for groups that"),
        (["--host", "10.0.0.1"], "--host needs --groups-from"),
        (["--ranks-per-node", "2"], "--ranks-per-node needs --launcher ray"),
        (["--report", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    options: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["serve-sim", *options])

    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_a_directory_is_a_file_or_a_server(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path / "groups.db"))

    assert directory.groups().members == ()
    directory.close()

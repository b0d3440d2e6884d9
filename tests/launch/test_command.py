"""The command reports invalid input in one line, before any rank starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import __version__
from lockstep.errors import ConfigError
from lockstep.launch.cli.environment import read_rank_environment
from lockstep.launch.cli.replay_settings import ReplaySettings, with_replay_durability
from tests.kit.launch.in_process import Run, refusal

SAYS_ITS_MODULES = """
import sys
from lockstep.launch.lockstep_command import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
SLOW = {"torch", "numpy", "psutil", "importlib.metadata", "lockstep.ranks.replica"}
"""Slow modules, which must not be imported merely to report invalid input."""
LINE = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}


def trace(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], 'Invalid value "0" for --ranks. Must be >= 1.'),
        (["--ranks", "3"], "--ranks is 3: column 'k' has 8 KV heads, which 3 ranks cannot divide"),
        (["--profile", "deepseek", "--ranks", "9999"], '"9999" for --ranks. Must be <= 1024'),
        (["--page-tokens", str(10**21)], "--page-tokens. Must be <= 65536"),
        (["--round-timeout-s", "0"], "--round-timeout-s. Must be > 0"),
        (["--round-timeout-s", "nan"], "--round-timeout-s"),
        (["--seed", str(10**23)], "--seed"),
        (["--profile", "gpt"], '"gpt" for --profile. Choose from: "llama", "gemma", '),
        (["--window-host-pages", "9"], "is 9, but profile 'llama' has no window pool"),
        (["--profile", "gemma", "--state-device-pages", "9"], "'gemma' has no state pool"),
        (["--profile", "gemma", "--window-device-pages", "17"], "is 17, must be from 18 to"),
        (["--profile", "qwen-next", "--state-device-pages", "1"], "is 1, must be from 2 to"),
        (
            ["--profile", "gemma", "--window-host-pages", "999999999"],
            "--window-host-pages is 999999999: the pools of 2 rank(s) on this host need ",
        ),
        (["--ray-address", "host:1"], "--ray-address needs --launcher ray"),
        (["--launcher", "ray", "--ray-address", "host"], "--ray-address is 'host', must be HOST"),
        (["--store", "ftp://host/kv"], "--store: store 'ftp://host/kv': unknown scheme 'ftp'"),
        (
            ["--store", "/var/kv"],
            "--store is '/var/kv', which is not a URI; for a directory write file:///var/kv",
        ),
        (["--store", ""], "--store is empty; give a URI"),
        (["--store", "file:///d/{rnak}"], "'file:///d/{rnak}' has '{rnak}' in it; known: {rank}"),
        (["/nowhere/trace.jsonl"], "cannot read the trace /nowhere/trace.jsonl"),
        (["--report", "/nowhere/report.json"], "there is no directory /nowhere"),
        (["--report", "/"], "it is a directory"),
        (
            ["--timeline", "/nowhere/t.json"],
            "cannot write the timeline /nowhere/t.json: there is no",
        ),
        (["--report", "/r", "--timeline", "/r"], "are both /r; name two files"),
        (["--store", "file:///d/{rank}?direct={rank}x"], "'0x'"),
        (["--report", "/proc/report.json"], "cannot write the report /proc/report.json: "),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "replay", *arguments)


def test_the_command_tells_its_version(lockstep: Run) -> None:
    assert lockstep("--version") == (0, f"lockstep {__version__}\n", "")


def test_a_malformed_trace_is_refused_with_its_line_number(lockstep: Run, tmp_path: Path) -> None:
    path = trace(tmp_path, LINE, {**LINE, "hash_ids": "?"})

    error_line = refusal(lockstep, "replay", path)

    assert error_line == (
        f"lockstep: {path}, line 2: not a request in JSON: Expected `array`, got `str` - at"
        " `$.hash_ids`\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seeds", "5"], "--seeds: '5' must be A:B with whole numbers, for example 0:100"),
        (["--seeds", "5:"], "must be A:B with whole numbers"),
        (["--seeds", "5:5"], "must be A:B with A less than B"),
        (["--seeds", f"0:{10**30}"], "must be A:B with A less than B, and B at most"),
        (["--profile", "sunny"], '--profile. Choose from: "llama", '),
        (["--pd", "3x1"], "--pd"),
        (["--pd", "2x1", "--ranks", "4"], "--pd sets the number of ranks; remove --ranks"),
        (["--report", "/nowhere/report.json"], "there is no directory /nowhere"),
    ],
)
def test_a_simulation_that_cannot_be_gets_one_line_and_status_2(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "simulate", *arguments)


def test_a_simulation_writes_its_report(lockstep: Run, tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    status, _, _ = lockstep("simulate", "--seeds", "0:2", "--report", path)

    report = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0
    assert report["schedules"] == 2
    assert report["violations"] == []
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_a_demo_does_not_touch_a_directory_that_holds_something(
    lockstep: Run, tmp_path: Path
) -> None:
    trace(tmp_path, LINE)

    error_line = refusal(lockstep, "demo", "--store", tmp_path.as_uri())

    assert error_line == (
        f"lockstep: --store: {tmp_path} is not empty; the demo needs an empty store\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--store", __file__], f"which is not a URI; for a directory write file://{__file__}"),
        (["--store", f"file://{__file__}"], f"--store: {__file__} is not a directory"),
        (["--store", "ftp://host/kv"], "--store: store 'ftp://host/kv': unknown scheme 'ftp'"),
        (["--report", "/nowhere/report.json"], "there is no directory /nowhere"),
    ],
)
def test_a_demo_that_cannot_be_is_refused_before_it_runs(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "demo", *arguments)


def test_settings_travel_as_json_unchanged() -> None:
    settings = ReplaySettings(
        trace="/t", requests=3, store="memory://", verify=False, profile="glm", page_tokens=32
    )

    assert ReplaySettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("text", ["{", "[]", '{"colour": 1}'])
def test_settings_of_another_shape_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ReplaySettings.from_json(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": 0}, "--concurrency is 0: Must be >= 1."),
        ({"round_timeout_s": float("nan")}, "--round-timeout-s is nan: Must be <= 1000000.0."),
        ({"eviction": "fifo"}, "--eviction is 'fifo': Must be one of lru, lfu, slru, priority."),
        ({"page_tokens": "64"}, "--page-tokens is '64': Expected `int`, got `str`"),
        ({"store": ["s3://key:secret@x"]}, "--store is a list: Expected `str | null`, got `array`"),
    ],
)
def test_settings_from_json_are_checked_as_options_are(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ReplaySettings.from_json(json.dumps(given))

    assert str(refused.value) == message


def test_what_may_differ_between_ranks_is_not_compared() -> None:
    hybrid = ReplaySettings(profile="hybrid-all")
    settings = ReplaySettings(
        profile="hybrid-all",
        device_pages=10,
        host_pages=10,
        window_device_pages=50,
        state_host_pages=50,
        report="/r",
        table=False,
    )

    assert settings.fingerprint() == hybrid.fingerprint()
    assert ReplaySettings(seed=1).fingerprint() != ReplaySettings().fingerprint()


@pytest.mark.parametrize(
    ("uri", "used"),
    [
        ("file:///var/kv", "file:///var/kv?durability=none"),
        ("file:///var/kv?direct=0", "file:///var/kv?direct=0&durability=none"),
        ("file:///var/kv?durability=full", "file:///var/kv?durability=full"),
        ("memory://", "memory://"),
    ],
)
def test_a_replay_does_not_wait_for_the_disk_unless_it_is_told_to(uri: str, used: str) -> None:
    assert with_replay_durability(uri) == used


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("RANK", None, "RANK is not set; start the ranks with torchrun"),
        ("RANK", "first", "must be whole numbers, as torchrun sets them: .*'first'"),
        ("RANK", "2", "RANK is 2, must be from 0 to WORLD_SIZE - 1 = 1"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, complaint: str
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    given = {each: text for each, text in (good | {name: value}).items() if text is not None}
    monkeypatch.delenv(name, raising=False)
    for each, text in given.items():
        monkeypatch.setenv(each, text)

    with pytest.raises(ConfigError, match=complaint):
        read_rank_environment()


@pytest.mark.parametrize("line", ["--version", "--help", "simulate --help"])
def test_what_only_tells_of_the_command_loads_nothing_that_takes_long(line: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SAYS_ITS_MODULES, *line.split()],
        check=True,
        capture_output=True,
        text=True,
    )

    assert SLOW & set(ended.stderr.split()) == set()

"""Control requests over a group's socket: executed on every rank in the same step, and answered."""

import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep import (
    Bounds,
    Cache,
    ConfigError,
    Control,
    LockstepError,
    Peers,
    StorageError,
    UsageError,
    ask,
)
from lockstep.coordinator.collectives.in_process import InProcessGroup
from tests.kit.ranks.controlled_group import (
    LAYOUT,
    ControlledGroup,
    computes,
    config_with,
    reply_to_request,
    socket_in,
)
from tests.kit.waiting import wait_for

PROMPT = list(range(16))
PAGES = len(PROMPT) // LAYOUT.page_tokens


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    """Two ranks with a computed prompt of namespace `tenant`, whose request is not yet released."""
    config = config_with(socket_in(tmp_path), store="memory://")
    made = ControlledGroup(config, prepare=computes("r", PROMPT, "tenant"))
    yield made
    made.end()


def test_what_is_inserted_is_in_the_store_once_a_flush_is_answered(group: ControlledGroup) -> None:
    answer = group.ask("flush")

    stored = group.ask("stats")["replica"]["stored_pages"]["storage"]
    assert stored == {"persisted": PAGES}
    assert answer["operations"] <= 2
    assert group.ask("flush") == {"operations": 0, "unwritten": {}}


def serves(request: str, tokens: list[int]) -> Callable[[Cache], None]:
    """Return a program that computes a prompt on a rank and serves it to other groups."""

    def program(cache: Cache) -> None:
        computes(request, tokens)(cache)
        while not cache.serve(request, tokens, ttl_s=600):
            cache.step()

    return program


def test_a_flush_does_not_wait_for_what_is_served(tmp_path: Path) -> None:
    config = config_with(socket_in(tmp_path), peers=Peers(address="127.0.0.1:0"))
    group = ControlledGroup(config, prepare=serves("r", PROMPT))
    served = group.ask("stats")["in_flight"]
    answer = group.ask("flush")
    group.end()

    assert (served, answer) == ({"serve": 1}, {"operations": 0, "unwritten": {}})


def test_the_list_has_what_namespaces_keep_and_all_that_was_set(group: ControlledGroup) -> None:
    group.ask("flush")
    group.ask("pin", name="p", tokens=PROMPT[:8], namespace="tenant", ttl_s=60)
    group.ask("limit", namespace="*", host_pages=20)

    assert group.ask("list") == {
        "namespaces": {"tenant": {"device_pages": PAGES, "host_pages": PAGES}},
        "limits": [{"namespace": "*", "device_pages": None, "host_pages": 20, "ttl_s": None}],
        "pins": {"p": {"namespace": "tenant", "tokens": 8}},
        "store": "attached",
    }


def test_a_pin_keeps_what_is_cached_until_it_is_unpinned(group: ControlledGroup) -> None:
    kept = [
        group.ask("pin", name="p", tokens=[*PROMPT, 99], namespace="tenant"),
        group.ask("pin", name="q", tokens=[7, 7, 7, 7], namespace="tenant"),
    ]

    assert kept == [{"tokens": len(PROMPT)}, {"tokens": 0}]
    assert [group.ask("unpin", name=each) for each in ("p", "p")] == [
        {"was_pinned": True},
        {"was_pinned": False},
    ]


def test_a_drop_says_what_has_left_and_what_requests_hold(group: ControlledGroup) -> None:
    group.ask("flush")

    assert group.ask("drop", namespace="tenant") == {"pages": PAGES, "held": PAGES}
    assert group.ask("drop", namespace=None) == {"pages": 0, "held": PAGES}


def test_a_namespace_that_nobody_knows_is_not_dropped_and_the_others_are_named(
    group: ControlledGroup,
) -> None:
    with pytest.raises(
        UsageError, match="nothing is cached for namespace 'tenat'; cached: 'tenant'"
    ):
        group.ask("drop", namespace="tenat")


def test_a_limit_bounds_a_namespace_and_one_without_bounds_takes_it_away(
    group: ControlledGroup,
) -> None:
    group.ask("flush")
    known = group.ask("limit", namespace="tenant", host_pages=1)
    unknown = group.ask("limit", namespace="another", ttl_s=5)
    bounded = group.ask("list")
    for namespace in ("tenant", "another"):
        group.ask("limit", namespace=namespace)

    assert [known, unknown] == [{"is_known": True}, {"is_known": False}]
    assert bounded["namespaces"]["tenant"]["host_pages"] == 1
    assert [each["namespace"] for each in bounded["limits"]] == ["tenant", "another"]
    assert group.ask("list")["limits"] == []


def test_stores_are_detached_and_attached_once_every_rank_is_ready(
    group: ControlledGroup, tmp_path: Path
) -> None:
    group.ask("detach")
    without = group.ask("list")["store"]
    group.ask("attach", store=tmp_path.joinpath("kv").as_uri())

    assert (without, group.ask("list")["store"]) == ("detached", "attached")


def test_a_flush_writes_what_was_cached_before_the_store_was_attached(tmp_path: Path) -> None:
    pages = 24
    config = config_with(socket_in(tmp_path), bounds=Bounds(persists=1))
    tokens = list(range(pages * LAYOUT.page_tokens))
    group = ControlledGroup(config, prepare=computes("r", tokens, "tenant"))
    group.ask("flush")
    group.ask("attach", store="memory://")

    answer = group.ask("flush")

    stored = group.ask("stats")["replica"]["stored_pages"]
    group.end()
    assert answer["unwritten"] == {}
    assert stored["storage"] == {"persisted": pages}


def test_a_store_that_cannot_be_opened_is_told_with_its_reason(
    group: ControlledGroup, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no store")
    group.ask("detach")

    with pytest.raises(StorageError, match="file"):
        group.ask("attach", store=(tmp_path / "file").as_uri())
    with pytest.raises(ConfigError, match="not a URI"):
        group.ask("attach", store="nowhere")


def test_other_weights_hide_what_was_cached_under_those_before(group: ControlledGroup) -> None:
    group.ask("flush")
    group.ask("weights", version="step 100")

    kept = group.ask("list")["namespaces"]["tenant"]
    assert kept == {"device_pages": PAGES, "host_pages": 0}
    assert group.ask("pin", name="p", tokens=PROMPT, namespace="tenant") == {"tokens": 0}


def test_a_request_that_is_refused_changes_nothing_on_any_rank(
    group: ControlledGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group.ask("pin", name="p", tokens=PROMPT, namespace="tenant")
    before = group.ask("list")

    with pytest.raises(UsageError, match="there is a pin 'p' already"):
        group.ask("pin", name="p", tokens=PROMPT, namespace="tenant")
    # The refusal is logged as well, because a client may leave before its request is executed.
    assert "pin is refused: there is a pin 'p' already" in caplog.text
    with pytest.raises(UsageError, match="ttl_s is 0"):
        group.ask("pin", name="q", tokens=PROMPT, ttl_s=0)
    with pytest.raises(ConfigError, match="host_pages is -1"):
        group.ask("limit", namespace="tenant", host_pages=-1)
    assert group.ask("list") == before


def test_the_socket_is_for_its_user_alone_and_gone_with_the_group(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    group = ControlledGroup(config_with(socket_in(folder)))
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "s")]
    group.end()

    assert modes == [0o700, 0o600]
    assert list(folder.iterdir()) == []


def test_whoever_waits_at_the_end_is_told_once_nobody_listens_any_more(tmp_path: Path) -> None:
    """At the close, waiting clients get an error, and the socket is removed, so new clients fail."""
    control = socket_in(tmp_path)
    group = InProcessGroup(1)
    cache = Cache.open(config_with(control), group.member(0))

    def flush() -> tuple[str, bool]:
        with pytest.raises(LockstepError) as ended:
            ask(control.path, "flush")
        return str(ended.value), Path(control.path).exists()

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(flush)
        wait_for(lambda: bool(group.values), "the request")
        cache.abandon()

    assert asking.result() == ("the group ended before the request was executed", False)
    assert group.values == {}


def refused_by(config_of: Callable[[Path], Any], folder: Path) -> list[str]:
    """Open a group with an invalid config; return the text of the error."""
    with pytest.raises(ConfigError) as refused:
        ControlledGroup(config_of(folder))
    return [str(refused.value)]


def test_a_path_at_which_another_group_listens_is_refused_on_every_rank(tmp_path: Path) -> None:
    first = ControlledGroup(config_with(socket_in(tmp_path)))
    refusals = refused_by(lambda folder: config_with(socket_in(folder)), tmp_path)
    listed = first.ask("list")
    first.end()

    assert refusals == [
        f"rank 0: another group listens at {tmp_path / 's'}; choose another path for control"
    ]
    assert listed["namespaces"] == {}


def test_a_group_of_one_rank_does_what_it_is_asked(tmp_path: Path) -> None:
    control = socket_in(tmp_path)
    cache = Cache.open(config_with(control), InProcessGroup(1).member(0))

    answer = reply_to_request(cache.step, control, "drop", namespace=None)
    cache.close()

    assert answer == {"pages": 0, "held": 0}


def test_what_an_engine_decides_itself_is_not_asked_of_its_group(tmp_path: Path) -> None:
    control = Control(path=socket_in(tmp_path).path, refused=("weights",))
    group = ControlledGroup(config_with(control), 1)

    with pytest.raises(UsageError, match="weights is refused: this group's engine decides"):
        group.ask("weights", version="2")
    group.end()

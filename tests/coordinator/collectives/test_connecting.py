"""Which transport a group gets: the choice of `auto`, and the error if a transport is unavailable."""

import fcntl
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.connecting import connect, pick
from lockstep.coordinator.collectives.shared_memory import HostIdentity, ranks_by_host
from lockstep.coordinator.collectives.torch_gloo import TorchCollective
from lockstep.coordinator.transport import Transport
from lockstep.errors import ConfigError, PeerLost
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group import opening
from lockstep.ranks.protocol.config import CacheConfig, Timeouts
from tests.kit.collectives.contract import LANES, PATIENCE_S, Hold, lanes_of
from tests.kit.ranks.as_processes import RanksAsProcesses

pytestmark = pytest.mark.distributed


@pytest.fixture
def ranks(tmp_path: Path) -> RanksAsProcesses:
    return RanksAsProcesses(tmp_path)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([(0,)], "shm: there is one rank"),
        ([(0, 1, 2)], "shm: all 3 ranks are on one host"),
        ([(0, 2), (1,)], "hierarchical: 3 ranks are on 2 hosts"),
        ([(0,), (1,)], "torch: each of 2 ranks is on a separate host or in a separate container"),
    ],
)
def test_auto_picks_by_the_hosts_of_the_ranks_and_says_why(
    hosts: list[tuple[int, ...]], expected: str
) -> None:
    transport, why = pick(hosts)

    assert f"{transport}: {why}" == expected


def test_ranks_are_on_one_host_where_kernel_and_process_numbers_are_the_same() -> None:
    """Containers of a machine count as separate hosts, because they cannot open each other's files."""
    one, other = HostIdentity("kernel", "all"), HostIdentity("kernel", "of a container")

    assert ranks_by_host([one, other, one]) == ((0, 2), (1,))


@pytest.mark.parametrize(
    ("ranks_per_host", "carried_by"),
    [
        (4, "shm: all 4 ranks are on one host"),
        (2, "hierarchical: 4 ranks are on 2 hosts"),
    ],
)
def test_what_auto_picks_carries_rounds(
    ranks: RanksAsProcesses, ranks_per_host: int, carried_by: str
) -> None:
    assert ranks.run(partial(run_rounds, ranks_per_host), 4) == [(carried_by, [0, 1, 2])] * 4


@pytest.mark.parametrize(
    ("call", "clumsy"),
    [
        ("os.memfd_create", 0),
        ("os.pidfd_open", 1),
        ("fcntl.F_ADD_SEALS", 1),
    ],
)
def test_where_the_python_of_one_rank_lacks_a_call_auto_takes_torch_on_all_and_says_why(
    ranks: RanksAsProcesses, call: str, clumsy: int
) -> None:
    outcomes = ranks.run(partial(lack_a_call, call, clumsy), 2)

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].startswith(f"torch: rank {clumsy}: ")
    assert f"this Python has no {call}" in outcomes[0][0]
    assert outcomes[0][1] == [0, 1, 2]


def test_what_is_wanted_by_name_and_cannot_be_had_stops_every_rank_alike(
    ranks: RanksAsProcesses,
) -> None:
    errors = ranks.run(want_memory_across_hosts, 2)

    assert errors[0] == errors[1]
    assert "needs all ranks on one host" in errors[0]
    assert "2 hosts" in errors[0] or "there are 2" in errors[0]


def test_ranks_that_want_different_transports_meet_over_torch(ranks: RanksAsProcesses) -> None:
    """Ranks with different transports connect over torch, so bootstrap can report the difference."""
    assert ranks.run(want_different_things, 2) == ["torch", "torch"]


def test_what_a_round_may_take_is_not_bounded_by_what_the_start_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule R10: the round timeout, not the shorter open timeout, bounds a round over any transport."""
    given: list[float] = []

    def connect_and_tell(*_: object, timeout_s: float, lanes: int) -> None:
        given.append(timeout_s)

    monkeypatch.setattr(opening, "connect", connect_and_tell)
    layout = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=1, elements=1),))
    times = Timeouts(open_s=1.0, round_s=60.0)
    config = CacheConfig(model="m", layout=layout, device_pages=4, host_pages=0, timeouts=times)

    opening.connected(config, SimpleNamespace(world_size=1))  # type: ignore[arg-type]

    assert given == [60.0]


def rounds_of(collective: Collective) -> list[int]:
    return [
        int(collective.launch(lanes_of(number + collective.rank)).wait(PATIENCE_S)[-1])
        for number in range(3)
    ]


def run_rounds(ranks_per_host: int, group: Any, hold: Hold) -> tuple[str, list[int]]:
    host = HostIdentity(f"host {group.rank // ranks_per_host}", "all")
    collective = connect(group, Transport.AUTO, lanes=LANES, timeout_s=PATIENCE_S, host=host)
    folded = rounds_of(collective)
    collective.gather(b"", PATIENCE_S)
    collective.close()
    return collective.transport, folded


def lack_a_call(
    call: str, clumsy: int, group: TorchCollective, hold: Hold
) -> tuple[str, list[int]]:
    if group.rank == clumsy:
        module, name = call.split(".")
        delattr({"os": os, "fcntl": fcntl}[module], name)
    collective = connect(group, Transport.AUTO, lanes=LANES, timeout_s=PATIENCE_S)
    return collective.transport, rounds_of(collective)


def want_memory_across_hosts(group: TorchCollective, hold: Hold) -> str:
    host = HostIdentity(f"host {group.rank}", "all")
    with pytest.raises(ConfigError) as raised:
        connect(group, Transport.SHM, lanes=LANES, timeout_s=PATIENCE_S, host=host)
    with pytest.raises(PeerLost):
        group.gather(b"", PATIENCE_S)
    return str(raised.value)


def want_different_things(group: TorchCollective, hold: Hold) -> str:
    wanted = (Transport.SHM, Transport.TORCH)[group.rank]
    return connect(group, wanted, lanes=LANES, timeout_s=PATIENCE_S).transport

"""The allow list of sources: the hosts from which a process may read pages."""

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.protocol.allowed_sources import AllowedSources
from lockstep.storage_backends.registry import make_backend
from tests.kit.ranks.page_servers import serving_keys
from tests.kit.storage.calls import opened_at
from tests.storage_backends.peer.test_opening import LAYOUT

ENTRIES = ("10.0.0.0/8", "192.0.2.7", "fd00::/8", "[2001:db8::5]", "Prefill-0.example")


@pytest.mark.parametrize(
    ("host", "place", "excluded", "allowed"),
    [
        ("10.1.2.3", "10.1.2.3", False, True),
        ("11.1.2.3", "11.1.2.3", True, False),
        ("192.0.2.7", "192.0.2.7", False, True),
        ("192.0.2.8", "192.0.2.8", True, False),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3", False, True),
        ("fd00::1%eth0", "fd00::1%eth0", False, True),
        ("2001:db8::5", "2001:db8::5", False, True),
        ("2001:db8::6", "2001:db8::6", True, False),
        ("prefill-0.EXAMPLE.", "203.0.113.9", False, True),
        ("prefill-1.example", "203.0.113.9", False, False),
        ("prefill-1.example", "10.9.9.9", False, True),
    ],
)
def test_a_host_is_allowed_by_its_name_or_by_the_address_that_it_has(
    host: str,
    place: str,
    excluded: bool,
    allowed: bool,
) -> None:
    sources = AllowedSources(ENTRIES)

    assert sources.excludes(host) is excluded
    assert _allows(sources, host, place) is allowed


def test_a_name_is_excluded_before_it_is_resolved_where_names_alone_are_allowed() -> None:
    sources = AllowedSources(["prefill-0"])

    assert [sources.excludes(each) for each in ("prefill-0", "prefill-1", "10.0.0.1")] == [
        False,
        True,
        True,
    ]


def test_everything_is_allowed_where_nothing_is_said() -> None:
    sources = AllowedSources()

    assert not sources.excludes("anything")
    assert _allows(sources, "anything", "203.0.113.9")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("10.0.0.1/8", "'10.0.0.1/8' is not a network"),
        ("prefill-0:7001", "names a port; name the host alone"),
        ("10.0.0.1:7001", "names a port; name the host alone"),
        ("a,b", "is not a host"),
        ("", "is not a host"),
    ],
)
def test_what_is_no_network_and_no_host_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AllowedSources([entry])


async def test_nobody_is_connected_to_whose_address_is_not_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A host is refused if the list has neither its name nor the address that the name resolves to."""
    with serving_keys(1, LAYOUT) as group:
        uri = group.uri.replace("127.0.0.1", "localhost")
        async with opened_at(f"{uri}?allow_sources=127.0.0.0/8"):
            pass
        with pytest.raises(ConfigError, match=r"localhost \(127.0.0.1\) is not an allowed source"):
            await make_backend(f"{uri}?allow_sources=10.0.0.0/8,prefill-0").open()


def _allows(sources: AllowedSources, host: str, place: str) -> bool:
    try:
        sources.require(host, place)
    except ConfigError:
        return False
    return True

"""What leaves a process comes back equal, of the same types; whatever else arrives is refused."""

from contextlib import suppress
from dataclasses import replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered, Landed
from lockstep.coordinator.operation import Kind, Phase, Queue
from lockstep.coordinator.verdict import Arrived, Found, Verdict, Watermark
from lockstep.errors import WireError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.protocol import wire
from lockstep.ranks.protocol.config import CacheConfig, NamespaceLimit, Recurrent, SlidingWindow
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.effects import Effects
from lockstep.ranks.protocol.notices import Finished
from lockstep.ranks.protocol.orders import Fetch, LookUp, Need, ObjectTransfer
from lockstep.ranks.protocol.outside import Control, Peers
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.protocol.wire import decode, encode
from lockstep.ranks.replica.core.pages import page_run
from lockstep.simulation.rank.epoch import Build
from lockstep.simulation.schedule import run_schedule

T = TypeVar("T")

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=2, elements=8),))

FETCH = Fetch(3, (ObjectTransfer("kv", (b"k" * 32, b"l" * 32), (4, 5)),), 1.5)
EFFECTS = Effects(orders=(FETCH, LookUp(4, 0, (Need("kv", 0, (b"m",), 2, frozenset({9, 1})),), 5)))
VERDICT = Verdict(
    round=7,
    time_ms=1000,
    watermarks=(
        Watermark(queue=Queue.BACKUP, ended_through=2, first_failed=None, failed_rank=None),
    ),
    seats=(Found(1, 5, None, None, None, 1), Arrived(2, 8, 8, 1, None)),
)

PLAIN: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    NoneType: st.none(),
}

CHECKED = (CacheConfig, ReplicaConfig, Opened)
"""Types whose fields have to fit together, and those that have them among their fields."""

LISTED = [
    kind
    for kind in wire.TYPES.values()
    if kind not in (tuple, frozenset, *CHECKED) and not hasattr(kind, "__post_init__")
]

OPENED = Opened(
    1,
    2,
    CacheConfig(
        model="m",
        layout=LAYOUT,
        components=(
            SlidingWindow(window_tokens=8, layout=LAYOUT, device_pages=0, host_pages=3),
            Recurrent(
                checkpoint_tokens=8,
                layout=PageLayout(page_tokens=1, columns=LAYOUT.columns),
                device_pages=0,
                host_pages=4,
            ),
        ),
        host_pages=7,
        store="file:///kv",
        limits=(NamespaceLimit(namespace="*", ttl_s=1),),
        peers=Peers(),
        control=Control(path="/run/kv"),
    ),
    ReplicaConfig(
        page_tokens=4,
        device_pages=0,
        host_pages=7,
        components=(
            ComponentSettings(
                kind="recurrent", pool="state", device_pages=0, host_pages=4, every_pages=2
            ),
        ),
        has_store=True,
        model_digest=b"m",
        life=b"l" * 16,
    ),
    "host:1",
)


def there_and_back(value: T) -> T:
    """Return a value as another process would have it, which is no other in any part."""
    sent = encode(value)
    again: T = decode(sent)
    assert again == value
    # The types too: the bytes tell a phase from the number that it equals.
    assert encode(again) == sent
    return again


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for what a field of this annotation may hold, all types that are listed too."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, arguments))
    if origin in (tuple, frozenset):
        made: Any = origin
        return st.lists(values(arguments[0]), max_size=3).map(made)
    if hint in PLAIN:
        return PLAIN[hint]
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints = get_type_hints(hint)
    return st.builds(hint, **{name: values(hints[name]) for name in wire.field_names(hint)})


class Sent(RankCache):
    """A cache all of whose verdicts and effects have been through bytes."""

    def _apply(self, verdict: Verdict) -> Effects:
        return super()._apply(there_and_back(verdict))

    def _follow(self, outcome: tuple[T, Effects]) -> T:
        answer, effects = outcome
        return super()._follow((answer, there_and_back(effects)))


class SentCache(Sent, Cache):
    """The same, where the replica owns the device pages."""


class SentHostCache(Sent, HostCache):
    """The same, where the engine does."""


def test_groups_live_on_effects_and_verdicts_that_were_bytes_in_between() -> None:
    build = Build(cache=SentCache, host_cache=SentHostCache)

    violations = [run_schedule(seed, build=build).violation for seed in range(4)]

    assert violations == [None] * 4


@pytest.mark.parametrize("kind", LISTED, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_every_listed_type_comes_back_whatever_its_fields_hold(
    kind: type, data: st.DataObject
) -> None:
    value = data.draw(values(kind))

    assert type(there_and_back(value)) is kind


@pytest.mark.parametrize(
    "value", [EFFECTS, VERDICT, OPENED, Answered(1, 0, (2, 4)), (b"plain", None, True)]
)
def test_a_value_comes_back_equal_and_of_its_type(value: object) -> None:
    assert type(there_and_back(value)) is type(value)


def test_a_phase_comes_back_as_a_phase_and_a_float_as_a_float() -> None:
    again = decode(encode((Phase.QUERY, 1, 1.0, True)))

    assert [type(each) for each in again] == [Phase, int, float, bool]


def test_equal_sets_are_equal_bytes_whatever_their_order() -> None:
    need = Need("kv", 0, (), 1, frozenset((8, 0)))

    assert encode(need) == encode(replace(need, on_host=frozenset((0, 8))))


@pytest.mark.parametrize(
    "value",
    [
        page_run([1]),
        [1],
        {"a": 1},
        1j,
        FETCH._replace(transfers=(ObjectTransfer("kv", (), page_run([1])),)),  # type: ignore[arg-type]
        1 << 70,
    ],
)
def test_what_is_not_listed_does_not_leave(value: object) -> None:
    with pytest.raises(WireError, match="cannot be written"):
        encode(value)


def test_a_field_of_another_type_is_refused_where_it_arrives() -> None:
    lie = encode(Landed(1, "seven"))  # type: ignore[arg-type]

    with pytest.raises(WireError, match="pages of Landed is of type str"):
        decode(lie)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be read"):
        decode(msgpack.packb([msgpack.ExtType(127, b"\x90")]))


def test_what_is_too_long_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = encode(EFFECTS)
    monkeypatch.setattr(wire, "BYTES_MAX", len(sent) - 1)

    with pytest.raises(WireError, match="must be at most"):
        encode(EFFECTS)
    with pytest.raises(WireError, match="must be at most"):
        decode(sent)


def test_what_is_nested_without_end_is_refused() -> None:
    data = b"\x90"
    for _ in range(1000):
        data = msgpack.packb([msgpack.ExtType(0, data)])

    with pytest.raises(WireError, match="nested"):
        decode(data)


@given(st.integers(min_value=0, max_value=10_000), st.integers(min_value=0, max_value=255))
def test_damaged_bytes_are_refused_or_are_another_value_that_could_have_been_sent(
    position: int, byte: int
) -> None:
    sent = bytearray(encode((EFFECTS, VERDICT)))
    sent[position % len(sent)] = byte

    received = decoded_unless_refused(bytes(sent))

    assert [decode(encode(value)) for value in received] == received


@given(st.binary(max_size=64))
def test_bytes_of_anybody_are_refused_or_are_a_value(data: bytes) -> None:
    assert all(encode(value) for value in decoded_unless_refused(data))


def decoded_unless_refused(data: bytes) -> list[Any]:
    """Return the one value that the bytes stand for, or none where they are refused."""
    with suppress(WireError):
        return [decode(data)]
    return []


@pytest.mark.parametrize("length", range(0, 40, 3))
def test_a_message_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        decode(encode((Finished(1, Kind.BACKUP, Phase.QUERY), b"x" * 40))[:length])  # type: ignore[arg-type]

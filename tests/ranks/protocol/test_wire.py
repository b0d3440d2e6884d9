"""Encoded values decode to equal values of the same types; all other bytes are refused."""

import math
import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from lockstep.coordinator import codec
from lockstep.coordinator.codec import Codec
from lockstep.coordinator.expectations import Forgotten, Queued, Settled, SlotAssigned, SlotFreed
from lockstep.coordinator.operation import Phase, Queue
from lockstep.coordinator.proposal import Change
from lockstep.errors import StorageError, WireError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import HostCacheConfig, NamespaceLimit, Recurrent, SlidingWindow
from lockstep.ranks.protocol.dispatch import (
    DISPATCHES,
    OPENINGS,
    CarryOut,
    Dispatch,
    Expect,
    GiveUp,
    Log,
    Opened,
    Prepare,
    Rest,
    Vote,
)
from lockstep.ranks.protocol.network_config import Control, Peers
from lockstep.ranks.protocol.orders import (
    AttachStore,
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    DetachStore,
    Fence,
    Fetch,
    Fork,
    LookUp,
    Need,
    ObjectTransfer,
    Put,
    Serve,
)
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.core.pages import page_run
from lockstep.storage_backends.peer.wire import MESSAGES
from tests.storage_backends.peer.test_wire import MESSAGES_SENT

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=2, elements=8),))
OBJECTS = (ObjectTransfer("kv", (b"k" * 32, b"l" * 32), (4, 5), stored=True),)
COPIES = (CopyTransfer("kv", (4, 5), (1, 0), sealed=True),)
NEEDS = (Need("kv", 0, (b"m",), 2, frozenset({9, 1})), Need("state", 3, (b"", b"n")))

DISPATCH = Dispatch(
    7,
    (
        Expect(
            (
                SlotAssigned(1, 2, Phase.QUERY, 1 << 40),
                SlotFreed(2),
                Queued(Queue.PERSIST, 3, 4),
                Settled(Queue.BACKUP, 5),
                Forgotten(6),
            )
        ),
        CarryOut(
            (
                LookUp(1, 0, NEEDS, 5.0, "peer://h:1"),
                Fetch(2, OBJECTS, 1.5),
                Put(3, OBJECTS, 1.5, b"k", 2),
                Serve(4, OBJECTS),
                CopyToHost(5, COPIES, 2.0),
                CopyToDevice(6, COPIES, 2.0),
                Fork("state", 1, 2),
                Fence((1, 2), 0.5),
                Cancel(1, 0.5),
                AttachStore((1 << 63) - 1),
                DetachStore(),
            )
        ),
        Prepare(Change.ATTACH, "file:///kv"),
        GiveUp(),
        Log("debug"),
        Rest(0.25),
        Vote(1 << 62, 3, 4, 5),
    ),
)

OPENED = Opened(
    1,
    2,
    HostCacheConfig(
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
        limits=(NamespaceLimit(namespace="*", ttl_s=1.0),),
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

SENT: list[tuple[Codec[Any], Any]] = [
    (DISPATCHES, DISPATCH),
    (OPENINGS, OPENED),
    *((MESSAGES, each) for each in MESSAGES_SENT),
]

HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\x03\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
)
"""Invalid encodings whose headers announce huge arrays, bytes or texts that do not follow."""
ODD = (
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xc0",
    b"\xc3",
    b"\x80",
    b"\xc7\x00\x01",
    b"\xff",
    b"\x91" * 5000,
)
"""Encodings of valid values of wrong types: NaN, null, true, a map, an extension, -1, nested arrays."""


@pytest.mark.parametrize(("form", "value"), SENT)
def test_a_value_comes_back_equal_and_of_its_types(form: Codec[Any], value: object) -> None:
    again = form.decode(form.encode(value))

    assert again == value
    assert form.encode(again) == form.encode(value)


def test_what_is_read_of_an_enumeration_is_its_member() -> None:
    expected = DISPATCHES.decode(DISPATCHES.encode(DISPATCH)).messages[0]

    assert isinstance(expected, Expect)
    assert isinstance(expected.expectations[0], SlotAssigned)
    assert expected.expectations[0].phase is Phase.QUERY


def packed(*messages: Any) -> bytes:
    return msgspec.msgpack.encode(["Dispatch", 1, messages])


NO_TRANSFERS: list[Any] = []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packed(["Vote", 1, 2, 3]), "length 5, got 4 - at `$[2][0]`"),
        (packed(["Vote", 1, 2, 3, 4, 5]), "at most length 4, got 5 - at `$[2][0]`"),
        (packed(["Vote", 1, 2, 3, "4"]), "Expected `int`, got `str` - at `$[2][0][4]`"),
        (packed(["Vote", math.nan, 2, 3, 4]), "Expected `int`, got `float` - at `$[2][0][1]`"),
        (packed(["Vote", True, 2, 3, 4]), "Expected `int`, got `bool`"),
        (packed(["Fetch", 1, NO_TRANSFERS, 1.0, ""]), "Invalid value 'Fetch' - at `$[2][0][0]`"),
        (packed(["Prepare", 9, ""]), "Invalid enum value 9"),
        (packed(["Expect", [["SlotFreed", NO_TRANSFERS]]]), "Expected `int`, got `array`"),
        (packed(["Prepare", 1, b"\xff"]), "Expected `str`, got `bytes`"),
        (packed(["GiveUp"])[:-1], "truncated"),
        (packed(["GiveUp"]) + b"\0", "trailing characters"),
        (b"", "truncated"),
        (b"\x93\xa8Dispatch\x01" + HUGE[0], "truncated"),
        (OPENINGS.encode(OPENED), "Invalid value 'Opened' - at `$[0]`"),
    ],
)
def test_what_is_no_dispatch_is_refused_by_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(WireError) as refused:
        DISPATCHES.decode(data)

    assert message in str(refused.value)


def test_settings_that_do_not_fit_together_are_refused_where_they_arrive() -> None:
    data = OPENINGS.encode(OPENED).replace(b"\xabpage_tokens\x04", b"\xabpage_tokens\x00")

    with pytest.raises(WireError, match=r"page_tokens is 0, must be 1 or more - at `\$\[3\]"):
        OPENINGS.decode(data)


@pytest.mark.parametrize("pages", [page_run([1]), (1 << 70,), "\ud800", range(2)])
def test_what_has_no_bytes_does_not_leave(pages: Any) -> None:
    order = Serve(1, (ObjectTransfer("kv", (b"k",), pages),))

    with pytest.raises(WireError, match="cannot be written"):
        DISPATCHES.encode(Dispatch(1, (CarryOut((order,)),)))


def test_what_is_too_long_is_refused_on_both_sides() -> None:
    sent = DISPATCHES.encode(DISPATCH)
    short = Codec[Dispatch](Dispatch, bytes_max=len(sent) - 1)

    with pytest.raises(WireError, match="must be at most"):
        short.encode(DISPATCH)
    with pytest.raises(WireError, match="must be at most"):
        short.decode(sent)
    assert len(sent) < codec.BYTES_MAX


def damaged(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 1, 2, 9)))
        new = rng.choice((b"", rng.randbytes(1), rng.randbytes(1), data[at : at + 40], *HUGE, *ODD))
        data = data[:at] if rng.random() < 0.1 else data[:at] + new + data[end:]
    return data


def comes_back(form: Codec[Any], data: bytes) -> bool:
    """Return whether damaged bytes are refused, or decode to a value that survives a round trip."""
    try:
        again = form.encode(form.decode(data))
    except (WireError, StorageError):
        return True
    return bool(form.encode(form.decode(again)) == again)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes_are_refused_or_are_a_value_and_cost_no_memory(seed: int) -> None:
    rng = random.Random(seed)
    sent = ((form, form.encode(value)) for form, value in rng.choices(SENT, k=1000))
    tracemalloc.start()
    wrong = [data for form, data in sent if not comes_back(form, damaged(rng, data))]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert wrong == [], f"replay: pytest '{__file__}' -k 'damaged and {seed}'"
    assert most < 32 << 20

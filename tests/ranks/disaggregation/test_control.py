"""Control messages: what is read is what was written, and all else is refused by name (rule R11)."""

from collections import Counter
from dataclasses import asdict, fields, replace
from hashlib import sha256
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import MessageError, UsageError
from lockstep.page_format.namespace import Namespace
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.disaggregation.control import (
    CONTROL_BYTES_MAX,
    PROMPT_BYTES_MAX,
    Announce,
    Arrival,
    Control,
    Receipt,
    Resend,
    Withdrawn,
    decode,
    encode,
)
from lockstep.ranks.disaggregation.manifest import (
    KEY_BYTES,
    OPAQUE_BYTES_MAX,
    STATES_MAX,
    TEXT_MAX,
    TOKENS_MAX,
    HandoffManifest,
    HandoffTerms,
    PoolContents,
    layout_fingerprint,
)
from lockstep.ranks.disaggregation.refusal import Refusal, Refused
from lockstep.ranks.disaggregation.telling import (
    Counted,
    Drain,
    EventsTold,
    EventsWanted,
    Milestone,
    Progress,
    RequestsTold,
    RequestsWanted,
    SnapshotTold,
)
from lockstep.ranks.replica.tree import page_keys
from lockstep.ranks.replica.tree.tokens import as_token_bytes

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=2, heads=4, elements=8),))
NAMESPACE = Namespace(model="m", weights_version="7", layouts={"kv": LAYOUT})
TERMS = HandoffTerms.of(NAMESPACE)
MANIFEST = HandoffManifest(
    request="r7",
    namespace_digest=NAMESPACE.digest(),
    namespace="tenant",
    weights_version="7",
    layout_fingerprint=TERMS.layout_fingerprint,
    tokens=18,
    end_key=b"e" * KEY_BYTES,
    tail_key=b"t" * KEY_BYTES,
    pools=(
        PoolContents(pool="kv", first_page=0, end_page=4, tail=True),
        PoolContents(pool="state", first_page=4, end_page=4, tail=True, states=(2, 4)),
    ),
    first_token=1234,
    sampling=b"seed",
    speculation=b"draft",
    metadata=b"slot",
    source="peer://10.0.0.1:7000",
)

counts = st.integers(0, TOKENS_MAX)
texts = st.text(max_size=20)
sources = texts.filter(lambda text: not set(text) & set("?@"))
names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20)
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
digests = keys.map(bytes.hex)
opaque = st.binary(max_size=60)
pools = st.tuples(counts, counts, st.sets(counts, max_size=4)).map(
    lambda drawn: PoolContents(
        pool="",
        first_page=min(drawn[:2]),
        end_page=max(drawn[:2]),
        tail=bool(drawn[0] % 2),
        states=tuple(sorted(drawn[2])),
    )
)
manifests = st.builds(
    HandoffManifest,
    request=names,
    namespace_digest=digests,
    namespace=texts,
    weights_version=texts,
    layout_fingerprint=digests,
    tokens=counts,
    end_key=keys,
    tail_key=keys,
    pools=st.lists(pools, max_size=3).map(
        lambda drawn: tuple(replace(each, pool=f"pool{at}") for at, each in enumerate(drawn))
    ),
    first_token=st.integers(0, (1 << 31) - 1),
    sampling=opaque,
    speculation=opaque,
    metadata=opaque,
    source=sources,
)
progresses = st.builds(
    Progress,
    group=texts,
    request=names,
    stage=st.sampled_from([each.value for each in Milestone]),
    at_us=counts,
    hit_tokens=counts,
    computed_tokens=counts,
)
several_names = st.lists(names, max_size=3).map(tuple)
messages: st.SearchStrategy[Control] = st.one_of(
    manifests,
    st.builds(
        Arrival,
        request=names,
        tokens=st.lists(st.integers(0, 1 << 20), max_size=9).map(as_token_bytes),
        namespace=texts,
        sampling=opaque,
        partner=texts,
        patience_ms=st.integers(0, 1 << 40),
    ),
    st.builds(Announce, request=names, tokens=counts, source=sources),
    st.builds(Resend, request=names, from_token=counts),
    st.builds(Receipt, request=names),
    st.builds(Withdrawn, request=names),
    st.builds(Drain),
    st.builds(Counted, group=texts, data=opaque),
    progresses,
    st.builds(RequestsWanted, reader=texts, requests=several_names),
    st.builds(
        RequestsTold,
        group=texts,
        here=several_names,
        ended=st.lists(progresses, max_size=3).map(tuple),
        unknown=several_names,
    ),
    st.builds(EventsWanted, reader=texts, life=counts, first=counts),
    st.builds(EventsTold, group=texts, life=counts, sequence=counts, payload=opaque),
    st.builds(
        SnapshotTold,
        group=texts,
        life=counts,
        part=st.integers(0, 8),
        batches=counts,
        parts=st.just(9),
        data=opaque,
    ),
)


def refused(data: bytes) -> Refused:
    with pytest.raises(Refused) as raised:
        decode(data)
    return raised.value


def outcome(data: bytes) -> Control | Refusal | str:
    """Return the message, or by which name it is refused; or what is said, if that is no sentence."""
    try:
        return decode(data)
    except Refused as error:
        return str(error) if "\n" in str(error) else error.refusal


def sealed(body: object, *, kind: int = 1, version: int = 1) -> bytes:
    """Return a message whose checksum is right, whatever its body is."""
    header = b"LKCM" + bytes([version, kind])
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return header + sha256(header + packed).digest() + packed


def plain(message: Control) -> dict[str, Any]:
    """Return a message's fields as msgpack has them."""
    return asdict(message)


@given(messages)
@settings(max_examples=300)
def test_what_is_read_is_what_was_written(message: Control) -> None:
    again = decode(encode(message))

    assert again == message
    assert type(again) is type(message)
    assert encode(again) == encode(message)


@given(st.binary(max_size=400) | st.binary(max_size=400).map(sealed))
@settings(max_examples=500)
def test_any_other_bytes_are_refused_by_name(data: bytes) -> None:
    assert isinstance(outcome(data), Refusal)


@given(messages, st.data())
@settings(max_examples=300)
def test_a_message_with_any_byte_changed_is_refused(message: Control, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))

    assert isinstance(outcome(bytes(encoded)), Refusal)


def test_a_manifest_with_any_single_bit_flipped_is_refused() -> None:
    encoded = encode(MANIFEST)
    number = int.from_bytes(encoded, "big")

    outcomes = [
        outcome((number ^ (1 << bit)).to_bytes(len(encoded), "big"))
        for bit in range(8 * len(encoded))
    ]

    assert [each for each in outcomes if not isinstance(each, Refusal)] == []
    assert Counter(outcomes) == {
        Refusal.MALFORMED: 8 * 4,
        Refusal.VERSION: 8,
        Refusal.CHECKSUM: 8 * (len(encoded) - 5),
    }


def test_a_manifest_that_is_cut_off_anywhere_or_goes_on_is_refused() -> None:
    encoded = encode(MANIFEST)

    outcomes = {outcome(encoded[:length]) for length in range(len(encoded))}

    assert outcomes == {Refusal.MALFORMED, Refusal.CHECKSUM}
    assert outcome(encoded + b"\0") is Refusal.CHECKSUM


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_by_name_whatever_it_says(version: int) -> None:
    error = refused(sealed(b"", version=version))

    assert error.refusal is Refusal.VERSION
    assert f"of version {version}, and this process reads 1" in str(error)
    assert isinstance(error, MessageError)


def test_a_kind_that_this_version_does_not_know_is_refused() -> None:
    assert refused(sealed({}, kind=200)).refusal is Refusal.UNKNOWN_KIND


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    error = refused(bytes(CONTROL_BYTES_MAX + 1))

    assert error.refusal is Refusal.TOO_LARGE


WRONG: tuple[tuple[dict[str, Any], Refusal, str], ...] = (
    ({"color": 1}, Refusal.UNKNOWN_FIELD, "HandoffManifest has the unknown field 'color'"),
    ({"tokens": "18"}, Refusal.WRONG_TYPE, "HandoffManifest.tokens is of type str, must be int"),
    ({"tokens": True}, Refusal.WRONG_TYPE, "HandoffManifest.tokens is of type bool"),
    ({"tokens": 18.0}, Refusal.WRONG_TYPE, "HandoffManifest.tokens is of type float"),
    ({"tokens": None}, Refusal.WRONG_TYPE, "HandoffManifest.tokens is of type NoneType"),
    ({"tokens": -1}, Refusal.OUT_OF_BOUNDS, "tokens is -1, must be 0 to"),
    ({"end_key": "e" * 32}, Refusal.WRONG_TYPE, "end_key is of type str, must be bytes"),
    ({"end_key": b"short"}, Refusal.OUT_OF_BOUNDS, "end_key has 5 bytes, must be 32"),
    ({"request": ""}, Refusal.OUT_OF_BOUNDS, "request is empty"),
    ({"request": "r\0early"}, Refusal.OUT_OF_BOUNDS, "request has a character 0"),
    ({"namespace": "n" * (TEXT_MAX + 1)}, Refusal.OUT_OF_BOUNDS, "namespace has 1025 characters"),
    ({"namespace_digest": "G" * 64}, Refusal.OUT_OF_BOUNDS, "must be 64 hex digits"),
    ({"first_token": 1 << 31}, Refusal.OUT_OF_BOUNDS, "first_token is 2147483648"),
    ({"sampling": bytes(OPAQUE_BYTES_MAX + 1)}, Refusal.OUT_OF_BOUNDS, "sampling has 262145 bytes"),
    ({"pools": {}}, Refusal.WRONG_TYPE, "pools is of type dict, must be a list"),
    ({"pools": [1]}, Refusal.WRONG_TYPE, "pools[0] is of type int, must be a map"),
    ({"pools": [{"pool": "kv"}]}, Refusal.MISSING_FIELD, "pools[0] lacks the field 'first_page'"),
    (
        {"pools": [asdict(MANIFEST.pools[0])] * 2},
        Refusal.OUT_OF_BOUNDS,
        "2 pools, must be at most 64, each once",
    ),
    (
        {"pools": [{**asdict(MANIFEST.pools[0]), "first_page": 9}]},
        Refusal.OUT_OF_BOUNDS,
        "first_page is 9, after end_page 4",
    ),
    (
        {"pools": [{**asdict(MANIFEST.pools[0]), "states": [4, 2]}]},
        Refusal.OUT_OF_BOUNDS,
        "states are not ascending",
    ),
    (
        {"pools": [{**asdict(MANIFEST.pools[0]), "states": list(range(STATES_MAX + 1))}]},
        Refusal.OUT_OF_BOUNDS,
        "4097 states, must be at most 4096",
    ),
)


@pytest.mark.parametrize(("changed", "refusal", "words"), WRONG, ids=lambda each: str(each)[:40])
def test_a_field_that_is_not_as_it_must_be_is_refused_by_its_name(
    changed: dict[str, Any], refusal: Refusal, words: str
) -> None:
    error = refused(sealed({**plain(MANIFEST), **changed}))

    assert error.refusal is refusal
    assert words in str(error)


@pytest.mark.parametrize("name", [each.name for each in fields(HandoffManifest)])
def test_a_manifest_lacks_no_field(name: str) -> None:
    named = plain(MANIFEST)
    del named[name]

    error = refused(sealed(named))

    assert error.refusal is Refusal.MISSING_FIELD
    assert str(error) == f"HandoffManifest lacks the field {name!r}"


def test_there_is_one_way_to_write_a_message() -> None:
    """Rule R11: a second field of one name, another order or a longer integer would be another text."""
    named = plain(Receipt(request="r"))
    twice = b"\x82" + msgpack.packb(named)[1:] * 2
    moved = dict(reversed(plain(Resend(request="r", from_token=1)).items()))
    longer = msgpack.packb(plain(Resend(request="r", from_token=1)))[:-1] + b"\xcc\x01"

    outcomes = [
        outcome(sealed(twice, kind=5)),
        outcome(sealed(moved, kind=4)),
        outcome(sealed(longer, kind=4)),
    ]

    assert outcomes == [Refusal.MALFORMED] * 3


def test_a_body_that_is_no_map_is_refused() -> None:
    assert refused(sealed([])).refusal is Refusal.WRONG_TYPE
    assert refused(sealed(b"\xc1")).refusal is Refusal.MALFORMED
    assert refused(sealed(b"\x91" * 5000)).refusal is Refusal.MALFORMED
    assert refused(sealed({1: 2})).refusal is Refusal.MALFORMED


def test_a_prompt_of_as_many_tokens_as_there_may_be_is_a_message() -> None:
    arrival = Arrival(request="r", tokens=bytes(PROMPT_BYTES_MAX))

    assert decode(encode(arrival)) == arrival


def test_a_message_that_makes_no_sense_is_not_made() -> None:
    with pytest.raises(UsageError, match="tokens has 5 bytes, must be four for each token"):
        Arrival(request="r", tokens=b"12345")
    with pytest.raises(UsageError, match="request must be text that UTF-8 can hold"):
        Receipt(request="\ud800")
    with pytest.raises(UsageError, match="from_token is -1"):
        Resend(request="r", from_token=-1)


def test_a_source_that_tells_a_secret_is_neither_sent_nor_repeated() -> None:
    with pytest.raises(UsageError, match="peer://host:port and nothing else") as raised:
        Announce(request="r", tokens=1, source="peer://there:1?secret=hush")
    assert "hush" not in str(raised.value)
    with pytest.raises(UsageError, match="peer://host:port and nothing else"):
        replace(MANIFEST, source="peer://me:hush@there:1")


def test_what_a_field_cannot_hold_is_not_written() -> None:
    wrong: Any = {"first_page": 0, "end_page": 1.0, "tail": 1}

    with pytest.raises(UsageError, match="a HandoffManifest cannot be written: float in place of"):
        encode(replace(MANIFEST, pools=(PoolContents(pool="kv", **wrong),)))


def test_a_manifest_of_the_same_namespace_weights_and_layout_is_accepted() -> None:
    TERMS.require(MANIFEST)


@pytest.mark.parametrize(
    ("changed", "refusal", "words"),
    [
        ({"weights_version": "8"}, Refusal.WEIGHTS, "of another version of the weights: '8'"),
        ({"layout_fingerprint": "0" * 64}, Refusal.LAYOUT, "of another layout of pages: '000"),
        ({"namespace_digest": "f" * 64}, Refusal.NAMESPACE, "of another namespace: 'fff"),
    ],
)
def test_a_manifest_of_something_else_is_refused_by_name(
    changed: dict[str, Any], refusal: Refusal, words: str
) -> None:
    """Rule R16: the request is then computed, which is all that a refusal may bring about."""
    with pytest.raises(Refused, match=words) as raised:
        TERMS.require(replace(MANIFEST, **changed))

    assert raised.value.refusal is refusal
    assert "the manifest of request 'r7' is" in str(raised.value)


STATE = replace(LAYOUT, page_tokens=1)


@pytest.mark.parametrize(
    "other",
    [
        {"kv": replace(LAYOUT, page_tokens=8)},
        {"kv": replace(LAYOUT, columns=(replace(LAYOUT.columns[0], dtype="float16"),))},
        {"kv": replace(LAYOUT, columns=(replace(LAYOUT.columns[0], layers=3),))},
        {"kv": LAYOUT, "state": STATE},
        {"other": LAYOUT},
    ],
    ids=["page", "dtype", "layers", "another pool", "another name"],
)
def test_the_fingerprint_differs_where_pages_do(other: dict[str, PageLayout]) -> None:
    assert layout_fingerprint(other) != layout_fingerprint({"kv": LAYOUT})


def test_the_fingerprint_is_of_the_pools_in_any_order() -> None:
    one = layout_fingerprint({"kv": LAYOUT, "state": STATE})

    assert one == layout_fingerprint({"state": STATE, "kv": LAYOUT})


def test_a_manifest_s_keys_are_as_long_as_those_of_pages() -> None:
    assert KEY_BYTES == page_keys.KEY_BYTES

"""Chunks have one name only where their bytes mean the same, and then under every TP size."""

from dataclasses import replace

import pytest

from lockstep.integrations.vllm.tier.contract import OffloadingConfig
from lockstep.integrations.vllm.tier.names import ChunkNames, chunk_names
from lockstep.page_format.object_name import ObjectName, name_digest
from tests.kit.vllm.tier.offloading import Cache, Group, OffloadedModel, Offloading, Ranks

KEY = bytes(range(32)) + b"\x00\x00\x00\x02"


def named(
    config: OffloadingConfig,
    *,
    identity: str = "version 1",
    model: str = "org/model",
    row_bytes: int = 8192,
    form: str | None = None,
) -> ChunkNames:
    return chunk_names(config, identity, model, row_bytes, form)


def test_a_chunk_is_named_by_its_hash_and_its_group() -> None:
    names = ChunkNames("ab" * 32, "one-copy")

    assert names.of([KEY]) == [
        ObjectName("ab" * 32, bytes(range(32)).hex(), "vllm-tier-g2", "one-copy")
    ]


@pytest.mark.parametrize("length", [0, 1, 16, 32, 33, 100])
def test_every_hash_makes_a_name_that_a_store_takes(length: int) -> None:
    (name,) = named(Offloading()).of([b"\x01" * length + b"\x00\x00\x00\x00"])

    assert name_digest(name) is not None


OTHERS: dict[str, ChunkNames] = {
    "weights": named(Offloading(), identity="version 2"),
    "model": named(Offloading(), model="org/other"),
    "row": named(Offloading(), row_bytes=4096),
    "type": named(Offloading(model=OffloadedModel(dtype="fp8_e4m3"))),
    "order of axes": named(Offloading(kv_cache_layout="LBNHC")),
    "block": named(Offloading(groups=[Group(tokens_per_block=32)])),
    "layers": named(Offloading(groups=[Group(layer_names=("layers.1", "layers.0"))])),
    "groups": named(Offloading(groups=[Group(), Group(group_id=1)])),
    "hash": named(Offloading(cache=Cache(tokens_per_hash=32))),
    "chunk": named(Offloading(cache=Cache(blocks_per_chunk=2))),
    "division": named(Offloading(Ranks.tp(2))),
    "form": named(Offloading(canonical_layout=True), form="v1-hnd"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_chunks_of_another_kind_have_other_names(what: str) -> None:
    assert OTHERS[what].of([KEY]) != named(Offloading()).of([KEY])


def test_what_changes_no_byte_changes_no_name() -> None:
    other_group_number = Offloading(groups=[Group(group_id=3)])

    assert named(other_group_number) == named(Offloading())


def test_latent_attention_has_the_same_objects_under_every_tp_size() -> None:
    sizes = [Offloading(Ranks.tp(size), replicated_layout=size > 1) for size in (1, 2, 4)]

    assert {named(each) for each in sizes} == {named(Offloading())}


def test_canonical_chunks_have_the_same_objects_under_every_tp_size() -> None:
    sizes = [Offloading(Ranks.tp(size, agnostic=True), canonical_layout=True) for size in (1, 2, 4)]

    assert len({named(each, form="v1-hnd") for each in sizes}) == 1


def test_canonical_chunks_of_another_form_are_others() -> None:
    canonical = Offloading(Ranks.tp(2, agnostic=True), canonical_layout=True)

    assert named(canonical, form="v1-hnd") != named(canonical, form="v2-hnd")


@pytest.mark.parametrize("is_canonical", [False, True])
def test_rows_that_hold_the_parts_of_workers_are_for_the_same_division_alone(
    is_canonical: bool,
) -> None:
    config = Offloading(Ranks.tp(4), canonical_layout=is_canonical)
    divisions = [
        Ranks.tp(4),
        Ranks.tp(2),
        replace(Ranks.tp(4), tp_size=2, pp_size=2),
        replace(Ranks.tp(4), tp_size=2, pcp_size=2),
        replace(Ranks.tp(4), dcp_size=2),
    ]

    assert len({named(replace(config, parallel=each)) for each in divisions}) == len(divisions)


def test_rows_in_the_order_of_workers_are_not_shared_though_vllm_calls_them_agnostic() -> None:
    sizes = [Offloading(Ranks.tp(size, agnostic=True)) for size in (1, 2, 4)]

    assert len({named(each) for each in sizes}) == 3

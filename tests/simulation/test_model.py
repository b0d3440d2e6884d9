"""The simulated model keeps a request's pages in each pool, and reports wrong content."""

from dataclasses import replace

import pytest

from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import CacheConfig, Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.simulation.engine.every_rank import NO_PAGE, every_rank
from lockstep.simulation.engine.model import SimulatedModel
from lockstep.simulation.rank.memory import SymbolicMemory
from lockstep.simulation.world.contents import ExpectedContents
from lockstep.simulation.world.request import EngineRequest
from lockstep.simulation.world.violated import Violated

PAGE_TOKENS = 4
WINDOW_TOKENS = 6
TOKENS = bytes(range(4 * 24))


def layout(page_tokens: int) -> PageLayout:
    column = Column(name="kv", layers=1, heads=1, elements=1, dtype="uint8")
    return PageLayout(page_tokens=page_tokens, columns=(column,))


class Served:
    """One rank that serves a hybrid model, and a request whose pools have room for five pages."""

    def __init__(self) -> None:
        window = SlidingWindow(
            window_tokens=WINDOW_TOKENS, layout=layout(4), device_pages=8, host_pages=8
        )
        state = Recurrent(checkpoint_tokens=8, layout=layout(1), device_pages=3, host_pages=3)
        config = CacheConfig(
            model="hybrid",
            layout=layout(PAGE_TOKENS),
            components=(window, state),
            device_pages=8,
            host_pages=8,
        )
        self.findings: list[str] = []
        self.contents = ExpectedContents()
        self.memory = SymbolicMemory(config.pool_sizes(), self.findings.append)
        self.model = SimulatedModel(config, self.contents)
        self.model.begin_epoch(every_rank([self.memory]))
        self.request = EngineRequest("r", "", TOKENS, prompt=20, room=20)
        self.request.tables = {
            KV_POOL: [0, 1, 2, 3, 4],
            "window": [5, 4, 3, 2, 1],
            "state": [2],
        }

    def content(self, pool: str, tokens: int) -> int:
        return self.contents.of("", self.request.head(tokens), pool=pool)


def test_computing_fills_pages_and_advances_the_state_in_place() -> None:
    served = Served()

    served.model.compute(served.request, 3)
    served.model.compute(served.request, 10)

    assert served.memory.device[KV_POOL].content[:3] == [
        served.content(KV_POOL, tokens) for tokens in (4, 8, 10)
    ]
    assert served.memory.device["window"].content[3:6] == [
        served.content("window", tokens) for tokens in (10, 8, 4)
    ]
    assert served.memory.device["state"].content[2] == served.content("state", 10)
    assert not served.findings
    served.model.check_tables(served.request)


def test_a_state_that_is_not_the_one_after_the_computed_tokens_is_found() -> None:
    served = Served()
    served.model.compute(served.request, 8)
    served.memory.device["state"].content[2] = served.content("state", 4)

    with pytest.raises(Violated, match="device state page 2 of request r holds"):
        served.model.check_tables(served.request)
    served.model.compute(served.request, 9)
    assert "device state page 2 of request r holds" in served.findings[0]


def test_a_page_of_full_attention_in_the_place_of_one_of_a_window_is_found() -> None:
    served = Served()
    served.model.compute(served.request, 8)
    served.memory.device["window"].content[5] = served.content(KV_POOL, 4)

    with pytest.raises(Violated, match="device window page 5"):
        served.model.check_expected([served.request])


def test_pages_before_the_window_may_be_gone() -> None:
    served = Served()
    served.model.compute(served.request, 16)
    served.request.tables["window"][:2] = [NO_PAGE, NO_PAGE]
    served.model.check_tables(served.request)


@pytest.mark.parametrize("index", [2, 3, 4])
def test_a_page_that_the_window_reaches_or_that_is_to_be_computed_must_be_there(index: int) -> None:
    served = Served()
    served.model.compute(served.request, 16)
    served.request.tables["window"][index] = NO_PAGE
    with pytest.raises(Violated, match="its page table of pool 'window' is"):
        served.model.check_tables(served.request)


def test_two_requests_may_share_a_page_of_a_common_prefix_and_no_working_state() -> None:
    served = Served()
    served.model.compute(served.request, 8)
    other = replace(served.request, name="s", tokens=TOKENS[:32] + bytes(64), computed=8)
    other.tables = {KV_POOL: [0, 1, 5], "window": [5, 4, 0], "state": [1]}
    served.memory.device["state"].content[1] = served.content("state", 8)
    served.model.check_expected([served.request, other])

    other.tables = {KV_POOL: [], "window": [], "state": [2]}
    other.computed = 9
    with pytest.raises(Violated, match="device state page 2 belongs to request s and to"):
        served.model.check_expected([served.request, other])

"""The line logged at the start reports what is cached, how much fits, and bytes per token and rank."""

from lockstep.integrations.vllm.start_line import start_line
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import HostCacheConfig, Recurrent, SlidingWindow


def layout(layers: int, heads: int = 8, page_tokens: int = 16) -> PageLayout:
    column = Column(name="kv", layers=layers, heads=heads, elements=256, dtype="bfloat16")
    return PageLayout(page_tokens=page_tokens, columns=(column,))


def test_a_model_of_one_kind_of_layers_is_said_in_one_line() -> None:
    config = HostCacheConfig(
        model="m", layout=layout(32), host_pages=8192, store="s3://me:secret@kv/pages"
    )

    line = start_line(config, {"kv": 8192}, 2, "shm")

    assert line == (
        "Lockstep caches 131072 tokens in 8.00 GiB of host memory on each of 2 ranks:"
        " kv: 32 layers, 8192 pages of 16 tokens, 65536 bytes a token;"
        " store s3://***@kv/pages, pipeline depth 1, rounds over shm"
    )


def test_each_pool_of_a_hybrid_model_is_named_with_what_it_costs() -> None:
    window = SlidingWindow(window_tokens=1024, layout=layout(24), device_pages=0, host_pages=100)
    state = Recurrent(
        checkpoint_tokens=512, layout=layout(8, page_tokens=1), device_pages=0, host_pages=10
    )
    config = HostCacheConfig(model="m", layout=layout(8), host_pages=64, components=(window, state))

    line = start_line(config, {"kv": 64, "window": 100, "state": 10}, 1, "one process")

    assert "caches 1024 tokens in" in line
    assert "; window: 24 layers, a window of 1024, 100 pages of 16 tokens, 98304 bytes a" in line
    assert "; state: 8 layers, 10 states, one for 512 tokens, 32768 bytes each; no store" in line

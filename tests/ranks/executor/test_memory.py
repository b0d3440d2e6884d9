"""Host and device pools: page addresses, and refusals before memory is allocated."""

import resource
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.host_memory import cgroup_available, check_host_memory
from lockstep.ranks.executor.pools import TORCH_DTYPES, DevicePool, HostPool
from lockstep.ranks.executor.stores import StoreAccess
from lockstep.ranks.protocol.agreed_pools import agreed_pools
from lockstep.ranks.protocol.config import CacheConfig, Recurrent, SlidingWindow
from tests.kit.ranks.executor_parts import LAYOUTS, mixed_layout, plain_pages
from tests.kit.storage.files import limited

GIB = 1 << 30
CPU = torch.device("cpu")
COLUMNS = (Column(name="k", layers=2, heads=4, elements=3, dtype="float32"),)
WINDOW = SlidingWindow(
    window_tokens=8,
    layout=PageLayout(
        page_tokens=4, columns=(*COLUMNS, Column(name="v", layers=1, heads=2, elements=2))
    ),
    device_pages=6,
    host_pages=7,
)
STATE = Recurrent(
    checkpoint_tokens=8,
    layout=PageLayout(page_tokens=1, columns=COLUMNS),
    device_pages=3,
    host_pages=9,
)
HYBRID = CacheConfig(
    model="hybrid",
    layout=PageLayout(page_tokens=4, columns=COLUMNS),
    components=(WINDOW, STATE),
    device_pages=5,
    host_pages=8,
    populate_host=True,
)
SIZES = {"kv": (5, 8), "window": (4, 6), "state": (3, 2)}


def no_store(uri: str) -> StoreAccess:
    raise AssertionError(f"nobody names a store, and {uri} was asked for")


def create(device: torch.device | Mapping[str, EnginePages]) -> RankExecutor:
    return RankExecutor.create(
        HYBRID,
        agreed_pools(HYBRID, SIZES, rank=1, world_size=2),
        device,
        connect=no_store,
    )


def test_an_executor_has_the_pools_of_its_configuration_in_their_agreed_sizes() -> None:
    executor = create(CPU)
    executor.close()

    devices, hosts = executor.device_pools, executor.host_pools
    assert {name: pool.pages for name, pool in devices.items()} == {
        "kv": 5,
        "window": 4,
        "state": 3,
    }
    assert {name: pool.pages for name, pool in hosts.items()} == {"kv": 8, "window": 6, "state": 2}
    assert devices["kv"].column("k").shape == (2, 5, 2, 4, 3)
    assert devices["window"].column("v").shape == (1, 4, 1, 4, 2)
    assert devices["state"].column("k").shape == (2, 3, 2, 1, 3)
    assert executor.device_pool is devices["kv"]
    assert executor.host_pool is hosts["kv"]


def lent(layout: PageLayout, pages: int = 5) -> EnginePages:
    """Return engine pages of rank 0 of 2, with the shard layout of that rank."""
    shard = layout.shard(0, 2)
    tensors = {
        each.column.name: [
            torch.zeros(
                pages,
                each.heads,
                layout.page_tokens,
                each.column.elements,
                dtype=TORCH_DTYPES[each.column.dtype],
            )
            for _ in range(each.layers)
        ]
        for each in shard.columns
    }
    return EnginePages(shard, tensors)


@pytest.mark.parametrize(
    ("layouts", "named"),
    [
        (
            {"kv": HYBRID.layout, "window": WINDOW.layout},
            "for the pools kv, window, and the model has the pools kv, state, window",
        ),
        (
            {"kv": HYBRID.layout, "window": STATE.layout, "state": STATE.layout},
            "lends for pool 'window' are not of its layout: they have 1 tokens in 2 layers",
        ),
    ],
)
def test_an_engine_lends_pages_of_just_the_model_s_pools(
    layouts: dict[str, PageLayout], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        create({name: lent(layout) for name, layout in layouts.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_pages_follow_each_other_from_an_aligned_address(layout: str) -> None:
    shard = LAYOUTS[layout]
    pool = HostPool(shard, 5, pinned=False)

    assert pool.bytes_tensor.data_ptr() % 4096 == 0
    assert pool.bytes_tensor.shape == (5, shard.page_bytes)
    assert not pool.bytes_tensor.any()
    for slot in range(5):
        pool.page(slot)[:] = bytes([slot + 1]) * shard.page_bytes
    assert [int(page.min()) for page in pool.bytes_tensor] == [1, 2, 3, 4, 5]
    assert [int(page.max()) for page in pool.bytes_tensor] == [1, 2, 3, 4, 5]


def test_a_page_outlives_its_pool_while_somebody_holds_it() -> None:
    pool = HostPool(mixed_layout(), 2, pinned=False)
    page = pool.page(1)
    pool.close()
    del pool

    page[0] = 7
    assert page[0] == 7


def test_a_pool_that_the_system_does_not_give_is_refused_with_what_may_be_lowered() -> None:
    mapped = psutil.Process().memory_info().vms
    with (
        limited(resource.RLIMIT_AS, mapped + GIB),
        pytest.raises(ConfigError, match=r"no 4\.00 GiB for 4096 host pages: .*; lower host_pages"),
    ):
        HostPool(plain_pages(1 << 20).shard(0, 1), 4096, pinned=False)


def test_device_pages_that_the_system_does_not_give_are_refused_in_one_line() -> None:
    mapped = psutil.Process().memory_info().vms
    with (
        limited(resource.RLIMIT_AS, mapped + GIB),
        pytest.raises(
            ConfigError, match=r"^4096 device pages cannot be had on cpu: .*; lower device_pages$"
        ),
    ):
        DevicePool(plain_pages(1 << 20).shard(0, 1), 4096, torch.device("cpu"))


def test_a_large_pool_costs_nothing_until_it_is_used() -> None:
    shard = plain_pages(1 << 20).shard(0, 1)

    pool = HostPool(shard, 4096, pinned=False)

    assert pool.page(4095)[-1] == 0
    assert resident_bytes() < GIB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


def test_device_columns_are_writable_outside_the_inference_mode_they_were_made_in() -> None:
    with torch.inference_mode():
        pool = DevicePool(mixed_layout(), 2, torch.device("cpu"))

    pool.column("v").fill_(1)
    assert pool.column("v").shape == (2, 2, 2, 3, 7)


def test_memory_that_the_machine_does_not_have_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"need 4096000\.00 GiB for 4 rank\(s\).* GiB is avail"):
        check_host_memory(1024000 * GIB, 4)
    check_host_memory(1, 4)


def test_what_the_kernel_says_is_available_of_the_machine_s_memory_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", f"MemFree: 5 kB\nMemAvailable:   {3 * GIB >> 10} kB\n")

    check_host_memory(3 * GIB, root=tmp_path)
    with pytest.raises(
        ConfigError, match=r"need 6\.00 GiB.*3\.00 GiB is available on this machine"
    ):
        check_host_memory(3 * GIB, 2, root=tmp_path)


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/7\n")
    group = tmp_path / "sys/fs/cgroup/jobs"
    write(group / "memory.max", f"{8 * GIB}\n")
    write(group / "memory.current", f"{6 * GIB}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
    write(group / "7/memory.max", "max\n")
    write(group / "7/memory.current", f"{GIB}\n")
    write(group / "7/memory.stat", "inactive_file 0\n")

    assert cgroup_available(tmp_path) == 3 * GIB
    with pytest.raises(ConfigError, match=r"need 4\.00 GiB.*3\.00 GiB is available within"):
        check_host_memory(2 * GIB, 2, root=tmp_path)


def test_a_container_of_version_1_counts_although_its_path_is_not_mounted(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,memory:/docker/ab\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(group / "memory.stat", "total_inactive_file 0\n")

    assert cgroup_available(tmp_path) == GIB


def test_without_control_groups_there_is_no_limit_but_the_machine_s(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path) is None


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

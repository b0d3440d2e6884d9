"""Random walks of requests over SGLang's tree and pools: ranks stay equal, and every byte is right.

The device pool is small, so requests retract each other; host memory is small, too. Some copies of rank
0 are slow, and some loads of rank 1 fail. If the seed is odd, each rank has a separate store that loses
objects, answers lookups wrongly and delays calls.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.rigs import Rigs
from tests.kit.sglang.tree.stateful_rig import StatefulRig
from tests.kit.sglang.tree.walk import Walk

pytestmark = here.MARKS

FAULTS = "fault.lost=0.3&fault.lie=0.1&fault.delay=0.1"


def walk(seed: int, folder: Path, **settings: Any) -> None:
    """Run a random walk on two ranks, with a store if the seed is odd."""
    store = f"fault+file://{folder}/{{rank}}?fault.seed={seed}{{rank}}&{FAULTS}"
    with Rigs(2, store=store if seed % 2 else None, **settings) as rigs:
        walk = Walk(rigs, seed)

        walk.run(200)

        assert walk.wrong == []
        assert walk.served > 5


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["attention", "latent"])
def test_requests_find_what_is_theirs_on_every_rank_however_they_come(
    kind: str, seed: int, tmp_path: Path
) -> None:
    walk(seed, tmp_path, kind=kind, pages=28, host_pages=(40, 12)[seed // 2 % 2])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tracked", [False, True])
def test_requests_with_a_state_find_it_on_every_rank_however_they_come(
    seed: int, tracked: bool, tmp_path: Path
) -> None:
    pages, host_pages = ((28, 40), (112, 160))[not tracked]
    walk(
        seed,
        tmp_path,
        rig=StatefulRig,
        tracked=tracked,
        slots=(20, 14)[not tracked],
        pages=pages,
        host_pages=host_pages // (1, 4)[seed // 2 % 2],
        host_states=(40, 6)[seed // 2 % 2],
    )

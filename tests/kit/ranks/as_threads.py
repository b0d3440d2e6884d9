"""Ranks that are threads of one process, joined by the in-process transport."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from lockstep.coordinator.collectives.in_process import InProcessGroup
from tests.kit.collectives.contract import PATIENCE_S, Program


class RanksAsThreads:
    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        group = InProcessGroup(world_size)
        others_are_done = threading.Event()

        def hold() -> None:
            assert others_are_done.wait(PATIENCE_S)

        with ThreadPoolExecutor(world_size) as pool:
            running = [pool.submit(program, group.member(rank), hold) for rank in range(world_size)]
            wait([each for rank, each in enumerate(running) if rank not in late], PATIENCE_S)
            others_are_done.set()
            return [each.result(PATIENCE_S) for each in running]

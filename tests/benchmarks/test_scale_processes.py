"""The model's counts of what is sent, held against what real processes write."""

from typing import Any

import pytest

from lockstep.benchmarks.exchange import measure_exchanges
from lockstep.benchmarks.exchange_settings import ExchangeSettings
from lockstep.benchmarks.scale.fit import deployment_of, way
from lockstep.benchmarks.scale.memory import sockets
from lockstep.benchmarks.scale.model import traffic
from lockstep.coordinator.collective import Transport

pytestmark = pytest.mark.distributed

LONG = 30_023
"""Of six ranks these are too long to be gathered."""


@pytest.mark.parametrize(
    "group",
    [
        {"ranks": 2, "transport": Transport.SHM},
        {"ranks": 3, "transport": Transport.TORCH},
        {"ranks": 6, "transport": Transport.TORCH},
        {"ranks": 4, "transport": Transport.HIERARCHICAL, "hosts": 2},
        {"ranks": 6, "transport": Transport.HIERARCHICAL, "hosts": 6},
        {"ranks": 4, "transport": Transport.TORCH, "doubling": True},
    ],
    ids=lambda group: f"{group['ranks']}-{group['transport']}",
)
@pytest.mark.parametrize("lanes", [120, LONG])
def test_processes_write_the_bytes_and_keep_the_sockets_that_the_model_counts(
    group: dict[str, Any], lanes: int
) -> None:
    settings = ExchangeSettings(**group, lanes=(lanes,), rounds=20)

    [measured] = measure_exchanges(settings)

    deployment = deployment_of(settings.ranks, settings.hosts, lanes)
    counted = traffic(deployment, way(settings)).between
    # Something else may write now and then, such as the wake-up of a thread, and what a courier
    # sends may leave after the round has come back; a message more in every round would be seen.
    stray = 64 + counted.written_bytes / settings.rounds
    assert measured.written_bytes == pytest.approx(counted.written_bytes, abs=stray)
    assert measured.sockets == sockets(deployment, way(settings))
    assert measured.cpu_us > 0
    assert 0 < measured.min_us <= measured.p50_us

"""The constants of the model, fitted to measurements, and the model held against others.

Fitted are what one process does alone, rounds of one and of two processes, and memory of small
crowds. What 4, 8 and 16 processes take is predicted from that, and was not fitted.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from ...coordinator.collective import Transport
from ..exchange import Exchange, measure_exchanges
from ..exchange_settings import ExchangeSettings
from .model import (
    DOUBLING,
    WORD,
    Costs,
    Deployment,
    Way,
    exchange_path,
    exchange_work_us,
    fold_us,
    shared_us,
    total_us,
    traffic,
)
from .steps import LANES, StepParts, Steps, StepSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Processes that were measured, and what they measured."""

    settings: ExchangeSettings
    exchanges: list[Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One length of one group: what the model says, and what was measured."""

    transport: str
    ranks: int
    hosts: int
    lanes: int
    cores: int
    fitted: bool
    """Whether the constants were fitted to this very measurement."""
    predicted_us: float
    predicted_cold_us: float
    """What the model says where something else fills the caches, as processes that take turns do."""
    p50_us: float
    min_us: float
    alone_us: float
    """What the model says where every rank has a core."""
    predicted_work_us: float
    predicted_cold_work_us: float
    work_us: float
    """What all processors do, which other load on the machine disturbs less than the time."""
    predicted_bytes: int
    """What gloo writes between hosts, headers included."""
    written_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Says how far a fit is from what it was fitted to."""

    part: str
    samples: int
    median: float
    """The median of |fitted / measured - 1|."""
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The constants, and how well they fit."""

    warm: Costs
    """The constants of a core that does nothing else."""
    cold: Costs
    """The constants of a core whose caches something else has filled between two rounds."""
    residuals: list[Residual]


def groups(cores: int, processes_max: int) -> list[ExchangeSettings]:
    """Return the groups that are measured, those first which are fitted."""
    shm, torch, hierarchical = Transport.SHM, Transport.TORCH, Transport.HIERARCHICAL
    made = [
        ExchangeSettings(ranks=1, transport=shm, lanes=LANES),
        ExchangeSettings(ranks=2, transport=shm, lanes=LANES, cores=1),
        ExchangeSettings(ranks=1, transport=torch, lanes=LANES),
        ExchangeSettings(ranks=2, transport=torch, lanes=LANES),
        ExchangeSettings(ranks=2, transport=hierarchical, hosts=2, lanes=LANES),
        ExchangeSettings(ranks=2, transport=shm, lanes=LANES),
    ]
    for ranks, rounds in ((2, 200), (4, 100), (8, 60), (16, 30)):
        of_so_many = ExchangeSettings(
            ranks=ranks, transport=torch, lanes=LANES, rounds=rounds, cores=cores
        )
        if ranks > 2:
            made.append(replace(of_so_many, transport=shm))
            made.append(of_so_many)
            made.append(replace(of_so_many, transport=hierarchical, hosts=2))
        if ranks > 4:
            made.append(replace(of_so_many, transport=hierarchical, hosts=ranks // 2))
        made.append(replace(of_so_many, doubling=True))
    return [each for each in made if each.ranks <= processes_max]


def measure_groups(
    settings: Iterable[ExchangeSettings], progress: Callable[[str], None]
) -> list[Group]:
    """Measure one group after the other."""
    measured: list[Group] = []
    for each in settings:
        progress(f"{each.ranks} processes over {way(each)}, {each.hosts} hosts")
        measured.append(Group(settings=each, exchanges=measure_exchanges(each)))
    return measured


def way(settings: ExchangeSettings) -> Way:
    """Return how a group exchanges."""
    return DOUBLING if settings.doubling else settings.transport


@dataclass(slots=True)
class _Solver:
    """Solves one part after the other, and keeps how well each fits."""

    residuals: list[Residual] = field(default_factory=list[Residual])

    def solve(
        self, part: str, columns: Sequence[Sequence[float]], measured: Sequence[float]
    ) -> list[float]:
        """Return a factor for each column, none negative, by least squares of the relative error."""
        target = np.asarray(measured, dtype=np.float64)
        matrix = np.asarray(columns, dtype=np.float64)
        weighted = matrix / target[:, None]
        used = list(range(matrix.shape[1]))
        found = np.zeros(matrix.shape[1])
        while used:
            solution = np.linalg.lstsq(weighted[:, used], np.ones(len(target)), rcond=None)[0]
            if (solution >= 0.0).all():
                found[used] = solution
                break
            # What comes out below zero is not there, as far as these measurements show.
            del used[int(solution.argmin())]
        errors = np.abs(matrix @ found / target - 1.0)
        self.residuals.append(
            Residual(
                part=part,
                samples=len(target),
                median=float(np.median(errors)),
                worst=float(errors.max()),
            )
        )
        factors: list[float] = found.tolist()
        return factors


def fit(steps: Steps, measured: Sequence[Group]) -> Fit:
    """Fit the constants to what was measured alone, and to the groups of one and two processes."""
    solver = _Solver()
    warm = _fit_replica(_fit_parts(steps.warm, solver, ""), steps, solver)
    warm = _fit_gloo(_fit_wake(warm, measured), measured, solver)
    warm = _fit_courier(warm, measured)
    cold_parts = _fit_parts(steps.cold, solver, ", cold")
    cold = replace(warm, **{name: factor for name, factor in asdict(cold_parts).items() if factor})
    return Fit(warm=warm, cold=cold, residuals=solver.residuals)


def _fit_parts(parts: StepParts, solver: _Solver, how: str) -> Costs:
    write = solver.solve(f"write a cell{how}", _by_lanes(parts.write), _us(parts.write))
    read = solver.solve(f"read cells{how}", _by_rows(parts.read), _us(parts.read))
    folds = solver.solve(f"fold{how}", _by_rows(parts.fold), _us(parts.fold))
    fill = solver.solve(f"fill a ballot{how}", _by_lanes(parts.fill), _us(parts.fill))
    return Costs(
        fill_us=fill[0],
        fill_lane_us=fill[1],
        write_us=write[0],
        write_lane_us=write[1],
        read_us=read[0],
        read_row_us=read[1],
        read_lane_us=read[2],
        fold_us=folds[0],
        fold_row_us=folds[1],
        fold_lane_us=folds[2],
    )


def _fit_replica(costs: Costs, steps: Steps, solver: _Solver) -> Costs:
    verdict = solver.solve(
        "read a verdict",
        [[1.0, each.lanes, each.changes] for each in steps.rounds],
        [each.verdict_us for each in steps.rounds],
    )
    apply = solver.solve(
        "apply a verdict",
        [[1.0, each.changes, each.changes * each.pages] for each in steps.rounds],
        [each.apply_us for each in steps.rounds],
    )
    replica = solver.solve(
        "memory of operations",
        [[each.operations, each.operations * each.pages] for each in steps.memory],
        [each.replica_bytes for each in steps.memory],
    )
    return replace(
        costs,
        note_us=steps.note_us,
        verdict_us=verdict[0],
        verdict_lane_us=verdict[1],
        verdict_change_us=verdict[2],
        apply_us=apply[0],
        apply_change_us=apply[1],
        apply_page_us=apply[2],
        sightings_bytes=statistics.median(
            each.ballot_bytes / each.operations for each in steps.memory
        ),
        operation_bytes=replica[0],
        operation_page_bytes=replica[1],
    )


def _fit_wake(costs: Costs, measured: Sequence[Group]) -> Costs:
    """Two ranks on one core sleep once each in a round: what that costs is what nothing else does."""
    short = _found(measured, Transport.SHM, ranks=2, cores=1)[:3]
    rest = [
        (each.cpu_us - exchange_work_us(deployment_of(2, 1, each.lanes), Transport.SHM, costs)) / 2
        for each in short
    ]
    return replace(costs, wake_us=max(0.0, statistics.median(rest)))


def _fit_gloo(costs: Costs, measured: Sequence[Group], solver: _Solver) -> Costs:
    """One rank sends nothing; two make one step, in which each sends its vector in two messages.

    Times are the least that were measured, since on a path no rank waits for a core; what is computed
    is the mean.
    """
    alone = _found(measured, Transport.TORCH, ranks=1, cores=None)
    entering = solver.solve(
        "enter gloo",
        [[1.0, each.lanes] for each in alone],
        [max(0.1, each.min_us - fold_us(1, each.lanes, costs)) for each in alone],
    )
    two = _found(measured, Transport.TORCH, ranks=2, cores=None)

    def beyond(us: float, lanes: int, entering_us: float) -> float:
        return max(0.1, us - entering_us - entering[1] * 2 * lanes - fold_us(2, lanes, costs))

    step = solver.solve(
        "a step of gloo",
        [[1.0, WORD * each.lanes] for each in two],
        [beyond(each.min_us, each.lanes, entering[0]) for each in two],
    )
    own_us = statistics.median(
        max(0.0, each.cpu_us - entering[1] * each.lanes - fold_us(1, each.lanes, costs))
        for each in alone[:3]
    )
    work = solver.solve(
        "what gloo computes for a message",
        [[2.0, WORD * each.lanes] for each in two],
        [beyond(each.cpu_us / 2, each.lanes, own_us) for each in two],
    )
    return replace(
        costs,
        gloo_us=entering[0],
        gloo_lane_us=entering[1],
        gloo_step_us=step[0],
        gloo_byte_us=step[1],
        gloo_work_us=own_us,
        gloo_message_work_us=work[0],
        gloo_byte_work_us=work[1],
    )


def _fit_courier(costs: Costs, measured: Sequence[Group]) -> Costs:
    """Two hosts of one rank each have two couriers: what they add is what nothing else does."""
    two = _found(measured, Transport.HIERARCHICAL, ranks=2, cores=None)[:3]
    over_us: list[float] = []
    over_work_us: list[float] = []
    for each in two:
        group = deployment_of(2, 2, each.lanes)
        path = exchange_path(group, Transport.HIERARCHICAL, costs)
        over_us.append(each.min_us - total_us(path))
        work_us = exchange_work_us(group, Transport.HIERARCHICAL, costs)
        over_work_us.append((each.cpu_us - work_us) / 2)
    return replace(
        costs,
        courier_us=max(0.0, statistics.median(over_us)),
        courier_work_us=max(0.0, statistics.median(over_work_us)),
    )


def compare(fitted: Fit, measured: Sequence[Group], cores: int) -> list[Comparison]:
    """Hold the model against every length of every group."""
    made: list[Comparison] = []
    for group in measured:
        settings, how = group.settings, way(group.settings)
        shared = settings.cores or cores
        for each in group.exchanges:
            hosts = settings.hosts if how is Transport.HIERARCHICAL else 1
            deployment = deployment_of(settings.ranks, hosts, each.lanes)
            made.append(
                Comparison(
                    transport=str(how),
                    ranks=settings.ranks,
                    hosts=hosts,
                    lanes=each.lanes,
                    cores=shared,
                    fitted=_is_fitted(settings),
                    predicted_us=shared_us(deployment, how, fitted.warm, shared),
                    predicted_cold_us=shared_us(deployment, how, fitted.cold, shared),
                    p50_us=each.p50_us,
                    min_us=each.min_us,
                    predicted_work_us=exchange_work_us(deployment, how, fitted.warm),
                    predicted_cold_work_us=exchange_work_us(deployment, how, fitted.cold),
                    work_us=each.cpu_us,
                    alone_us=total_us(exchange_path(deployment, how, fitted.warm)),
                    predicted_bytes=traffic(deployment, how).between.written_bytes,
                    written_bytes=each.written_bytes,
                )
            )
    return made


def _is_fitted(settings: ExchangeSettings) -> bool:
    if settings.transport is Transport.SHM:
        return settings.ranks == 2 and settings.cores == 1  # Alone on two cores it is predicted.
    return settings.ranks <= 2 and settings.cores is None and not settings.doubling


def _found(
    measured: Sequence[Group], transport: Transport, *, ranks: int, cores: int | None
) -> list[Exchange]:
    for group in measured:
        settings = group.settings
        if (way(settings), settings.ranks, settings.cores) == (transport, ranks, cores):
            return group.exchanges
    raise ValueError(f"{ranks} processes over {transport} were not measured")


def deployment_of(ranks: int, hosts: int, lanes: int) -> Deployment:
    """Return the group whose vectors have so many lanes."""
    none = Deployment(ranks=ranks, hosts=hosts, seats=0)
    return replace(none, seats=(lanes - none.lanes) // 3)


def _by_lanes(samples: Sequence[StepSample]) -> list[list[float]]:
    return [[1.0, each.lanes] for each in samples]


def _by_rows(samples: Sequence[StepSample]) -> list[list[float]]:
    return [[1.0, each.rows, each.rows * each.lanes] for each in samples]


def _us(samples: Sequence[StepSample]) -> list[float]:
    return [each.us for each in samples]

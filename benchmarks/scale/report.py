"""What agreement costs at a thousand ranks: `python -m lockstep.benchmarks.scale --report FILE.json`.

Measures the parts of a step and groups of processes, fits the model, holds it against the groups that
were not fitted, and simulates large groups ballot by ballot. Takes five minutes, half of them for the
largest group, and 4 GB of memory; `--quick` takes one minute. Run it on a machine that does nothing
else: the load is in the report.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ...coordinator.collective import Transport
from ...coordinator.collectives.torch_gloo import GATHERED_BYTES_MAX
from ...simulation.crowd import CrowdCounts, CrowdRounds, CrowdSettings
from .fit import Comparison, Fit, Group, compare, fit, groups, measure_groups
from .memory import memory, sockets
from .model import (
    DOUBLING,
    Costs,
    Deployment,
    Network,
    critical_path,
    exchange_path,
    gathered_bytes_max,
    total_us,
    traffic,
)
from .steps import Steps, measure_steps

RANKS_PER_HOST = 8

QUICK = ((2, 32), (8, 256), (64, 256))
THOROUGH = (
    (2, 32),
    (8, 32),
    (8, 2048),
    (64, 256),
    (64, 2048),
    (256, 2048),
    (1024, 256),
    (1024, 10_000),
)
"""Ranks and operations of the groups that are simulated."""

SEATS = (32, 256, 2048, 10_000)
"""The seats of the groups that are predicted."""

LATENCIES_US = (5.0, 25.0, 250.0)
"""One way between two hosts: the least that is hoped for, what is taken where nothing is said, and half
the 80th percentile of a round trip in a public cloud."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A crowd's rounds until nothing is in flight; microseconds are medians where nothing is said."""

    ranks: int
    hosts: int
    operations: int
    seats: int
    lanes: int
    rounds: int
    outcomes: dict[str, int]
    digest: int
    """The replica's digest at the end, the same after hierarchical folds and after flat ones."""
    counts: CrowdCounts
    """What one round moved."""
    note_us: float
    fill_us: float
    """What one ballot among all takes to fill: nothing of it is in any cache."""
    fold_host_us: float
    verdict_us: float
    apply_us: float
    changes_max: int
    verdict_max_us: float
    apply_max_us: float
    """What the round took that brought the most that was new."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """On what it was measured, and what else went on there."""

    cores: int
    processor: str
    python: str
    load_before: float
    """Processes that wanted a core, in the minute before."""
    load_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport:
    """Everything, as it is written to the file."""

    machine: Machine
    steps: Steps
    groups: list[Group]
    fit: Fit
    comparisons: list[Comparison]
    simulated: list[Simulated]


def simulate(ranks: int, operations: int, *, seed: int = 0) -> Simulated:
    """Run the rounds of a group of eight ranks a host, with so much in flight at first."""
    began = time.perf_counter()
    hosts = max(1, ranks // RANKS_PER_HOST)
    settings = CrowdSettings(ranks=ranks, hosts=hosts, operations=operations, seed=seed)
    # Ten million sightings would be looked through again and again.
    gc.disable()
    try:
        crowd = CrowdRounds(settings, time.perf_counter)
        in_flight = len(crowd.replica.agenda.in_flight)
        if in_flight != operations:
            raise AssertionError(f"{in_flight} operations are in flight and not {operations}")
        crowd.run()
    finally:
        gc.enable()
    samples = crowd.samples
    busiest = max(range(len(samples.changes)), key=samples.changes.__getitem__)
    return Simulated(
        ranks=ranks,
        hosts=hosts,
        operations=operations,
        seats=settings.seats,
        lanes=crowd.shape.length,
        rounds=crowd.rounds - crowd.rounds_before,
        outcomes={
            f"{kind} {outcome}": count
            for kind, ended in crowd.tallies.stats().operations.items()
            for outcome, count in ended.items()
        },
        digest=crowd.replica.digest,
        counts=crowd.counts,
        note_us=_median_us(samples.note_s),
        fill_us=_median_us(samples.fill_s),
        fold_host_us=_median_us(samples.fold_host_s),
        verdict_us=_median_us(samples.verdict_s),
        apply_us=_median_us(samples.apply_s),
        changes_max=samples.changes[busiest],
        verdict_max_us=samples.verdict_s[busiest] * 1e6,
        apply_max_us=samples.apply_s[busiest] * 1e6,
        took_s=time.perf_counter() - began,
    )


def run(progress: Callable[[str], None], *, quick: bool = False) -> ScaleReport:
    """Measure, fit, compare and simulate."""
    cores = len(os.sched_getaffinity(0))
    load_before = os.getloadavg()[0]
    steps = measure_steps(progress, rows_max=16 if quick else 256)
    measured = measure_groups(groups(cores, 4 if quick else 16), progress)
    fitted = fit(steps, measured)
    simulated: list[Simulated] = []
    for ranks, operations in QUICK if quick else THOROUGH:
        progress(f"simulating {ranks} ranks with {operations} operations")
        simulated.append(simulate(ranks, operations))
        gc.collect()
    return ScaleReport(
        machine=Machine(
            cores=cores,
            processor=_processor(),
            python=platform.python_version(),
            load_before=load_before,
            load_after=os.getloadavg()[0],
        ),
        steps=steps,
        groups=measured,
        fit=fitted,
        comparisons=compare(fitted, measured, cores),
        simulated=simulated,
    )


def _median_us(samples_s: list[float]) -> float:
    return statistics.median(samples_s) * 1e6 if samples_s else 0.0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def main() -> None:
    """Measure, print the tables and write the report."""
    parser = argparse.ArgumentParser(prog="python -m lockstep.benchmarks.scale")
    parser.add_argument("--quick", action="store_true", help="only the small sizes")
    parser.add_argument("--report", type=Path, help="where to write everything, as JSON")
    arguments = parser.parse_args()
    report = run(lambda what: print(f"... {what}", file=sys.stderr), quick=arguments.quick)
    print_report(report)
    if arguments.report is not None:
        text = json.dumps(asdict(report), indent=1, default=str)
        arguments.report.write_text(text + "\n", encoding="utf-8")


def print_report(report: ScaleReport) -> None:
    """Print what a reader wants first."""
    machine = report.machine
    print(
        f"{machine.cores} cores of {machine.processor}, load {machine.load_before:.1f} before and"
        f" {machine.load_after:.1f} after; microseconds\n"
    )
    _print_constants(report.fit)
    _print_comparisons(report.comparisons)
    _print_simulated(report.simulated)
    _print_predicted(report.fit.cold)


def _print_constants(fitted: Fit) -> None:
    warm, cold = asdict(fitted.warm), asdict(fitted.cold)
    print(f"{'constant':22}{'warm':>12}{'cold':>12}")
    for name, value in warm.items():
        print(f"{name:22}{value:12.5g}{cold[name]:12.5g}")
    print(f"\n{'fit':32}{'samples':>8}{'median error':>14}{'worst':>8}")
    for each in fitted.residuals:
        print(f"{each.part:32}{each.samples:8}{each.median:14.0%}{each.worst:8.0%}")


def _print_comparisons(comparisons: list[Comparison]) -> None:
    print("\nProcesses that share the cores: predicted with warm to cold caches, and measured")
    print(
        f"{'transport':13}{'ranks':>6}{'hosts':>6}{'lanes':>7}{'':7}{'predicted':>15}{'median':>8}"
        f"{'least':>8}{'work predicted':>17}{'measured':>9}"
    )
    for each in comparisons:
        predicted = f"{each.predicted_us:,.0f} to {each.predicted_cold_us:,.0f}"
        work = f"{each.predicted_work_us:,.0f} to {each.predicted_cold_work_us:,.0f}"
        print(
            f"{each.transport:13}{each.ranks:6}{each.hosts:6}{each.lanes:7}"
            f"{'fitted' if each.fitted else '':>7}{predicted:>15}{each.p50_us:8,.0f}"
            f"{each.min_us:8,.0f}{work:>17}{each.work_us:9,.0f}"
        )


def _print_simulated(simulated: list[Simulated]) -> None:
    print("\nSimulated: real ballots, folds, verdicts and replicas; one round")
    print(
        f"{'ranks':>5}{'hosts':>6}{'operations':>11}{'lanes':>7}{'rounds':>7}{'messages':>9}"
        f"{'MB between':>11}{'MB in hosts':>12}{'fill':>7}{'host fold':>10}{'verdict':>8}"
        f"{'apply':>8}{'most new':>9}{'verdict':>8}{'apply':>9}"
    )
    for each in simulated:
        counts = each.counts
        inside = (counts.bytes_written + counts.bytes_read) / 1e6
        print(
            f"{each.ranks:5}{each.hosts:6}{each.operations:11,}{each.lanes:7,}{each.rounds:7}"
            f"{counts.messages_between:9,}{counts.bytes_between / 1e6:11.2f}{inside:12.2f}"
            f"{each.fill_us:7.1f}{each.fold_host_us:10.1f}{each.verdict_us:8.0f}{each.apply_us:8.0f}"
            f"{each.changes_max:9,}{each.verdict_max_us:8,.0f}{each.apply_max_us:9,.0f}"
        )


def _print_predicted(costs: Costs) -> None:
    print("\nPredicted, eight ranks a host, cold caches, nothing new in the round")
    heads = "".join(f"{f'{latency:g} us':>10}" for latency in LATENCIES_US)
    print(
        f"{'ranks':>5}{'hosts':>6}{'seats':>7}{heads}{'doubling':>10}{'messages':>10}"
        f"{'MB between':>11}{'MB of a rank':>13}{'sockets':>8}"
    )
    for seats in SEATS:
        for ranks in (8, 16, 64, 256, 1024):
            group = group_of(ranks, seats)
            transport = transport_of(group)
            steps = "".join(f"{step_us(group, costs, each):10,.0f}" for each in LATENCIES_US)
            doubling = f"{doubling_step_us(group, costs):,.0f}" if group.hosts > 1 else ""
            sent = traffic(group, transport).between
            taken = memory(group, transport, costs).total
            print(
                f"{ranks:5}{group.hosts:6}{seats:7,}{steps}{doubling:>10}"
                f"{sent.messages:10,}{sent.written_bytes / 1e6:11.2f}{taken / 1e6:13.2f}"
                f"{sockets(group, transport):8,}"
            )
    for hosts in (8, 32, 128):
        best = gathered_bytes_max(hosts, costs, Network())
        print(
            f"{hosts} hosts: gathering takes less time up to vectors of {best / 1e3:,.0f} KB;"
            f" they are gathered up to {GATHERED_BYTES_MAX / 1e3:,.0f} KB"
        )


def group_of(ranks: int, seats: int) -> Deployment:
    """Return a group of eight ranks a host, with every seat taken."""
    hosts = max(1, ranks // RANKS_PER_HOST)
    return Deployment(ranks=ranks, hosts=hosts, seats=seats, operations=seats)


def transport_of(group: Deployment) -> Transport:
    """Return what `auto` picks for such a group."""
    return Transport.HIERARCHICAL if group.hosts > 1 else Transport.SHM


def step_us(group: Deployment, costs: Costs, latency_us: float) -> float:
    """Return what a blocking step of such a group takes."""
    network = Network(latency_us=latency_us)
    return total_us(critical_path(group, transport_of(group), costs, network))


def doubling_step_us(group: Deployment, costs: Costs, network: Network | None = None) -> float:
    """Return a step of the hierarchical transport whose couriers would double their reach."""
    between = network or Network()
    whole_us = total_us(critical_path(group, Transport.HIERARCHICAL, costs, between))
    couriers = Deployment(ranks=group.hosts, hosts=group.hosts, seats=group.seats)
    ring_us = total_us(exchange_path(couriers, Transport.TORCH, costs, between))
    return whole_us - ring_us + total_us(exchange_path(couriers, DOUBLING, costs, between))

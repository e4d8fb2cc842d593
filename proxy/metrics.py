"""What Prometheus sees. An observer of leases and of finished exchanges; nothing else imports Prometheus.

Counters and histograms are told what happened. Gauges are read from the lock's own state at scrape time, so they
agree with `/-/queue` always. Every label set but `code` exists from the start, so that a rate over a class that has
not been used yet is 0 and not absent; a model's name becomes a label only where the configuration gives that name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy import __version__
from proxy.errors import Refusal
from proxy.lease import Leases
from proxy.tickets import Ticket, WaitOutcome

WAIT_BUCKETS = (0, 0.01, 0.05, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
"""Seconds. Up to the 600 s after which SDKs give up, and one more; 30, 60, 120 are common client timeouts."""

MOST_MODELS = 200
"""Values of the label `model`."""

EXCHANGE_OUTCOMES = ("ok", "cancelled", "upstream_error", "upstream_truncated")


class Metrics:
    """All series, on a registry of their own. `wall` is the wall clock, `clock` the lock's."""

    def __init__(
        self, class_names: tuple[str, ...], *, wall: Callable[[], float] = time.time, clock: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self.class_names = class_names
        self._wall, self._clock = wall, clock
        # In the plain format the time of creation would be one more gauge beside each of the others.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._loaded: set[str] = set()
        self._turn_seconds = dict.fromkeys(class_names, 0.0)
        self._define_waits()
        self._define_exchanges()
        self._create_label_sets()
        # Asked on every request. The label sets are few, and to find one costs more than to count.
        self._wait, self._hold = cache(self.wait.labels), cache(self.hold.labels)
        self._first_byte, self._exchanges = cache(self.first_byte.labels), cache(self.exchanges.labels)
        self._requests = cache(self.requests.labels)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _define_waits(self) -> None:
        reg = self.registry
        self.wait = Histogram(
            "gpu_lease_wait_seconds",
            "Time from a request's arrival in the queue to its grant, or to the end of its wait.",
            ("class", "outcome"),
            buckets=WAIT_BUCKETS,
            registry=reg,
        )
        self.hold = Histogram(
            "gpu_lease_hold_seconds",
            "Time from grant to release.",
            ("class",),
            buckets=WAIT_BUCKETS,
            registry=reg,
        )
        self.turns = Counter("gpu_lease_turns", "Turns begun, by the class that began them.", ("class",), registry=reg)
        self.swaps = Counter("gpu_lease_swaps", "Grants that make llama-swap stop a model.", registry=reg)
        self.orphans = Counter("gpu_lease_orphans", "Leases taken back from tasks that had ended.", registry=reg)
        self.overlong = Counter(
            "gpu_lease_overlong_holds", "Leases held for longer than max_hold.", ("class",), registry=reg
        )

    def _define_exchanges(self) -> None:
        reg = self.registry
        self.first_byte = Histogram(
            "gpu_lease_upstream_first_byte_seconds",
            "Time from sending a request to llama-swap to the head of its answer.",
            ("class",),
            buckets=WAIT_BUCKETS,
            registry=reg,
        )
        self.requests = Counter(
            "gpu_lease_requests",
            "Requests on model routes, by the status sent; 499 for a client that left before one.",
            ("class", "model", "code"),
            registry=reg,
        )
        self.exchanges = Counter(
            "gpu_lease_exchanges", "How exchanges with llama-swap ended.", ("class", "outcome"), registry=reg
        )
        self.incomplete_streams = Counter(
            "gpu_lease_incomplete_streams",
            "Event streams that ended well on the wire but without their last event.",
            ("class",),
            registry=reg,
        )
        self.rejected = Counter(
            "gpu_lease_rejected", "Requests that the proxy refused by itself, by error code.", ("reason",), registry=reg
        )
        self.upstream_up = Gauge(
            "gpu_lease_upstream_up", "Whether llama-swap answered its last health check: 1 or 0.", registry=reg
        )
        self.load_seconds = Gauge(
            "gpu_lease_load_seconds", "How long the last load of a model took.", ("model",), registry=reg
        )
        Info("gpu_lease_build", "The version of the proxy.", registry=reg).info({"version": __version__})

    def _create_label_sets(self) -> None:
        for name in self.class_names:
            for outcome in get_args(WaitOutcome):
                self.wait.labels(name, outcome)
            for outcome in EXCHANGE_OUTCOMES:
                self.exchanges.labels(name, outcome)
            for metric in (self.hold, self.first_byte):
                metric.labels(name)
            for counter in (self.turns, self.overlong, self.incomplete_streams):
                counter.labels(name)
        for error in _with_codes(Refusal):
            self.rejected.labels(error.code)

    # -- observer of leases

    def watch(self, leases: Leases) -> None:
        """Read gauges from `leases` at every scrape."""
        self.registry.register(_Gauges(self, leases))

    def wait_ended(self, ticket: Ticket, outcome: WaitOutcome, seconds: float) -> None:
        """See `tickets.Observer`."""
        exemplar = {"request_id": ticket.request_id} if ticket.request_id else None
        self._wait(ticket.class_name, outcome).observe(seconds, exemplar)

    def lease_ended(self, ticket: Ticket, seconds: float) -> None:
        """See `tickets.Observer`."""
        self._hold(ticket.class_name).observe(seconds)

    def turn_ended(self, class_name: str, seconds: float) -> None:
        """See `tickets.Observer`."""
        self._turn_seconds[class_name] = self._turn_seconds.get(class_name, 0.0) + seconds

    def turn_begun(self, class_name: str) -> None:
        """See `tickets.Observer`."""
        self.turns.labels(class_name).inc()

    def swap(self) -> None:
        """See `tickets.Observer`."""
        self.swaps.inc()

    def orphan_freed(self) -> None:
        """See `tickets.Observer`."""
        self.orphans.inc()

    def hold_overlong(self, class_name: str) -> None:
        """See `tickets.Observer`."""
        self.overlong.labels(class_name).inc()

    # -- told by the application

    def load_measured(self, model: str, seconds: float) -> None:
        """A load of `model` took that long. llama-swap's own ids only, and not without end."""
        if len(self._loaded) < MOST_MODELS:
            self._loaded.add(model)
        if model in self._loaded:
            self.load_seconds.labels(model).set(seconds)

    def answered(self, class_name: str, model: str, code: int) -> None:
        """A request on a model route got the status `code`."""
        self._requests(class_name, model, str(code)).inc()

    def refused(self, error: Refusal) -> None:
        """The proxy gave an answer of its own."""
        self.rejected.labels(error.code).inc()

    def head_arrived(self, class_name: str, seconds: float) -> None:
        """The head of an answer came `seconds` after the request was sent."""
        self._first_byte(class_name).observe(seconds)

    def exchange_ended(self, class_name: str, outcome: str) -> None:
        """An exchange under a lease ended with one of EXCHANGE_OUTCOMES."""
        self._exchanges(class_name, outcome).inc()

    def stream_incomplete(self, class_name: str) -> None:
        """A stream ended well on the wire, but without its last event."""
        self.incomplete_streams.labels(class_name).inc()


class _Gauges(Collector):
    """Reads the lock when Prometheus asks."""

    def __init__(self, metrics: Metrics, leases: Leases) -> None:
        self._metrics = metrics
        self._leases = leases

    def collect(self) -> Iterator[Metric]:
        """All gauges that are state, and the time of turns, the current one included."""
        snapshot = self._leases.snapshot()
        yield self._per_class(
            "gpu_lease_waiting", "Requests waiting now.", [waiter.class_name for waiter in snapshot.waiters]
        )
        yield self._per_class("gpu_lease_held", "Leases held now.", [holder.class_name for holder in snapshot.holders])
        yield GaugeMetricFamily(
            "gpu_lease_queue_limit", "How many requests may wait (max_queue).", self._leases.bounds.max_queue
        )
        for name, what, ages in (
            ("wait", "longest waiting request began to wait", [w.waited_seconds for w in snapshot.waiters]),
            ("hold", "longest held lease was granted", [h.held_seconds for h in snapshot.holders]),
        ):
            yield GaugeMetricFamily(
                f"gpu_lease_oldest_{name}_start_timestamp_seconds",
                f"When the {what}; NaN when there is none.",
                self._metrics._wall() - max(ages) if ages else math.nan,
            )
        yield self._turn_seconds()

    def _per_class(self, name: str, help_text: str, present: list[str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=("class",))
        for class_name in self._metrics.class_names:
            family.add_metric((class_name,), present.count(class_name))
        return family

    def _turn_seconds(self) -> CounterMetricFamily:
        turn = self._leases.turn()
        family = CounterMetricFamily(
            "gpu_lease_turn_seconds", "Time that turns lasted, by the class that began them.", labels=("class",)
        )
        for class_name, seconds in self._metrics._turn_seconds.items():
            running = turn.seconds if turn is not None and turn.class_name == class_name else 0.0
            family.add_metric((class_name,), seconds + running)
        return family


def _with_codes(error: type[Refusal]) -> Iterator[type[Refusal]]:
    """`error` and the errors below it, where they have a code of their own."""
    if "code" in vars(error):
        yield error
    for child in error.__subclasses__():
        yield from _with_codes(child)

"""Counts and times of a server of environments, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms' buckets."""


class ServerMetrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()  # a separate one: a process may have several servers

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"envgym_{name}_total", help, labels, registry=registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(f"envgym_{name}_seconds", help, ["env"], registry=registry, buckets=SECONDS)

        self.open_sessions = Gauge("envgym_sessions", "Sessions that are open.", ["env"], registry=registry)
        self.opened_sessions = counter("sessions_opened", "Sessions opened.", "env")
        self.closed_sessions = counter(
            "sessions_closed", "Sessions closed, by the client, by their lease or at the end.", "env", "by"
        )
        self.steps = counter("steps", "Steps taken; a repeated request takes none.", "env")
        self.failures = counter("failures", "Exceptions of environments, by their class.", "env", "kind")
        self.rejected = counter("rejected", "Requests rejected, by the kind of problem.", "reason")
        self.reset_seconds = seconds("reset", "Seconds an environment took for a reset.")
        self.step_seconds = seconds("step", "Seconds an environment took for a step.")
        self.group_seconds = seconds("group", "Seconds an environment took to score a group.")

    def text(self) -> bytes:
        """All metrics, in Prometheus's text format of version 0.0.4."""
        return generate_latest(self._registry)

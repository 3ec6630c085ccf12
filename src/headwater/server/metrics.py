"""Figures for Prometheus. Knows names and units. Does not know where the events come from."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headwater.server.job import Asked, Done, Failed

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headwater_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.tokens = Counter(
            "headwater_tokens",
            "Tokens: prompt (conversations so far), fed (computed of them), generated, evicted.",
            ["kind"],
            registry=registry,
        )
        self.recalled = Counter("headwater_recalled_passages", "Passages that memory brought.", registry=registry)
        self.answers = Counter("headwater_answers", "Answers by why they ended.", ["reason"], registry=registry)
        self.how = Counter(
            "headwater_histories", "Requests by how their session was found.", ["how"], registry=registry
        )
        self.queue = Histogram(
            "headwater_queue_seconds", "Time before a request's turn.", buckets=SECONDS, registry=registry
        )
        self.first = Histogram(
            "headwater_first_token_seconds", "Time to the first piece.", buckets=SECONDS, registry=registry
        )
        self.rate = Histogram(
            "headwater_tokens_per_second", "Tokens a second of an answer.", buckets=RATES, registry=registry
        )
        gauges = {
            "sessions": "Sessions kept by keys that were used since the start.",
            "sessions_in_memory": "Conversations in memory.",
            "cache_bytes": "Bytes of all caches.",
            "seen_tokens": "Tokens ever fed to the conversations in memory.",
            "held_tokens": "Tokens that their caches hold.",
            "active": "Answers that take turns.",
            "waiting": "Requests that wait for their turn.",
            "snapshots_saved": "Conversations that left memory for their snapshot.",
        }
        self.gauges = {name: Gauge(f"headwater_{name}", said, registry=registry) for name, said in gauges.items()}

    def asked(self, event: Asked) -> None:
        """A message was fed."""
        self.tokens.labels("prompt").inc(event.prompt_tokens)
        self.tokens.labels("fed").inc(event.fed)
        if event.session:
            self.how.labels(event.how).inc()

    def over(self, event: Done | Failed, *, waited_s: float, first_s: float | None) -> None:
        """An answer ended."""
        self.queue.observe(max(0.0, waited_s))
        self.answers.labels(event.reason if isinstance(event, Done) else "failed").inc()
        if first_s is not None:
            self.first.observe(first_s)
        if isinstance(event, Done):
            self.tokens.labels("generated").inc(event.tokens)
            self.tokens.labels("evicted").inc(max(0, event.evicted))
            if event.stats is not None:
                self.recalled.inc(len(event.stats.recalled))
                if event.stats.tokens_per_s is not None:
                    self.rate.observe(event.stats.tokens_per_s)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)

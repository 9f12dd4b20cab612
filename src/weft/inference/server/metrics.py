"""Prometheus metrics of a server, under vLLM's names, so that dashboards made for it read these."""

from collections.abc import Iterator
from typing import Any

from weft.inference.server.driver import Driver

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """What requests took, as they end, and the engine's counters, as they are asked for."""

    def __init__(self, driver: Driver, model: str):
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry()
        self.driver, self.model = driver, model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry).labels(
                model
            )

        self.first = histogram("time_to_first_token_seconds", "From the request to its first token.", SECONDS)
        self.between = histogram("inter_token_latency_seconds", "Between the tokens of a request.", SECONDS)
        self.whole = histogram("e2e_request_latency_seconds", "From the request to its end.", SECONDS)
        self.prompt = histogram("request_prompt_tokens", "Tokens of prompts.", TOKENS)
        self.generated = histogram("request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self._ended = Counter(
            "vllm:request_success", "Requests that ended, by reason.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def ended(self, reason: str) -> None:
        self._ended.labels(self.model, reason).inc()

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        s = self.driver.stats
        gauges = {
            "num_requests_running": (s.running, "Requests in the batch."),
            "num_requests_waiting": (s.waiting, "Requests that wait for room."),
            "kv_cache_usage_perc": (s.cache_usage, "Share of the cache's blocks in use, 0 to 1."),
        }
        counters = {
            "prompt_tokens": (s.prompt_tokens, "Tokens of prompts."),
            "generation_tokens": (s.generated_tokens, "Tokens generated."),
            "num_preemptions": (s.preemptions, "Requests put back for want of cache."),
            "prefix_cache_queries": (s.prefix_queries, "Tokens looked up in the prefix cache."),
            "prefix_cache_hits": (s.prefix_hits, "Tokens found in it."),
            "spec_decode_num_draft_tokens": (s.draft_tokens, "Tokens guessed."),
            "spec_decode_num_accepted_tokens": (s.accepted_tokens, "Guesses that were right."),
        }
        for kind, found in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, text) in found.items():
                family = kind(f"vllm:{name}", text, labels=["model_name"])
                family.add_metric([self.model], value)
                yield family

    def text(self) -> tuple[bytes, str]:
        """The page and its content type."""
        from prometheus_client import generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

"""What a Prometheus gets from a server that has answered a request."""

from __future__ import annotations

import re
import urllib.request

from octavo.client import Client
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import Running, wait_until


def scrape(url: str) -> dict[tuple[str, str | None], float]:
    """By name of the series, and executor."""
    with urllib.request.urlopen(f"{url}metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {(s.name, s.labels.get("executor")): s.value for family in families for s in family.samples}


def test_a_requests_steps_are_told_under_its_executors_address() -> None:
    flags = ("--port=0", "--http-port=0", "--simulate-step-ms=1")
    with Running("serve", *flags) as running, Client(running.address) as client:
        [url] = re.findall(r"serving_http .*url=(\S+)", "\n".join(running.stderr))
        [executor] = [each.target for each in client.load().executors]
        assert client.complete(text="one two three", max_tokens=6).usage.num_output_tokens == 6
        # Gauges and the core's counters are refreshed every second.
        asked = ("octavo_prefix_cache_queries_total", executor)
        wait_until("the prefix cache was asked", lambda: scrape(url).get(asked, 0) > 0)
        told = scrape(url)
        assert told["octavo_generation_tokens_total", None] == 6
        assert told["octavo_step_time_seconds_count", executor] == 6
        assert told["octavo_step_sequences_sum", executor] == 6
        assert told["octavo_step_time_seconds_sum", executor] >= 6 * 0.001
        assert told["octavo_plan_round_trip_seconds_sum", executor] > told["octavo_step_time_seconds_sum", executor]
        assert told["octavo_time_to_first_token_seconds_sum", None] > 0.001
        assert told["octavo_num_requests_running", executor] == 0
        running.interrupt()
        assert running.end() == 0

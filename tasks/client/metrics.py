"""One reading of a server's own counters: SGLang's /v1/loads and /metrics, llama.cpp's /metrics."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from tasks.client.transport import open_session
from tasks.records import Server, ServiceSample

TIMEOUT_S = 5.0
Counters = Mapping[str, float]

# Wanted sample names. `realtime_tokens_total{mode="decode"}` moves while requests run; `generation_tokens_total` only
# when one ends (seen on 0.5.17: 402 against 20,114 in the same reading), so it is the fallback of versions without.
_SGLANG = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:gen_throughput",
    "sglang:spec_accept_length",
    "sglang:is_cuda_graph",
    "sglang:num_retracted_requests_total",
    "sglang:num_retracted_reqs",
    "sglang:generation_tokens_total",
    "sglang:realtime_tokens_total",
    "sglang:prompt_tokens_total",
)
_WANTED = (*_SGLANG, "llamacpp:")


def parse_counters(text: str) -> dict[str, float]:
    """Sums over labels, by sample name; `realtime_tokens_total` by mode. Unparsable text gives what could be read."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.name
                if name == "sglang:realtime_tokens_total":
                    name = f"{name}:{sample.labels.get('mode', '')}"
                sums[name] = sums.get(name, 0.0) + sample.value
    except ValueError:
        return sums
    return sums


def parse_loads(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ServiceSample from one /v1/loads answer; sums over data-parallel ranks, the worst of their ages."""
    loads = body.get("loads") or []
    if not loads:
        return {}
    lengths = [load["speculative"]["accept_length"] for load in loads if (load.get("speculative") or {})]
    outer = body.get("timestamp")
    ages = [_epoch(outer) - load["timestamp"] for load in loads if outer and load.get("timestamp")]
    return {
        "running": sum(load.get("num_running_reqs", 0) for load in loads),
        "queued": sum(load.get("num_waiting_reqs", 0) for load in loads),
        "kv_usage": max(load.get("token_usage", 0.0) for load in loads),
        "gen_throughput_tok_s": sum(load.get("gen_throughput", 0.0) for load in loads),
        "accept_length": sum(lengths) / len(lengths) if lengths else None,
        "heartbeat_age_s": max(ages) if ages else None,
    }


def _epoch(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else datetime.fromisoformat(str(value)).timestamp()


def from_counters(counters: Counters) -> dict[str, Any]:
    """Fields of ServiceSample from /metrics; only what is there."""
    get = counters.get
    if any(name.startswith("llamacpp:") for name in counters):
        found = {
            "running": _whole(get("llamacpp:requests_processing")),
            "queued": _whole(get("llamacpp:requests_deferred")),
            "kv_usage": get("llamacpp:kv_cache_usage_ratio"),
            "generated_tokens_total": get("llamacpp:tokens_predicted_total"),
            "prompt_tokens_total": get("llamacpp:prompt_tokens_total"),
            "gen_throughput_tok_s": get("llamacpp:predicted_tokens_seconds"),
        }
        return {name: value for name, value in found.items() if value is not None}
    graph = get("sglang:is_cuda_graph")
    found = {
        "running": _whole(get("sglang:num_running_reqs")),
        "queued": _whole(get("sglang:num_queue_reqs")),
        "kv_usage": get("sglang:token_usage"),
        "gen_throughput_tok_s": get("sglang:gen_throughput"),
        # 0 without speculation and before the first decode: says nothing.
        "accept_length": get("sglang:spec_accept_length") or None,
        "generated_tokens_total": get("sglang:realtime_tokens_total:decode", get("sglang:generation_tokens_total")),
        "prompt_tokens_total": get("sglang:prompt_tokens_total"),
        "retracted_total": get("sglang:num_retracted_requests_total"),
        "cuda_graph": bool(graph) if graph is not None else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None else None


async def read_service_sample(
    server: Server, session: aiohttp.ClientSession | None = None, timeout_s: float = TIMEOUT_S
) -> ServiceSample:
    """Read what `server` tells; fields it does not tell are None, `alive` False when nothing answered."""
    if session is None:
        async with open_session(server.base_url, server.api_key) as own:
            return await read_service_sample(server, own, timeout_s)
    can, fields, alive = server.capabilities, {}, False
    if can.metrics:
        text = await _get(session, "/metrics", timeout_s)
        alive = text is not None
        fields = from_counters(parse_counters(text.decode("utf-8", "replace"))) if text else {}
    if can.loads:
        body = await _get(session, "/v1/loads", timeout_s)
        alive = alive or body is not None
        fields |= {name: value for name, value in _loads(body).items() if value is not None}
    if not can.metrics and not can.loads:
        alive = await _get(session, "/v1/models", timeout_s) is not None
    return replace(ServiceSample(time.monotonic(), server.name), alive=alive, **fields)


def read_service_sample_sync(server: Server, timeout_s: float = TIMEOUT_S) -> ServiceSample:
    """`read_service_sample` for callers without an event loop."""
    return asyncio.run(read_service_sample(server, None, timeout_s))


def _loads(body: bytes | None) -> dict[str, Any]:
    try:
        return parse_loads(orjson.loads(body)) if body else {}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        return {}


async def _get(session: aiohttp.ClientSession, path: str, timeout_s: float) -> bytes | None:
    try:
        async with session.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            payload = await answer.read()
            return payload if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None

"""Bodies in the shapes recorded from SGLang 0.5.17 (0.5.11 lacks ids and meta_info on chat)."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from simulator.batching import Batch
from simulator.codec import Codec
from simulator.settings import SimSettings
from simulator.writer import Script


def chat_answer(settings: SimSettings, body: Mapping[str, Any], script: Script, ended: str) -> dict[str, Any]:
    """One chat completion. The blank lines after the think block stay in `content`, as 0.5.17 leaves them."""
    finish = "abort" if ended == "abort" else script.finish
    content: str | None = script.content
    if script.reasoning is not None and content and script.fault != "reasoning_in_content":
        content = "\n\n" + content
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": script.reasoning,
        "tool_calls": script.calls,
    }
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    if settings.api == "sglang" and body.get("return_token_ids"):
        choice["prompt_token_ids"] = script.prompt_ids
        choice["token_ids"] = script.ids
    if settings.api == "sglang" and body.get("return_meta_info"):
        choice["meta_info"] = _meta(script, finish)
    prompt, completion = len(script.prompt_ids), script.usage_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {
        "id": script.meta.get("id", ""),
        "object": "chat.completion",
        "model": settings.model,
        "choices": [choice],
        "usage": usage,
        "metadata": {"simulator": True},
    }


def generate_answer(codec: Codec, script: Script, ended: str) -> dict[str, Any]:
    """One /generate answer."""
    finish = "abort" if ended == "abort" else {"tool_calls": "stop"}.get(script.finish, script.finish)
    return {"text": codec.decode(script.ids), "output_ids": script.ids, "meta_info": _meta(script, finish)}


def _meta(script: Script, finish: str) -> dict[str, Any]:
    meta = {
        **script.meta,
        "finish_reason": {"type": finish},
        "prompt_tokens": len(script.prompt_ids),
        "completion_tokens": script.usage_tokens,
        "simulator": True,
    }
    if script.verify_ct:
        meta["spec_verify_ct"] = script.verify_ct
        meta["spec_accept_length"] = script.usage_tokens / script.verify_ct
    return meta


def error_answer(status: int, text: str, generate: bool) -> web.Response:
    """SGLang's two shapes of an error."""
    if generate:
        return web.json_response({"error": {"message": text}}, status=status)
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    body = {"object": "error", "message": text, "type": kind, "param": None, "code": status}
    return web.json_response(body, status=status)


def server_info(settings: SimSettings, version: str) -> dict[str, Any]:
    """What provisioning and capability detection read."""
    mtp = settings.accept_length is not None
    state: dict[str, Any] = {"effective_max_running_requests_per_dp": settings.max_running, "last_gen_throughput": 0.0}
    if mtp:
        state["avg_spec_accept_length"] = settings.accept_length
    return {
        "simulator": True,
        "version": version,
        "status": "ready",
        "model_path": settings.model,
        "served_model_name": settings.model,
        "context_length": settings.context_tokens,
        "max_running_requests": settings.max_running,
        "enable_metrics": settings.metrics,
        "reasoning_parser": "qwen3",
        "speculative_algorithm": "EAGLE" if mtp else None,
        "speculative_num_draft_tokens": 4 if mtp else None,
        "internal_states": [state],
    }


def loads_answer(settings: SimSettings, batch: Batch, outer: str, beat: float) -> dict[str, Any]:
    """/v1/loads; the inner timestamp is the scheduler's heartbeat."""
    capacity = min(settings.kv_tokens, 1e9)
    rate = 0.0 if batch.frozen else settings.total_tok_s(batch.running) * settings.speedup / batch.slow_factor
    load: dict[str, Any] = {
        "timestamp": beat,
        "dp_rank": 0,
        "num_running_reqs": batch.running,
        "num_waiting_reqs": batch.queued,
        "max_running_requests": settings.max_running,
        "max_total_num_tokens": int(capacity),
        "token_usage": min(1.0, batch.kv_used() / capacity),
        "gen_throughput": rate,
        "queues": {"waiting": batch.queued, "retracted": 0},
    }
    if settings.accept_length:
        rate = (settings.accept_length - 1) / 3
        load["speculative"] = {"accept_length": settings.accept_length, "accept_rate": rate}
    return {"timestamp": outer, "version": "simulator", "simulator": True, "loads": [load]}


def metrics_text(settings: SimSettings, batch: Batch) -> str:
    """/metrics with the names the project reads."""
    capacity = min(settings.kv_tokens, 1e9)
    rate = 0.0 if batch.frozen else settings.total_tok_s(batch.running) * settings.speedup / batch.slow_factor
    values = {
        "num_running_reqs": ("gauge", batch.running),
        "num_queue_reqs": ("gauge", batch.queued),
        "token_usage": ("gauge", min(1.0, batch.kv_used() / capacity)),
        "gen_throughput": ("gauge", rate),
        "spec_accept_length": ("gauge", settings.accept_length or 0.0),
        "is_cuda_graph": ("gauge", 1.0),
        "num_retracted_requests_total": ("counter", batch.retracted),
        "prompt_tokens_total": ("counter", batch.prompt_total),
    }
    lines = ["# simulator"]
    for name, (kind, value) in values.items():
        lines += [f"# TYPE sglang:{name} {kind}", f'sglang:{name}{{model_name="{settings.model}"}} {float(value)}']
    lines += ["# TYPE sglang:realtime_tokens_total counter"]
    lines += [f'sglang:realtime_tokens_total{{mode="decode",model_name="{settings.model}"}} {batch.generated}']
    return "\n".join(lines) + "\n"

"""Request bodies. A server gets only the fields it was found to understand (`Capabilities`)."""

from typing import Any

from tasks.client.outcomes import ChatRequest
from tasks.records import Server

CHAT = "/v1/chat/completions"
GENERATE = "/generate"


def endpoint(server: Server, request: ChatRequest) -> str:
    """`/generate` where it is the only way to exact token ids and the prompt's ids are known, else chat."""
    can = server.capabilities
    exact_chat = can.return_token_ids or can.logprob_ids
    return GENERATE if can.generate_endpoint and not exact_chat and request.prompt_ids is not None else CHAT


def chat_body(server: Server, request: ChatRequest) -> dict[str, Any]:
    """Body of /v1/chat/completions, non-streaming."""
    can, sampling = server.capabilities, request.sampling
    body: dict[str, Any] = {"model": server.model, "messages": request.messages, "max_tokens": sampling.max_tokens}
    for name in ("temperature", "top_p", "presence_penalty", "seed"):
        value = getattr(sampling, name)
        if value is not None:
            body[name] = value
    if request.stop:
        body["stop"] = list(request.stop)
    if request.tools:
        body["tools"] = request.tools
    body.update(_extras(server, request))
    if can.return_token_ids:
        body["return_token_ids"] = True
        if server.engine == "sglang":
            body["return_meta_info"] = True
    elif can.logprob_ids and server.engine == "llama.cpp":
        # Its logprobs leave out every token that ends inside a character; these two fields give all ids.
        body.update(verbose=True, return_tokens=True)
    elif can.logprob_ids:
        body["logprobs"] = True
    body.update(request.extra)
    return body


def _extras(server: Server, request: ChatRequest) -> dict[str, Any]:
    can, known = server.capabilities, server.engine in ("sglang", "llama.cpp")
    extras: dict[str, Any] = {}
    if request.sampling.top_k is not None and (known or can.chat_template_kwargs):
        extras["top_k"] = request.sampling.top_k
    if request.ignore_eos and known:
        extras["ignore_eos"] = True
    if can.chat_template_kwargs and request.thinking is not None:
        # Both are always said: templates differ in their defaults (Qwen3.8 flips preserve_thinking).
        extras["chat_template_kwargs"] = {
            "enable_thinking": request.thinking,
            "preserve_thinking": request.preserve_thinking,
        }
    if can.separate_reasoning:
        extras["separate_reasoning"] = True
    if can.abort:
        extras["rid"] = request.request_id
    return extras


def generate_body(request: ChatRequest) -> dict[str, Any]:
    """Body of SGLang's /generate: ids in, ids out. It does not read generation_config.json, so all is said."""
    sampling = request.sampling
    params: dict[str, Any] = {"max_new_tokens": sampling.max_tokens}
    pairs = (
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("top_k", sampling.top_k),
        ("presence_penalty", sampling.presence_penalty),
        ("sampling_seed", sampling.seed),
    )
    params.update({name: value for name, value in pairs if value is not None})
    if request.ignore_eos:
        params["ignore_eos"] = True
    if request.stop:
        params["stop"] = list(request.stop)
    body: dict[str, Any] = {"input_ids": request.prompt_ids, "sampling_params": params, "rid": request.request_id}
    if request.thinking:
        body["require_reasoning"] = True
    return {**body, **request.extra}

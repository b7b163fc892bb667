"""What a server is and understands, found by asking it once at start."""

import asyncio
import re
from typing import Any, Literal

import aiohttp
import orjson

from tasks.client.transport import open_session
from tasks.errors import ServerError
from tasks.records import Capabilities

Engine = Literal["sglang", "llama.cpp", "openai"]
Detected = tuple[Engine, str, Capabilities, dict[str, Any]]
RETURN_TOKEN_IDS_SINCE = (0, 5, 17)  # SGLang, on chat completions (PR #30917)
PROBE_S = 60.0


def version_tuple(version: str) -> tuple[int, ...]:
    """`0.5.17.post1` → (0, 5, 17)."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def sglang_capabilities(version: str, info: dict[str, Any]) -> Capabilities:
    """From a version and /server_info alone; an unreadable version (a development build) counts as new."""
    known = version_tuple(version)
    return Capabilities(
        return_token_ids=not known or known >= RETURN_TOKEN_IDS_SINCE,
        generate_endpoint=True,
        chat_template_kwargs=True,
        separate_reasoning=True,
        abort=True,
        loads=True,
        metrics=bool(info.get("enable_metrics", True)),
    )


LLAMA_CPP = Capabilities(chat_template_kwargs=True, metrics=True, logprob_ids=True)


async def detect_async(base_url: str, api_key: str = "", model: str = "", timeout_s: float = 10.0) -> Detected:
    """Ask in order: SGLang's /server_info, llama.cpp's /props, vLLM's /version, then any OpenAI-compatible server.

    Raises ServerError when nothing answers at `base_url`.
    """
    base = base_url.rstrip("/").removesuffix("/v1")
    async with open_session(base, api_key) as session:
        for path in ("/server_info", "/get_server_info"):
            info = await _get(session, path, timeout_s)
            if isinstance(info, dict) and ("internal_states" in info or "server_args" in info):
                version = str(info.get("version", ""))
                return "sglang", version, sglang_capabilities(version, info), info
        props = await _get(session, "/props", timeout_s)
        if isinstance(props, dict) and "default_generation_settings" in props:
            return await _llama_cpp(session, props, timeout_s)
        version_info = await _get(session, "/version", timeout_s)
        models = await _get(session, "/v1/models", timeout_s)
        if isinstance(version_info, dict) and "version" in version_info:
            can = Capabilities(return_token_ids=True, chat_template_kwargs=True)
            return "openai", str(version_info["version"]), can, {"models": models}
        if models is None and not await _answers(session, timeout_s):
            raise ServerError(f"nothing answers at {base}: expected SGLang, llama.cpp or an OpenAI-compatible server")
        accepts = await _accepts_template_kwargs(session, model or _first_model(models))
        return "openai", "", Capabilities(chat_template_kwargs=accepts), {"models": models}


def detect(base_url: str, api_key: str = "", model: str = "", timeout_s: float = 10.0) -> Detected:
    """`detect_async` for callers without an event loop."""
    return asyncio.run(detect_async(base_url, api_key, model, timeout_s))


async def _llama_cpp(session: aiohttp.ClientSession, props: dict[str, Any], timeout_s: float) -> Detected:
    version = str(props.get("build_info", ""))
    metrics = await _status(session, "/metrics", timeout_s) == 200
    can = Capabilities(chat_template_kwargs=True, metrics=metrics, logprob_ids=True)
    return "llama.cpp", version, can, props


async def _get(session: aiohttp.ClientSession, path: str, timeout_s: float) -> Any:
    try:
        async with session.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            return orjson.loads(await answer.read()) if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError):
        return None


async def _status(session: aiohttp.ClientSession, path: str, timeout_s: float) -> int | None:
    try:
        async with session.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            return answer.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


async def _answers(session: aiohttp.ClientSession, timeout_s: float) -> bool:
    return await _status(session, "/v1/models", timeout_s) is not None


def _first_model(models: Any) -> str:
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return "default"


async def _accepts_template_kwargs(session: aiohttp.ClientSession, model: str) -> bool:
    """Whether an unknown server takes `chat_template_kwargs` (some refuse unknown fields with 422)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    try:
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        async with session.post("/v1/chat/completions", data=orjson.dumps(body), timeout=timeout) as answer:
            await answer.read()
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False

"""Stands in for SGLang's interpreter: prints recorded-looking logs, fails as told, or serves a little of the HTTP API.

    fake_sglang.py FOLDER -c CODE                       prints the version
    fake_sglang.py FOLDER -m sglang.launch_server …     start number n behaves as FOLDER/behaviours.json[n]

A behaviour: {"log": text, "exit": code} fails; {"serve": true, …} serves. Options: "accept_length", "think" (false: no
reasoning), "child" (a grandchild that would outlive a killed parent), "speculative" (false: /server_info says none),
"running" (effective limit), "ready_after_s". POST /fake {"hang": true} freezes heartbeat and answers, {"exit": 3}
ends it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

THINKING = "Okay, the user wants a short answer."
ANSWER = "Hello there! How can I help you today?"
READY = """Load weight begin. avail mem=139.13 GB
Load weight end. elapsed=0.27 s, type=Qwen3_5ForConditionalGeneration, avail mem=88.07 GB, mem usage=51.05 GB.
Load weight end. elapsed=0.00 s, type=Qwen3_5ForCausalLMMTP, avail mem=82.51 GB, mem usage=5.53 GB.
KV Cache is allocated. #tokens: 1000, K size: 9.07 GB, V size: 9.07 GB
Capture draft decode CUDA graph begin. backend=full
Capture draft decode CUDA graph end. elapsed=1.28 s
"""


def value(flags: list[str], name: str, default: str = "") -> str:
    return flags[flags.index(name) + 1] if name in flags else default


class State:
    def __init__(self, behaviour: dict[str, Any], flags: list[str]) -> None:
        self.behaviour, self.flags = behaviour, flags
        self.key = value(flags, "--api-key")
        self.hung_at: float | None = None
        self.running = 0
        self.tokens = 0
        self.begun = time.time()
        self.lock = threading.Lock()

    def enter(self, change: int) -> None:
        with self.lock:
            self.running += change


def handler(state: State) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health":
                young = time.time() - state.begun < state.behaviour.get("ready_after_s", 0)
                return self.reply(503 if young else 200, "")
            if state.key and self.headers.get("authorization") != f"Bearer {state.key}" and self.path != "/metrics":
                return self.reply(401, {"error": "no key"})
            return self.reply(*answer(state, self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            if self.path == "/fake":
                return self.reply(200, hurt(state, body))
            if state.key and self.headers.get("authorization") != f"Bearer {state.key}":
                return self.reply(401, {"error": "no key"})
            while state.hung_at is not None:
                time.sleep(0.1)
            if self.path == "/generate":
                meta = {"spec_accept_length": 2.909} if state.behaviour.get("accept_length", 1) else {}
                return self.reply(200, {"text": "x", "output_ids": [1], "meta_info": meta})
            state.enter(1)
            time.sleep(1.0 if body.get("max_tokens") == 400 else 0.0)
            answered = chat(state, body)
            state.enter(-1)
            return self.reply(200, answered)

    return Handler


def hurt(state: State, body: dict[str, Any]) -> dict[str, Any]:
    if body.get("hang"):
        state.hung_at, state.running = time.time(), 2
    if "exit" in body:
        os._exit(int(body["exit"]))
    return {}


def answer(state: State, path: str) -> tuple[int, Any]:
    behaviour, flags = state.behaviour, state.flags
    if path == "/server_info":
        speculative = behaviour.get("speculative", "--speculative-algorithm" in flags)
        wanted = int(value(flags, "--max-running-requests", "48"))
        return 200, {
            "version": behaviour.get("version", "0.5.17"),
            "api_key": state.key,
            "model_path": value(flags, "--model-path"),
            "speculative_algorithm": "EAGLE" if speculative else None,
            "speculative_num_steps": 3 if speculative else None,
            "max_running_requests": wanted,
            "enable_metrics": True,
            "internal_states": [{"effective_max_running_requests_per_dp": behaviour.get("running", wanted)}],
        }
    if path == "/v1/models":
        return 200, {"data": [{"id": value(flags, "--served-model-name", "fake")}]}
    if path.startswith("/v1/loads"):
        now = time.time()
        load: dict[str, Any] = {
            "timestamp": state.hung_at or now,
            "num_running_reqs": state.running,
            "num_waiting_reqs": 0,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
        }
        return 200, {"timestamp": datetime.fromtimestamp(now, UTC).isoformat(), "loads": [load]}
    if path == "/metrics":
        lines = f"sglang:num_running_reqs {state.running}\nsglang:generation_tokens_total {state.tokens}\n"
        return 200, lines + "sglang:prompt_tokens_total 5\n"
    return 404, {"error": path}


def chat(state: State, body: dict[str, Any]) -> dict[str, Any]:
    state.tokens += 40
    length = state.behaviour.get("accept_length", 2.9)
    message: dict[str, Any] = {"role": "assistant", "content": ANSWER, "reasoning_content": THINKING}
    if not state.behaviour.get("think", True):
        message = {"role": "assistant", "content": "<think>A greeting.</think>Hello there!", "reasoning_content": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
    if body.get("return_token_ids"):
        choice |= {"token_ids": [1, 2, 3], "prompt_token_ids": [4, 5]}
    if body.get("return_meta_info"):
        choice["meta_info"] = {"spec_accept_length": length, "spec_verify_ct": round(40 / length)} if length else {}
    return {"id": "1", "choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 40}}


def serve(behaviour: dict[str, Any], flags: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(f"server_args=ServerArgs(api_key='{value(flags, '--api-key')}')", flush=True)
    print(READY, end="")
    running = behaviour.get("running", value(flags, "--max-running-requests", "48"))
    print(f"max_total_num_tokens=1000, max_running_requests={running}, context_len=4096, available_gpu_mem=9.9 GB")
    if behaviour.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    state = State(behaviour, flags)
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer((value(flags, "--host", "127.0.0.1"), int(value(flags, "--port"))), handler(state))
    server.daemon_threads = True
    print("The server is fired up and ready to roll!", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(3600)


def main() -> None:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    if arguments[0] == "-c":
        print((folder / "version").read_text())
        return
    behaviours = json.loads((folder / "behaviours.json").read_text())
    with (folder / "starts").open("a") as starts:
        starts.write(json.dumps({"flags": arguments, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}) + "\n")
    number = len((folder / "starts").read_text().splitlines()) - 1
    by_gpu = json.loads(os.environ.get("FAKE_BY_GPU", "{}"))
    behaviour = by_gpu.get(os.environ.get("CUDA_VISIBLE_DEVICES")) or behaviours[min(number, len(behaviours) - 1)]
    if behaviour.get("serve"):
        serve(behaviour, arguments[2:])
        return
    print(behaviour["log"], flush=True)
    code = behaviour["exit"]
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Run by the trainers' own Python for bench_tokenize.py: times their published preprocessing of one JSONL file.

Usage: trainer_preprocessing.py specforge|speculators RAW_JSONL TARGET_DIR CORES. Prints seconds as the last line.
"""

import json
import multiprocessing
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def specforge(raw: str, model: str, cores: int) -> float:
    """`build_eagle3_dataset` as its provider calls it."""
    from datasets import load_dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    start = time.perf_counter()
    dataset = load_dataset("json", data_files=raw, split="train")
    build_eagle3_dataset(
        dataset=dataset,
        tokenizer=tokenizer,
        chat_template="qwen3.5",
        max_length=32768,
        num_proc=cores,
        train_only_last_turn=True,
        minimum_valid_tokens=1,
    )
    return time.perf_counter() - start


class Render(BaseHTTPRequestHandler):
    """Stands in for vLLM's render endpoint: the template and the tokenizer, nothing else."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = TOKENIZER.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=body["add_generation_prompt"]
        )
        ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
        data = json.dumps({"token_ids": ids}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


TOKENIZER = None


def serve(model: str, port: "multiprocessing.Queue[int]") -> None:
    """Serve in a process of its own, on a free port."""
    global TOKENIZER
    from transformers import AutoTokenizer

    TOKENIZER = AutoTokenizer.from_pretrained(model)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Render)
    port.put(server.server_address[1])
    server.serve_forever()


def speculators(raw: str, model: str, cores: int) -> float:
    """`load_and_preprocess_dataset` with a render endpoint."""
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=serve, args=(model, ports), daemon=True)
    server.start()
    endpoint = f"http://127.0.0.1:{ports.get(timeout=120)}"
    start = time.perf_counter()
    try:
        load_and_preprocess_dataset(
            model, [raw], seq_length=32768, build_dataset_num_proc=cores, render_endpoint=endpoint
        )
        return time.perf_counter() - start
    finally:
        server.terminate()


if __name__ == "__main__":
    name, raw, model, cores = sys.argv[1:]
    folder = Path(model)
    values = json.loads((folder / "config.json").read_text())
    if "model_type" not in values:
        (folder / "config.json").write_text(json.dumps({**values, "model_type": "qwen3"}))
    print({"specforge": specforge, "speculators": speculators}[name](raw, model, int(cores)))

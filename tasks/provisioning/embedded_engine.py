"""The embedded engine's process: llama.cpp's own HTTP server, from the `xllamacpp` wheel, with one model.

    REGEN_ENGINE_KEY=secret python -m tasks.provisioning.embedded_engine --model m.gguf --port 8080 --slots 8 --ctx 2048

It speaks OpenAI's chat API with continuous batching and has `/health`, `/props`, `/slots`, `/metrics`, `/tokenize` and
`/apply-template`. It writes to stderr only; whoever starts it gives it a log file. It ends on SIGTERM.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

KEY_VARIABLE = "REGEN_ENGINE_KEY"
"""Environment variable with the API key: an argument would show in every process list."""

HOST = "127.0.0.1"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. `--ctx` is tokens of one request, prompt and answer."""
    parser = argparse.ArgumentParser(prog="embedded_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--alias", default="embedded:smollm2", help="model name that /v1/models tells")
    parser.add_argument("--port", type=int, required=True, help="loopback port")
    parser.add_argument("--slots", type=int, default=8, help="requests decoded together")
    parser.add_argument("--ctx", type=int, default=2048, help="context of one request, tokens")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: the CPUs this process may use")
    return parser.parse_args(arguments)


def build_params(options: argparse.Namespace) -> Any:
    """xllamacpp's CommonParams for `options`.

    llama.cpp divides `n_ctx` among its slots (8,192 over 8 slots is 1,024 each), so the per-request context is
    multiplied here. Its default sampling (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05) is set to neutral: a
    request is then sampled as it asks and nothing more. The samplers run in the order of SGLang and transformers
    (temperature first; llama.cpp's own order has it last).
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias}
    params.hostnames = [HOST]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.ctx * options.slots
    params.kv_unified = False
    params.cont_batching = True
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = False  # GET /props stays; only changing properties is refused
    params.ui = False
    params.use_jinja = True
    params.offline = True
    params.n_threads_http = 2 * options.slots
    threads = options.threads or len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    sampling = params.sampling
    sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p = 1.0, 0, 1.0, 0.0
    sampling.samplers = "penalties;temperature;top_k;top_p;min_p"
    key = os.environ.pop(KEY_VARIABLE, "")
    if key:
        params.api_keys = [key]
    return params


def main() -> int:
    """Serve until SIGTERM or SIGINT. Exit status 1 when the model does not load or the port is taken."""
    options = parse()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    import xllamacpp

    try:
        server = xllamacpp.Server(build_params(options))
    except Exception as error:
        print(f"embedded engine: cannot serve {options.model} on port {options.port}: {error}", file=sys.stderr)
        return 1
    print(f"embedded engine: listening on {server.listening_address}", file=sys.stderr, flush=True)
    while not stop.wait(1.0):
        pass
    # The C++ server's threads end with the process; its destructor would wait for requests that nobody reads any more.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

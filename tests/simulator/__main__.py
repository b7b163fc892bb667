"""`python -m simulator --servers 2 --port 30000`: simulated servers for trying things out by hand."""

import argparse
import asyncio
import math

from simulator.server import SimServer
from simulator.settings import SimSettings


async def serve(arguments: argparse.Namespace) -> None:
    settings = SimSettings(
        seed=arguments.seed,
        api=arguments.api,
        max_running=arguments.slots,
        request_tok_s=arguments.tok_s,
        saturation=arguments.saturation,
        median_tokens=arguments.median,
        sigma=arguments.sigma,
        speedup=arguments.speedup,
    )
    servers = []
    for index in range(arguments.servers):
        port = arguments.port + index if arguments.port else 0
        server = SimServer(settings, name=f"sim{index}", port=port)
        await server.start()
        servers.append(server)
        print(f"SIMULATOR (no model runs here): {server.url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="first port; 0 takes free ones")
    parser.add_argument("--api", choices=["sglang", "sglang-old", "plain"], default="sglang")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tok-s", type=float, default=100.0)
    parser.add_argument("--saturation", type=float, default=math.inf)
    parser.add_argument("--median", type=float, default=100.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--speedup", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

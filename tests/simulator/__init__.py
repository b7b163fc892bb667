"""A SIMULATOR of inference servers for tests and benchmarks. No model runs here; every answer is made up.

It speaks what this project uses of SGLang's HTTP API, on one event loop, deterministic under a seed. Its version says
`+simulator`, its answers carry `X-Simulator: 1` and its model name begins with `simulator/`, so that nothing measured
on it can be mistaken for a measurement of a real server.
"""

from simulator.codec import SimTarget, TargetCodec, ToyCodec
from simulator.faults import Fault, FaultPlan
from simulator.fleet import SimFleet
from simulator.server import SimServer
from simulator.settings import SimSettings

__all__ = ["Fault", "FaultPlan", "SimFleet", "SimServer", "SimSettings", "SimTarget", "TargetCodec", "ToyCodec"]

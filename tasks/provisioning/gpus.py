"""Which GPUs a server gets. The flow hands in what its sensors read; without that `nvidia-smi` is asked."""

import shutil
import subprocess
from collections.abc import Callable, Sequence

from tasks.errors import ServerError
from tasks.records import GpuFacts

GpuReader = Callable[[], Sequence[GpuFacts]]
QUERY = "--query-gpu=index,uuid,memory.total,memory.free,name"
MIB = 1 << 20


def read_nvidia_smi() -> list[GpuFacts]:
    """The node's GPUs by `nvidia-smi`; an empty list where there is none. Honours CUDA_VISIBLE_DEVICES not at all."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run(
        [program, QUERY, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        return []
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> list[GpuFacts]:
    """Rows of `index, uuid, total MiB, free MiB, name`; rows that say [N/A] are left out."""
    facts = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 4)]
        if len(cells) == 5 and cells[0].isdigit() and cells[2].isdigit() and cells[3].isdigit():
            facts.append(GpuFacts(int(cells[0]), cells[1], int(cells[2]) * MIB, int(cells[3]) * MIB, cells[4]))
    return facts


def choose(facts: Sequence[GpuFacts], wanted: Sequence[int]) -> list[GpuFacts]:
    """The GPUs to use, in the order asked for. Raises ServerError naming an index that is not there."""
    if not facts:
        raise ServerError(
            "no NVIDIA GPU was found on this machine: use serving.mode attach (servers elsewhere) or embedded (CPU), "
            "or check that nvidia-smi works here"
        )
    if not wanted:
        return list(facts)
    by_index = {gpu.index: gpu for gpu in facts}
    missing = [index for index in wanted if index not in by_index]
    if missing:
        raise ServerError(f"serving.gpus names {missing}, this machine has {sorted(by_index)}")
    return [by_index[index] for index in wanted]


def groups(gpus: Sequence[GpuFacts], size: int) -> list[tuple[GpuFacts, ...]]:
    """Groups of `size` GPUs, one a server; a remainder stays unused."""
    return [tuple(gpus[at : at + size]) for at in range(0, len(gpus) - size + 1, size)]


def least_free(gpus: Sequence[GpuFacts]) -> int:
    """Free bytes on the fullest of the GPUs: what a server of this fleet can count on."""
    return min(gpu.free_bytes for gpu in gpus)

"""Bar 7: tokenization with masks against the bare tokenizer, and against the trainers' own preprocessing.

Measured in one run, alternating, on the same synthetic thinking conversations (mean about 1,000 sampled tokens) and the
same cores; medians of the rounds.

- bare: `encode_batch` of exactly the rendered texts, offsets included, nothing else (all cores).
- ours: completions.parquet to tokens.parquet from text only (render, tokenize, offsets, mask, counts, Parquet), in
  processes; and the usual case, in which the server's ids are there and only prompts are tokenized for render parity.
- specforge 0.2.0: `build_eagle3_dataset` of the raw conversations with one process a core.
- speculators 0.9.0: `load_and_preprocess_dataset` with one process a core; it renders over HTTP, so a local server that
  renders and tokenizes with the same template stands in for vLLM's `/render`.

Limits: ours >= 0.8 x bare; >= 3 x each trainer. The trainers are measured where an environment with their published
packages is given (REGEN_TEST_TRAINERS, as tests/export builds it); else they are reported as not measured.

Usage: python tests/benchmarks/bench_tokenize.py [--rows N] [--rounds N] [--small]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent):
    sys.path.insert(0, str(folder))

from completions import assistant, completion, served, without_ids, write_completions  # noqa: E402
from targets import qwen36, qwen36_directory  # noqa: E402
from tasks.records import Message  # noqa: E402
from tasks.settings import SamplingSettings  # noqa: E402
from tasks.tokenization.run import tokenize_chunk  # noqa: E402
from tasks.tokenization.settings import TokenizationSettings  # noqa: E402

# Prose, code, mathematics and other scripts, so that the tokenizer works as it does on real answers.
TEXT = """
the answer is that we have to compare both numbers before a proof by induction shows function values of x in Python:
def main(argument): return [i for i in range(10)] # and so on; light scattering wavelength molecules however therefore
because integral \\frac{a}{b} = 42, 3.14 `code` **bold** Überraschung 数学 données
"""
WORDS = TEXT.split()


def conversations(count: int, seed: int = 7) -> list[list[Message]]:
    """Two in ten have two turns; lengths are log-normal, thinking is two thirds of an answer."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        pieces = (draw.choice(WORDS) + ("\n\n" if draw.random() < 0.02 else " ") for _ in range(max(4, words)))
        return "".join(pieces).strip()

    def turn() -> list[Message]:
        size = draw.lognormvariate(6.0, 0.7)
        return [Message("user", text(40)), assistant(text(int(size / 3)), text(int(size * 2 / 3)))]

    return [[m for _ in range(2 if draw.random() < 0.2 else 1) for m in turn()] for _ in range(count)]


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def timed(call: Any) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process and its workers)."""
    start, before = time.perf_counter(), cpu_s()
    call()
    return time.perf_counter() - start, cpu_s() - before


def cpu_s() -> float:
    """User and system time of this process and of its living children."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def rendered(target: Any, chats: list[list[Message]]) -> list[str]:
    """The texts that ours tokenizes: one an assistant turn, up to its end of turn."""
    texts = []
    for chat in chats:
        for index, message in enumerate(chat):
            if message.role == "assistant":
                texts.append(target.render(chat[: index + 1], add_generation_prompt=False).removesuffix("\n"))
    return texts


def main() -> None:
    """Measure, print a table, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a few rows, no trainers: proves that it still runs")
    options = parser.parse_args()
    rows, rounds = (150, 1) if options.small else (options.rows, options.rounds)
    cores = len(os.sched_getaffinity(0))
    target, chats = qwen36(), conversations(rows)
    texts = rendered(target, chats)
    with tempfile.TemporaryDirectory(prefix="bench-tokenize-") as name:
        folder = Path(name)
        sampled = [
            [f"{m.reasoning_content}\n</think>\n\n{m.content}<|im_end|>" for m in c if m.role == "assistant"]
            for c in chats
        ]
        exact = [served(target, f"{n:032x}", c, s) for n, (c, s) in enumerate(zip(chats, sampled, strict=True))]
        text_path = write_completions(folder / "text.parquet", [without_ids(row) for row in exact])
        ids_path = write_completions(folder / "ids.parquet", exact)
        warm = write_completions(folder / "warm.parquet", [completion("w", chats[0])] * 600)
        settings = TokenizationSettings(min_content_tokens=0, workers=1 if options.small else cores)

        def ours(path: Path) -> None:
            tokenize_chunk(path, folder / "tokens.parquet", target, settings, SamplingSettings())
            (folder / "tokens.parquet").unlink()

        ours(warm)  # processes start and load the tokenizer once a run, not once a chunk
        times: dict[str, list[tuple[float, float]]] = {}
        tokens = sum(len(e.ids) for e in target.encode_batch(texts))
        trainers = None if options.small else os.environ.get("REGEN_TEST_TRAINERS")
        raw = write_raw(folder / "raw.jsonl", chats) if trainers else None
        for _ in range(rounds):
            times.setdefault("bare encode_batch", []).append(timed(lambda: target.encode_batch(texts)))
            times.setdefault("ours, from text", []).append(timed(lambda: ours(text_path)))
            times.setdefault("ours, from ids", []).append(timed(lambda: ours(ids_path)))
        for trainer in ("specforge", "speculators") if raw else ():
            times[trainer] = [(run_trainer(str(trainers), trainer, raw, cores), 0.0) for _ in range(rounds)]
    report(times, tokens, len(texts), cores)


def write_raw(path: Path, chats: list[list[Message]]) -> Path:
    """One conversation an assistant turn, as these trainers need for thinking targets."""
    with path.open("w", encoding="utf-8") as file:
        for number, chat in enumerate(chats):
            for index, message in enumerate(chat):
                if message.role == "assistant":
                    turns = [
                        {k: getattr(m, k) for k in ("role", "content", "reasoning_content")} for m in chat[: index + 1]
                    ]
                    file.write(json.dumps({"id": f"{number}_{index}", "conversations": turns}) + "\n")
    return path


def run_trainer(folder: str, trainer: str, raw: Path, cores: int) -> float:
    """Seconds that the trainer's own preprocessing took, measured inside its process after its imports."""
    script = HERE / "trainer_preprocessing.py"
    command = [f"{folder}/bin/python", str(script), trainer, str(raw), str(qwen36_directory()), str(cores)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(raw.parent / "hf"), "HF_DATASETS_CACHE": ""}
    environment.pop("HF_DATASETS_CACHE")
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(f"{trainer}: {done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def report(times: dict[str, list[tuple[float, float]]], tokens: int, rows: int, cores: int) -> None:
    """The table and the last line.

    CPU seconds stand beside wall seconds: where others use the machine they are the fairer comparison.
    """
    wall = {name: median([seconds for seconds, _ in values]) for name, values in times.items()}
    cpu = {name: median([seconds for _, seconds in values]) for name, values in times.items()}
    text = "ours, from text"
    print(f"{rows} rows, {tokens:,} tokens, {cores} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':22}{'s':>8}{'CPU s':>8}{'rows/s':>10}{'tokens/s':>12}{'time/ours':>11}")
    for name, t in wall.items():
        used = f"{cpu[name]:8.2f}" if cpu[name] else f"{'':8}"
        print(f"{name:22}{t:8.2f}{used}{rows / t:10.0f}{tokens / t:12,.0f}{t / wall[text]:11.2f}")
    ratios = {name: round(wall[name] / wall[text], 2) for name in ("specforge", "speculators") if name in wall}
    for name in ("specforge", "speculators"):
        if name not in times:
            print(f"{name}: not measured; set REGEN_TEST_TRAINERS to an environment with the published packages")
    bars = {
        "bar": "7",
        "share_of_bare_tokenizer": round(wall["bare encode_batch"] / wall[text], 3),
        "share_of_bare_tokenizer_cpu": round(cpu["bare encode_batch"] / cpu[text], 3),
        "bar_share": 0.8,
        "times_specforge": ratios.get("specforge"),
        "times_speculators": ratios.get("speculators"),
        "bar_times": 3.0,
        "rows_s_from_ids": round(rows / wall["ours, from ids"]),
        "rows_s_from_text": round(rows / wall[text]),
        "load": round(os.getloadavg()[0], 1),
    }
    met = [bars["share_of_bare_tokenizer"] >= 0.8, *(ratio >= 3 for ratio in ratios.values())]
    print(json.dumps({**bars, "met": all(met)}))


if __name__ == "__main__":
    main()

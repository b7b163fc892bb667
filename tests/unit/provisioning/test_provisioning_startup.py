"""Recorded logs, and each failure of the table, replayed against the parsers."""

import pytest

from paths import shared
from tasks.provisioning.startup import Failure, diagnose, milestone, read_facts

RECORDED_FAILURES = [
    ("27b-mem-too-low", -9, Failure.FRACTION_TOO_LOW),
    ("27b-mtp-too-many-requests", -9, Failure.TOO_MANY_REQUESTS),
    ("tiny-mtp-no-extra-buffer", 1, Failure.RADIX_WITH_MTP),
    ("tiny-mtp-eagle-default-memory", -9, Failure.OOM_POOLS),
]


@pytest.mark.parametrize(("case", "code", "failure"), RECORDED_FAILURES)
def test_recorded_failures(case: str, code: int, failure: Failure) -> None:
    log = shared(f"captures/sglang-0.5.11-h200/{case}/server.log").read_text()
    found = diagnose(log, code)
    assert found.failure is failure
    assert found.evidence and "sigquit" not in found.evidence.lower()


@pytest.mark.parametrize("case", ["0.5.17-h200/tiny-plain", "0.5.17-h200/tiny-mtp-eagle"])
def test_a_killed_scheduler_is_a_crash(case: str) -> None:
    log = shared(f"captures/sglang-{case}/server.log").read_text()
    assert diagnose(log, -9).failure is Failure.SCHEDULER_CRASHED


RECORDED_STARTS = [
    # case, available, weights, states, KV tokens, running, free, draft graphs
    ("0.5.11-h200/27b-default/server.log", 139.13, 51.05, 216, 567_278, 72, 21.79, False),
    ("0.5.11-h200/27b-mem-too-high/server.log", 139.13, 51.05, 286, 747_753, 95, 0.60, False),
    ("0.5.11-h200/27b-mtp-default/server.log", 139.13, 51.05, 113, 297_057, 22, 37.57, True),
    ("0.5.11-h200/tiny-mtp-nextn/server.log", 139.13, 0.18, 48, 10_834_963, 48, 55.43, True),
    ("0.5.17-h200/tiny-plain/server.log", 137.61, 0.18, 78_212, 17_076_779, 4096, 11.90, False),
    ("0.5.17-h200/tiny-mtp-eagle/server.log", 137.61, 0.18, 14_358, 7_863_788, 48, 65.25, True),
    ("0.5.17-h200/bench/27b-mtp3-decode.log", 139.13, 51.05, 64, 224_863, 64, 24.69, True),
    ("0.5.17-h200/bench/27b-mtp1-decode.log", 139.13, 51.05, 32, 757_846, 32, 23.38, True),
]


@pytest.mark.parametrize("row", RECORDED_STARTS, ids=lambda row: row[0])
def test_recorded_starts(row: tuple[str, float, float, int, int, int, float, bool]) -> None:
    case, available, weights, states, tokens, running, free, drafted = row
    facts = read_facts(shared(f"captures/sglang-{case}").read_text())
    assert facts.milestone == "ready"
    assert (facts.available_gb, facts.weights_gb, facts.state_slots) == (available, weights, states)
    assert (facts.kv_tokens, facts.max_running_requests, facts.free_gb) == (tokens, running, free)
    assert facts.draft_graphs is drafted
    assert (facts.draft_gb is not None) is drafted


def test_milestones_come_in_order() -> None:
    log = shared("captures/sglang-0.5.17-h200/tiny-mtp-eagle/server.log").read_text()
    seen = []
    for end in range(0, len(log), 400):
        name = milestone(log[:end])
        if name and name not in seen:
            seen.append(name)
    assert seen[:3] == ["arguments", "loading weights", "weights loaded"]
    assert seen[-1] == "ready"
    assert len(seen) >= 7


LOADED = (
    "Load weight begin. avail mem=94.5 GB\nLoad weight end. elapsed=9 s, type=X, avail mem=43.0 GB, mem usage=51.0 GB\n"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TABLE = [
    ("launch_server.py: error: unrecognized arguments: --mamba-scheduler-strategy extra_buffer", Failure.UNKNOWN_FLAG),
    ("launch_server.py: error: argument --tool-call-parser: invalid choice: 'x'", Failure.UNKNOWN_FLAG),
    (LOADED + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
     "mem_fraction_static=0.8", Failure.FRACTION_TOO_LOW),
    ("Spec v2 is enabled by default\n" + LOADED + "Not enough memory. Please try to increase --mem-fraction-static.",
     Failure.TOO_MANY_REQUESTS),
    (LOADED + "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5. Raise "
     "--mem-fraction-static above 0.612 (minimum viable = 0.612).", Failure.FRACTION_TOO_LOW),
    (LOADED + "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size=0",
     Failure.STATE_CACHE_TOO_SMALL),
    (LOADED + "Hybrid (mamba/linear-attention) state cache is too small to serve any requests.",
     Failure.STATE_CACHE_TOO_SMALL),
    (LOADED + "Capture cuda graph begin.\nCapture cuda graph failed: CUDA out of memory", Failure.OOM_GRAPHS),
    (LOADED + "Memory pool end. avail mem=1 GB\nCapture draft cuda graph begin.\n" + OOM, Failure.OOM_GRAPHS),
    (LOADED + OOM, Failure.OOM_POOLS),
    ("Load weight begin. avail mem=23 GB\n" + OOM, Failure.OOM_WEIGHTS),
    (LOADED + "The server is fired up and ready to roll!\n" + OOM, Failure.OOM_RUNNING),
    ("Prefill out of memory. Try to lower your batch size.", Failure.OOM_RUNNING),
    ("alloc_req_slots runs out of memory. Please set a smaller number", Failure.OOM_RUNNING),
    ("Not enough space for mamba cache, try to increase --mamba-full-memory-ratio", Failure.OOM_RUNNING),
    ("The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", Failure.GPU_OCCUPIED),
    ("Not enough host memory available. Requesting 90 GB but only have 20 GB free.", Failure.HOST_MEMORY),
    ("ValueError: mamba extra_buffer is not compatible with --disable-radix-cache Overlap scheduling is already",
     Failure.STRATEGY_WITHOUT_RADIX),
    (LOADED + "Capture prefill CUDA graph failed: CUDA out of memory.", Failure.OOM_GRAPHS),
    ("OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
     Failure.PORT_TAKEN),
    ("/usr/bin/python: No module named sglang", Failure.NO_MODULE),
    ("RuntimeError: No CUDA GPUs are available", Failure.NO_DRIVER),
    ("OSError: /models/none is not a local folder and is not a valid model identifier", Failure.MODEL_MISSING),
    ("Initialization failed. warmup error: Traceback", Failure.WARM_UP),
    ("Scheduler hit an exception: Traceback (most recent call last):\nAttributeError: x", Failure.SCHEDULER_CRASHED),
    ("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
     Failure.SCHEDULER_CRASHED),
    ("nothing that is known", Failure.UNKNOWN),
]  # fmt: skip
END = "\n[2026-11-30 19:16:15] Received sigquit from a child process. It usually means the child failed.\n"


@pytest.mark.parametrize(("log", "failure"), TABLE, ids=[f"{i}-{f.name}" for i, (_, f) in enumerate(TABLE)])
def test_each_failure_of_the_table(log: str, failure: Failure) -> None:
    assert diagnose(log + END, -9).failure is failure


def test_the_number_that_a_message_gives_is_kept() -> None:
    log = "Loaded weights leave no GPU memory for the KV cache. Raise --mem-fraction-static above 0.612 (minimum viable"
    assert diagnose(log, -9).hint == pytest.approx(0.612)


def test_a_fraction_above_that_number_means_too_many_requests() -> None:
    # 0.5.17 prints what the weights need even when the states of too many requests took the rest.
    log = "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.9. "
    found = diagnose(log + "Raise --mem-fraction-static above 0.407 (minimum viable = 0.4066).", -9)
    assert (found.failure, found.hint) == (Failure.TOO_MANY_REQUESTS, None)


def test_the_unknown_flag_is_named() -> None:
    assert diagnose("x: error: unrecognized arguments: --tool-call-parser qwen", 2).flag == "--tool-call-parser"


def test_a_running_process_that_is_not_ready_timed_out() -> None:
    found = diagnose(LOADED, None)
    assert (found.failure, found.evidence) == (Failure.TIMEOUT, "weights loaded")


def test_an_empty_log_is_no_crash() -> None:
    assert diagnose("", 1).failure is Failure.UNKNOWN
    assert read_facts("").as_dict() == {"draft_graphs": False, "speculation_noted": False}

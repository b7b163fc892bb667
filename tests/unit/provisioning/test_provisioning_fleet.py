"""A fleet from a stand-in for SGLang: every way to start, fail, hang, crash and end."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioning_fleets import LOADED, OOM, RESERVE, SERVE, Bench, Listener, flag, until
from provisioning_helpers import fake_gpu, write_interpreter
from tasks.errors import ServerError
from tasks.provisioning.fleet import open_fleet
from tasks.provisioning.mtp import Verdict, mtp_gate
from tasks.provisioning.settings import MtpSettings, ServingSettings
from tasks.provisioning.supervisor import start_ticks
from tasks.provisioning.wire import call
from tasks.records import GpuFacts
from tasks.runs import read_json
from tasks.settings import TargetSettings


def test_a_server_starts_with_mtp_and_ends_with_the_fleet(bench: Bench) -> None:
    fleet = bench.open()
    server = fleet.servers[0]
    assert (server.engine, server.version, server.name) == ("sglang", "0.5.17", "server-0")
    assert server.max_running_requests == int(flag(bench.starts()[0], "--max-running-requests")) >= 44
    assert server.arguments["speculative_algorithm"] == "EAGLE"
    assert server.base_url.startswith("http://127.0.0.1:")
    assert server.gpu_uuids and bench.starts()[0]["gpus"] == server.gpu_uuids[0]
    assert fleet.records[0]["outcome"] == "ready" and "server-0: ready" in bench.said
    running = fleet.members[0].running
    assert running is not None and running.pid is not None
    fleet.close()
    assert start_ticks(running.pid) is None
    assert call(server.base_url + "/health").status == 0


def test_the_key_is_asked_for_and_stands_nowhere(bench: Bench) -> None:
    fleet = bench.open()
    server = fleet.servers[0]
    assert len(server.api_key) >= 24
    assert call(server.base_url + "/server_info").status == 401
    fleet.close()
    texts = [path.read_text() for path in bench.paths.run_dir.rglob("*") if path.is_file()]
    assert texts and not any(server.api_key in text for text in [*texts, repr(fleet.records), repr(server)])
    assert "***" in "".join(texts)


def test_verdicts_with_and_without_mtp(bench: Bench) -> None:
    on = mtp_gate(bench.open().servers, MtpSettings())
    assert (on.verdict, on.stops) == (Verdict.ON_AND_EFFECTIVE, False)
    bench.fleets.pop().close()
    plain = bench.open({"serve": True, "accept_length": None}, mtp=False)
    assert "--speculative-algorithm" not in bench.starts()[-1]["flags"]
    assert mtp_gate(plain.servers, MtpSettings(), wanted=False).verdict == Verdict.OFF
    off = mtp_gate(plain.servers, MtpSettings(), wanted=True)
    assert (off.verdict, off.stops) == (Verdict.OFF, True)


@pytest.mark.parametrize(
    ("failure", "changed"),
    [
        ({"log": RESERVE, "exit": -9}, ("--max-running-requests", lambda a, b: int(b) < int(a))),
        ({"log": OOM, "exit": -9}, ("--mem-fraction-static", lambda a, b: float(b) < float(a))),
        (
            {"log": LOADED + "Not enough memory. Please try to increase --mem-fraction-static.", "exit": -9},
            ("--mem-fraction-static", lambda a, b: float(b) > float(a)),
        ),
        (
            {
                "log": LOADED + "Hybrid (mamba/linear-attention) state cache is too small to serve any requests.",
                "exit": 1,
            },
            ("--max-running-requests", lambda a, b: int(b) < int(a)),
        ),
        (
            {"log": LOADED + "Capture cuda graph begin.\nCapture cuda graph failed: CUDA out of memory", "exit": -9},
            ("--mem-fraction-static", lambda a, b: float(b) < float(a)),
        ),
        (
            {"log": "[Errno 98] error while attempting to bind on address: address already in use", "exit": 1},
            ("--port", lambda a, b: a != b),
        ),
        ({"log": "Initialization failed. warmup error: x", "exit": 1}, ("--port", lambda a, b: a == b)),
        ({"log": "Scheduler hit an exception: Traceback", "exit": -9}, ("--port", lambda a, b: a == b)),
        ({"log": "who knows", "exit": 7}, ("--port", lambda a, b: a == b)),
    ],
)
def test_each_recoverable_failure_is_recovered_by_the_ladder(
    bench: Bench, failure: dict[str, Any], changed: tuple[str, Callable[[str, str], bool]]
) -> None:
    fleet = bench.open(failure, SERVE)
    first, second = bench.starts()
    name, holds = changed
    assert holds(flag(first, name), flag(second, name))
    assert [record["outcome"] for record in fleet.records] == ["failed", "ready"]
    assert fleet.records[0]["failure"] and fleet.records[0]["evidence"]
    assert fleet.records[0]["failure"] in fleet.records[1]["reason"]
    assert read_json(bench.paths.record)["server_starts"] == fleet.records


def test_an_unknown_optional_flag_is_left_out(bench: Bench) -> None:
    bench.open({"log": "error: unrecognized arguments: --mm-feature-transport cpu", "exit": 2}, SERVE)
    assert "--mm-feature-transport" not in bench.starts()[1]["flags"]


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ({"log": "Load weight begin. avail mem=9 GB\nCUDA out of memory.", "exit": -9}, "larger card"),
        (
            {"log": "The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", "exit": 1},
            "end the",
        ),
        ({"log": "/x/python: No module named sglang", "exit": 1}, "install sglang"),
        ({"log": "RuntimeError: No CUDA GPUs are available", "exit": 1}, "nvidia-smi"),
    ],
)
def test_hopeless_failures_end_at_once_with_advice(bench: Bench, failure: dict[str, Any], advice: str) -> None:
    with pytest.raises(ServerError, match=advice) as caught:
        bench.open(failure)
    assert len(bench.starts()) == 1
    assert caught.value.log_path and Path(caught.value.log_path).exists()


def test_tries_are_limited_and_recorded(bench: Bench) -> None:
    with pytest.raises(ServerError, match="after 3 attempt"):
        bench.open({"log": RESERVE, "exit": -9}, start_attempts=3)
    records = read_json(bench.paths.record)["server_starts"]
    assert [r["outcome"] for r in records] == ["failed"] * 3
    assert len({r["config"]["max_running"] for r in records}) == 3


def test_a_start_that_takes_too_long_is_ended(bench: Bench) -> None:
    with pytest.raises(ServerError, match="not ready in time"):
        bench.open({"serve": True, "ready_after_s": 60}, start_timeout_s=1.0)


def test_a_silently_clamped_limit_is_a_warning(bench: Bench) -> None:
    fleet = bench.open({"serve": True, "running": 22})
    assert fleet.servers[0].max_running_requests == 22
    assert "the state cache capped them" in fleet.records[0]["warnings"][0]


def test_a_killed_server_is_noticed_and_comes_back(bench: Bench) -> None:
    fleet = bench.open({"serve": True, "child": True}, SERVE)
    listener = Listener()
    fleet.subscribe(listener)
    before = fleet.servers[0]
    running = fleet.members[0].running
    assert running is not None and running.pid is not None
    os.kill(running.pid, signal.SIGKILL)
    assert until(lambda: ("up", "server-0") in listener.told), listener.told
    assert listener.told[0][0] == "down" and "-9" in listener.told[0][1]
    after = fleet.servers[0]
    assert (after.base_url, after.api_key, after.name) == (before.base_url, before.api_key, before.name)
    assert after.log_path != before.log_path
    assert [event["event"] for event in fleet.check()] == ["server.down", "server.up"]
    assert "restart 1" in fleet.records[-1]["reason"]


def test_a_server_that_ran_out_of_memory_comes_back_smaller(bench: Bench) -> None:
    fleet = bench.open()
    listener = Listener()
    fleet.subscribe(listener)
    server = fleet.servers[0]
    assert server.log_path is not None
    with Path(server.log_path).open("a") as log:
        log.write("Decode out of memory. Try to lower your batch size.\n")
    call(server.base_url + "/fake", {"exit": 3})
    assert until(lambda: ("up", "server-0") in listener.told), listener.told
    first, second = bench.starts()
    assert float(flag(second, "--mem-fraction-static")) < float(flag(first, "--mem-fraction-static"))
    assert "out of GPU memory while running" in fleet.records[-1]["reason"]
    fleet.close()
    record = read_json(bench.paths.record)
    assert len(record["server_starts"]) == 2 and record["server_events"][0]["event"] == "server.down"


def test_a_hung_server_that_still_answers_health_is_restarted(bench: Bench) -> None:
    fleet = bench.open()
    listener = Listener()
    fleet.subscribe(listener)
    assert call(fleet.servers[0].base_url + "/fake", {"hang": True}).ok
    assert call(fleet.servers[0].base_url + "/health").ok, "it answers 200 though it hangs"
    assert until(lambda: ("up", "server-0") in listener.told, 25), listener.told
    assert "heartbeat" in listener.told[0][1] or "not one token" in listener.told[0][1]


def test_the_restart_budget_ends(bench: Bench) -> None:
    fleet = bench.open(SERVE, {"log": "who knows", "exit": 1}, restart_budget=1, start_attempts=1)
    events: list[dict[str, Any]] = []
    fleet.on_event(events.append)
    assert call(fleet.servers[0].base_url + "/fake", {"exit": 3}).status == 0
    assert until(lambda: any(event["event"] == "server.lost" for event in events))
    with pytest.raises(ServerError, match="every server is lost"):
        fleet.check()


def test_gpu_memory_is_seen_to_be_free_before_a_restart(bench: Bench) -> None:
    reads: list[float] = []
    held = fake_gpu(free_gib=10)

    def read() -> list[GpuFacts]:
        reads.append(time.monotonic())
        # Two reads while it opens; after the crash the memory stays held for two reads more.
        return [held if 2 < len(reads) <= 5 else fake_gpu()]

    python = write_interpreter(bench.folder / "env", [SERVE])
    serving = ServingSettings(python=str(python), hang_timeout_s=3.0)
    target = TargetSettings(model=str(bench.model))
    fleet = open_fleet(serving, target, bench.paths, max_tokens=4096, gpus=read)
    bench.fleets.append(fleet)
    listener = Listener()
    fleet.subscribe(listener)
    call(fleet.servers[0].base_url + "/fake", {"exit": 3})
    assert until(lambda: ("up", "server-0") in listener.told)
    assert len(reads) >= 6


def test_one_server_a_gpu_each_with_its_own_port_log_key_and_gpu(bench: Bench) -> None:
    fleet = bench.open(gpus=[fake_gpu(i) for i in range(3)])
    servers = fleet.servers
    assert [server.name for server in servers] == ["server-0", "server-1", "server-2"]
    for name in ("base_url", "api_key", "log_path", "gpu_uuids"):
        assert len({getattr(server, name) for server in servers}) == 3, name
    assert sorted(start["gpus"] for start in bench.starts()) == sorted(fake_gpu(i).uuid for i in range(3))


BROKEN = {"log": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "exit": 1}


@pytest.mark.parametrize("broken", [0, 2])
def test_a_gpu_that_cannot_start_is_left_out_when_fewer_servers_are_enough(bench: Bench, broken: int) -> None:
    gpus = [fake_gpu(i) for i in range(3)]
    behaviours = [SERVE, SERVE, SERVE]
    behaviours[broken] = BROKEN
    by_gpu = {gpu.uuid: behaviour for gpu, behaviour in zip(gpus, behaviours, strict=True)}
    fleet = bench.open(SERVE, gpus=gpus, min_servers=2, env={"FAKE_BY_GPU": json.dumps(by_gpu)})
    assert [server.name for server in fleet.servers] == [f"server-{i}" for i in range(3) if i != broken]
    assert [(e["event"], e["server"], e["gpus"]) for e in fleet.events] == [
        ("server.lost_at_start", f"server-{broken}", [gpus[broken].uuid])
    ]
    assert "server" in fleet.events[0]["reason"] and any("goes on without it" in line for line in bench.said)


def test_by_default_every_gpu_must_start(bench: Bench) -> None:
    gpus = [fake_gpu(i) for i in range(2)]
    by_gpu = {gpus[1].uuid: BROKEN}
    with pytest.raises(ServerError):
        bench.open(SERVE, gpus=gpus, env={"FAKE_BY_GPU": json.dumps(by_gpu)})


def test_gpus_can_be_chosen(bench: Bench) -> None:
    fleet = bench.open(gpus=[fake_gpu(i) for i in range(3)], indices=(2, 0))
    assert [server.gpu_uuids for server in fleet.servers] == [(fake_gpu(2).uuid,), (fake_gpu(0).uuid,)]
    with pytest.raises(ServerError, match=r"\[7\]"):
        bench.open(gpus=[fake_gpu(0)], indices=(7,))

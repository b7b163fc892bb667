"""Fleets during a run: restarts, budgets, closing."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest

from provisioning_fleets import SERVE, Bench, Listener, flag, until
from provisioning_helpers import fake_gpu, write_interpreter
from tasks.errors import ServerError, SpecError
from tasks.provisioning.fleet import open_fleet, open_fleet_async, resolve
from tasks.provisioning.parity import compare
from tasks.provisioning.settings import MtpSettings, ServingSettings
from tasks.provisioning.supervisor import start_ticks
from tasks.provisioning.wire import call
from tasks.settings import TargetSettings


def test_tensor_parallel_groups_where_one_gpu_is_too_small(bench: Bench) -> None:
    fleet = bench.open(gpus=[fake_gpu(i, free_gib=44) for i in range(4)])
    assert len(fleet.servers) == 2
    assert flag(bench.starts()[0], "--tp-size") == "2"
    assert all(len(server.gpu_uuids) == 2 for server in fleet.servers)


def test_what_does_not_fit_is_said_before_anything_starts(bench: Bench) -> None:
    with pytest.raises(ServerError, match="What would make it fit"):
        bench.open(gpus=[fake_gpu(free_gib=44)])
    assert not (bench.folder / "env" / "starts").exists()


def test_last_resorts_only_where_allowed(bench: Bench) -> None:
    bench.open(gpus=[fake_gpu(free_gib=44)], allow_fp8=True)
    assert flag(bench.starts()[0], "--quantization") == "fp8"


def test_a_key_of_the_user_is_used_and_blanked_like_ours(bench: Bench) -> None:
    fleet = bench.open(extra_args=("--api-key", "their-own-key", "--load-format", "dummy"))
    assert fleet.servers[0].api_key == "their-own-key"
    assert "their-own-key" not in repr(fleet.records) and flag(bench.starts()[0], "--load-format") == "dummy"


@pytest.mark.parametrize("word", ["--port=1", "--host"])
def test_ports_and_addresses_are_ours(bench: Bench, word: str) -> None:
    with pytest.raises(SpecError, match="every server gets its own"):
        bench.open(extra_args=(word, "0.0.0.0"))


def test_a_restart_keeps_the_port_that_clients_know(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.provisioning.start.PORT_WAIT_S", 0.1)
    fleet = bench.open(SERVE, {"log": "[Errno 98] x: address already in use", "exit": 1}, SERVE)
    listener = Listener()
    fleet.subscribe(listener)
    before = fleet.servers[0].base_url
    call(before + "/fake", {"exit": 3})
    assert until(lambda: ("up", "server-0") in listener.told), listener.told
    assert fleet.servers[0].base_url == before and len({flag(start, "--port") for start in bench.starts()}) == 1


def test_simulated_acceptance_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="SGLANG_SIMULATE_ACC_LEN is set"):
        bench.open(env={"SGLANG_SIMULATE_ACC_LEN": "3"})
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_METHOD", "multinomial")
    with pytest.raises(ServerError, match="SGLANG_SIMULATE_ACC_METHOD"):
        bench.open()
    allowed = bench.open(simulate=3.0)
    assert allowed.simulated and allowed.servers[0].simulated_acceptance


def test_a_gpu_in_use_by_another_run_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    monkeypatch.setattr("tasks.provisioning.fleet.LOCK_WAIT_S", 0.2)
    with pytest.raises(ServerError, match="is in use by"):
        bench.open()


def test_the_ladder_may_not_change_data_that_has_begun(bench: Bench) -> None:
    (bench.paths.chunk(0)).mkdir(parents=True)
    (bench.paths.chunk(0) / "journal").write_bytes(b"x")
    log = "Load weight begin. avail mem=9 GB\nCUDA out of memory."
    with pytest.raises(ServerError, match="weights do not fit"):
        bench.open({"log": log, "exit": -9}, SERVE, allow_fp8=True)


def test_what_the_ladder_changed_is_remembered_for_the_resumed_run(bench: Bench) -> None:
    log = "Load weight begin. avail mem=9 GB\nCUDA out of memory."
    fleet = bench.open({"log": log, "exit": -9}, SERVE, allow_fp8=True)
    assert fleet.changes_data == {"target.quantization": "fp8"}
    fleet.close()
    again = bench.open(SERVE)
    assert again.changes_data == {"target.quantization": "fp8"}
    assert flag(bench.starts()[-1], "--quantization") == "fp8"


def test_parity_canary_starts_once_without_speculation(bench: Bench) -> None:
    fleet = bench.open(knobs=MtpSettings(parity_canary=True))
    first, second = bench.starts()
    assert "--speculative-algorithm" not in first["flags"] and "--speculative-algorithm" in second["flags"]
    report = compare(fleet.servers, fleet.parity_reference, MtpSettings())
    assert report.verdict == "SAME" and fleet.plain_tok_s
    changed = dict.fromkeys(fleet.parity_reference, "another answer")
    assert compare(fleet.servers, changed, MtpSettings()).verdict == "DIFFERENT"


def test_attach_describes_and_watches_without_ending(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = bench.open()
    server = owner.servers[0]
    monkeypatch.setenv("REGEN_API_KEY", server.api_key)
    serving = ServingSettings(mode="attach", urls=(server.base_url + "/v1/",), hang_timeout_s=2.0)
    attached = open_fleet(serving, TargetSettings(model="x"), bench.paths, max_tokens=64)
    assert attached.servers[0].base_url == server.base_url
    assert attached.servers[0].model == str(bench.model)
    assert attached.servers[0].engine == "sglang"
    attached.close()
    assert call(server.base_url + "/health").ok


def test_attach_sees_a_server_go_and_come(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = bench.open()
    monkeypatch.setenv("REGEN_API_KEY", owner.servers[0].api_key)
    serving = ServingSettings(mode="attach", urls=(owner.servers[0].base_url,), hang_timeout_s=1.0)
    attached = open_fleet(serving, TargetSettings(model="x"), bench.paths, max_tokens=64)
    bench.fleets.append(attached)
    listener = Listener()
    attached.subscribe(listener)
    monkeypatch.setattr("tasks.provisioning.keeper.backoff_s", lambda restarts: 2.0)
    call(owner.servers[0].base_url + "/fake", {"exit": 3})  # its owner brings it back
    assert until(lambda: [kind for kind, _ in listener.told] == ["down", "up"]), listener.told


def test_urls_and_names_become_base_urls() -> None:
    assert resolve(["http://a:1/v1", "b:2", "http://a:1"]) == ["http://a:1", "http://b:2"]
    assert "http://127.0.0.1:30000" in resolve(["dns://localhost:30000"])
    with pytest.raises(ServerError, match="does not resolve"):
        resolve(["dns://no-such-name.invalid:1"])


def test_a_cancelled_start_ends_its_server(bench: Bench) -> None:
    python = write_interpreter(bench.folder / "env", [{"serve": True, "ready_after_s": 60}])
    serving = ServingSettings(python=str(python))

    async def cancelled() -> None:
        target = TargetSettings(model=str(bench.model))
        opening = asyncio.ensure_future(
            open_fleet_async(serving, target, bench.paths, max_tokens=64, gpus=[fake_gpu()])
        )
        while not (bench.folder / "env" / "starts").exists():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(cancelled())
    states = list((bench.folder / "node" / "servers").glob("*.json"))
    assert states == []


FLOW = """
import json, sys, time
from pathlib import Path
from tasks.provisioning.fleet import open_fleet
from tasks.provisioning.settings import ServingSettings
from tasks.records import GpuFacts
from tasks.runs import RunPaths
from tasks.settings import TargetSettings
python, model, folder = sys.argv[1:]
gpus = [GpuFacts(i, f"GPU-flow-{i}", 143771 << 20, 139 << 30) for i in range(2)]
fleet = open_fleet(ServingSettings(python=python), TargetSettings(model=model), RunPaths(Path(folder), "r9"),
                   max_tokens=64, gpus=gpus)
print(json.dumps([member.running.pid for member in fleet.members]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_server_outlives_a_killed_flow(bench: Bench, number: signal.Signals) -> None:
    python = write_interpreter(bench.folder / "env", [{"serve": True, "child": True}])
    command = [sys.executable, "-c", FLOW, str(python), str(bench.model), str(bench.folder / "flow")]
    flow = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert flow.stdout is not None
    pids = json.loads(flow.stdout.readline())
    assert len(pids) == 2 and all(start_ticks(pid) for pid in pids)
    flow.send_signal(number)
    flow.wait(10)
    flow.stdout.close()
    assert until(lambda: all(start_ticks(pid) is None for pid in pids))


def test_closing_twice_and_during_a_restart_is_safe(bench: Bench) -> None:
    fleet = bench.open(SERVE, {"serve": True, "ready_after_s": 60})
    call(fleet.servers[0].base_url + "/fake", {"exit": 3})
    assert until(lambda: len(bench.starts()) == 2)
    closing = threading.Thread(target=fleet.close)
    closing.start()
    fleet.close()
    closing.join(30)
    assert not closing.is_alive()
    left = [path.read_text() for path in (bench.folder / "node" / "servers").glob("*.json")]
    assert left == []

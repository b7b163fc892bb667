"""The sampler: what it keeps, what a crash leaves, what it costs."""

import time

import pyarrow.parquet as pq
import pytest

from power_fakes import UUID, FakeSensor, info
from tasks.errors import SensorError
from tasks.power.sampler import (
    COMPACT_PARTS,
    SCHEMA,
    PowerSampler,
    merge_parts,
    parts_dir,
    read_power,
    samples_from,
    write_part,
)
from tasks.records import PowerSample


def reading(time_s: float, **changes) -> PowerSample:
    return PowerSample(time_s=time_s, gpu_uuid=UUID, **{"power_average_w": 480.0, **changes})


def wait_for(condition, timeout_s: float = 20.0) -> None:
    """The machine may be busy: wait for what must come, not for a time in which it usually does."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_run_is_one_file_with_the_explicit_schema(tmp_path):
    path = tmp_path / "power.parquet"
    with PowerSampler(path, FakeSensor(), hz=20, part_s=0.2) as sampler:
        wait_for(lambda: len(sampler.window(10)) >= 8)
        assert sampler.mean_power_w(time.time() - 10) == pytest.approx(480.0)
    assert not parts_dir(path).exists()
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    times = table["time_s"].to_pylist()
    assert len(times) >= 8
    assert times == sorted(times)
    assert samples_from(table)[0].enforced_limit_w == 700.0


def test_a_second_run_appends(tmp_path):
    path = tmp_path / "power.parquet"
    for _ in range(2):
        with PowerSampler(path, FakeSensor(), hz=20) as sampler:
            wait_for(lambda sampler=sampler: len(sampler.window(10)) >= 2)
    rows = read_power(path).num_rows
    assert rows >= 4
    assert len(set(read_power(path)["time_s"].to_pylist())) == rows


def test_what_was_flushed_survives_a_kill(tmp_path):
    """A killed sampler never merges: the parts are readable, and the next one folds them in."""
    path = tmp_path / "power.parquet"
    write_part(path, [reading(1.0), reading(1.2)])
    write_part(path, [reading(1.4)])
    (parts_dir(path) / ".00000002.parquet.99.tmp").write_bytes(b"half a part")
    assert read_power(path)["time_s"].to_pylist() == [1.0, 1.2, 1.4]
    with PowerSampler(path, FakeSensor(), hz=20) as sampler:
        wait_for(lambda: sampler.window(10))
    assert pq.read_table(path)["time_s"].to_pylist()[:3] == [1.0, 1.2, 1.4]
    assert not parts_dir(path).exists()


def test_a_crash_between_merging_and_dropping_parts_doubles_nothing(tmp_path):
    path = tmp_path / "power.parquet"
    part = write_part(path, [reading(1.0), reading(1.2)])
    kept = part.read_bytes()
    merge_parts(path)
    parts_dir(path).mkdir()
    part.write_bytes(kept)
    assert read_power(path)["time_s"].to_pylist() == [1.0, 1.2]
    merge_parts(path)
    assert pq.read_table(path)["time_s"].to_pylist() == [1.0, 1.2]


def test_parts_are_folded_so_that_a_long_run_keeps_few_files(tmp_path):
    path = tmp_path / "power.parquet"
    for minute in range(COMPACT_PARTS + 5):
        write_part(path, [reading(float(minute))])
    assert len(list(parts_dir(path).glob("*.parquet"))) < 10
    assert read_power(path)["time_s"].to_pylist() == [float(m) for m in range(COMPACT_PARTS + 5)]


def test_a_failing_sensor_is_counted_and_sampling_goes_on():
    sensor = FakeSensor()
    with PowerSampler(None, sensor, hz=20) as sampler:
        sensor.fail = SensorError("GPU 0 is lost")
        wait_for(lambda: sampler.errors >= 1)
        sensor.fail = None
        failed_at_s = time.time()
        wait_for(lambda: sampler.since(failed_at_s))
        assert sampler.last_error == "GPU 0 is lost"


def test_a_full_disk_does_not_stop_sampling(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    sampler = PowerSampler(blocked / "power.parquet", FakeSensor(), hz=20, part_s=0.05)
    sampler.__enter__()
    wait_for(lambda: sampler.errors >= 1)
    assert "cannot keep power readings" in (sampler.last_error or "")
    assert sampler.window(1)


def test_without_nvidia_it_does_nothing(tmp_path):
    with PowerSampler(tmp_path / "power.parquet", None) as sampler:
        assert sampler.gpus == []
        assert sampler.window(60) == []
        assert sampler.mean_power_w(0) is None
    assert list(tmp_path.iterdir()) == []


def test_fleet_power_is_the_sum_over_gpus():
    sensor = FakeSensor(infos=[info("GPU-a"), info("GPU-b")])
    with PowerSampler(None, sensor, hz=20) as sampler:
        wait_for(lambda: sampler.mean_power_w(0) == pytest.approx(960.0))


def test_sampling_costs_less_than_a_hundredth_of_a_core(tmp_path):
    """Eight GPUs at 5 Hz with a sensor that costs nothing: our own share (NVML's is measured on a GPU)."""
    write_part(tmp_path / "first.parquet", [reading(1.0)])  # the library's first file costs a quarter of a second, once
    sensor = FakeSensor(infos=[info(f"GPU-{i}", index=i) for i in range(8)])
    with PowerSampler(tmp_path / "power.parquet", sensor, hz=5, part_s=1.0) as sampler:
        time.sleep(3.0)
        share = sampler.cpu_share
    assert 0 < share < 0.01


def test_energy_is_power_over_time():
    sensor = FakeSensor(lambda _: 360.0)
    with PowerSampler(None, sensor, hz=20) as sampler:
        assert PowerSampler(None, None).energy_kwh is None
        wait_for(lambda: len(sampler.window(10)) >= 8)
    readings = sampler.window(60)
    seconds = readings[-1].time_s - readings[0].time_s
    assert sampler.energy_j == pytest.approx(360.0 * seconds)
    assert sampler.energy_kwh == pytest.approx(360.0 * seconds / 3.6e6)

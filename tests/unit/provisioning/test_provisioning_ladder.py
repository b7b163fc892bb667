"""The ladder: which knob each failure turns, and when it stops."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.provisioning.arguments import StartConfig
from tasks.provisioning.ladder import Limits, advice, turn
from tasks.provisioning.settings import MtpSettings
from tasks.provisioning.startup import Diagnosis, Failure

CONFIG = StartConfig(64, 0.93, MtpSettings())
ALL = Limits(allow_bf16=True, allow_fp8=True)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 31.98 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 16.60 GiB is free."
)


NOTHING = Limits()


def step(failure: Failure, config: StartConfig = CONFIG, limits: Limits = NOTHING, evidence: str = "", **more: object):
    return turn(config, Diagnosis(failure, evidence, **more), limits, (config,))  # type: ignore[arg-type]


def test_too_many_requests_lowers_them_before_it_raises_the_fraction() -> None:
    first = step(Failure.TOO_MANY_REQUESTS)
    assert (first.config.max_running, first.config.mem_fraction) == (38, 0.93)
    one = dataclasses.replace(CONFIG, max_running=1)
    assert step(Failure.TOO_MANY_REQUESTS, one).config.mem_fraction > 0.93


def test_a_fraction_that_is_too_low_is_raised_to_the_number_in_the_message() -> None:
    low = dataclasses.replace(CONFIG, mem_fraction=0.5)
    assert step(Failure.FRACTION_TOO_LOW, low).config.mem_fraction == 0.55
    assert step(Failure.FRACTION_TOO_LOW, low, hint=0.612).config.mem_fraction == 0.632


def test_out_of_memory_in_the_pools_lowers_the_fraction_by_what_was_missing() -> None:
    high = dataclasses.replace(CONFIG, mem_fraction=0.876)
    turned = step(Failure.OOM_POOLS, high, evidence=OOM)
    # Keys and values of the draft are 2 × 31.98 GiB, 16.60 were free of 139.80; at 0.63 states of 41, KV of 46 and a
    # draft of 46 GiB fit together.
    assert turned.config.mem_fraction == pytest.approx(0.633, abs=2e-3)


def test_graphs_shrink_after_the_fraction_was_lowered() -> None:
    first = step(Failure.OOM_GRAPHS)
    assert first.config.mem_fraction == 0.88
    frozen = Limits(fixed_flags=frozenset({"--mem-fraction-static"}))
    second = step(Failure.OOM_GRAPHS, limits=frozen)
    assert second.config.graph_size == 32 and not second.config.prefill_graph


def test_graphs_of_the_prefill_go_first_where_they_failed() -> None:
    turned = step(Failure.OOM_GRAPHS, evidence="Capture prefill CUDA graph failed: CUDA out of memory")
    assert not turned.config.prefill_graph and turned.config.mem_fraction == 0.93


def test_weights_that_do_not_fit_need_permission_for_fp8() -> None:
    assert step(Failure.OOM_WEIGHTS) is None
    allowed = step(Failure.OOM_WEIGHTS, limits=ALL)
    assert allowed.config.quantization == "fp8" and allowed.changes_data == ("target.quantization",)


def test_nothing_that_changes_the_data_changes_once_there_are_answers() -> None:
    begun = Limits(allow_bf16=True, allow_fp8=True, data_begun=True)
    assert step(Failure.OOM_WEIGHTS, limits=begun) is None
    one = dataclasses.replace(CONFIG, max_running=1, mem_fraction=0.975)
    assert step(Failure.TOO_MANY_REQUESTS, one, begun) is None
    assert step(Failure.TOO_MANY_REQUESTS, one, ALL).config.state_dtype == "bfloat16"


def test_radix_trouble_turns_the_radix_cache_off() -> None:
    radix = dataclasses.replace(CONFIG, radix=True, max_states=320)
    for failure in (Failure.RADIX_WITH_MTP, Failure.STRATEGY_WITHOUT_RADIX):
        turned = step(failure, radix)
        assert not turned.config.radix and turned.config.max_states is None
    hierarchical = dataclasses.replace(CONFIG, hierarchical=True)
    assert not step(Failure.HOST_MEMORY, hierarchical).config.hierarchical


def test_unknown_flags_are_dropped_only_where_they_are_optional() -> None:
    turned = step(Failure.UNKNOWN_FLAG, flag="--mm-feature-transport")
    assert turned.config.dropped == ("--mm-feature-transport",)
    assert step(Failure.UNKNOWN_FLAG, flag="--speculative-algorithm") is None


def test_a_taken_port_is_left_for_another() -> None:
    turned = step(Failure.PORT_TAKEN)
    assert turned.new_port and turned.config == CONFIG


def test_flags_of_the_user_are_not_turned() -> None:
    fixed = Limits(fixed_flags=frozenset({"--max-running-requests", "--mem-fraction-static"}))
    assert step(Failure.TOO_MANY_REQUESTS, limits=fixed) is None


def test_a_crash_is_tried_once_more_unchanged_then_smaller() -> None:
    crash = Diagnosis(Failure.SCHEDULER_CRASHED, "")
    first = turn(CONFIG, crash, Limits(), (CONFIG,))
    assert first is not None and first.config == CONFIG
    second = turn(CONFIG, crash, Limits(), (CONFIG, CONFIG))
    assert second is not None and second.config.max_running == 38


@pytest.mark.parametrize(
    "failure", [Failure.GPU_OCCUPIED, Failure.NO_MODULE, Failure.NO_DRIVER, Failure.MODEL_MISSING, Failure.TIMEOUT]
)
def test_what_no_knob_helps_ends_with_advice(failure: Failure) -> None:
    assert step(failure, limits=ALL) is None
    assert len(advice(failure)) > 20


@given(failures=st.lists(st.sampled_from(list(Failure)), max_size=30), bf16=st.booleans(), fp8=st.booleans())
def test_the_ladder_ends_and_never_repeats_a_changed_configuration(
    failures: list[Failure], bf16: bool, fp8: bool
) -> None:
    config, tried = CONFIG, [CONFIG]
    for failure in failures:
        turned = turn(config, Diagnosis(failure, ""), Limits(bf16, fp8), tuple(tried))
        if turned is None:
            return
        assert 1 <= turned.config.max_running <= config.max_running
        assert 0.1 <= turned.config.mem_fraction <= 0.975
        assert turned.config == config or turned.config not in tried
        assert turned.reason
        config = turned.config
        tried.append(config)

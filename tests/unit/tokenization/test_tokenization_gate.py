"""A chunk that gives nothing stops the run with its reasons; a few short answers do not."""

import pytest

from tasks.errors import GateError
from tasks.records import TokenRecord
from tasks.tokenization.gate import SYSTEMATIC, check_chunk, judge_chunk
from tasks.tokenization.reasons import Reason


def record(rows: int, reasons: dict[str, int]) -> TokenRecord:
    return TokenRecord(7, "x/tokens.parquet", rows, sum(reasons.values()), 0, 0, reasons)


@pytest.mark.parametrize("reason", sorted(SYSTEMATIC))
def test_one_cause_for_all_rows_stops_whatever_their_number(reason: Reason):
    with pytest.raises(GateError, match=reason.value) as caught:
        check_chunk(record(0, {reason.value: 2}))
    assert caught.value.report["verdict"] == "EVERYTHING_REJECTED"
    assert caught.value.report["details"]["rejected"] == "x/tokens_rejected.parquet"
    assert check_chunk(record(1, {reason.value: 2})).verdict == "PASSED"


def test_many_rejects_stop_and_few_may_be_chance():
    assert judge_chunk(record(0, {"TOO_FEW_SUPERVISED_TOKENS": 16})).stops
    assert not judge_chunk(record(0, {"TOO_FEW_SUPERVISED_TOKENS": 2})).stops
    assert not judge_chunk(record(0, {})).stops

"""JSONL: any bytes are rows or rejects, with their line; never an exception, and never another row's trouble."""

import io
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.validation.lines import cut_blocks, parse, rows
from tasks.validation.reasons import Reason, RowError
from tasks.validation.run import validate
from tasks.validation.settings import SourceSettings
from validation_rows import chat

GOOD = orjson.dumps(chat("what is it?"))


@given(st.binary(max_size=300))
def test_byte_soup_is_a_reject_and_never_an_exception(soup: bytes) -> None:
    found = list(rows(soup, 0, max_line=200, last=True))
    lines = [i for i, line in enumerate(soup.removeprefix(b"\xef\xbb\xbf").split(b"\n")) if line.strip()]
    assert [number for number, _ in found] == lines


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), st.just(GOOD)), min_size=1, max_size=12))
def test_soup_between_good_lines_ends_as_rejects_and_the_good_lines_survive(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("soup")
    source = folder / "soup.jsonl"
    source.write_bytes(b"\n".join([GOOD, *lines]) + b"\n")
    result = validate(SourceSettings(paths=(str(source),)), None, folder / "out")
    assert result.kept >= 1
    assert result.rows == result.kept + result.rejected + result.duplicates
    assert result.kept + result.duplicates >= 1 + sum(line == GOOD for line in lines)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "conversations", "prompt", "turns", "role", "from", "content", "value",
                             "tool_calls", "function", "name", "arguments", "tools", "text", "type", "input_ids"]),
            inner,
            max_size=4,
        ),
        max_leaves=25,
    )
)  # fmt: skip
def test_any_json_value_is_kept_or_rejected_with_a_reason(value: object) -> None:
    from tasks.validation.policy import Policy

    policy = Policy(SourceSettings(paths=("x",)), None)
    try:
        assert policy.keep(value).ids
    except RowError as error:
        assert error.reason in Reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": NaN}', Reason.INVALID_JSON),
        (b'{"a": "\\ud800"}', Reason.LONE_SURROGATE),
        (b'{"a": "\xff"}', Reason.INVALID_UTF8),
        (b'{"a": ', Reason.INVALID_JSON),
        (b"[" * 5000, Reason.INVALID_JSON),
    ],
)
def test_each_fault_of_a_line_has_its_reason(line: bytes, reason: Reason) -> None:
    with pytest.raises(RowError) as caught:
        parse(line)
    assert caught.value.reason is reason


def test_only_newline_ends_a_line_and_a_mark_at_the_start_is_dropped() -> None:
    text = "one\u2028still one\u0085and on"
    data = b"\xef\xbb\xbf" + orjson.dumps(chat(text)) + b"\r\n\r\n" + orjson.dumps(chat("two")) + b"\r\n"
    found = list(rows(data, 0, max_line=1000, last=False))
    assert [number for number, _ in found] == [0, 2]
    assert found[0][1]["messages"][0]["content"] == text


def test_big_integers_in_tool_arguments_stay_exact() -> None:
    line = b'{"messages": [], "tools": [{"x": 123456789012345678901234567890}]}'
    assert parse(line)["tools"][0]["x"] == 123456789012345678901234567890


def test_a_torn_last_line_is_told_from_a_broken_one() -> None:
    found = dict(rows(GOOD + b'\n{"a": tr\n{"messages": [', 0, max_line=1000, last=True))
    assert found[1].reason is Reason.INVALID_JSON
    assert found[2].reason is Reason.TORN_LINE


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.integers(1, 60))
def test_blocks_join_to_the_file_and_count_its_lines(lines: list[bytes], block: int) -> None:
    data = b"\n".join(lines)
    blocks = list(cut_blocks(io.BytesIO(data), keep_data=True, max_line=10_000, block_bytes=block))
    assert b"".join(b.data or b"" for b in blocks) == data
    for b in blocks:
        assert data[: b.start].count(b"\n") == b.first_row
        assert b.last == (b is blocks[-1] and not data.endswith(b"\n"))


def test_an_endless_line_is_skipped_without_being_held() -> None:
    data = GOOD + b"\n" + b"x" * 5000 + b"\n" + GOOD + b"\n"
    blocks = list(cut_blocks(io.BytesIO(data), keep_data=True, max_line=500, block_bytes=256))
    oversize = [b for b in blocks if b.oversize]
    assert [b.first_row for b in oversize] == [1]
    assert max(len(b.data or b"") for b in blocks) < 1000
    assert blocks[-1].first_row == 2 and blocks[-1].data == GOOD + b"\n"


def test_a_line_over_the_limit_is_one_reject(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    source.write_bytes(GOOD + b"\n" + orjson.dumps(chat("y" * 5000)) + b"\n" + orjson.dumps(chat("z")) + b"\n")
    result = validate(SourceSettings(paths=(str(source),), max_line_bytes=2048), None, tmp_path / "out")
    assert (result.rows, result.kept, dict(result.reasons)) == (3, 2, {"LINE_TOO_LONG": 1})

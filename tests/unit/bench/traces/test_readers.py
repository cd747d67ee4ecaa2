"""Trace files of each format, made up here; and the public ones where they are at hand."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import TraceRequest
from elastic.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:59.5000000,480,10\r
2023-11-17 00:00:00.0000010,318,8\r
2023-11-17 00:00:01.2500000,7,0\r
2023-11-17 00:00:02.5000000,100,20"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,0,0,0,Conversation log
45,GPT-4,1087,230,1317,API log
45,GPT-4,11,12,23,API log
46,GPT-4,21,22,43,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,a,1.0,ChatGPT,472,18,490,Conversation log
5.0,b,1.0,ChatGPT,1,2,3,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""
PUBLIC = Path(os.environ.get("ELASTIC_TRACES", Path(__file__).parents[4] / "traces"))


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_azure_counts_from_its_first_row(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    trace = read_trace(path)
    assert trace.requests == (
        TraceRequest(0.0, 480, 10),
        TraceRequest(0.500001, 318, 8),
        TraceRequest(3.0, 100, 20),
    )
    assert trace.dropped == 1
    assert trace.source == "trace"
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert trace.described()["sha256"] == trace.sha256


def test_burstgpt_spreads_the_requests_of_a_second_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    trace = read_trace(path, seed=3)
    assert trace.dropped == 1
    first, second, third, last = trace.requests
    assert 5 <= first.arrival_s < 6
    assert 45 <= second.arrival_s < 45.5 <= third.arrival_s < 46 <= last.arrival_s < 47
    assert [r.prompt_tokens for r in trace.requests] == [472, 1087, 11, 21]
    assert trace == read_trace(path, seed=3)
    assert trace != read_trace(path, seed=4)


def test_burstgpt_with_sessions_and_fractions_is_taken_as_it_is(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, BURSTGPT_3))
    assert trace.requests == (TraceRequest(5.0, 1, 2), TraceRequest(5.5, 472, 18))


def test_mooncake_is_in_milliseconds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.requests == (TraceRequest(0.0, 6758, 500), TraceRequest(3.052, 7322, 490))


AZURE_HEADER = AZURE.splitlines()[0] + "\n"
GOOD_MOONCAKE = json.dumps({"timestamp": 1, "input_length": 1, "output_length": 1}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: '' is no header of a known trace"),
        ("time,tokens\n1,2\n", "line 1: 'time,tokens' is no header"),
        (AZURE_HEADER, "there is no request in it"),
        (AZURE_HEADER + "2023-11-16 18:17:03,5,0\n", "none of its 1 requests has tokens of a prompt and of an output"),
        (AZURE_HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP 'yesterday' is not a time"),
        (AZURE_HEADER + "2023-11-16 18:17:03,many,2\n", "line 2: ContextTokens 'many' is not a number of tokens"),
        (AZURE_HEADER + "2023-11-16 18:17:03,1,-2\n", "line 2: GeneratedTokens '-2' must be a whole number"),
        (AZURE_HEADER + "2023-11-16 18:17:03,1,2\n\n2023-11-16 18:17:03,1\n", "line 4: it has not as many columns"),
        (AZURE_HEADER + "2023-11-16 18:17:03,1,2,3\n", "line 2: it has not as many columns"),
        (AZURE_HEADER + f"2023-11-16 18:17:03,1,{'9' * 400}\n", "line 2: GeneratedTokens '9{39} must be .* 64 bits"),
        (BURSTGPT + "soon,ChatGPT,1,2,3,API log\n", "line 7: Timestamp 'soon' is not a time"),
        (BURSTGPT + "-1,ChatGPT,1,2,3,API log\n", "line 7: Timestamp '-1' must be a finite number, not below 0"),
        (BURSTGPT + "nan,ChatGPT,1,2,3,API log\n", "line 7: Timestamp 'nan' must be a finite number"),
        (GOOD_MOONCAKE + "{oops\n", "line 2: it is not JSON"),
        (GOOD_MOONCAKE + "7\n", "line 2: '7' is not a JSON object"),
        (GOOD_MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "line 2: output_length is missing"),
        (GOOD_MOONCAKE + '{"input_length": 1, "output_length": 1}\n', "line 2: timestamp is missing"),
        (GOOD_MOONCAKE.replace(": 1}", ": 1.5}"), "line 1: output_length 1.5 must be a whole number"),
        (GOOD_MOONCAKE.replace(": 1}", ": true}"), "line 1: output_length True must be a whole number"),
        (GOOD_MOONCAKE.replace(": 1}", ": Infinity}"), "line 1: output_length inf is not a number of tokens"),
        (GOOD_MOONCAKE.replace(": 1,", ": true,", 1), "line 1: timestamp True must be a finite number, not below 0"),
        (GOOD_MOONCAKE.replace(": 1,", ": [],", 1), r"line 1: timestamp \[\] is not a time"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_times_of_several_zones_are_one_clock(tmp_path: Path) -> None:
    rows = "2023-11-16 18:00:00.2+00:00,5,3\n2023-11-16 19:00:00.3+01:00,5,3\n"
    assert [r.arrival_s for r in read_trace(written(tmp_path, AZURE_HEADER + rows)).requests] == [0.0, 0.1]


def test_what_is_no_path_is_refused() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(ConfigError, match=r"trace=.* cannot be; it must be a path"):
            read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")


@given(
    rest=st.binary(max_size=200),
    start=st.sampled_from([b"", AZURE_HEADER.encode(), BURSTGPT.encode(), GOOD_MOONCAKE.encode()]),
)
def test_whatever_the_bytes_only_a_config_error_comes_of_them(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes, start: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "trace"
    path.write_bytes(start + rest)
    try:
        trace = read_trace(path)
    except ConfigError:
        return
    assert all(r.prompt_tokens > 0 and r.output_tokens > 0 and r.arrival_s >= 0 for r in trace.requests)


@pytest.mark.parametrize(
    ("name", "requests", "window", "inside", "densest"),
    [("code", 8819, (1073, 1145), 443, 827), ("conv", 19366, (1841.7, 1913.7), 616, 616)],
)
def test_the_public_azure_traces_read_as_they_are_described(
    name: str, requests: int, window: tuple[float, float], inside: int, densest: int
) -> None:
    path = PUBLIC / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.is_file():
        pytest.skip("the public traces are not here (ELASTIC_TRACES names their folder)")
    trace = read_trace(path)
    assert len(trace.requests) + trace.dropped == requests
    assert len(trace.cut(*window).requests) == inside
    assert len(trace.cut(*trace.densest(72)).requests) == densest


def test_the_public_piece_of_burstgpt_loses_its_failed_rows() -> None:
    path = PUBLIC / "BurstGPT_1_head100.csv"
    if not path.is_file():
        pytest.skip("the public traces are not here (ELASTIC_TRACES names their folder)")
    trace = read_trace(path)
    assert (len(trace.requests), trace.dropped) == (95, 5)

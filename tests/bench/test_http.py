"""`pellucid bench http`: the command on a tiny config, its arithmetic on streams written by hand, what voids a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pellucid.bench.http import Answer, Run, completion_request, servable, summary
from pellucid.bench.offline import Load
from pellucid.bench.streams import Stream, percentile
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.main import cli
from pellucid.core import PellucidError
from pellucid.selection.args import EngineArgs
from pellucid.tokenizer.tokenizer import Tokenizer
from tests import checkpoints
from tests.engine.tiny import write_tokenizer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
END = b"data: [DONE]\n\n"
LOAD = Load((2,), 5, 4, 2)
ENGINE = {
    "tokens_per_s": 4.0,
    "decode_step_s": {"median": 0.5, "min": 0.4, "max": 0.8},
    "end_to_end_s": {"median": 4.0, "min": 3.0, "max": 5.0},
    "invalid": [],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.text_config(checkpoints.CONFIGS["v2"])))
    return folder


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}], "usage": None})


def usage(tokens: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    return event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens_details": details}})


def stream(sent: float, chunks: Iterable[tuple[float, str]], tokens: int = 4, cached: int = 0) -> Stream:
    """As a server sends it: an event at a time, the usage last."""
    reads = [(when, chunk(text)) for when, text in chunks]
    return Stream(sent, [(sent, HEAD), *reads, (99.0, usage(tokens, cached) + END)])


def run(*streams: Stream, client_busy: float = 0.1) -> Run:
    return Run(tuple(Answer.of(one) for one in streams), cpu_s=8e-6, client_busy=client_busy)


def two_streams(slower_by: float = 0.0, names: Sequence[str] = "abcdefgh") -> Run:
    return run(
        stream(10.0, zip((11.0, 12.0, 13.0, 14.0), names[:4], strict=True)),
        stream(10.5, zip((12.0, 13.0, 14.0, 15.0 + slower_by), names[4:], strict=True)),
    )


def test_decoding_is_timed_from_the_last_first_chunk_to_the_last_chunk() -> None:
    measured = two_streams()
    assert (measured.first_s, measured.total_s) == (2.0, 5.0)
    # 2 streams, 3 tokens after each one's first, 3 seconds.
    assert measured.tokens_per_s(4) == 2.0
    assert measured.ttft_s() == [1.0, 1.5]
    assert measured.inter_token_s() == [1.0] * 6
    assert measured.invalid(4, spelled=True) == []


def test_a_summary_has_the_shares_of_the_engine_with_both_spreads() -> None:
    cell = summary([two_streams(), two_streams(slower_by=3.0)], LOAD, ENGINE, spelled=True)
    assert cell["tokens_per_s"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    # The engine's least and most: 2 tokens in 0.8 and 0.4 s.
    assert cell["share_of_engine"] == pytest.approx({"median": 0.375, "min": 1.0 / 5.0, "max": 2.0 / 2.5})
    assert cell["end_to_end_tokens_per_s"] == {"median": 1.3, "min": 1.0, "max": 1.6}
    assert cell["end_to_end_share_of_engine"] == pytest.approx({"median": 0.65, "min": 3 / 8, "max": 1.0})
    assert cell["ttft_s"]["p99"] == {"median": 1.5, "min": 1.5, "max": 1.5}
    assert cell["inter_token_s"]["p50"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert cell["inter_token_s"]["p99"] == {"median": 2.5, "min": 1.0, "max": 4.0}
    assert cell["api_cpu_us_per_token"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert (cell["concurrency"], cell["repetitions"], cell["chunks_per_token"]) == (2, 2, 1.0)
    assert cell["invalid"] == []


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        ([stream(0, [(1, "a"), (2, "b"), (3, "c")])], "1 chunks are missing"),
        ([stream(0, [(1, "a"), (2, "b"), (3, "c")], tokens=3)], "1 of 1 streams did not end with 4 tokens"),
        ([stream(0, zip((1, 2, 3, 4), "abcd", strict=True), cached=3)], "3 prompt tokens came from the prefix cache"),
        ([stream(0, zip((1, 2, 3, 4), "abcd", strict=True))] * 2, "all 2 sequences are equal"),
    ],
)
def test_what_voids_a_run_is_named(streams: Sequence[Stream], reason: str) -> None:
    assert any(reason in found for found in run(*streams).invalid(4, spelled=True))


def test_a_client_that_is_busy_itself_voids_a_run() -> None:
    busy = run(stream(0, zip((1, 2, 3, 4), "abcd", strict=True)), client_busy=0.97)
    assert busy.invalid(4, spelled=True) == ["this client computed for 97% of the time: it may be what was measured"]


def test_what_voids_the_engines_figures_voids_the_ratio() -> None:
    cell = summary([two_streams()], LOAD, {**ENGINE, "invalid": ["preempted"]}, spelled=True)
    assert cell["invalid"] == ["the engine alone: preempted"]


def test_a_models_own_tokenizer_may_have_tokens_without_text() -> None:
    fewer = run(stream(0, [(1, "a"), (2, "b"), (3, "c")]))
    assert fewer.invalid(4, spelled=False) == []
    assert fewer.chunks() == 3


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    data = HEAD + chunk("a") + chunk("b")
    answer = Answer.of(Stream(0.0, [(1.0, data[:-4]), (2.0, data[-4:] + usage(2)), (3.0, END)]))
    assert (answer.times, answer.texts, answer.completion_tokens) == ((1.0, 2.0), ("a", "b"), 2)
    broken = Answer.of(Stream(0.0, [(1.0, data[:-4])]))
    assert (broken.texts, broken.completion_tokens) == (("a",), None)


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ([], "nothing"),
        ([(1.0, b"HTTP/1.1 503 Service Unavailable\r\n\r\n"), (1.0, b'{"error": "draining"}')], "draining"),
        ([(1.0, HEAD + chunk("a") + event({"error": {"message": "the engine died"}}))], "the engine died"),
    ],
)
def test_an_answer_that_is_no_whole_stream_ends_the_bench(reads: list[tuple[float, bytes]], message: str) -> None:
    with pytest.raises(PellucidError, match=message):
        Answer.of(Stream(0.0, reads))


def test_streams_that_come_in_one_piece_can_not_be_timed() -> None:
    at_once = run(stream(0.0, zip((1.0,) * 4, "abcd", strict=True)))
    with pytest.raises(PellucidError, match="raise --output-tokens"):
        summary([at_once], LOAD, ENGINE, spelled=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_a_percentile_has_its_share_of_values_below_it(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value < found for value in values) <= share * len(values)
    assert sum(value <= found for value in values) >= min(share * len(values), len(values))


def test_a_request_asks_for_a_greedy_stream_of_its_full_length() -> None:
    head, _, body = completion_request([3, 1, 2], 7).partition(b"\r\n\r\n")
    asked = json.loads(body)
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert (asked["prompt"], asked["max_tokens"], asked["temperature"]) == ([3, 1, 2], 7, 0)
    assert asked["ignore_eos"] and asked["stream"]


@pytest.mark.parametrize("file", ["", "config.json"])
def test_synthetic_weights_get_a_tokenizer_that_spells_every_token(folder: Path, file: str) -> None:
    (folder / "tokenizer.json").write_text("of the model")
    with servable(str(folder / file), "synthetic") as served:
        assert Path(served.model, "config.json").read_text() == (folder / "config.json").read_text()
        tokenizer = Tokenizer.from_directory(served.model)
        words = {tokenizer.decode([token_id]) for token_id in range(served.vocab_size)}
        assert served.spelled and len(words) == served.vocab_size == 320
        assert all(words)
    assert not Path(served.model).exists()
    assert (folder / "tokenizer.json").read_text() == "of the model"


def test_real_weights_need_their_tokenizer(tmp_path: Path) -> None:
    model = checkpoints.write("v2", tmp_path / "model")
    with pytest.raises(PellucidError, match=r"has no tokenizer.*--load-format synthetic"), servable(str(model), None):
        pass
    write_tokenizer(model)
    with servable(str(model), None) as served:
        assert served == (str(model), 320, False)


ASKED = (
    EngineArgs("m"),
    EngineArgs("m", load_format="synthetic", dtype="bfloat16", enforce_eager=True, enable_prefix_caching=False),
    EngineArgs("m", max_model_len=768, gpu_memory_utilization=0.85, decode_path="fused", served_model_name="a b"),
)


@pytest.mark.parametrize("asked", ASKED)
def test_what_was_asked_reaches_another_process_as_it_was(asked: EngineArgs) -> None:
    @click.command()
    @engine_options
    @click.pass_context
    def read(ctx: click.Context, **_: object) -> EngineArgs:
        return engine_args(ctx, "m")

    assert read.main(list(asked.command_line()), standalone_mode=False) == asked


def test_the_command_measures_the_engine_then_the_server_and_prints_json_last(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "http.jsonl"
    quick = ("--load-format", "synthetic", "--device", "cpu", "--threads", "1", "--save", str(saved))
    load = ("--concurrency", "4", "--input-tokens", "9", "--output-tokens", "24")
    result = CliRunner().invoke(cli, ["bench", "http", str(folder), *quick, *load], catch_exceptions=False)
    assert result.exit_code == 0
    *lines, last = result.stdout.splitlines()
    record: dict[str, Any] = json.loads(last)
    assert json.loads(saved.read_text()) == record
    assert lines.index("the engine alone:") < lines.index("over HTTP:")
    assert any("of the floor" in line for line in lines)
    (cell,), engine = record["cells"], record["engine"]
    assert cell["invalid"] == []
    assert (cell["concurrency"], cell["chunks_per_token"], record["tokenizer"]) == (4, 1.0, "generated")
    assert cell["engine_tokens_per_s"] == engine["cells"][0]["tokens_per_s"]
    ratio = cell["tokens_per_s"]["median"] / cell["engine_tokens_per_s"]
    assert cell["share_of_engine"]["median"] == pytest.approx(ratio)
    assert cell["end_to_end_tokens_per_s"]["median"] > 0
    assert 0 < cell["ttft_s"]["p50"]["median"] <= cell["ttft_s"]["p99"]["median"]
    assert cell["inter_token_s"]["p99"]["max"] > 0
    decided = {decision["op"]: decision["value"] for decision in engine["decisions"]}
    assert (decided["threads"], decided["enable_prefix_caching"], decided["max_num_seqs"]) == (1, False, 4)
    assert {"commit", "date", "command", "cpu"} <= set(record)

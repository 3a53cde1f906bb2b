"""Request logs: the three formats, the shipped log, and the sentences for a log that can't be read."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from labcore.workload.traces import CHAT_TRACE, CONVERSATION_TRACE, TraceRequest, load_trace

REAL = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture
def log(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "log"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_our_format_is_read_with_its_comments_skipped(log):
    path = log("# made by hand\narrival_s,prompt_tokens,output_tokens\n0.5,6,2\n1.25,3,9\n")
    assert load_trace(path) == [TraceRequest(0.0, 6, 2), TraceRequest(0.75, 3, 9)]


def test_the_azure_format_is_read_with_seven_digits_of_a_second(log):
    path = log(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50,396,109\r\n"
    )
    first, second = load_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival == pytest.approx(3.31941, abs=1e-6)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_the_mooncake_format_is_read_with_its_block_hashes(log):
    path = log(
        '{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 30000, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
    )
    assert load_trace(path) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(3.0, 512, 7, (0,))]


def test_lines_out_of_order_come_back_in_order_of_arrival(log):
    path = log("arrival_s,prompt_tokens,output_tokens\n9,1,1\n4,2,2\n")
    assert load_trace(path) == [TraceRequest(0.0, 2, 2), TraceRequest(5.0, 1, 1)]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(log):
    path = log("\ufeffarrival_s,prompt_tokens,output_tokens\n\n0,1,1\n\n")
    assert load_trace(path) == [TraceRequest(0.0, 1, 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("when,in,out\n0,1,1\n", "no known format"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2: .*2 fields, not 3"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,six,1\n", "line 3: .*can't be read"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "line 2: .*below 1 token"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: .*no time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: .*can't be read"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: .*can't be read"),
        ('{"timestamp": 0, "input_leng', "line 1: .*can't be read"),
        ('{"timestamp": 0, "input_length": null, "output_length": 1, "hash_ids": []}\n', "line 1: .*can't be read"),
    ],
)
def test_a_log_that_cannot_be_true_is_refused_with_the_line_that_is_wrong(log, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_trace(log(text))


def test_a_missing_log_says_which_one_and_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.csv.*load_trace\(\)"):
        load_trace(tmp_path / "absent.csv")


def test_the_shipped_log_has_the_published_lengths_and_arrivals():
    requests = load_trace()
    gaps = [after.arrival - before.arrival for before, after in zip(requests, requests[1:], strict=False)]
    prompts = sorted(request.prompt_tokens for request in requests)
    outputs = sorted(request.output_tokens for request in requests)

    def p99(tokens):
        return statistics.quantiles(tokens, n=100, method="inclusive")[98]

    assert len(requests) == 2000
    assert statistics.mean(prompts) == pytest.approx(1155, rel=0.005)
    assert (statistics.median(prompts), p99(prompts)) == (pytest.approx(1020, abs=2), pytest.approx(4142, abs=5))
    assert statistics.mean(outputs) == pytest.approx(211, rel=0.01)
    assert (statistics.median(outputs), p99(outputs)) == (pytest.approx(129, abs=2), pytest.approx(601, abs=3))
    assert 1 / statistics.mean(gaps) == pytest.approx(5.53, rel=0.001)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1.09, abs=0.01)


def test_the_script_makes_the_shipped_log_again_byte_for_byte(tmp_path):
    script = tmp_path / "make_chat.py"
    script.write_bytes((CHAT_TRACE.parent / "make_chat.py").read_bytes())
    subprocess.run([sys.executable, str(script)], check=True)
    assert (tmp_path / "chat.csv").read_bytes() == CHAT_TRACE.read_bytes()


def reuse(requests):
    """(blocks that repeat an earlier one, blocks) under a cache that forgets nothing."""
    seen, repeated, total = set(), 0, 0
    for request in requests:
        for block in request.block_hashes:
            repeated, total = repeated + (block in seen), total + 1
            seen.add(block)
    return repeated, total


def test_the_shipped_conversations_have_the_published_lengths_and_reuse():
    requests = load_trace(CONVERSATION_TRACE)
    prompts = [request.prompt_tokens for request in requests]
    repeated, total = reuse(requests)
    assert len(requests) == 1000
    assert statistics.mean(prompts) == pytest.approx(12035, rel=0.01)
    assert statistics.median(prompts) == pytest.approx(6909, rel=0.03)
    assert statistics.mean(request.output_tokens for request in requests) == pytest.approx(343, rel=0.01)
    assert repeated / total == pytest.approx(0.366, abs=0.004)
    assert all(len(request.block_hashes) == -(-request.prompt_tokens // 512) for request in requests)
    assert {request.block_hashes[0] for request in requests} == {0}


def test_the_script_makes_the_shipped_conversations_again_byte_for_byte(tmp_path):
    script = tmp_path / "make_conversations.py"
    script.write_bytes(CONVERSATION_TRACE.with_name("make_conversations.py").read_bytes())
    subprocess.run([sys.executable, str(script)], check=True)
    assert (tmp_path / "conversations.jsonl").read_bytes() == CONVERSATION_TRACE.read_bytes()


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not on this machine")
def test_the_real_conversations_repeat_a_third_of_their_blocks():
    assert reuse(load_trace(REAL / "mooncake_conversation_head3000.jsonl")) == (25_332, 80_619)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not on this machine")
def test_the_real_logs_are_read_whole():
    azure = load_trace(REAL / "AzureLLMInferenceTrace_conv.csv")
    mooncake = load_trace(REAL / "mooncake_conversation_head3000.jsonl")
    assert (len(azure), len(mooncake)) == (19366, 3000)
    assert statistics.mean(request.prompt_tokens for request in azure) == pytest.approx(1155, abs=0.5)
    assert all(len(request.block_hashes) == -(-request.prompt_tokens // 512) for request in mooncake)


def test_the_module_needs_no_torch():
    code = "import sys, labcore.workload.traces; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

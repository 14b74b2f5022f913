import pytest

from vllm.benchmarks.client import RequestResult
from vllm.benchmarks.report import WIDTH, make_report

RESULTS = [
    RequestResult(10, 5, 0.1, [0.1, 0.1, 0.1, 0.1], 0.5, start_s=0.0),
    RequestResult(20, 3, 0.3, [0.2, 0.2], 0.7, start_s=0.4),
    RequestResult(error="HTTP 400"),
]


@pytest.fixture
def report():
    settings = {"request_rate": "inf", "max_concurrency": None}
    return make_report(RESULTS, 2.0, settings, ["ttft", "tpot"], [50.0, 99.0])


def test_throughput_counts_what_succeeded(report):
    figures = report.figures
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 8)
    assert figures["output_throughput"] == pytest.approx(4.0)
    assert figures["total_token_throughput"] == pytest.approx(19.0)


def test_times_are_milliseconds(report):
    figures = report.figures
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    # 400 ms over four further tokens, and 400 ms over two.
    assert figures["mean_tpot_ms"] == pytest.approx(150.0)
    assert figures["median_itl_ms"] == pytest.approx(100.0)
    assert figures["p50_e2el_ms"] == pytest.approx(600.0)


def test_two_requests_overlap_once(report):
    assert report.figures["max_concurrent_requests"] == 2


def test_the_block_is_fifty_columns_and_leaves_out_what_was_not_asked(report):
    lines = report.format().splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * WIDTH
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "P99 TPOT (ms):" in text
    assert "ITL" not in text
    assert "Maximum request concurrency" not in text


def test_no_success_is_a_report_of_zeros():
    settings = {"request_rate": "inf", "max_concurrency": None}
    report = make_report(RESULTS[2:], 1.0, settings, ["itl"], [99.0])
    assert report.figures["mean_itl_ms"] == 0.0
    assert report.figures["errors"] == ["HTTP 400"]

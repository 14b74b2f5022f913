"""The comparison with other engines: its sums, its table, and what it reads."""

import importlib
import json
import math
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import vllm
from tests.model_executor.hf_reference import tiny_model, write_gguf
from vllm.benchmarks.client import RequestResult

FOLDER = Path(vllm.__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def report_module() -> ModuleType:
    return importlib.import_module("peer_report")


@pytest.fixture
def engines() -> ModuleType:
    return importlib.import_module("peer_engines")


def answer(
    start_s: float, ttft_s: float, itl_s: list[float], num_output: int
) -> RequestResult:
    return RequestResult(
        num_prompt_tokens=100,
        num_output_tokens=num_output,
        ttft_s=ttft_s,
        itl_s=itl_s,
        latency_s=ttft_s + sum(itl_s),
        start_s=start_s,
    )


def test_one_request_has_a_prompt_rate_and_a_decode_rate(report_module):
    figures = report_module.load_figures([[answer(5.0, 0.5, [0.25] * 4, 5)]])
    assert figures == {
        "prompt_tokens_per_s": 200.0,
        "decode_tokens_per_s": 4.0,
        "output_tokens_per_s": 5 / 1.5,
        "first_token_ms": 500.0,
    }


def test_decoding_is_measured_while_all_requests_do_it(report_module):
    early = answer(0.0, 1.0, [1.0] * 6, 7)
    # Decodes from second 3 to 9; of the first one's pieces, those of 4 to 7 count.
    late = answer(0.0, 3.0, [1.0] * 6, 7)
    figures = report_module.load_figures([[early, late]])
    assert figures["decode_tokens_per_s"] == (4 + 4) / 4
    assert figures["prompt_tokens_per_s"] == 200 / 3
    assert figures["output_tokens_per_s"] == 14 / 9


def test_a_piece_counts_as_many_tokens_as_pieces_hold_on_average(report_module):
    drafted = answer(0.0, 1.0, [1.0] * 4, 13)
    assert report_module.tokens_between(drafted, 1.0, 3.0) == 6.0
    assert report_module.tokens_between(answer(0.0, 1.0, [], 1), 0.0, 9.0) == 0.0


def test_requests_that_never_decode_together_have_no_decode_rate(report_module):
    wave = [answer(0.0, 1.0, [1.0], 2), answer(0.0, 4.0, [1.0], 2)]
    assert math.isnan(report_module.load_figures([wave])["decode_tokens_per_s"])


def test_waves_are_summed_up(report_module):
    slow, fast = answer(0.0, 1.0, [0.5] * 4, 5), answer(9.0, 3.0, [1.0] * 4, 5)
    figures = report_module.load_figures([[slow], [fast]])
    assert figures["decode_tokens_per_s"] == 8 / 6
    assert figures["prompt_tokens_per_s"] == 50.0
    assert figures["first_token_ms"] == 2000.0


def make_report(
    module: ModuleType,
    names: list[str],
    decode: dict[str, list[float]],
    limits: tuple[float, ...] = (0.0, 0.0, 0.0),
):
    report = module.PeersReport(names, [1, 32], 10**8, 10**8)
    for name in names:
        for concurrency in (1, 32):
            for rate in decode[name]:
                figures = dict.fromkeys((module.PROMPT, module.OUTPUT), 10.0)
                figures |= {module.FIRST: 5.0, module.DECODE: rate * concurrency}
                report.add_load(name, concurrency, figures)
        for limit in limits:
            process = {"startup_s": 1.25, "peak_memory_mib": 2000.0}
            if limit:
                process |= {module.BYTES: limit, module.PRODUCTS: 32 * limit}
            report.add_process(name, process)
    return report


RATES = {"off": [30.0, 10.0, 20.0], "llama.cpp": [10.0, 10.0, 40.0]}


def test_a_ratio_is_the_median_of_the_rounds_own(report_module):
    report = make_report(report_module, ["off", "llama.cpp"], RATES)
    assert report.median("off", 1, report_module.DECODE) == 20.0
    # 3, 1 and 0.5; that of the medians would be 2.
    assert report.ratio("off", 1, report_module.DECODE) == 1.0
    assert report.ratio("llama.cpp", 1, report_module.DECODE) is None


def test_shares_of_the_limits_need_a_step_of_the_files_weights(report_module):
    rates = RATES | {"adaptive": RATES["off"]}
    names = ["off", "adaptive", "llama.cpp"]
    assert make_report(report_module, names, rates).shares("off") == {}
    # Rounds of 30, 10 and 20 steps a second, of which each reads 0.1 GB.
    report = make_report(report_module, names, rates, limits=(4e9, 1e9, 8e9))
    # 0.75, 1 and 0.25; that of the medians would be 0.5.
    assert report.shares("off") == {"memory": 0.75, "products": 0.75}
    assert report.shares("adaptive") == {}


def test_the_tables_show_rates_ratios_and_aims(report_module):
    limits = (6e9, 2e9, 4e9)
    report = make_report(report_module, ["off", "llama.cpp"], RATES, limits)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.format().splitlines()
    ]
    assert lines[2][:8] == ["1", "off", "20.0", "1.00", "1.3", "10.0", "1.00", "3.0"]
    assert lines[3][:8] == ["1", "llama.cpp", "10.0", "", "", "10.0", "", ""]
    assert ["off", "1.2", "2,000"] in lines
    assert ["off", "50%", "70%", "50%", "50%"] in lines


def test_without_llama_cpp_there_are_rates_and_no_ratios(report_module):
    report = make_report(report_module, ["off"], RATES)
    assert "20.0" in report.format()
    assert report.ratio("off", 1, report_module.DECODE) is None


def test_what_was_not_measured_is_empty_in_the_table_and_null_in_the_file(
    report_module,
):
    rates = RATES | {"off": [math.nan] * 3}
    limits = (4e9, 1e9, 8e9)
    report = make_report(report_module, ["off", "llama.cpp"], rates, limits)
    assert "nan" not in report.format()
    [load] = [
        one
        for one in report.to_json()["loads"]
        if (one["engine"], one["requests"]) == ("off", 1)
    ]
    assert load["medians"]["decode_tokens_per_s"] is None
    assert load["ratios"]["decode_tokens_per_s"] is None
    json.dumps(report.to_json(), allow_nan=False)


def test_a_round_without_a_figure_is_left_out_of_medians(report_module):
    rates = {"off": [math.nan, 40.0, 20.0], "llama.cpp": [10.0, 10.0, 10.0]}
    limits = (1e9, 4e9, 2e9)
    report = make_report(report_module, ["off", "llama.cpp"], rates, limits)
    assert report.median("off", 1, report_module.DECODE) == 30.0
    assert report.ratio("off", 1, report_module.DECODE) == 3.0
    assert report.shares("off") == {"memory": 1.0, "products": 1.0}


def test_a_picture_of_the_comparison_is_drawn(report_module, tmp_path):
    pytest.importorskip("matplotlib")
    report = make_report(report_module, ["off", "llama.cpp"], RATES)
    report.draw(str(tmp_path / "peers.png"))
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_read_from_lines_of_kilobytes(engines):
    text = "VmHWM:\t  123456 kB\nVmRSS:\t     789 kB\n"
    assert engines.read_kib(text, "VmHWM") == 123456
    assert engines.read_kib(text, "VmRSS") == 789
    with pytest.raises(ValueError, match="Pss"):
        engines.read_kib(text, "Pss")


@pytest.mark.parametrize(
    ("says", "has"),
    [("/elsewhere/vllm/__init__.py", True), (vllm.__file__, False), (None, False)],
)
def test_this_repository_is_no_other_vllm(says, has, engines, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{f'echo {says}' if says else 'exit 1'}\n")
    python.chmod(0o755)
    assert engines.has_upstream(str(python)) is has


def test_no_engine_is_given_a_prompt_twice():
    class Chat:
        def encode(self, messages: list[dict[str, str]]) -> list[int]:
            return [0, *messages[0]["content"].encode(), 0]

    class Recorder:
        def __init__(self) -> None:
            self.prompts: list[tuple[int, ...]] = []

        def answer(self, prompts: list[list[int]], output_len: int) -> list[Any]:
            self.prompts += map(tuple, prompts)
            return [answer(0.0, 1.0, [1.0] * (output_len - 1), output_len)] * len(
                prompts
            )

    peers = importlib.import_module("peers")
    engine, args = Recorder(), Namespace(input_len=100, output_len=4)
    peers.warm_up(engine, args, Chat())
    for round_idx in range(2):
        for concurrency in (1, 8):
            peers.run_load(engine, args, Chat(), concurrency, round_idx)
    assert len(set(engine.prompts)) == len(engine.prompts)


@pytest.mark.parametrize("text", ["1,x", "1,8x,32", "1,,8", "0", "", "-1"])
def test_what_is_no_number_of_requests_is_refused(text):
    peers = importlib.import_module("peers")
    assert peers.number_list("1,8") == [1, 8]
    with pytest.raises(ArgumentTypeError):
        peers.number_list(text)


def test_a_chat_is_cut_at_the_start_of_its_content():
    peers = importlib.import_module("peers")
    frame = [1, 2, 3, 8, 9]
    chat = [1, 2, 3, 21, 22, 23, 24, 8, 9]
    assert peers.cut_to_length(chat, frame, 7) == [1, 2, 3, 23, 24, 8, 9]
    assert peers.cut_to_length(chat, frame, 9) == chat


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_the_table_of_embeddings_only_as_output_layer(tied, tmp_path):
    peers = importlib.import_module("peers")
    model = tiny_model("llama", tie_word_embeddings=tied)
    path = str(tmp_path / "tiny.gguf")
    write_gguf(path, model, "llama", "Q8_0")
    matrices = [w for name, w in model.named_parameters() if "norm" not in name]
    num_read = sum(w.numel() for w in matrices)
    if not tied:
        num_read -= model.model.embed_tokens.weight.numel()
    assert peers.weight_sizes(path) == (num_read * 34 // 32, num_read)


def test_log_probabilities_of_llama_cpp_are_read_by_window(tmp_path):
    module = importlib.import_module("llama_perplexity")
    path = tmp_path / "log_probs"
    window, vocab_size, num_windows = 6, 3, 2
    head = np.array([window, vocab_size, num_windows], np.int32)
    token_ids = np.arange(window * num_windows, dtype=np.int32)
    rows = []
    for number in range(num_windows * 2):
        scale = np.array([0.5, -4.0 - number], np.float32).view(np.uint16)
        rows += [*scale, 0, 1, 2, 0]
    data = np.array(rows, np.uint16)
    path.write_bytes(b"_logits_" + b"".join(map(bytes, (head, token_ids, data))))
    [(first_ids, first), (second_ids, second)] = module.read_log_probs(path)
    assert first_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert second_ids.tolist() == [6, 7, 8, 9, 10, 11]
    assert first.tolist() == [[-4.0, -3.5, -3.0], [-5.0, -4.5, -4.0]]
    assert second.tolist() == [[-6.0, -5.5, -5.0], [-7.0, -6.5, -6.0]]
    assert first.dtype == torch.float32


def test_a_file_of_something_else_is_refused(tmp_path):
    module = importlib.import_module("llama_perplexity")
    path = tmp_path / "log_probs"
    path.write_bytes(b"GGUF----")
    with pytest.raises(SystemExit, match="no log-probabilities"):
        next(module.read_log_probs(path))

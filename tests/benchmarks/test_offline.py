from types import SimpleNamespace

import pytest

from vllm.benchmarks import latency, throughput
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.offline import engine_parser, make_llm
from vllm.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """Answers each prompt with as many tokens as were asked for."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append("generate")
        if not isinstance(params, list):
            params = [params] * len(prompts)
        assert all(one.ignore_eos for one in params)
        return [
            RequestOutput(
                str(index),
                None,
                list(prompt),
                None,
                [CompletionOutput(0, "", [1] * one.max_tokens)],
                finished=True,
            )
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


def test_throughput_counts_prompts_and_answers():
    requests = [SampleRequest([1, 2, 3], 3, 5), SampleRequest([1], 1, 2)]
    figures = throughput.measure(FakeLLM(), requests)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (4, 7)
    rate = figures["tokens_per_second"] / figures["output_tokens_per_second"]
    assert rate == pytest.approx(11 / 7)


def test_no_round_of_latency_finds_the_prompts_of_the_one_before():
    llm = FakeLLM()
    seconds = latency.measure(llm, [[1]], output_len=2, num_warmups=1, num_iters=3)
    assert len(seconds) == 3
    assert llm.calls == ["reset", "generate"] * 4


def test_flags_reach_the_engine(monkeypatch):
    monkeypatch.setattr(
        "vllm.benchmarks.offline.LLM", lambda **kwargs: SimpleNamespace(**kwargs)
    )
    parser = engine_parser("tool", "A tool.")
    llm = make_llm(parser, parser.parse_args(["--max-num-seqs=3", "--model=m"]))
    assert (llm.max_num_seqs, llm.model) == (3, "m")


def test_a_wrong_flag_is_exit_code_2(capsys):
    parser = engine_parser("tool", "A tool.")
    with pytest.raises(SystemExit) as raised:
        make_llm(parser, parser.parse_args(["--max-num-seqs=0"]))
    assert raised.value.code == 2
    assert "max_num_seqs must be at least 1" in capsys.readouterr().err

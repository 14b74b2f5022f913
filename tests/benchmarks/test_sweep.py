"""A sweep gives every engine the same loads in turn, and compares medians."""

import json
from collections.abc import Iterator

import pytest

from vllm.benchmarks import sweep
from vllm.benchmarks.closed_loop import run_closed_loop
from vllm.benchmarks.datasets import chat_prompts
from vllm.benchmarks.sweep_report import SweepReport
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5}'


class FakeProcess:
    """Says how fast it was: by its name, and by the number of its loads."""

    log: list[tuple[str, dict]]
    speeds = {"off": 100.0, "3": 120.0, "adaptive": 150.0}

    def __init__(self, name, engine_args):
        self.name, self.engine_args = name, engine_args
        self.num_loads = 0

    def run_load(self, **load):
        self.log.append((self.name, load))
        self.num_loads += 1
        return {
            "tokens_per_s": self.speeds[self.name] + self.num_loads,
            "num_steps": 10,
            "drafts": {} if self.name == "off" else {"draft_tokens": 60},
        }

    def close(self):
        self.log.append((self.name, {}))


@pytest.fixture
def log(monkeypatch) -> Iterator[list[tuple[str, dict]]]:
    monkeypatch.setattr(FakeProcess, "log", [], raising=False)
    monkeypatch.setattr(sweep, "EngineProcess", FakeProcess)
    return FakeProcess.log


def test_engines_take_turns_and_none_is_always_first(log):
    argv = ["--quick", "--rounds=3", "--concurrency=2,4", "--settings=off,3"]
    assert sweep.run([*argv, f"--speculative-config={NGRAM}"]) == 0
    loads = [(name, load["concurrency"]) for name, load in log if load]
    assert loads[:2] == [("off", 1), ("3", 1)]
    assert loads[2:] == [
        *[("off", 2), ("3", 2), ("3", 4), ("off", 4)],
        *[("3", 2), ("off", 2), ("off", 4), ("3", 4)],
        *[("off", 2), ("3", 2), ("3", 4), ("off", 4)],
    ]
    assert [name for name, load in log if not load] == ["3", "off"]


def test_every_engine_gets_the_same_prompts_and_enough_to_fill_its_slots(log):
    argv = ["--quick", "--concurrency=4,16", f"--speculative-config={NGRAM}"]
    sweep.run(argv)
    for concurrency, num_prompts in ((4, 8), (16, 32)):
        prompts = [
            load["prompts"] for _, load in log if load.get("concurrency") == concurrency
        ]
        assert len(prompts) == 3
        assert all(one == prompts[0] for one in prompts)
        assert len(set(prompts[0])) == num_prompts


def test_a_load_has_as_many_requests_as_are_asked_for(log):
    argv = ["--quick", "--concurrency=2,16", "--min-requests=20"]
    sweep.run([*argv, f"--speculative-config={NGRAM}"])
    # The first loads warm up.
    loads = [load for _, load in log if load][3:]
    sizes = {(load["concurrency"], len(load["prompts"])) for load in loads}
    assert sizes == {(2, 20), (16, 32)}


def engine_args(*argv: str, setting: str) -> dict:
    parser = sweep.make_parser()
    args = parser.parse_args([*argv, "--quick"])
    sweep._fill_and_check(parser, args)
    return sweep.make_engine_args(args, setting)


def test_a_setting_is_a_speculative_configuration():
    flag = f"--speculative-config={NGRAM}"
    assert engine_args(flag, setting="off")["speculative_config"] is None
    assert engine_args(flag, setting="3")["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": False,
    }
    assert engine_args(flag, setting="adaptive")["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "enable_adaptive_verification": True,
    }


def test_all_engines_fit_unless_the_user_says_how_large_they_are():
    values = engine_args(setting="off")
    assert (values["max_num_seqs"], values["kv_cache_memory_bytes"]) == (4, 2**30)
    values = engine_args(
        "--num-gpu-blocks-override=99", "--max-num-seqs=9", setting="off"
    )
    assert (values["max_num_seqs"], values["kv_cache_memory_bytes"]) == (9, None)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--concurrency=1,x", "must be different integers"),
        ("--concurrency=0", "must be different integers"),
        ("--concurrency=2,2", "must be different integers"),
        ("--settings=off,none", "must be different ones of off, adaptive"),
        ("--settings=0", "must be different ones of off, adaptive"),
        ("--settings=off,off", "must be different ones of off, adaptive"),
        ("--rounds=0", "--rounds must be at least 1"),
        ("--min-requests=0", "--min-requests must be at least 1"),
        ("--temperature=-1", "must be at least 0"),
        ("--max-num-seqs=2", "must be at least the largest --concurrency"),
        ("--settings=65", "num_speculative_tokens must be"),
    ],
)
def test_a_wrong_flag_is_exit_code_2_before_any_engine_starts(
    flag, message, log, capsys
):
    with pytest.raises(SystemExit) as raised:
        sweep.run(["--quick", f"--speculative-config={NGRAM}", flag])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
    assert log == []


def test_figures_are_medians_of_the_rounds(log, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    argv = ["--quick", "--rounds=3", "--concurrency=2", f"--output-json={path}"]
    sweep.run([*argv, f"--speculative-config={NGRAM}"])
    document = json.loads(path.read_text())
    # The first load of each engine warms it up.
    assert [
        (one["setting"], one["tokens_per_s"], one["verified_drafts"])
        for one in document["results"]
    ] == [("off", 103.0, None), ("3", 123.0, 3.0), ("adaptive", 153.0, 3.0)]
    [comparison] = document["comparisons"]
    assert comparison["best_other"] == "3"
    assert comparison["adaptive_to_best"] == pytest.approx(153 / 123)
    assert comparison["adaptive_to_off"] == pytest.approx(153 / 103)
    assert document["output_len"] == 16
    last = capsys.readouterr().out.splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["2", "103.0", "123.0", "153.0", "fixed 3", "1.244", "1.485"]


def test_ratios_are_medians_of_the_rounds_own():
    report = SweepReport(["off", "3", "adaptive"], [1])
    # The machine is half as fast from the second round on.
    for off, fixed, adaptive in [(8, 20, 22), (4, 10, 8), (4, 10, 12)]:
        speeds = {"off": off, "3": fixed, "adaptive": adaptive}
        for setting, speed in speeds.items():
            report.add(1, setting, {"tokens_per_s": speed})
    assert report.compare(1) == {
        "best_other": "3",
        "adaptive_to_best": pytest.approx(1.1),
        "adaptive_to_off": pytest.approx(2.75),
    }


def test_a_sweep_without_an_adaptive_engine_compares_nothing():
    report = SweepReport(["off"], [1])
    report.add(1, "off", {"tokens_per_s": 5.0, "num_steps": 1, "drafts": {}})
    assert report.compare(1) == {}
    assert "5.0" in report.format()


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report = SweepReport(["off", "adaptive"], [1, 2])
    for concurrency in (1, 2):
        figures = {"tokens_per_s": 5.0, "num_steps": 1, "drafts": {}}
        report.add(concurrency, "off", figures)
        report.add(concurrency, "adaptive", figures | {"drafts": {"draft_tokens": 3}})
    report.draw(str(tmp_path / "sweep.png"))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


class FakeEngine:
    """Gives every running request a token a step; request i ends after i + 1."""

    log_stats = False

    def __init__(self):
        self.left = {}
        self.running_at_once = []
        self.aborted = set()

    def add_request(self, request_id, prompt, params):
        self.left[request_id] = len(prompt["prompt_token_ids"])

    def step(self):
        self.running_at_once.append(len(self.left))
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            finished = self.left[request_id] == 0
            if finished:
                del self.left[request_id]
            answer = CompletionOutput(0, "", [1])
            outputs.append(
                RequestOutput(request_id, None, [], None, [answer], finished=finished)
            )
        return outputs

    def abort_request(self, request_ids):
        self.aborted |= set(request_ids)
        for request_id in request_ids:
            self.left.pop(request_id)

    def has_unfinished_requests(self):
        return bool(self.left)


def test_only_full_slots_are_measured():
    engine = FakeEngine()
    prompts = [[0] * length for length in (2, 5, 1, 4)]
    figures = run_closed_loop(engine, prompts, SamplingParams(), 2, "run")
    # Requests 0 and 1; 2 takes the slot of 0, 3 that of 2; 1 ends and nobody waits.
    assert engine.running_at_once == [2] * 5
    assert (figures.num_steps, figures.num_tokens) == (5, 10)
    assert engine.aborted == {"run-3"}
    assert figures.tokens_per_s == pytest.approx(10 / figures.seconds)


def test_prompts_are_all_different_and_drawn_by_the_seed():
    prompts = chat_prompts(200, seed=0)
    assert len(set(prompts)) == 200
    assert prompts != chat_prompts(200, seed=1)
    assert chat_prompts(5000, seed=0)[:200] == prompts

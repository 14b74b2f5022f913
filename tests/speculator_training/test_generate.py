from types import SimpleNamespace

import pytest

from tests.speculator_training.tiny_target import TEMPLATE
from tests.v1.engine.fakes import EOS, make_tokenizer
from vllm.speculator_training import generate
from vllm.speculator_training.generate import Generator, read_chunks
from vllm.speculator_training.prompts import ChatFormat
from vllm.speculator_training.settings import DataSettings, TrainingError
from vllm.transformers_utils.tokenizer import Tokenizer, TokenizerSettings

SETTINGS = DataSettings(
    num_prompts=5,
    prompt_temperatures=(0.5, 1.0),
    answer_temperatures=(0.0, 0.5, 1.0),
    max_answer_tokens=20,
    seed=3,
)


class FakeEngine:
    """Writes prompts that follow from the seed, and answers of one token."""

    def __init__(self, num_prompts: int = 1000, dies_at: int | None = None):
        self.num_prompts = num_prompts
        self.calls = []
        self.dies_at = dies_at

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append((prompts, sampling_params))
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        text=f" prompt {params.seed % self.num_prompts}",
                        token_ids=[params.seed % 1000],
                    )
                ]
            )
            for params in sampling_params
        ]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(generate, "CHUNK_SIZE", 2)


def make_generator(engine, folder, prompts=None, max_model_len=100):
    tokenizer = Tokenizer(make_tokenizer(), TokenizerSettings(eos_token=EOS))
    chat = ChatFormat(tokenizer, TEMPLATE)
    return Generator(engine, chat, SETTINGS, max_model_len, str(folder), prompts)


def test_a_killed_run_goes_on_to_the_same_answers(tmp_path):
    whole = make_generator(FakeEngine(), tmp_path / "whole").run()
    assert len(whole) == 5
    with pytest.raises(KeyboardInterrupt):
        make_generator(FakeEngine(dies_at=3), tmp_path / "killed").run()
    assert len(read_chunks(str(tmp_path / "killed"))) == 1
    assert make_generator(FakeEngine(), tmp_path / "killed").run() == whole
    engine = FakeEngine()
    assert make_generator(engine, tmp_path / "killed").run() == whole
    assert engine.calls == []


def test_temperatures_take_turns_and_every_draw_has_its_own_seed(tmp_path):
    engine = FakeEngine()
    answers = make_generator(engine, tmp_path).run()
    assert [answer.temperature for answer in answers] == [0.0, 0.5, 1.0, 0.0, 0.5]
    params = [one for _, batch in engine.calls for one in batch]
    seeds = [one.seed for one in params]
    assert len(set(seeds)) == len(seeds)
    assert [one.temperature for one in engine.calls[0][1]] == [0.5, 1.0]


def test_no_prompt_is_answered_twice(tmp_path):
    answers = make_generator(FakeEngine(num_prompts=5), tmp_path).run()
    texts = [answer.conversation[0]["content"] for answer in answers]
    assert len(set(texts)) == len(texts) == 5


def test_a_model_that_repeats_itself_is_told(tmp_path):
    generator = make_generator(FakeEngine(num_prompts=3), tmp_path)
    with pytest.raises(TrainingError, match="no new prompts after 3 of 5"):
        generator.run()


def test_a_prompt_that_fills_the_context_is_left_out(tmp_path):
    prompts = [[{"role": "user", "content": text}] for text in ("a", "b" * 90, "c")]
    engine = FakeEngine()
    answers = make_generator(engine, tmp_path, prompts).run()
    texts = [answer.conversation[0]["content"] for answer in answers]
    assert texts == ["a", "c"]


def test_an_answer_ends_with_the_context(tmp_path):
    engine = FakeEngine()
    prompts = [[{"role": "user", "content": "a"}]]
    (answer,) = make_generator(engine, tmp_path, prompts, max_model_len=30).run()
    (params,) = engine.calls[0][1]
    assert params.max_tokens == 30 - len(answer.prompt_ids) < 20


def test_a_damaged_chunk_is_named(tmp_path):
    (tmp_path / "00000.jsonl").write_text('{"conversation"')
    with pytest.raises(TrainingError, match="00000.jsonl: the file is damaged"):
        make_generator(FakeEngine(), tmp_path).run()

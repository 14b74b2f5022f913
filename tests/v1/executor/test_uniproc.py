from pathlib import Path

from tests.v1.engine.fakes import make_config
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc import UniProcExecutor


class RecordingWorker:
    """Notes what it is asked and answers with the name of the question."""

    def __init__(self, vllm_config):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return name

        return call


def test_every_question_reaches_the_worker_and_its_answer_comes_back():
    executor = UniProcExecutor(make_config(Path("/nowhere")), RecordingWorker)
    executor.init_device()
    executor.load_model()
    assert executor.get_kv_cache_config() == "get_kv_cache_config"
    executor.initialize_from_config("config")
    executor.compile_or_warm_up_model()
    executor.execute_model("step")
    assert executor.sample_tokens("mask") == "sample_tokens"
    executor.shutdown()
    assert executor.worker.calls == [
        ("init_device",),
        ("load_model",),
        ("get_kv_cache_config",),
        ("initialize_from_config", "config"),
        ("compile_or_warm_up_model",),
        ("execute_model", "step"),
        ("sample_tokens", "mask"),
        ("shutdown",),
    ]


def test_one_device_needs_one_process():
    assert Executor.get_class(make_config(Path("/nowhere"))) is UniProcExecutor

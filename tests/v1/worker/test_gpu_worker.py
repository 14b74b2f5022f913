from dataclasses import replace

from tests.v1.engine.fakes import make_config
from vllm.config import DeviceConfig
from vllm.v1.worker import gpu_worker


def test_a_device_without_a_number_can_be_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_worker, "GPUModelRunner", lambda _, device: device)
    config = replace(make_config(tmp_path), device_config=DeviceConfig(device="cuda"))
    worker = gpu_worker.Worker(config)
    worker.init_device()
    assert worker.model_runner.type == "cuda"

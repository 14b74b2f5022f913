import gguf
import numpy as np
import pytest

from vllm.exceptions import CheckpointError
from vllm.transformers_utils.gguf_file import GGUFFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("number", 7)
    writer.add_float32("half", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo")
    writer.add_array("words", ["", "a", "ünï", "x" * 300])
    writer.add_array("numbers", [-1, 2, 3])
    writer.add_tensor("small", np.arange(3, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_of_every_kind_are_read(path):
    file = GGUFFile(str(path))
    assert file.architecture == "llama"
    assert file.get("number") == 7
    assert file.get("half") == 0.5
    assert file.get("yes") is True
    assert file.get("text") == "héllo"
    assert file.get("words") == ["", "a", "ünï", "x" * 300]
    assert file.get("numbers") == [-1, 2, 3]
    assert file.get("nothing", 5) == 5


def test_tensors_have_torchs_order_of_dimensions(path):
    file = GGUFFile(str(path))
    assert file.tensors["matrix"].shape == (2, 3)
    values = file.raw_tensor("matrix", 24).view(np.float32)
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert file.raw_tensor("small", 12).view(np.float32).tolist() == [0, 1, 2]


def test_metadata_equals_the_packages_reader(embedded_model):
    file = GGUFFile(embedded_model)
    reader = gguf.GGUFReader(embedded_model)
    ours = {key: file.get(key) for key in file.metadata}
    theirs = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    assert ours == theirs
    assert len(file.tensors) == len(reader.tensors)
    for tensor in reader.tensors[::20]:
        ours = file.raw_tensor(tensor.name, int(tensor.n_bytes))
        assert np.array_equal(ours, tensor.data.view(np.uint8).reshape(-1))


def test_header_cut_anywhere_is_refused_in_one_line(path, tmp_path):
    whole = path.read_bytes()
    header_end = whole.index(b"matrix") + 20
    cut_path = tmp_path / "cut.gguf"
    for end in [1, 4, 10, *range(24, header_end, 7)]:
        cut_path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(str(cut_path))
        assert str(cut_path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_tensor_beyond_the_end_is_refused(path, tmp_path):
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"tensor matrix .* truncated"):
        GGUFFile(str(path)).raw_tensor("matrix", 24)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04 and more bytes than a header", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1 is not supported"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "truncated or damaged"),
    ],
)
def test_other_files_are_refused(content, reason, tmp_path):
    path = tmp_path / "b.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(str(path))


def test_missing_file_is_refused():
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile("/nowhere/c.gguf")

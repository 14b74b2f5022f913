import json
import time
import warnings

import gguf
import pytest
import regex
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.transformers_utils.gguf_builder import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    write_tokenizer,
)
from vllm.exceptions import CheckpointError, UnsupportedError, VLLMValidationError
from vllm.transformers_utils.byte_alphabet import CHAR_TO_BYTE
from vllm.transformers_utils.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and   inner spaces \n\n\t tabs\n",
    "It's we'll I'VE don't",
    "1234567 12,345.67 x2y3 ١٢٣",
    "héllo naïve Ünïcode ﬁ … 日本語のテキスト",
    "👍🏽 👨‍👩‍👧 \u200b zero width",
    "def f(x):\n    return x ** 2  # square\n",
    '{"name": "Jo", "tags": ["a", "b"], "n": -1.5e10}',
    "<|im_start|>user\nhi<|im_end|>\n",
    "almost <|im_start and <|im_end|><|im_end|>",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def smollm(embedded_model):
    return Tokenizer.from_path(embedded_model)


class ReferenceBpe:
    """Byte-level BPE in plain Python, on the package's reader and the regex module."""

    # The cut of SmolLM2: each digit alone, then GPT-2's pattern.
    DIGITS = regex.compile(r"\p{N}")
    WORDS = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, path: str) -> None:
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(merges)}
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        self.special = regex.compile("|".join(map(regex.escape, special)))
        self.to_char = {byte: char for char, byte in CHAR_TO_BYTE.items()}

    def encode(self, text: str) -> list[int]:
        out, end = [], 0
        for match in self.special.finditer(text):
            out += self._encode_plain(text[end : match.start()])
            out.append(self.ids[match.group()])
            end = match.end()
        return out + self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> list[int]:
        out, end = [], 0
        pieces = []
        for match in self.DIGITS.finditer(text):
            pieces += [text[end : match.start()], match.group()]
            end = match.end()
        for piece in [*pieces, text[end:]]:
            for word in self.WORDS.findall(piece):
                out += self._merge([self.to_char[byte] for byte in word.encode()])
        return out

    def _merge(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            ranked = [
                (self.ranks.get(pair, 1 << 30), i)
                for i, pair in enumerate(zip(parts, parts[1:], strict=False))
            ]
            rank, i = min(ranked)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def reference(embedded_model):
    return ReferenceBpe(embedded_model)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_of_smollm_equals_the_definition(text, smollm, reference):
    assert smollm.encode(text) == reference.encode(text)


def test_encoding_of_smollm_equals_transformers(smollm, embedded_model):
    from transformers.integrations.gguf import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, fields, _ = get_gguf_tokenizer(embedded_model)
    reference, _ = convert_gguf_tokenizer(architecture, fields)
    # Its converter does not cut digits apart, as this model's own tokenizer.json does.
    for text in [text for text in TEXTS if not regex.search(r"\p{N}{2}", text)]:
        assert smollm.encode(text) == reference.encode(text).ids, text
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), reference.pre_tokenizer]
    )
    for text in TEXTS:
        assert smollm.encode(text) == reference.encode(text).ids, text


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text, smollm):
    token_ids = smollm.encode(text)
    assert smollm.decode(token_ids, skip_special_tokens=False) == text
    assert b"".join(map(smollm.token_bytes, token_ids)) == text.encode()


def test_special_tokens_can_be_left_out_of_a_text(smollm):
    token_ids = smollm.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm.decode(token_ids) == "user\nhi"


def test_embedded_tokenizer_knows_its_special_tokens(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.max_token_id == 49151
    assert (smollm.eos_token, smollm.eos_token_id) == ("<|im_end|>", 2)
    assert (smollm.bos_token, smollm.bos_token_id) == ("<|im_start|>", 1)
    assert smollm.all_special_ids == frozenset(range(17))
    assert smollm.chat_template is not None
    assert "im_start" in smollm.chat_template


def test_ids_and_tokens_are_each_others_inverse(smollm):
    assert smollm.id_to_token(28) == ","
    assert smollm.token_to_id(",") == 28
    assert smollm.id_to_token(49152) is None
    assert smollm.token_to_id("no such token") is None
    assert smollm.token_bytes(49152) == b""


def test_every_byte_has_a_character_of_its_own():
    assert sorted(CHAR_TO_BYTE.values()) == list(range(256))
    assert CHAR_TO_BYTE["A"] == 65
    assert CHAR_TO_BYTE["Ġ"] == 32
    assert CHAR_TO_BYTE["Ċ"] == 10


def test_embedded_tokenizer_loads_in_half_a_second(embedded_model):
    Tokenizer.from_path(embedded_model)
    start = time.process_time()
    Tokenizer.from_path(embedded_model)
    # Time of this process alone: other tests may run beside it.
    assert time.process_time() - start < 0.5


def test_half_a_surrogate_pair_is_refused(smollm):
    with pytest.raises(VLLMValidationError, match="surrogate"):
        smollm.encode("ok \ud83d")


def test_json_form_builds_an_equal_tokenizer(smollm):
    copy = tokenizers.Tokenizer.from_str(smollm.to_json())
    for text in TEXTS:
        assert copy.encode(text).ids == smollm.encode(text)


def save_directory(folder, config: dict | None = None) -> Tokenizer:
    """Write a byte-level tokenizer of 256 bytes, one merge and two special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(CHAR_TO_BYTE))} | {"hi": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_path(str(folder))


def test_directory_is_read_as_transformers_reads_it(tmp_path):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": "{{ messages }}",
    }
    tokenizer = save_directory(tmp_path, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert tokenizer.eos_token_id == reference.eos_token_id == 258
    assert tokenizer.bos_token_id == reference.bos_token_id == 257
    assert tokenizer.chat_template == reference.chat_template
    assert tokenizer.all_special_ids == set(reference.all_special_ids)
    assert tokenizer.vocab_size == len(reference) == 260
    for text in ["hi there", "<s>hi</s>", "<tool>é"]:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference.encode(text), skip_special_tokens=True
        )


def test_tokenizer_json_alone_is_enough(tmp_path):
    save_directory(tmp_path)
    tokenizer = Tokenizer.from_path(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("hi") == [256]
    assert tokenizer.eos_token_id is None
    assert tokenizer.chat_template is None


def test_added_token_stands_for_its_spelling(tmp_path):
    tokenizer = save_directory(tmp_path)
    assert tokenizer.token_bytes(259) == b"<tool>"
    assert tokenizer.token_bytes(256) == b"hi"
    assert 259 not in tokenizer.all_special_ids


def test_template_file_wins_over_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = save_directory(tmp_path, {"chat_template": "from the configuration"})
    assert tokenizer.chat_template == "from the file"


def test_default_of_several_templates_is_taken(tmp_path):
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    tokenizer = save_directory(tmp_path, {"chat_template": templates})
    assert tokenizer.chat_template == "plain"


def test_llama_class_adds_what_its_configuration_says(tmp_path):
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
    }
    tokenizer = save_directory(tmp_path, config)
    assert tokenizer.encode("hi") == [257, 256]
    assert tokenizer.encode("hi", add_special_tokens=False) == [256]


def test_truncation_left_in_the_file_has_no_effect(tmp_path):
    save_directory(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_path(str(tmp_path)).encode("hi hi hi")) == 5


def test_code_beside_a_tokenizer_never_runs(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(f"open({str(canary)!r}, 'w').close()")
    config = {
        "tokenizer_class": "MineTokenizer",
        "auto_map": {"AutoTokenizer": ["mine.MineTokenizer", None]},
    }
    assert save_directory(tmp_path, config).encode("hi") == [256]
    assert not canary.exists()


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Odd"}}'])
def test_damaged_tokenizer_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not") as caught:
        Tokenizer.from_path(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no tokenizer\.json"):
        Tokenizer.from_path(str(tmp_path))


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture
def spm(tmp_path):
    """A SentencePiece vocabulary in which "ab" scores better than "bc"."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁ab", "abc", "<tool>"]
    scores = [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -1.5, -5.0, 0.0]
    path = write_tokenizer(
        tmp_path / "spm.gguf",
        "llama",
        ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces],
        scores=[0.0] * 259 + scores,
        types=[UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        + [*[NORMAL] * 8, USER_DEFINED],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    return Tokenizer.from_path(path)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


def test_best_scored_pieces_are_merged_first(spm):
    assert tokens_of(spm, "abc") == ["<s>", "▁ab", "c"]
    assert tokens_of(spm, "cbc") == ["<s>", "▁", "c", "bc"]


def test_characters_outside_the_vocabulary_become_bytes(spm):
    assert tokens_of(spm, "aé") == ["<s>", "▁", "a", "<0xC3>", "<0xA9>"]
    assert spm.token_bytes(spm.encode("aé")[-1]) == b"\xa9"


def test_marks_are_spaces_again_in_bytes_and_text(spm):
    token_ids = spm.encode("ab ab é", add_special_tokens=False)
    assert b"".join(map(spm.token_bytes, token_ids)) == " ab ab é".encode()
    assert spm.decode(token_ids) == "ab ab é"


def test_special_tokens_of_sentencepiece_are_found_in_a_text(spm):
    assert tokens_of(spm, "<s>a</s>")[1:] == ["<s>", "▁", "a", "</s>"]
    assert spm.all_special_ids == {0, 1, 2}


def byte_level_gguf(path, pre: str, **numbers: object) -> Tokenizer:
    tokens = [*sorted(CHAR_TO_BYTE), "12", "123", "<s>"]
    return Tokenizer.from_path(
        write_tokenizer(
            path / "a.gguf",
            "gpt2",
            tokens,
            merges=["1 2", "12 3"],
            types=[*[NORMAL] * 258, CONTROL],
            pre=pre,
            bos_token_id=258,
            **numbers,
        )
    )


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "1", "2"]),
        ("qwen2", ["1", "2", "3", "1", "2"]),
        ("llama-bpe", ["<s>", "123", "12"]),
        ("gpt-2", ["123", "12"]),
        ("default", ["123", "12"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre, expected, tmp_path):
    assert tokens_of(byte_level_gguf(tmp_path, pre), "12312") == expected


def test_bos_is_added_as_the_file_says(tmp_path):
    with_bos = byte_level_gguf(tmp_path, "smollm", add_bos_token=True)
    assert tokens_of(with_bos, "a") == ["<s>", "a"]
    without = byte_level_gguf(tmp_path, "llama-bpe", add_bos_token=False)
    assert tokens_of(without, "a") == ["a"]


def test_unknown_pre_tokenizer_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="pre-tokenizer 'odd'"):
        byte_level_gguf(tmp_path, "odd")


def test_unknown_kind_of_gguf_tokenizer_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "a.gguf", "rwkv", ["a"])
    with pytest.raises(UnsupportedError, match="tokenizer model 'rwkv'"):
        Tokenizer.from_path(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "gpt2", "merges": ["a b"]}, "the tokenizer is damaged"),
        ({"kind": "gpt2", "eos_token_id": 7}, "eos_token_id 7 is not in the"),
        ({"kind": "gpt2", "types": [1]}, "one type a token"),
        ({"kind": "llama", "scores": [0.0]}, "one score a token"),
    ],
)
def test_damaged_gguf_tokenizer_is_refused(options, reason, tmp_path):
    path = write_tokenizer(tmp_path / "a.gguf", tokens=["a", "c"], **options)
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer.from_path(path)


def test_gguf_without_tokenizer_is_refused(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="give one with --tokenizer"):
        Tokenizer.from_path(str(tmp_path / "a.gguf"))

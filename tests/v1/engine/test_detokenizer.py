import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer, TokenizerSettings
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, StopStringChecker
from vllm.v1.engine.token_texts import TokenTable


def detokenize(tokenizer, token_ids, *, step=1, stop_token=False, prompt=(), **params):
    """Feed `step` tokens at a time; return the deltas, the stop string and the ids."""
    params = SamplingParams(max_tokens=None, **params)
    detokenizer = IncrementalDetokenizer(
        tokenizer, TokenTable(tokenizer), params, list(prompt)
    )
    deltas, stop = [], None
    for start in range(0, len(token_ids), step):
        is_last = start + step >= len(token_ids)
        stop = detokenizer.update(
            token_ids[start : start + step], stop_token and is_last
        )
        if stop is not None:
            break
        deltas.append(detokenizer.take_text(False, True))
    stop = stop or detokenizer.finish()
    deltas.append(detokenizer.take_text(True, True))
    assert "".join(deltas) == detokenizer.take_text(True, False)
    return deltas, stop, detokenizer.token_ids


def byte_ids(tokenizer, text):
    """Return one token a byte, so that characters and stop strings are split."""
    ids = {tokenizer.token_bytes(i): i for i in range(256)}
    return [ids[bytes([byte])] for byte in text.encode()]


@pytest.fixture(scope="module")
def word_tokenizer():
    """A tokenizer in SentencePiece's form: blanks before words, bytes as a fallback."""
    words = ["<s>", "</s>", "▁a", "▁b", "b", *[f"<0x{i:02X}>" for i in range(256)]]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, TokenizerSettings(eos_token="</s>"))


def test_no_half_character_is_emitted(tokenizer):
    deltas, _, _ = detokenize(tokenizer, byte_ids(tokenizer, "é☺"))
    assert deltas == ["", "é", "", "", "☺", ""]


def test_an_incomplete_character_is_replaced_at_the_end(tokenizer):
    deltas, _, _ = detokenize(tokenizer, byte_ids(tokenizer, "a☺")[:-1])
    assert deltas == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("step", [1, 3])
def test_joined_deltas_are_the_full_decode(tokenizer, step):
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        deltas, _, _ = detokenize(tokenizer, token_ids, step=step)
        assert "".join(deltas) == tokenizer.decode(token_ids)


def test_special_tokens_are_shown_when_asked_for(tokenizer):
    token_ids = [*byte_ids(tokenizer, "a"), tokenizer.eos_token_id]
    shown, _, _ = detokenize(tokenizer, token_ids, skip_special_tokens=False)
    skipped, _, _ = detokenize(tokenizer, token_ids)
    assert ("".join(shown), "".join(skipped)) == ("a<eos>", "a")


def test_a_stop_token_has_no_text_but_stays_in_the_ids(tokenizer):
    token_ids = byte_ids(tokenizer, "ab")
    deltas, _, kept = detokenize(tokenizer, token_ids, stop_token=True)
    assert ("".join(deltas), kept) == ("a", token_ids)


def test_a_stop_token_is_shown_with_include_stop_str(tokenizer):
    deltas, _, _ = detokenize(
        tokenizer,
        byte_ids(tokenizer, "ab"),
        stop_token=True,
        include_stop_str_in_output=True,
    )
    assert "".join(deltas) == "ab"


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_a_stop_string_over_token_borders_ends_text_and_ids(tokenizer, step):
    deltas, stop, kept = detokenize(
        tokenizer, byte_ids(tokenizer, "one END two"), step=step, stop="END"
    )
    assert ("".join(deltas), stop, len(kept)) == ("one ", "END", 7)


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    deltas, _, _ = detokenize(tokenizer, byte_ids(tokenizer, "xEEN!"), stop="END")
    assert deltas == ["x", "", "E", "", "EN!", ""]


def test_the_stop_string_is_shown_when_asked_for(tokenizer):
    deltas, stop, _ = detokenize(
        tokenizer,
        byte_ids(tokenizer, "one END two"),
        stop=["END"],
        include_stop_str_in_output=True,
    )
    assert ("".join(deltas), stop) == ("one END", "END")


def test_text_behind_the_stop_in_the_same_token_is_dropped(tokenizer):
    [hell] = tokenizer.encode("hell")
    deltas, stop, kept = detokenize(tokenizer, [hell], stop="e")
    assert ("".join(deltas), stop, kept) == ("h", "e", [hell])


def test_the_stop_string_that_begins_first_wins(tokenizer):
    [hell] = tokenizer.encode("hell")
    deltas, stop, _ = detokenize(tokenizer, [hell], stop=["l", "el"])
    assert ("".join(deltas), stop) == ("h", "el")


def test_min_tokens_delays_stop_strings(tokenizer):
    deltas, stop, kept = detokenize(
        tokenizer, byte_ids(tokenizer, "a.b.c"), stop=".", min_tokens=2
    )
    assert ("".join(deltas), stop, len(kept)) == ("a.b", ".", 4)


def test_a_replaced_character_at_the_end_may_complete_a_stop_string(tokenizer):
    _, stop, _ = detokenize(tokenizer, byte_ids(tokenizer, "☺")[:1], stop="\ufffd")
    assert stop == "\ufffd"


def test_without_detokenization_there_is_no_text(tokenizer):
    deltas, _, kept = detokenize(tokenizer, [1, 2, 3], detokenize=False)
    assert ("".join(deltas), kept) == ("", [1, 2, 3])


def test_words_keep_their_blanks(word_tokenizer):
    encode = word_tokenizer.token_to_id
    token_ids = [encode("▁a"), encode("▁b"), encode("b"), encode("▁a")]
    deltas, _, _ = detokenize(word_tokenizer, token_ids)
    assert deltas == ["a", " b", "b", " a", ""]
    assert "".join(deltas) == word_tokenizer.decode(token_ids)


def test_the_prompt_decides_about_the_first_blank(word_tokenizer):
    encode = word_tokenizer.token_to_id
    deltas, _, _ = detokenize(word_tokenizer, [encode("▁b")], prompt=[encode("▁a")])
    assert "".join(deltas) == " b"


def test_fallback_bytes_wait_for_the_whole_character(word_tokenizer):
    token_ids = [word_tokenizer.token_to_id(f"<0x{b:02X}>") for b in "☺".encode()]
    deltas, _, _ = detokenize(word_tokenizer, token_ids)
    assert deltas == ["", "", "☺", ""]


def test_bytes_that_never_become_a_character_are_given_up(word_tokenizer):
    token_ids = [word_tokenizer.token_to_id("<0xFF>")] * 70
    deltas, _, _ = detokenize(word_tokenizer, token_ids)
    assert "".join(deltas) == "\ufffd" * 70
    assert any(deltas[:-1])


@pytest.mark.parametrize(
    ("text", "held"), [("", 0), ("abc", 0), ("xa", 1), ("xab", 2), ("aab", 2)]
)
def test_the_longest_beginning_of_a_stop_string_is_held(text, held):
    assert StopStringChecker(["abx", "a"], False).num_held_chars(text) == held

import pytest

from vllm.utils.quantities import parse_human_int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("4096", 4096),
        ("1_000", 1000),
        ("32K", 32768),
        ("32k", 32000),
        ("25.6k", 25600),
        ("1.5K", 1536),
        ("2G", 2 * 2**30),
        ("2g", 2_000_000_000),
        ("1M", 2**20),
        ("1T", 2**40),
    ],
)
def test_upper_case_suffixes_are_binary_and_lower_case_ones_decimal(text, value):
    assert parse_human_int(text) == value


@pytest.mark.parametrize("text", ["", "K", "1.5", "0.3K", "12Q", "1e3", "ten", "1 K"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="not a"):
        parse_human_int(text)

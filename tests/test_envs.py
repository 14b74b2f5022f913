"""What the environment may say."""

import pytest

from vllm import envs

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        ("all", None),
        ("nobind", None),
        ("3", {3}),
        ("0-2", {0, 1, 2}),
        ("0-1, 7,5-5", {0, 1, 5, 7}),
    ],
)
def test_processors_are_named_by_number_and_range(text, expected, monkeypatch):
    monkeypatch.setenv(BIND, text)
    assert expected == envs.VLLM_CPU_OMP_THREADS_BIND


@pytest.mark.parametrize(
    "text",
    ["", "many", "1-0", "0-", "-1", "0,,1", "0-1|2-3", "\u0661", "0x1", "123456"],
)
def test_what_names_no_processors_is_refused(text, monkeypatch):
    monkeypatch.setenv(BIND, text)
    with pytest.raises(ValueError, match=f"{BIND} must be"):
        _ = envs.VLLM_CPU_OMP_THREADS_BIND

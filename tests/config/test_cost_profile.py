"""The document of a machine's costs: what it may hold, and what the errors say."""

import json
from dataclasses import replace

import pytest

from vllm.config.cost_profile import (
    CostProfile,
    parse_cost_profile,
    read_cost_profile,
)
from vllm.exceptions import VLLMValidationError

PROFILE = CostProfile(
    ((1, 2.5), (8, 4.0)), ((1, 20.0), (64, 90.0)), 16, single_draft_curve=((1, 2.0),)
)
GOOD = {"draft_curve": [[1, 2]], "verify_curve": [[1, 20], [4, 21.5]]}


def test_a_profile_survives_its_document():
    document = json.loads(json.dumps(PROFILE.to_json()))
    assert parse_cost_profile(document, "file") == PROFILE
    plain = replace(PROFILE, single_draft_curve=())
    document = json.loads(json.dumps(plain.to_json()))
    assert parse_cost_profile(document, "file") == plain


def test_nothing_is_captured_unless_the_document_says_so():
    profile = parse_cost_profile(GOOD, "file")
    assert profile == CostProfile(((1, 2.0),), ((1, 20.0), (4, 21.5)), 0)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "the document"),
        (GOOD | {"curve": []}, "curve is unknown"),
        ({"draft_curve": [[1, 2]]}, "verify_curve must be a list"),
        (GOOD | {"draft_curve": []}, "draft_curve must be a list"),
        (GOOD | {"verify_curve": {"1": 2}}, "verify_curve must be a list"),
        (GOOD | {"verify_curve": [[1, 2], [1, 3]]}, r"verify_curve\[1\] must have"),
        (GOOD | {"verify_curve": [[2, 2], [1, 3]]}, r"verify_curve\[1\] must have"),
        (GOOD | {"verify_curve": [[1, 2], 3]}, r"verify_curve\[1\] must be"),
        (GOOD | {"verify_curve": [[1]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[0, 2]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1.5, 2]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[True, 2]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1, -2]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1, True]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1, "2"]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[10**30, 2]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1, 1e308]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"verify_curve": [[1, 10**400]]}, r"verify_curve\[0\] must be"),
        (GOOD | {"draft_curve": [[1, float("nan")]]}, r"draft_curve\[0\] must be"),
        (GOOD | {"draft_curve": [[1, float("inf")]]}, r"draft_curve\[0\] must be"),
        (GOOD | {"single_draft_curve": None}, "single_draft_curve must be a list"),
        (GOOD | {"single_draft_curve": [[1]]}, r"single_draft_curve\[0\] must be"),
        (GOOD | {"cudagraph_limit": -1}, "cudagraph_limit must be"),
        (GOOD | {"cudagraph_limit": 1.0}, "cudagraph_limit must be"),
    ],
)
def test_a_wrong_document_is_refused_by_its_place(document, place):
    with pytest.raises(VLLMValidationError, match=f"costs.json: {place}") as raised:
        parse_cost_profile(document, "costs.json", "speculative_config.cost_table")
    assert raised.value.parameter == "speculative_config.cost_table"


def test_a_file_that_is_not_there_or_no_json_is_refused_by_its_name(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(VLLMValidationError, match="costs.json cannot be read: No such"):
        read_cost_profile(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(VLLMValidationError, match="costs.json is not JSON"):
        read_cost_profile(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(VLLMValidationError, match="costs.json is not JSON"):
        read_cost_profile(str(path))
    path.write_text(json.dumps(GOOD))
    assert read_cost_profile(str(path)).verify_curve == ((1, 20.0), (4, 21.5))

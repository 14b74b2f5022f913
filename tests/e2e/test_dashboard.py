"""The dashboard of a real server with traffic, in a real browser."""

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import Browser, find_browser
from tests.e2e.conftest import Server, start_server, stop_server
from tests.e2e.picture_dashboard import take_picture

API_KEY = "a key"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
NUM_DRAFTS = 3
FLAGS = (
    "--enable-dashboard",
    "--api-key",
    API_KEY,
    "--max-model-len",
    "512",
    "--speculative-config.method",
    "ngram",
    "--speculative-config.num_speculative_tokens",
    str(NUM_DRAFTS),
    "--speculative-config.prompt_lookup_min",
    "1",
    "--speculative-config.prompt_lookup_max",
    "3",
    "--speculative-config.enable_adaptive_verification",
    "true",
)
COSTS = {
    "draft_curve": [[1, 0.1], [64, 0.2]],
    "verify_curve": [[1, 20.0], [8, 26.0], [64, 110.0]],
    "cudagraph_limit": 0,
}
PROMPTS = (
    "Repeat: the cat sat on the mat, the cat sat on the mat, the cat",
    "Count from one to twenty: one, two, three, four,",
    "Write a short poem about the sea.",
)
# Anything that Chromium's own start page or services would ask for is not the page's.
WIDTH = "document.querySelector('#timeline').clientWidth"
FIGURES = ("timeline", "positions", "reliability", "batches", "cost")
TABLE = "[...document.querySelectorAll('#requests tr')].map((row) => row.cells.length)"
HEADS = "[...document.querySelectorAll('#requests th')].map((one) => one.textContent)"
LOADED = "performance.getEntriesByType('resource').map((one) => one.name)"


async def _send_all(server: Server) -> list[str]:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:

        async def send(number: int) -> str:
            body: dict[str, Any] = {
                "prompt": PROMPTS[number % len(PROMPTS)],
                "max_tokens": 40,
                "ignore_eos": True,
                "temperature": 0.0,
                # The page shows every token.
                "skip_special_tokens": False,
            }
            if number % 4 == 3:
                body |= {"structured_outputs": {"regex": "(one, two, )+"}}
            response = await client.post("/v1/completions", json=body, headers=HEADERS)
            return response.json()["choices"][0]["text"]

        return await asyncio.gather(*map(send, range(8)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Measuring costs takes longer than all else here.
    table = tmp_path_factory.mktemp("costs") / "costs.json"
    table.write_text(json.dumps(COSTS))
    running = start_server(*FLAGS, "--speculative-config.cost_table", str(table))
    yield running
    stop_server(running)


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium is installed")
    running = Browser(path)
    running.resize(1100, 900)
    running.open(f"{server.base_url}/dashboard")
    running.wait_for("document.body && document.body.dataset.state")
    yield running
    running.close()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Browser:
    """The page with the key."""
    browser.evaluate(
        f"(document.querySelector('#key-text').value = '{API_KEY}',"
        "document.querySelector('#key button').click())"
    )
    browser.wait_for("document.body.dataset.state === 'live'")
    # Each refused request is a line of the console.
    browser.errors[:] = [error for error in browser.errors if "401" not in error]
    return browser


@pytest.fixture(scope="module")
def first_words(page: Browser) -> dict[str, str]:
    """What each part says before any traffic."""
    return {
        part: page.evaluate(f"document.querySelector('#{part}').textContent")
        for part in (*FIGURES, "requests")
    }


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest, server: Server) -> list[str]:
    if find_browser() is not None:
        request.getfixturevalue("first_words")
    return asyncio.run(_send_all(server))


def get_data(server: Server, **params: str) -> dict[str, Any]:
    url = f"{server.base_url}/dashboard/data"
    return httpx.get(url, params=params, headers=HEADERS).json()


def read_metrics(server: Server) -> str:
    return httpx.get(f"{server.base_url}/metrics", headers=HEADERS).text


def test_the_page_asks_for_the_key_and_shows_nothing_before(browser: Browser) -> None:
    browser.wait_for("document.body.dataset.state === 'locked'")
    assert browser.evaluate("document.querySelector('main').hidden")
    browser.evaluate(
        "(document.querySelector('#key-text').value = 'wrong',"
        "document.querySelector('#key button').click())"
    )
    browser.wait_for("document.querySelector('#key-note').textContent")
    assert browser.evaluate("document.querySelector('main').hidden")


def test_the_data_agrees_with_the_metrics_and_the_answers(
    server: Server, texts: list[str]
) -> None:
    data = get_data(server)
    metrics = read_metrics(server)
    for name, number in data["drafts"].items():
        [line] = [
            line
            for line in metrics.splitlines()
            if line.startswith(f"vllm:spec_decode_{name}_total")
        ]
        assert float(line.rpartition(" ")[2]) == number > 0
    keys = [one["key"] for one in data["requests"]]
    details = [get_data(server, request=key)["request"] for key in keys]
    told = ["".join(t for s in one["steps"] for t in s["tokens"]) for one in details]
    assert sorted(told) == sorted(texts)
    for detail in details:
        accepted = [
            draft[1] for step in detail["steps"] for draft in step["drafts"]
        ].count("accepted")
        assert accepted == detail["summary"]["num_accepted_tokens"]
        assert detail["summary"]["state"] == "length"


def test_before_any_traffic_every_part_says_so(first_words: dict[str, str]) -> None:
    assert first_words == {
        "timeline": "Nothing has run lately.",
        "positions": "No draft has been verified yet.",
        "reliability": "No predictions have been put to the test yet.",
        "batches": "No step has run yet.",
        "cost": "No step has been timed yet.",
        "requests": "No request has come yet.",
    }


def test_every_part_is_drawn_from_the_traffic(
    page: Browser, server: Server, texts: list[str]
) -> None:
    page.wait_for("document.querySelectorAll('#requests tbody tr').length === 8")
    for part in FIGURES:
        assert page.evaluate(f"document.querySelector('#{part} svg') !== null"), part
    bars = "document.querySelectorAll('#positions rect').length"
    assert page.evaluate(bars) == 2 * NUM_DRAFTS
    assert page.evaluate("document.querySelectorAll('#reliability circle').length")
    assert page.evaluate("document.querySelectorAll('#cost circle').length")
    assert "Expected calibration error" in page.evaluate(
        "document.querySelector('#ece').textContent"
    )
    loaded = page.evaluate(LOADED)
    assert loaded
    assert all(url.startswith(f"{server.base_url}/dashboard/data") for url in loaded)
    assert page.errors == []


def test_a_request_is_read_token_by_token(page: Browser, texts: list[str]) -> None:
    kept = (
        "[...document.querySelectorAll('#tokens .t-own, #tokens .t-accepted')]"
        ".map((one) => one.textContent).join('').replaceAll('⏎', '')"
    )
    page.evaluate("document.querySelector('#requests tbody tr button').click()")
    page.wait_for("document.querySelector('#tokens .t-accepted')")
    assert page.evaluate(kept) in texts
    page.move_to("#tokens .t-accepted")
    page.wait_for("!document.querySelector('#tip').hidden")
    tip = page.evaluate("document.querySelector('#tip').textContent")
    assert tip.startswith("draft 1: accepted")
    assert "predicted survival" in tip
    page.evaluate("document.querySelector('#ghosts').click()")
    hidden = "getComputedStyle(document.querySelector('#tokens .t-rejected')).display"
    if page.evaluate("document.querySelector('#tokens .t-rejected') !== null"):
        assert page.evaluate(hidden) == "none"
    page.evaluate("document.querySelector('#ghosts').click()")


def test_without_speculation_the_table_is_silent_on_drafts(
    page: Browser, texts: list[str]
) -> None:
    heads = page.evaluate(HEADS)
    silent, widths = page.evaluate(
        f"(data.server.method = null, draw(), [{HEADS}, {TABLE}])"
    )
    page.evaluate("update()")
    assert set(heads) - set(silent) == {"tokens a step", "verified", "accepted"}
    assert set(widths) == {len(silent)}
    assert page.evaluate(HEADS) == heads


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(page: Browser, is_dark: bool) -> None:
    page.resize(390, 800)
    page.prefer_dark(is_dark)
    page.wait_for(f"{WIDTH} < 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    [red, *_] = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (red < 128) == is_dark
    page.prefer_dark(False)
    page.resize(1100, 900)


def test_the_fit_of_costs_is_shown_in_two_ways(page: Browser, texts: list[str]) -> None:
    page.wait_for("document.querySelector('#cost .fit')")
    lines = "document.querySelectorAll('#cost .fit').length"
    assert page.evaluate(lines) == page.evaluate(
        "document.querySelectorAll('#cost circle').length"
    )
    page.evaluate(
        "(() => { const by = document.querySelector('#cost-by');"
        "by.value = 'prediction'; by.dispatchEvent(new Event('change')); })()"
    )
    assert page.evaluate(lines) == 1
    assert page.errors == []


def test_a_picture_shows_all_of_the_page_and_stays_small(
    page: Browser, texts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "dashboard.png"
    page.evaluate("document.querySelector('#requests tbody tr button').click()")
    page.wait_for("document.querySelector('#tokens .t-accepted')")
    take_picture(page, path)
    image = path.read_bytes()
    width, height = struct.unpack(">2I", image[16:24])
    assert (width, len(image) < 300_000) == (1280, True)
    assert height == page.evaluate("document.documentElement.scrollHeight") > 1000

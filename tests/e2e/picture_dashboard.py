"""Makes the picture of the dashboard that the documentation shows.

    python -m tests.e2e.picture_dashboard PICTURE [--seconds N] [flags of vllm serve]

A server on the embedded model gets mixed traffic, up to eight requests at once, and its
page is photographed. `--dark` and `--phone` name further pictures.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.browser import Browser, find_browser
from tests.e2e.conftest import start_server, stop_server
from tests.e2e.mixed_requests import CITY, ROWS, schema

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "chat_prompts.jsonl"
CONCURRENCIES = (1, 4, 8, 4, 2)
WIDTH, PHONE_WIDTH = 1280, 390
# Rows of the table of requests that are seen without scrolling it.
NUM_VISIBLE = 8
# A wrong city tempts a drafter to what the schema forbids.
OBJECT = 'Like {"city": "Oslo", "people": 7}, but as the schema wants it: '
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    schema("city", CITY) | {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    schema("rows", ROWS) | {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.95},
)


def make_requests() -> Iterator[dict[str, Any]]:
    """Yield requests of every kind in turn, without end."""
    lines = map(json.loads, PROMPTS.read_text().splitlines())
    prompts = itertools.cycle(line["prompt"] for line in lines if "prompt" in line)
    for kind in itertools.cycle(KINDS):
        start = OBJECT if "response_format" in kind else ""
        message = {"role": "user", "content": start + next(prompts)}
        yield {"messages": [message], "max_tokens": 64} | kind


async def send_traffic(base_url: str, seconds: float) -> None:
    """Keep more and then fewer requests running, each number as long."""
    requests = make_requests()
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:

        async def send_until(deadline: float) -> None:
            while time.monotonic() < deadline:
                body = next(requests)
                answer = await client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()

        for concurrency in CONCURRENCIES:
            deadline = time.monotonic() + seconds / len(CONCURRENCIES)
            await asyncio.gather(*[send_until(deadline) for _ in range(concurrency)])


def choose_request(base_url: str) -> str:
    """Return which of the latest requests had drafts of the most different ends."""

    def count_fates(key: str) -> tuple[int, int]:
        response = httpx.get(f"{base_url}/dashboard/data", params={"request": key})
        steps = response.json()["request"]["steps"]
        fates = [draft[1] for step in steps for draft in step["drafts"]]
        return len(set(fates)), fates.count("accepted")

    requests = httpx.get(f"{base_url}/dashboard/data").json()["requests"]
    return max((one["key"] for one in requests[:NUM_VISIBLE]), key=count_fates)


def take_picture(
    browser: Browser, path: Path, *, width: int = WIDTH, is_dark: bool = False
) -> None:
    """Write the whole page, with the pointer on an accepted draft."""
    browser.prefer_dark(is_dark)
    # What a pointer tells has its place in the window: all of the page is in it.
    browser.resize(width, 800)
    browser.wait_for(f"innerWidth === {width}")
    height = browser.evaluate("document.documentElement.scrollHeight")
    browser.resize(width, height)
    browser.wait_for(f"innerHeight === {height}")
    browser.move_to("#tokens .t-accepted")
    browser.wait_for("!document.querySelector('#tip').hidden")
    browser.screenshot(path)


def make_pictures(base_url: str, args: argparse.Namespace) -> None:
    """Send traffic and photograph what the page makes of it."""
    path = find_browser()
    assert path is not None, "no Chromium is installed"
    asyncio.run(send_traffic(base_url, args.seconds))
    browser = Browser(path)
    try:
        browser.open(f"{base_url}/dashboard")
        browser.wait_for("document.querySelector('#requests button') !== null")
        key = json.dumps(choose_request(base_url))
        browser.evaluate(
            "[...document.querySelectorAll('#requests button')]"
            f".find((one) => one.title === {key}).click()"
        )
        browser.wait_for("document.querySelector('#tokens .t-accepted')")
        take_picture(browser, args.picture)
        if args.dark is not None:
            take_picture(browser, args.dark, is_dark=True)
        if args.phone is not None:
            take_picture(browser, args.phone, width=PHONE_WIDTH)
        assert browser.errors == [], browser.errors
    finally:
        browser.close()


def main() -> None:
    """Serve, and make the pictures."""
    parser = argparse.ArgumentParser(description="Make the picture of the dashboard.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", type=Path, help="likewise, in the dark")
    parser.add_argument("--phone", type=Path, help="likewise, as wide as a phone")
    parser.add_argument("--seconds", type=float, default=60, help="of traffic")
    args, flags = parser.parse_known_args()
    server = start_server("--enable-dashboard", *flags)
    try:
        make_pictures(server.base_url, args)
    finally:
        stop_server(server)


if __name__ == "__main__":
    main()

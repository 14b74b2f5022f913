"""`vllm bench serve`: load a running server, and report throughput and latencies."""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx
import uvloop
from tqdm import tqdm

from vllm import envs
from vllm.benchmarks.client import RequestResult, send_request
from vllm.benchmarks.datasets import (
    WORDS,
    SampleRequest,
    file_requests,
    random_requests,
)
from vllm.benchmarks.event_stream import Endpoint, StreamError
from vllm.benchmarks.report import METRIC_NAMES, make_report
from vllm.exceptions import UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int, json_mapping

_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm bench serve`."""
    parser = FlexibleArgumentParser(
        prog="vllm bench serve",
        description="Send requests to a running server, and report what they took.",
    )
    parser.add_config_argument()
    _add_server_flags(parser.add_argument_group("Server"))
    _add_load_flags(parser.add_argument_group("Load"))
    _add_result_flags(parser.add_argument_group("Result"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", help="default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument(
        "--backend",
        choices=tuple(_ENDPOINTS),
        default="openai",
        help="openai: completions; openai-chat: chats (default: %(default)s)",
    )
    group.add_argument("--endpoint", help="route; default: that of the backend")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument(
        "--extra-body",
        type=json_mapping,
        default={},
        metavar="JSON",
        help='more fields of each request, such as {"temperature": 0}',
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=("random", "custom"),
        default="random",
        help="custom: JSON lines of --dataset-path (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path", help='file of {"prompt": text, "output_len": n} lines'
    )
    for name, default, text in (
        ("--num-prompts", 100, "requests"),
        ("--random-input-len", 128, "tokens a prompt"),
        ("--random-output-len", 128, "tokens an answer"),
        ("--num-warmups", 1, "requests before the clock starts"),
    ):
        group.add_argument(
            name, type=human_int, default=default, help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths vary by this share, 0 to 1 (default: %(default)s)",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="requests a second; inf: all at once (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="1: Poisson arrivals; above: more even (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency", type=int, help="requests in flight; default: no limit"
    )
    group.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    group.add_argument(
        "--ignore-eos", action="store_true", help="every answer has its full length"
    )


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        help="of ttft, tpot, itl, e2el (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", help="such as 50,90,99 (default: 99)"
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--result-dir", default=".", help="(default: %(default)s)")
    group.add_argument("--result-filename", help="default: named after the settings")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _check(parser: FlexibleArgumentParser, args: argparse.Namespace) -> None:
    metrics = args.percentile_metrics.split(",")
    unknown = sorted(set(metrics) - set(METRIC_NAMES))
    if unknown:
        parser.error(f"--percentile-metrics: unknown {', '.join(unknown)}")
    try:
        percentiles = [float(text) for text in args.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        parser.error(
            "--metric-percentiles must be numbers from 0 to 100, such as 50,99"
        )
    if args.num_prompts < 1 or args.random_input_len < 1 or args.random_output_len < 1:
        parser.error("--num-prompts and the random lengths must be at least 1")
    if not (args.request_rate > 0 and args.burstiness > 0):
        parser.error("--request-rate and --burstiness must be above 0")
    if not 0 <= args.random_range_ratio <= 1:
        parser.error("--random-range-ratio must be from 0 to 1")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        parser.error("--max-concurrency must be at least 1")
    if args.dataset_name == "custom" and not args.dataset_path:
        parser.error("--dataset-name custom needs --dataset-path")
    args.metrics, args.percentiles = metrics, percentiles


async def _first_model(client: httpx.AsyncClient, base_url: str) -> str:
    response = await client.get(f"{base_url}/v1/models")
    if response.status_code != 200:
        raise UnsupportedError(
            f"{base_url}/v1/models answered {response.status_code}: name a --model, "
            "or set VLLM_API_KEY"
        )
    return str(response.json()["data"][0]["id"])


async def _token_pool(
    client: httpx.AsyncClient, base_url: str, model: str
) -> list[int]:
    """Return the token ids of ordinary words, or [] if the server has no /tokenize."""
    body = {"model": model, "prompt": WORDS, "add_special_tokens": False}
    response = await client.post(f"{base_url}/tokenize", json=body)
    return list(response.json()["tokens"]) if response.status_code == 200 else []


async def _sample_requests(
    client: httpx.AsyncClient, base_url: str, args: argparse.Namespace
) -> list[SampleRequest]:
    if args.dataset_name == "custom":
        return file_requests(
            args.dataset_path, args.num_prompts, args.random_output_len
        )
    # A chat takes no token ids.
    use_tokens = args.backend == "openai"
    pool = await _token_pool(client, base_url, args.model) if use_tokens else []
    return random_requests(
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        pool,
        args.seed,
    )


def _body(request: SampleRequest, args: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"model": args.model}
    if args.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": request.prompt}]
        body["max_completion_tokens"] = request.num_output_tokens
    else:
        body["prompt"] = request.prompt
        body["max_tokens"] = request.num_output_tokens
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body | args.extra_body


def _gaps_s(args: argparse.Namespace, num_requests: int) -> list[float]:
    """Return the seconds before each request: gamma distributed, the first is 0."""
    if args.request_rate == float("inf"):
        return [0.0] * num_requests
    rng = random.Random(args.seed)
    scale = 1.0 / (args.request_rate * args.burstiness)
    return [0.0] + [
        rng.gammavariate(args.burstiness, scale) for _ in range(num_requests - 1)
    ]


async def _send_all(
    endpoint: Endpoint, requests: list[SampleRequest], args: argparse.Namespace
) -> list[RequestResult]:
    limit = asyncio.Semaphore(args.max_concurrency or len(requests))
    bar = tqdm(total=len(requests), disable=args.disable_tqdm, desc="Requests")

    async def send(request: SampleRequest) -> RequestResult:
        async with limit:
            result = await send_request(
                endpoint, _body(request, args), request.num_prompt_tokens
            )
        bar.update(1)
        return result

    tasks = []
    for request, gap_s in zip(requests, _gaps_s(args, len(requests)), strict=True):
        if gap_s:
            await asyncio.sleep(gap_s)
        tasks.append(asyncio.create_task(send(request)))
    results = await asyncio.gather(*tasks)
    bar.close()
    return results


async def _benchmark(args: argparse.Namespace) -> dict[str, Any]:
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    key = envs.VLLM_API_KEY or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # One, so that what is asked first and the load trust the same servers.
    tls = httpx.create_ssl_context(trust_env=False)
    try:
        endpoint = Endpoint(
            base_url + (args.endpoint or _ENDPOINTS[args.backend]), headers, tls
        )
    except StreamError as error:
        raise UnsupportedError(str(error)) from None
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(600.0, connect=10.0),
        verify=tls,
        trust_env=False,
    ) as client:
        try:
            args.model = args.model or await _first_model(client, base_url)
            requests = await _sample_requests(client, base_url, args)
        except httpx.TransportError as error:
            raise UnsupportedError(f"no server at {base_url}: {error}") from None
    for request in requests[: args.num_warmups]:
        warm_up = await send_request(endpoint, _body(request, args), 0)
        if warm_up.error:
            raise UnsupportedError(f"the first request failed: {warm_up.error}")
    start_s = time.perf_counter()
    results = await _send_all(endpoint, requests, args)
    duration_s = time.perf_counter() - start_s
    settings = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf"
        if args.request_rate == float("inf")
        else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    report = make_report(results, duration_s, settings, args.metrics, args.percentiles)
    print(report.format())
    return report.figures


def _save(figures: dict[str, Any], args: argparse.Namespace) -> None:
    name = args.result_filename or (
        f"{args.backend}-{figures['request_rate']}qps-"
        f"concurrency{args.max_concurrency}-{os.path.basename(args.model)}-"
        f"{figures['date']}.json"
    )
    os.makedirs(args.result_dir, exist_ok=True)
    path = os.path.join(args.result_dir, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=2)
    print(f"Written to {path}")


def run(argv: Sequence[str]) -> int:
    """Run the benchmark; return 1 if any request failed."""
    parser = make_parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    figures = uvloop.run(_benchmark(args))
    if args.save_result:
        _save(figures, args)
    if figures["errors"]:
        print(f"error: first failure: {figures['errors'][0]}", file=sys.stderr)
    return 1 if figures["failed"] else 0

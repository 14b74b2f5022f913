"""An engine in a process of its own: no other one shares its threads or its memory."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from vllm.exceptions import UnsupportedError


class EngineProcess:
    """Answers loads, one at a time.

    Args:
        name: of the engine, for errors.
        engine_args: fields of `EngineArgs`.

    Raises:
        UnsupportedError: the engine does not start; it has said why.
    """

    def __init__(self, name: str, engine_args: dict[str, Any]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # As in a server: threads that wait leave the cores to those that work.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
        self._ask(engine_args)

    def run_load(self, **load: Any) -> dict[str, Any]:
        """Run a load of `_run_load`, and return its figures.

        Raises:
            UnsupportedError: the engine has ended.
        """
        return self._ask(load)

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UnsupportedError(f"the engine {self._name!r} has ended, see above")
        return dict(json.loads(line))


def _run_load(
    engine: Any,
    prompts: list[str],
    concurrency: int,
    output_len: int,
    temperature: float,
    run_id: str,
) -> dict[str, Any]:
    """Answer chats of one user turn; return the figures as JSON."""
    from vllm.benchmarks.closed_loop import run_closed_loop
    from vllm.sampling_params import SamplingParams
    from vllm.speculator_training.prompts import ChatFormat

    tokenizer = engine.get_tokenizer()
    template = engine.vllm_config.model_config.chat_template or tokenizer.chat_template
    chat = ChatFormat(tokenizer, template)
    token_ids = [chat.encode([{"role": "user", "content": text}]) for text in prompts]
    params = SamplingParams(temperature=temperature, max_tokens=output_len)
    # No load finds the prompts of the one before.
    engine.reset_prefix_cache()
    figures = run_closed_loop(engine, token_ids, params, concurrency, run_id)
    return asdict(figures) | {
        "tokens_per_s": figures.tokens_per_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    # What libraries print must not stand among the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(sys.stdin.readline())))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        figures = _run_load(engine, **json.loads(line))
        print(json.dumps(figures), file=answers, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    _main()

"""An engine in the process of the test: the real front, and answers that are given."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

import numpy as np
from tokenizers import AddedToken

from tests.v1.engine.fakes import EOS, make_config, make_tokenizer
from vllm.config import VllmConfig
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.exceptions import EngineDeadError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer, TokenizerSettings
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.dashboard.collector import Dashboard
from vllm.v1.outputs import LogprobsLists

MODEL = "fake"
MARK = "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse' %}{{ raise_exception('no such message') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + ': ' + message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    "{% if style is defined %}{{ style }}{% endif %}"
)
# log p of the sampled token, of the candidates beside it, and of prompt tokens.
SAMPLED, CANDIDATES, PROMPT = -0.5, (-1.0, -2.0, -np.inf), -3.0


def make_fake_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Return the byte-level tokenizer with a chat template."""
    backend = make_tokenizer()
    backend.add_special_tokens([AddedToken(MARK, special=True)])
    return Tokenizer(backend, TokenizerSettings(eos_token=EOS, chat_template=template))


def make_fake_config(**model_fields: Any) -> VllmConfig:
    """Return a configuration with `model_fields` changed in its model's part."""
    policy = model_fields.pop("policy", "fcfs")
    config = make_config("unused", max_model_len=4096, policy=policy)
    model_config = replace_fields(config.model_config, **model_fields)
    return replace_fields(config, model_config=model_config)


@dataclass
class FakeEngine:
    """Answers every request with the same text.

    Args:
        answer: the text; an end-of-sequence token follows.
        tokens_per_step: how many tokens come at once.
        step_delay_s: before each step.
        fails_after: steps after which every request fails with `error`.
        num_cached_tokens: of each prompt.
        num_running: requests that have neither ended nor been aborted.
        prompts: token ids of the requests so far.
        params: sampling parameters of the requests so far.
        dashboard: what its page shows, if there is one.
    """

    answer: str = "hell yes"
    tokens_per_step: int = 1
    step_delay_s: float = 0.0
    fails_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("a secret path"))
    num_cached_tokens: int = 0
    vllm_config: VllmConfig = field(default_factory=make_fake_config)
    tokenizer: Tokenizer = field(default_factory=make_fake_tokenizer)
    death: EngineDeadError | None = None
    num_running: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_resets: int = 0
    dashboard: Dashboard | None = None

    def __post_init__(self) -> None:
        self._inputs = InputProcessor(self.vllm_config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, log_stats=False)
        self._eos = self.tokenizer.eos_token_id
        self._death_event = asyncio.Event()

    @property
    def errored(self) -> bool:
        return self.death is not None

    @property
    def dead_error(self) -> EngineDeadError:
        assert self.death is not None
        return self.death

    def die(self, reason: str) -> None:
        self.death = EngineDeadError(reason)
        self._death_event.set()

    async def wait_until_dead(self) -> EngineDeadError:
        await self._death_event.wait()
        return self.dead_error

    async def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        text, request = self._inputs.process_inputs(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.prompts.append(request.prompt_token_ids)
        self.params.append(sampling_params)
        collector = RequestOutputCollector(sampling_params.output_kind)
        children = self._outputs.add_request(
            request, text, collector, drops_output=sampling_params.max_tokens == 0
        )
        sequences = [_Sequence(child, self) for child in children]
        self.num_running += 1
        num_steps = 0
        try:
            while True:
                await asyncio.sleep(self.step_delay_s)
                if self.death is not None:
                    raise self.death
                if num_steps == self.fails_after:
                    raise self.error
                num_steps += 1
                alive = self._outputs.request_states
                for sequence in sequences:
                    if sequence.request.request_id in alive:
                        self._outputs.process_outputs([sequence.step()])
                output = collector.get_nowait()
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            self._outputs.abort_requests([request_id])
            self.num_running -= 1

    def answer_ids(self) -> list[int]:
        return [*self.tokenizer.encode(self.answer, False), self._eos]

    @property
    def eos_token_id(self) -> int:
        return self._eos


class _Sequence:
    """One answer on its way."""

    def __init__(self, request: EngineCoreRequest, engine: FakeEngine) -> None:
        self.request = request
        self._engine = engine
        self._left = engine.answer_ids()
        self._limit = max(request.sampling_params.max_tokens or 0, 1)
        self._is_first = True

    def step(self) -> EngineCoreOutput:
        params = self.request.sampling_params
        count = min(self._engine.tokens_per_step, self._limit)
        ids, self._left = self._left[:count], self._left[count:]
        self._limit -= len(ids)
        finish_reason = None
        if ids[-1] == self._engine.eos_token_id:
            finish_reason = FinishReason.STOP
        elif not self._limit:
            finish_reason = FinishReason.LENGTH
        output = EngineCoreOutput(self.request.request_id, ids)
        output.finish_reason = finish_reason
        if params.num_logprobs is not None:
            output.new_logprobs = self._rows(ids, params.num_logprobs, SAMPLED)
        if self._is_first:
            output.num_cached_tokens = self._engine.num_cached_tokens
            if params.prompt_logprobs is not None:
                rest = self.request.prompt_token_ids[1:]
                output.new_prompt_logprobs = self._rows(
                    rest, params.prompt_logprobs, PROMPT
                )
        self._is_first = False
        return output

    def _rows(self, ids: list[int], num_top: int, value: float) -> LogprobsLists:
        chosen = self.request.sampling_params.logprob_token_ids
        candidates = chosen or self._candidate_ids(num_top)
        columns = [[token_id, *candidates] for token_id in ids]
        values = [value, *CANDIDATES[: len(candidates)]]
        return LogprobsLists(
            np.array(columns, dtype=np.int64).reshape(len(ids), 1 + len(candidates)),
            np.array([values] * len(ids), dtype=np.float32).reshape(
                len(ids), len(values)
            ),
            np.ones(len(ids), dtype=np.int64),
        )

    def _candidate_ids(self, num_top: int) -> list[int]:
        # The sampled token is the likeliest, so it is a candidate too.
        return [self._engine.tokenizer.encode(char)[0] for char in "xyz"[:num_top]]


def make_app(engine: FakeEngine | None = None, **args: Any) -> Any:
    """Return the application around `engine`, with the flags `args`."""
    return build_app(engine or FakeEngine(), FrontendArgs(**args))

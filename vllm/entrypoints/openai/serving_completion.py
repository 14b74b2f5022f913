"""/v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm import envs
from vllm.entrypoints.openai.encoding import sse_event
from vllm.entrypoints.openai.logprobs import LogprobsFormatter, prompt_logprobs_list
from vllm.entrypoints.openai.protocol.common import UsageInfo
from vllm.entrypoints.openai.protocol.completion import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from vllm.entrypoints.openai.serving_engine import (
    OpenAIServing,
    check_finish,
    merge_generators,
)
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from vllm.sampling_params import SamplingParams


@dataclass
class _Choice:
    """What was sent of one of the answers.

    Args:
        text_offset: characters so far, the echoed prompt included.
    """

    has_begun: bool = False
    num_tokens: int = 0
    text_offset: int = 0


@dataclass
class _Prompt:
    """One of the prompts.

    Args:
        text: as the client sent it; None if it sent token ids.
        sent_token_ids: what went to the engine, which may cut it.
    """

    text: str | None
    sent_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    def for_engine(self) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": self.sent_token_ids}
        if self.text is not None:
            # For the log only.
            prompt["prompt"] = self.text
        return prompt

    def update(self, output: RequestOutput) -> None:
        self.token_ids = output.prompt_token_ids or self.token_ids
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.logprobs = output.prompt_logprobs


@dataclass
class _CompletionContext:
    """One request on its way, with all its prompts."""

    request: CompletionRequest
    request_id: str
    model: str
    params: SamplingParams
    prompts: list[_Prompt]
    outputs: AsyncGenerator[tuple[int, RequestOutput], None]
    formatter: LogprobsFormatter
    created: int

    @property
    def response_id(self) -> str:
        return f"cmpl-{self.request_id}"

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)


class OpenAIServingCompletion(OpenAIServing):
    """Goes on with texts."""

    async def create(
        self, request: CompletionRequest, request_id: str
    ) -> CompletionResponse | AsyncGenerator[bytes, None]:
        """Return the answer, or the events of its stream.

        Raises:
            VLLMValidationError: the request cannot be served as it is.
            ApiError: 404, no model has the name asked for.
            EngineDeadError: the engine has stopped.
        """
        context = await self._prepare(request, request_id)
        if request.stream:
            return self._stream(context)
        async with aclosing(context.outputs):
            return await self._respond(context)

    async def _prepare(
        self, request: CompletionRequest, request_id: str
    ) -> _CompletionContext:
        request.check()
        model = self.start(request.model)
        params = self._sampling_params(request)
        texts = request.prompts(envs.VLLM_MAX_COMPLETION_PROMPTS)
        if len(texts) * params.n > envs.VLLM_MAX_N_SEQUENCES:
            raise VLLMValidationError(
                f"prompts x n must be at most {envs.VLLM_MAX_N_SEQUENCES}, got "
                f"{len(texts)} x {params.n}",
                parameter="n",
            )
        adds_special = request.add_special_tokens is not False
        prompts = await self.in_thread(
            self._tokenize,
            texts,
            adds_special,
            request.truncate_prompt_tokens is not None,
        )
        # The client's id may be in use; the engine's must not be.
        engine_id = f"cmpl-{request_id}-{uuid.uuid4().hex[:8]}"
        generators = [
            self.engine.generate(
                prompt.for_engine(),
                params,
                f"{engine_id}-{number}",
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
            )
            for number, prompt in enumerate(prompts)
        ]
        formatter = LogprobsFormatter(
            self.tokenizer,
            request.logprobs or 0,
            chosen_ids=request.logprob_token_ids or None,
            as_token_ids=self.args.return_tokens_as_token_ids
            if request.return_tokens_as_token_ids is None
            else request.return_tokens_as_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        return _CompletionContext(
            request,
            request_id,
            model,
            params,
            prompts,
            merge_generators(generators),
            formatter,
            int(time.time()),
        )

    def _sampling_params(self, request: CompletionRequest) -> SamplingParams:
        defaults = self.model_config.default_sampling_params
        limit = request.max_tokens
        if limit is None:
            limit = defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            wanted = (request.logprobs, prompt_logprobs or 0)
            prompt_logprobs = -1 if -1 in wanted else max(wanted)
        return request.sampling_params(
            defaults,
            max_tokens=limit,
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _tokenize(
        self, prompts: list[str | list[int]], adds_special: bool, truncates: bool
    ) -> list[_Prompt]:
        return [
            _Prompt(
                prompt,
                self.tokenize_text(prompt, adds_special, need_not_fit=truncates),
            )
            if isinstance(prompt, str)
            else _Prompt(None, prompt)
            for prompt in prompts
        ]

    async def _respond(self, context: _CompletionContext) -> CompletionResponse:
        output: RequestOutput | None = None
        finals: list[list[CompletionOutput]] = [[] for _ in context.prompts]
        async for number, output in context.outputs:
            context.prompts[number].update(output)
            finals[number] = sorted(output.outputs, key=lambda final: final.index)
        choices = [
            self._choice(context, number, output)
            for number, outputs in enumerate(finals)
            for output in outputs
        ]
        num_tokens = sum(len(final.token_ids) for row in finals for final in row)
        return CompletionResponse(
            id=context.response_id,
            created=context.created,
            model=context.model,
            choices=choices,
            system_fingerprint=self.models.system_fingerprint,
            usage=self.usage(
                context.num_prompt_tokens, num_tokens, context.num_cached_tokens
            ),
            metrics=self.request_metrics(output, len(choices)),
        )

    def _choice(
        self, context: _CompletionContext, number: int, output: CompletionOutput
    ) -> CompletionChoice:
        check_finish(output)
        request, prompt = context.request, context.prompts[number]
        text, logprobs = self._text_and_logprobs(context, prompt, output, _Choice())
        shows_ids = request.return_token_ids
        return CompletionChoice(
            number * context.params.n + output.index,
            text,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            output.token_ids if shows_ids else None,
            prompt_logprobs_list(prompt.logprobs, request.prompt_logprobs),
            prompt.token_ids if shows_ids else None,
        )

    def _text_and_logprobs(
        self,
        context: _CompletionContext,
        prompt: _Prompt,
        output: CompletionOutput,
        choice: _Choice,
    ) -> tuple[str, CompletionLogprobs | None]:
        """Return what to send of `output`, the echoed prompt before the first part."""
        request = context.request
        text = ""
        logprobs = None
        if request.echo and not choice.has_begun:
            text = self._echoed_text(context, prompt)
            if request.logprobs is not None and prompt.logprobs is not None:
                logprobs, choice.text_offset = context.formatter.completion(
                    prompt.token_ids, prompt.logprobs, 0
                )
            choice.text_offset = len(text)
        choice.has_begun = True
        if request.logprobs is not None and output.logprobs is not None:
            own, choice.text_offset = context.formatter.completion(
                output.token_ids, output.logprobs, choice.text_offset
            )
            logprobs = own if logprobs is None else _joined(logprobs, own)
        return text + output.text, logprobs

    def _echoed_text(self, context: _CompletionContext, prompt: _Prompt) -> str:
        if prompt.text is not None and prompt.token_ids == prompt.sent_token_ids:
            return prompt.text
        return self.tokenizer.decode(
            prompt.token_ids, skip_special_tokens=context.params.skip_special_tokens
        )

    async def _stream(self, context: _CompletionContext) -> AsyncGenerator[bytes, None]:
        has_usage, is_continuous = self.usage_mode(context.request)
        n = context.params.n
        choices = [_Choice() for _ in range(n * len(context.prompts))]
        output: RequestOutput | None = None
        async with aclosing(context.outputs) as outputs:
            async for number, output in outputs:
                prompt = context.prompts[number]
                prompt.update(output)
                events = b""
                for completion in output.outputs:
                    index = number * n + completion.index
                    choice = choices[index]
                    choice.num_tokens += len(completion.token_ids)
                    usage: UsageInfo | None | msgspec.UnsetType = msgspec.UNSET
                    if is_continuous:
                        usage = self.usage(
                            len(prompt.token_ids),
                            choice.num_tokens,
                            prompt.num_cached_tokens,
                        )
                    elif has_usage:
                        usage = None
                    events += self._event(
                        context, prompt, completion, index, choice, usage
                    )
                yield events
        if has_usage:
            usage = self.usage(
                context.num_prompt_tokens,
                sum(choice.num_tokens for choice in choices),
                context.num_cached_tokens,
            )
            chunk = self._chunk(context, [], usage)
            chunk.metrics = self.request_metrics(output, len(choices))
            yield sse_event(chunk)

    def _event(
        self,
        context: _CompletionContext,
        prompt: _Prompt,
        output: CompletionOutput,
        index: int,
        choice: _Choice,
        usage: UsageInfo | None | msgspec.UnsetType,
    ) -> bytes:
        """Return the chunk of one delta; nothing if it tells nothing."""
        check_finish(output)
        is_first = not choice.has_begun
        text, logprobs = self._text_and_logprobs(context, prompt, output, choice)
        shows_ids = bool(context.request.return_token_ids)
        if not (text or output.finished() or logprobs or shows_ids):
            return b""
        part = CompletionChunkChoice(
            index, text, logprobs, output.finish_reason, output.stop_reason
        )
        if shows_ids:
            part.token_ids = output.token_ids
            if is_first:
                part.prompt_token_ids = prompt.token_ids
        chunk = self._chunk(context, [part], usage)
        if output.finished():
            chunk.system_fingerprint = self.models.system_fingerprint
        return sse_event(chunk)

    def _chunk(
        self,
        context: _CompletionContext,
        choices: list[CompletionChunkChoice],
        usage: UsageInfo | None | msgspec.UnsetType,
    ) -> CompletionChunk:
        return CompletionChunk(
            id=context.response_id,
            created=context.created,
            model=context.model,
            choices=choices,
            usage=usage,
        )


def _joined(
    first: CompletionLogprobs, second: CompletionLogprobs
) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )

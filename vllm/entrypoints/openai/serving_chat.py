"""/v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from vllm.entrypoints.openai.encoding import sse_event
from vllm.entrypoints.openai.logprobs import LogprobsFormatter, prompt_logprobs_list
from vllm.entrypoints.openai.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from vllm.entrypoints.openai.protocol.common import UsageInfo
from vllm.entrypoints.openai.serving_engine import OpenAIServing, check_finish
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams


@dataclass
class _ChatContext:
    """One request on its way.

    Args:
        request_id: the client's word for it.
    """

    request: ChatCompletionRequest
    request_id: str
    model: str
    params: SamplingParams
    outputs: AsyncGenerator[RequestOutput, None]
    formatter: LogprobsFormatter
    created: int

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.request_id}"


class OpenAIServingChat(OpenAIServing):
    """Answers messages."""

    async def create(
        self, request: ChatCompletionRequest, request_id: str
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
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
        self, request: ChatCompletionRequest, request_id: str
    ) -> _ChatContext:
        request.check()
        model = self.start(request.model)
        defaults = self.model_config.default_sampling_params
        limit = request.token_limit
        params = request.sampling_params(
            defaults,
            max_tokens=defaults.get("max_tokens") if limit is None else limit,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        prompt, token_ids = await self.in_thread(self._render, request)
        outputs = self.engine.generate(
            {"prompt": prompt, "prompt_token_ids": token_ids},
            params,
            # The client's id may be in use; the engine's must not be.
            f"chatcmpl-{request_id}-{uuid.uuid4().hex[:8]}",
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
        )
        formatter = LogprobsFormatter(
            self.tokenizer,
            request.top_logprobs or 0,
            chosen_ids=request.logprob_token_ids or None,
            as_token_ids=self.args.return_tokens_as_token_ids
            if request.return_tokens_as_token_ids is None
            else request.return_tokens_as_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        return _ChatContext(
            request, request_id, model, params, outputs, formatter, int(time.time())
        )

    def _render(self, request: ChatCompletionRequest) -> tuple[str, list[int]]:
        return self.render_chat(
            request.messages,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            reasoning_effort=request.reasoning_effort,
            add_special_tokens=request.add_special_tokens,
            need_not_fit=request.truncate_prompt_tokens is not None,
        )

    async def _respond(self, context: _ChatContext) -> ChatCompletionResponse:
        request = context.request
        final: RequestOutput | None = None
        async for output in context.outputs:
            final = output
        assert final is not None, "the engine ended a request without an output"
        prompt_token_ids = final.prompt_token_ids or []
        choices = [
            self._choice(context, output)
            for output in sorted(final.outputs, key=lambda output: output.index)
        ]
        num_tokens = sum(len(output.token_ids) for output in final.outputs)
        return ChatCompletionResponse(
            id=context.response_id,
            created=context.created,
            model=context.model,
            choices=choices,
            system_fingerprint=self.models.system_fingerprint,
            usage=self.usage(
                len(prompt_token_ids), num_tokens, final.num_cached_tokens or 0
            ),
            prompt_logprobs=prompt_logprobs_list(
                final.prompt_logprobs, request.prompt_logprobs
            ),
            prompt_token_ids=prompt_token_ids if request.return_token_ids else None,
            metrics=self.request_metrics(final, len(choices)),
        )

    def _choice(self, context: _ChatContext, output: CompletionOutput) -> ChatChoice:
        check_finish(output)
        return ChatChoice(
            output.index,
            ChatMessage(output.text),
            self._logprobs(context, output),
            output.finish_reason,
            output.stop_reason,
            output.token_ids if context.request.return_token_ids else None,
        )

    @staticmethod
    def _logprobs(
        context: _ChatContext, output: CompletionOutput
    ) -> ChatLogprobs | None:
        if not context.request.logprobs or output.logprobs is None:
            return None
        return context.formatter.chat(output.token_ids, output.logprobs)

    async def _stream(self, context: _ChatContext) -> AsyncGenerator[bytes, None]:
        request = context.request
        has_usage, is_continuous = self.usage_mode(request)
        num_prompt_tokens = num_cached = 0
        num_tokens = [0] * request.num_choices
        usage: UsageInfo | None
        output: RequestOutput | None = None
        async with aclosing(context.outputs) as outputs:
            async for output in outputs:
                events = b""
                if not num_prompt_tokens:
                    prompt_token_ids = output.prompt_token_ids or []
                    num_prompt_tokens = len(prompt_token_ids)
                    num_cached = output.num_cached_tokens or 0
                    usage = None
                    if is_continuous:
                        usage = self.usage(num_prompt_tokens, 0, num_cached)
                    events = self._first_events(
                        context, prompt_token_ids, _chunk_usage(has_usage, usage)
                    )
                for completion in output.outputs:
                    num_tokens[completion.index] += len(completion.token_ids)
                    usage = None
                    if is_continuous:
                        count = num_tokens[completion.index]
                        usage = self.usage(num_prompt_tokens, count, num_cached)
                    events += self._event(
                        context, completion, _chunk_usage(has_usage, usage)
                    )
                yield events
        if has_usage:
            usage = self.usage(num_prompt_tokens, sum(num_tokens), num_cached)
            chunk = self._chunk(context, [], usage)
            chunk.metrics = self.request_metrics(output, len(num_tokens))
            yield sse_event(chunk)

    def _chunk(
        self,
        context: _ChatContext,
        choices: list[ChatChunkChoice],
        usage: UsageInfo | None | msgspec.UnsetType,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=context.response_id,
            created=context.created,
            model=context.model,
            choices=choices,
            usage=usage,
        )

    def _first_events(
        self,
        context: _ChatContext,
        prompt_token_ids: list[int],
        usage: UsageInfo | None | msgspec.UnsetType,
    ) -> bytes:
        events = b""
        for index in range(context.request.num_choices):
            delta = ChatDelta(role="assistant", content="")
            chunk = self._chunk(context, [ChatChunkChoice(index, delta)], usage)
            if context.request.return_token_ids and index == 0:
                chunk.prompt_token_ids = prompt_token_ids
            events += sse_event(chunk)
        return events

    def _event(
        self,
        context: _ChatContext,
        output: CompletionOutput,
        usage: UsageInfo | None | msgspec.UnsetType,
    ) -> bytes:
        """Return the chunk of one delta; nothing if it tells nothing."""
        check_finish(output)
        logprobs = self._logprobs(context, output)
        shows_ids = bool(context.request.return_token_ids)
        is_last = output.finished()
        if not (output.text or is_last or logprobs or shows_ids):
            return b""
        choice = ChatChunkChoice(
            output.index,
            ChatDelta(content=output.text),
            logprobs,
            output.finish_reason,
        )
        if shows_ids:
            choice.token_ids = output.token_ids
        chunk = self._chunk(context, [choice], usage)
        if is_last:
            choice.stop_reason = output.stop_reason
            chunk.system_fingerprint = self.models.system_fingerprint
        return sse_event(chunk)


def _chunk_usage(
    has_usage: bool, usage: UsageInfo | None
) -> UsageInfo | None | msgspec.UnsetType:
    # OpenAI: once usage is asked for, every chunk has the key.
    return usage if has_usage else msgspec.UNSET

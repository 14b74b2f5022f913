"""What the endpoints that use the engine share: prompts, ids, checks, merging."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_messages import (
    detect_content_format,
    parse_messages,
)
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    PromptTokensDetails,
    UsageInfo,
)
from vllm.entrypoints.openai.protocol.metrics import RequestMetrics
from vllm.entrypoints.openai.request_metrics import make_request_metrics
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.chat_template import render_chat_template
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine.text_length import check_text_length

if TYPE_CHECKING:
    from vllm.v1.metrics.dashboard.collector import Dashboard

T = TypeVar("T")

# Printable ASCII without a space: the id goes into a header and into log lines.
_REQUEST_ID = re.compile(r"[!-~]{1,256}", re.ASCII)
_TEMPLATE_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "template",
)


class EngineClient(Protocol):
    """What the server needs of an engine; `AsyncLLM` has it."""

    vllm_config: VllmConfig
    tokenizer: Tokenizer
    dashboard: "Dashboard | None"

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped."""

    @property
    def dead_error(self) -> BaseException:
        """Why the engine has stopped."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs; closing the generator aborts it."""

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""

    async def reset_prefix_cache(self) -> Any:
        """Forget all cached prefixes."""


class OpenAIServing:
    """The common part of the serving classes.

    Args:
        pool: does what takes long, so that the event loop does not wait for it.
    """

    def __init__(
        self,
        engine: EngineClient,
        models: OpenAIServingModels,
        args: FrontendArgs,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.engine = engine
        self.models = models
        self.args = args
        self.tokenizer = engine.tokenizer
        self.model_config = engine.vllm_config.model_config
        self._pool = pool
        self._template = self.model_config.chat_template or self.tokenizer.chat_template
        self._content_format = args.chat_template_content_format
        if self._content_format == "auto":
            self._content_format = detect_content_format(self._template or "")

    def start(self, model: str | None) -> str:
        """Return the model's name for the answer.

        Raises:
            ApiError: 404, no model has this name.
            EngineDeadError: the engine has stopped.
        """
        if self.engine.errored:
            raise EngineDeadError(str(self.engine.dead_error))
        return self.models.resolve(model)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, computed beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *args)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_effort: str | None = None,
        add_special_tokens: bool | None = None,
        need_not_fit: bool = False,
    ) -> tuple[str, list[int]]:
        """Return the prompt that the template makes of the messages, and its token ids.

        Args:
            need_not_fit: the prompt is cut to its last tokens, or only counted.

        Raises:
            VLLMValidationError: the messages or the variables do not suit the template.
        """
        template, content_format = self._choose_template(chat_template)
        kwargs = self._template_kwargs(template, chat_template_kwargs, reasoning_effort)
        text = render_chat_template(
            template,
            parse_messages(messages, content_format),
            documents=documents,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            bos_token=self.tokenizer.bos_token or "",
            eos_token=self.tokenizer.eos_token or "",
            **kwargs,
        )
        return text, self.tokenize_text(
            text,
            bool(add_special_tokens),
            parameter="messages",
            need_not_fit=need_not_fit,
        )

    def tokenize_text(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        parameter: str = "prompt",
        need_not_fit: bool = False,
    ) -> list[int]:
        """Return the token ids of a text that may fit the context.

        Args:
            parameter: the request field that holds the text.
            need_not_fit: the prompt is cut to its last tokens, or only counted.

        Raises:
            VLLMValidationError: the text is too long.
        """
        check_text_length(
            text,
            self.tokenizer,
            self.model_config.max_model_len,
            parameter=parameter,
            need_not_fit=need_not_fit,
        )
        return self.tokenizer.encode(text, add_special_tokens)

    def _choose_template(self, of_request: str | None) -> tuple[str, str]:
        if of_request is not None:
            if not self.args.trust_request_chat_template:
                raise VLLMValidationError(
                    "chat_template needs a server with --trust-request-chat-template",
                    parameter="chat_template",
                )
            if self.args.chat_template_content_format == "auto":
                return of_request, detect_content_format(of_request)
            return of_request, self._content_format
        if self._template is None:
            raise VLLMValidationError(
                "this model has no chat template: start the server with "
                "--chat-template, or use /v1/completions",
                parameter="messages",
            )
        return self._template, self._content_format

    def _template_kwargs(
        self,
        template: str,
        of_request: dict[str, Any] | None,
        reasoning_effort: str | None,
    ) -> dict[str, Any]:
        for name in of_request or {}:
            if name in _TEMPLATE_VARIABLES or not name.isidentifier():
                raise VLLMValidationError(
                    f"chat_template_kwargs cannot set {name[:40]!r}",
                    parameter="chat_template_kwargs",
                )
        kwargs = self.args.default_chat_template_kwargs | (of_request or {})
        if reasoning_effort is not None and "reasoning_effort" in template:
            return {"reasoning_effort": reasoning_effort} | kwargs
        if reasoning_effort not in (None, "none"):
            raise VLLMValidationError(
                "reasoning_effort is not supported: this model's chat template does "
                "not read it",
                parameter="reasoning_effort",
            )
        return kwargs

    def usage(
        self, num_prompt_tokens: int, num_completion_tokens: int, num_cached: int
    ) -> UsageInfo:
        """Return the counts of a request."""
        details = None
        if self.args.enable_prompt_tokens_details:
            details = PromptTokensDetails(num_cached)
        total = num_prompt_tokens + num_completion_tokens
        return UsageInfo(num_prompt_tokens, total, num_completion_tokens, details)

    def request_metrics(
        self, output: RequestOutput | None, num_answers: int
    ) -> RequestMetrics | None | msgspec.UnsetType:
        """Return what the answer tells of its request; UNSET for no such field.

        Args:
            output: the request's last one.
            num_answers: of the response.
        """
        stats = None if output is None else output.metrics
        config = self.engine.vllm_config.observability_config
        return make_request_metrics(config, stats, num_answers)

    def usage_mode(self, request: GenerationRequest) -> tuple[bool, bool]:
        """Return whether a stream ends with its usage, and if each chunk has it."""
        options = request.stream_options
        include = bool(options and options.include_usage)
        include = include or self.args.enable_force_include_usage
        return include, include and bool(options and options.continuous_usage_stats)


def choose_request_id(of_body: str | None, of_header: str | None) -> str:
    """Return the id that the client chose, else a new one.

    Raises:
        VLLMValidationError: the chosen id holds what does not belong in a header.
    """
    chosen = of_body or of_header
    if not chosen:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(chosen):
        raise VLLMValidationError(
            "request_id must be 1 to 256 printable ASCII characters without spaces",
            parameter="request_id",
        )
    return chosen


def check_finish(output: CompletionOutput) -> None:
    """Refuse to pass on an answer that failed.

    Raises:
        ApiError: 500, the engine could not go on with this request.
    """
    if output.finish_reason == "error":
        raise ApiError(500, "InternalServerError", "The request failed in the engine")


async def merge_generators(
    generators: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (number of the generator, item) as the items come.

    The first failure ends all. The generators are closed when this one is.
    """
    if len(generators) == 1:
        async with aclosing(generators[0]) as only:
            async for item in only:
                yield 0, item
        return
    # Bounded, so that a slow client is waited for and outputs join in the engine.
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(
        len(generators)
    )

    async def pump(number: int, generator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    await queue.put((number, item))
        except Exception as exception:
            await queue.put(exception)
        else:
            await queue.put(None)

    tasks = [
        asyncio.ensure_future(pump(number, generator))
        for number, generator in enumerate(generators)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            entry = await queue.get()
            if entry is None:
                num_running -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

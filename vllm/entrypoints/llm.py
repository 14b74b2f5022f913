"""The offline engine: prompts in, answers out, in the caller's process."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.chat_template import render_chat_template
from vllm.v1.engine.input_processor import Prompt
from vllm.v1.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from vllm.transformers_utils.tokenizer import Tokenizer
    from vllm.v1.metrics.reader import Metric

Message = dict[str, Any]
UseTqdm = bool | Callable[..., tqdm]


class LLM:
    """A model that answers many prompts at once.

    Args:
        model: a Hugging Face directory, a GGUF file or a hub name; None is the embedded
            SmolLM2-135M-Instruct.
        kwargs: fields of `EngineArgs`. `disable_log_stats` is on unless given, and
            must be off for `get_metrics`.

    Raises:
        TypeError: an argument is unknown.
        VLLMValidationError: an argument is outside its bounds.
        UnsupportedError: the model cannot be served.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("disable_log_stats", True)
        engine_args = EngineArgs.from_kwargs(model=model, **kwargs)
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt.

        Args:
            prompts: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids};
                or several of these.
            sampling_params: one for all, or one a prompt; None is the model's default.
            use_tqdm: show progress; or what to call instead of `tqdm`.
            priority: one a prompt, lower runs earlier under the priority policy.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            VLLMValidationError: a prompt or a parameter is wrong. No request is left
                behind in the engine.
        """
        prompt_list = _as_list(prompts)
        params = self._params_list(sampling_params, len(prompt_list))
        priorities = list(priority) if priority is not None else [0] * len(prompt_list)
        if len(priorities) != len(prompt_list):
            raise VLLMValidationError(
                f"priority has {len(priorities)} entries, not {len(prompt_list)}",
                parameter="priority",
            )
        request_ids: list[str] = []
        try:
            for prompt, one, rank in zip(
                _bar(use_tqdm, prompt_list, desc="Rendering prompts"),
                params,
                priorities,
                strict=True,
            ):
                request_id = str(self._num_requests)
                self._num_requests += 1
                self.llm_engine.add_request(request_id, prompt, one, priority=rank)
                request_ids.append(request_id)
            return self._run(request_ids, params, use_tqdm)
        except BaseException:
            # Also when interrupted: what was added must not run in the next call.
            self.llm_engine.abort_request(request_ids)
            raise

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation.

        Args:
            messages: one conversation or a list of them; a conversation is a list of
                {"role": ..., "content": ...}.
            chat_template: instead of the model's own; text, not a path.
            add_generation_prompt: let an assistant's message begin.
            continue_final_message: go on inside the last message instead.
            tools: shown to the template.

        Returns:
            One output a conversation, in their order.

        Raises:
            VLLMValidationError: the template is missing or refuses the messages.
        """
        conversations: list[list[Message]] = (
            [messages]  # type: ignore[list-item]
            if messages and isinstance(messages[0], dict)
            else list(messages)  # type: ignore[arg-type]
        )
        tokenizer = self.get_tokenizer()
        model_config = self.llm_engine.vllm_config.model_config
        template = (
            chat_template or model_config.chat_template or tokenizer.chat_template
        )
        if template is None:
            raise VLLMValidationError(
                "the model has no chat template: give one as chat_template",
                parameter="chat_template",
            )
        texts = [
            render_chat_template(
                template,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                bos_token=tokenizer.bos_token or "",
                eos_token=tokenizer.eos_token or "",
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        prompts: list[Prompt] = [
            {
                "prompt": text,
                # The template has written the special tokens.
                "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False),
            }
            for text in texts
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> "Tokenizer":
        """Return the model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that says nothing."""
        config = self.llm_engine.vllm_config.model_config
        return SamplingParams(**config.default_sampling_params)

    def get_metrics(self) -> "list[Metric]":
        """Return what the engine has counted; needs `disable_log_stats=False`."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def _params_list(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        num_prompts: int,
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * num_prompts
        else:
            params = list(sampling_params)
        if len(params) != num_prompts:
            raise VLLMValidationError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts",
                parameter="sampling_params",
            )
        clones = [one.clone() for one in params]
        for clone in clones:
            clone.output_kind = RequestOutputKind.FINAL_ONLY
        return clones

    def _run(
        self,
        request_ids: list[str],
        params: list[SamplingParams],
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_answers = dict(zip(request_ids, (one.n for one in params), strict=True))
        num_input_tokens = num_output_tokens = 0
        with _bar(
            use_tqdm,
            total=len(request_ids),
            desc="Processed prompts",
            dynamic_ncols=True,
            postfix=_speed_text(0.0, 0.0),
        ) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if not output.finished:
                        continue
                    finished[output.request_id] = output
                    num_input_tokens += (
                        len(output.prompt_token_ids or [])
                        * num_answers[output.request_id]
                    )
                    num_output_tokens += sum(
                        len(answer.token_ids) for answer in output.outputs
                    )
                    _show_speed(bar, num_input_tokens, num_output_tokens)
        return [finished[request_id] for request_id in request_ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _bar(use_tqdm: UseTqdm, *args: Any, **kwargs: Any) -> tqdm:
    if isinstance(use_tqdm, bool):
        return tqdm(*args, **kwargs, disable=not use_tqdm)
    return use_tqdm(*args, **kwargs)


def _show_speed(bar: tqdm, num_input_tokens: int, num_output_tokens: int) -> None:
    seconds = max(bar.format_dict["elapsed"], 1e-9)
    bar.postfix = _speed_text(num_input_tokens / seconds, num_output_tokens / seconds)
    bar.update(1)


def _speed_text(input_rate: float, output_rate: float) -> str:
    return (
        f"est. speed input: {input_rate:.2f} toks/s, output: {output_rate:.2f} toks/s"
    )

"""Request fields that this server cannot honour: refused by name, never ignored."""

from typing import Any

from vllm.exceptions import VLLMValidationError

# Field -> (values that ask for nothing, what to do instead).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((), "tool calls are not supported yet"),
    "function_call": (("none", "auto"), "tool calls are not supported yet"),
    "tool_choice": (("none", "auto"), "tool calls are not supported yet"),
    "tools": ((), "tool calls are not supported yet"),
    "guided_json": ((), "use structured_outputs.json"),
    "guided_regex": ((), "use structured_outputs.regex"),
    "guided_choice": ((), "use structured_outputs.choice"),
    "guided_grammar": ((), "use structured_outputs.grammar"),
    "guided_json_object": ((False,), "use structured_outputs.json_object"),
    "guided_decoding_backend": ((), "the server's --structured-outputs-config decides"),
    "guided_whitespace_pattern": ((), "use structured_outputs.whitespace_pattern"),
    "structural_tag": ((), "use structured_outputs.json or regex"),
    "audio": ((), "only text is generated"),
    "best_of": ((1,), "use n and choose among the answers"),
    "data_parallel_rank": ((), "there is one engine"),
    "include_reasoning": ((True,), "reasoning is not split off yet"),
    "kv_transfer_params": ((), "the KV cache is not transferred"),
    "length_penalty": ((1.0,), "beam search is not supported"),
    "logits_processors": ((), "use logit_bias, bad_words or structured_outputs"),
    "lora": ((), "adapters are not supported"),
    "lora_request": ((), "adapters are not supported"),
    "min_new_tokens": ((), "use min_tokens"),
    "mm_processor_kwargs": ((), "only text is understood"),
    "modalities": ((["text"],), "only text is generated"),
    "prediction": ((), "predicted outputs are not supported"),
    "prompt_embeds": ((), "give the prompt as text or token ids"),
    "repetition_detection": ((), "use repetition_penalty or frequency_penalty"),
    "return_prompt_text": ((False,), "use return_token_ids and /detokenize"),
    "stream_interval": ((1,), "every step is streamed"),
    "suffix": (("",), "the models here complete from the left only"),
    "thinking_token_budget": ((), "reasoning is not counted yet"),
    "truncation_side": (
        ("left",),
        "truncate_prompt_tokens keeps the end of the prompt",
    ),
    "use_beam_search": ((False,), "use n with a temperature"),
    "verbosity": (("medium",), "say it in the prompt"),
    "vllm_xargs": ((), "there are no extensions that read it"),
    "web_search_options": ((), "the server does not search"),
}
# Without effect by definition: labels, hints, and things that are off.
_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "metadata": None,
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": ("auto", "default"),
    "session_id": None,
    "store": (False,),
    "user": None,
}


def check_extra_fields(extra: dict[str, Any]) -> list[str]:
    """Return the names in `extra` that nothing knows.

    Args:
        extra: fields of a request that its class does not declare.

    Raises:
        VLLMValidationError: a field asks for something that is not done here.
    """
    unknown = []
    for name, value in extra.items():
        if value is None:
            continue
        if name in _REFUSED:
            neutral, hint = _REFUSED[name]
            if not _is_one_of(value, neutral):
                raise VLLMValidationError(
                    f"{name} is not supported: {hint}", parameter=name, value=value
                )
        elif name in _HARMLESS:
            allowed = _HARMLESS[name]
            if allowed is not None and not _is_one_of(value, allowed):
                raise VLLMValidationError(
                    f"{name} is not supported with this value: leave it out",
                    parameter=name,
                    value=value,
                )
        else:
            unknown.append(name)
    return unknown


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # 1 == True in Python, but not in JSON.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool)
        for item in neutral
    )

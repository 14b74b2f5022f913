"""/tokenize and /detokenize."""

from vllm.entrypoints.openai.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.serving_engine import OpenAIServing
from vllm.exceptions import VLLMValidationError


class OpenAIServingTokenization(OpenAIServing):
    """Turns text into token ids and back, without the model."""

    async def tokenize(
        self, request: TokenizeRequest, request_id: str
    ) -> TokenizeResponse:
        """Return the token ids of a text, or of messages in the chat template.

        Raises:
            VLLMValidationError: the request cannot be served as it is.
            ApiError: 404, no model has the name asked for.
        """
        request.check()
        self.models.resolve(request.model)
        token_ids = await self.in_thread(self._encode, request)
        return TokenizeResponse(
            len(token_ids),
            self.model_config.max_model_len,
            token_ids,
            [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
            if request.return_token_strs
            else None,
        )

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is not None:
            return self.tokenize_text(
                request.prompt,
                request.add_special_tokens is not False,
                need_not_fit=True,
            )
        assert request.messages is not None, "check() lets one of the two through"
        _, token_ids = self.render_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            add_special_tokens=request.add_special_tokens,
            need_not_fit=True,
        )
        return token_ids

    async def detokenize(
        self, request: DetokenizeRequest, request_id: str
    ) -> DetokenizeResponse:
        """Return the text of token ids, special tokens included.

        Raises:
            VLLMValidationError: an id is outside the model's vocabulary.
            ApiError: 404, no model has the name asked for.
        """
        self.models.resolve(request.model)
        vocab_size = self.model_config.vocab_size
        for token_id in request.tokens:
            if not 0 <= token_id < vocab_size:
                raise VLLMValidationError(
                    f"tokens must hold ids from 0 to {vocab_size - 1}, got {token_id}",
                    parameter="tokens",
                )
        text = await self.in_thread(self._decode, request.tokens)
        return DetokenizeResponse(text)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

"""Log-probabilities in the shapes of the two APIs."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import islice

from vllm.entrypoints.openai.protocol.chat import (
    ChatLogprob,
    ChatLogprobs,
    ChatTokenLogprob,
)
from vllm.entrypoints.openai.protocol.common import PromptLogprob, PromptLogprobsList
from vllm.entrypoints.openai.protocol.completion import CompletionLogprobs
from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.transformers_utils.tokenizer import Tokenizer

# JSON has no minus infinity.
LOGPROB_FLOOR = -9999.0

_utf8_decoder = getincrementaldecoder("utf-8")


class LogprobsFormatter:
    """Writes log-probabilities for one request.

    Args:
        num_top: the most likely tokens to show at each position; -1: all there are.
        chosen_ids: show these tokens and not the most likely ones.
        as_token_ids: write a token as "token_id:N" and not as its text.
        skip_special_tokens: special tokens are not part of the answer's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        *,
        chosen_ids: Sequence[int] | None = None,
        as_token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._chosen_ids = chosen_ids
        self._as_token_ids = as_token_ids
        self._hidden_ids = (
            tokenizer.all_special_ids if skip_special_tokens else frozenset()
        )

    def chat(self, token_ids: Sequence[int], logprobs: SampleLogprobs) -> ChatLogprobs:
        """Return one entry for each of `token_ids`."""
        return ChatLogprobs(
            [
                self._chat_token(token_id, position)
                for token_id, position in zip(token_ids, logprobs, strict=True)
            ]
        )

    def _chat_token(
        self, token_id: int, position: dict[int, Logprob]
    ) -> ChatTokenLogprob:
        sampled = self._chat_logprob(token_id, position[token_id])
        top = [self._chat_logprob(*item) for item in self._top(position)]
        return ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top)

    def _chat_logprob(self, token_id: int, logprob: Logprob) -> ChatLogprob:
        token_bytes = list(self._tokenizer.token_bytes(token_id))
        return ChatLogprob(
            self._token(token_id, logprob), floored(logprob.logprob), token_bytes
        )

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob] | None],
        text_offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """Return the lists of `token_ids`, and where the next token begins.

        Args:
            logprobs: one a token; None for the first token of a prompt.
            text_offset: where the first token begins in the text, characters.
        """
        result = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, logprobs, strict=True):
            result.text_offset.append(text_offset)
            if position is None:
                text = self._first_text(token_id)
                result.tokens.append(
                    f"token_id:{token_id}" if self._as_token_ids else text
                )
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                sampled = position[token_id]
                text = sampled.decoded_token or ""
                token = self._token(token_id, sampled)
                result.tokens.append(token)
                result.token_logprobs.append(floored(sampled.logprob))
                result.top_logprobs.append(
                    self._completion_top(token, sampled, position)
                )
            if token_id not in self._hidden_ids:
                text_offset += len(text)
        return result, text_offset

    def _completion_top(
        self, token: str, sampled: Logprob, position: dict[int, Logprob]
    ) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in self._top(position):
            # Of two tokens with the same text, the likelier one.
            top.setdefault(self._token(token_id, logprob), floored(logprob.logprob))
        top.setdefault(token, floored(sampled.logprob))
        return top

    def _top(self, position: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        if self._chosen_ids is not None:
            return [(i, position[i]) for i in self._chosen_ids if i in position]
        # sorted is stable: tokens of equal logprob stay in the engine's order.
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        return ranked if self._num_top < 0 else ranked[: self._num_top]

    def _token(self, token_id: int, logprob: Logprob) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return logprob.decoded_token or ""

    def _first_text(self, token_id: int) -> str:
        return _utf8_decoder("replace").decode(self._tokenizer.token_bytes(token_id))


def prompt_logprobs_list(
    logprobs: PromptLogprobs | None, num_top: int | None
) -> PromptLogprobsList | None:
    """Return a prompt's log-probabilities as the API shows them.

    Args:
        num_top: the most likely tokens to keep beside the prompt's own; -1: all; None:
            none were asked for.
    """
    if logprobs is None or num_top is None:
        return None
    # The prompt's own token comes first.
    end = None if num_top < 0 else num_top + 1
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(
                floored(logprob.logprob), logprob.rank, logprob.decoded_token
            )
            for token_id, logprob in islice(position.items(), end)
        }
        for position in logprobs
    ]


def floored(logprob: float) -> float:
    """Return `logprob`, or the floor for minus infinity."""
    return max(logprob, LOGPROB_FLOOR)

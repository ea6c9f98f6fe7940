"""Texts that end a turn, looked for in what the sampled tokens decode to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]

_INCOMPLETE = "\ufffd"


class StopText:
    """Says which token completes one of the texts, wherever tokens and texts begin and end.

    Only a tail is decoded again for each token. What a token adds is the difference between the text of the tail with
    and without it, since tokenizers decode a first token differently from a later one. A character whose bytes are
    spread over several tokens decodes to a replacement until it is whole; until then the tail is kept.

    Args:
        texts: none of them empty.
        decode: the text of token ids, special tokens included.
    """

    def __init__(self, texts: tuple[str, ...], decode: Decode) -> None:
        self._texts = texts
        self._decode = decode
        self._overlap = max(map(len, texts)) - 1
        self._tail: list[int] = []
        self._known = 0
        self._known_text = ""
        self._before = ""

    def ends_with(self, token_id: int) -> bool:
        """Takes the next sampled token; True if it completes one of the texts."""
        self._tail.append(token_id)
        text = self._decode(self._tail)
        recent = self._before + text[len(self._known_text) :]
        if any(stop in recent for stop in self._texts):
            return True
        if not text.endswith(_INCOMPLETE):
            self._before = recent[len(recent) - self._overlap :] if self._overlap < len(recent) else recent
            del self._tail[: self._known]
            self._known = len(self._tail)
            self._known_text = self._decode(self._tail)
        return False


def load_tokenizer(path: str) -> Any:
    """The tokenizer in `path`; None where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        log.info("no tokenizer in %s, so no stop texts and no JSON schemas: %s", path, error)
        return None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes up where there are no files
        return None
    return tokenizer


def decode_with(tokenizer: Any) -> Decode:
    """The text of token ids by a tokenizer, special tokens included."""
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_decode(path: str) -> Decode | None:
    """The text of token ids, by the tokenizer in `path`; None where there is none."""
    tokenizer = load_tokenizer(path)
    return None if tokenizer is None else decode_with(tokenizer)

"""Answers that fit a JSON schema: which tokens may come next, by llguidance's parser."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import numpy as np

from agentrl.record import GuideError
from agentrl.record.protocols import GenerateRequest

_WRITING = {
    # Of whitespace one space after a comma or colon, as models write JSON: more of it could go on until the budget is
    # used up, and small models do that.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
_MOST_SCHEMAS = 64
_MOST_DIGITS = 15
_SMALLEST, _LARGEST = Decimal("0.000001"), 10**15


class Guide:
    """Where one answer stands in its schema. It changes with the answer's tokens alone, so it outlasts whatever becomes
    of their keys and values.

    A stop token may come when the value is complete, and at no other place, whatever text it has.

    Args:
        matcher: of llguidance, before the first token.
        texts, stops: uint8 `[W]`, a bit for each token that a value may consist of, and that ends it; the lowest bit is
            the first token's.

    Attributes:
        allowed: the same, for each token that may come next.
    """

    def __init__(self, matcher: Any, texts: np.ndarray, stops: np.ndarray) -> None:
        self._matcher = matcher
        self._texts = texts & ~stops
        self._stops = stops
        self.allowed = self._next()

    def accept(self, token_id: int) -> None:
        """Goes on by a token that was allowed and is no stop token.

        Raises:
            GuideError: nothing can come after it.
        """
        self._matcher.consume_token(token_id)
        self.allowed = self._next()

    def _next(self) -> np.ndarray:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._texts)] & self._texts
        if self._matcher.is_error():
            raise GuideError(f"the JSON schema can't guide this answer on: {_reason(self._matcher)}")
        if self._matcher.is_accepting():
            allowed |= self._stops
        if not allowed.any():
            raise GuideError("the JSON schema can't guide this answer on: no token of the model's may come next")
        return allowed


class Guides:
    """Makes guides for the requests of an engine, in a thread of its own: a large schema holds up neither the event
    loop nor the batch. What schemas compile to is kept for the latest of them.

    Args:
        tokenizer: transformers' tokenizer of the model.
        vocabulary: tokens that the model gives logits for, whether or not the tokenizer has as many.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._hf_tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tokenizer: Any = None
        self._texts = np.zeros(0, np.uint8)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._awaited: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")

    async def guide(self, request: GenerateRequest) -> Guide | None:
        """A guide before its first token; None if the request was aborted before there was one.

        Raises:
            GuideError: the request's schema is none, or llguidance does not support it.
        """
        self._awaited.add(request.request_id)
        try:
            guide = await asyncio.get_running_loop().run_in_executor(self._thread, self._guide, request)
            return guide if request.request_id in self._awaited else None
        finally:
            self._awaited.discard(request.request_id)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Requests that wait for a guide, by default all of them, get none."""
        self._awaited -= self._awaited.copy() if request_ids is None else set(request_ids)

    def close(self) -> None:
        """Ends the thread, after what it was asked for. Nobody may ask for more."""
        self._thread.shutdown(wait=False)

    def _guide(self, request: GenerateRequest) -> Guide:
        schema = request.json_schema
        if schema not in self._compiled:
            self._compiled[schema] = self._compile(schema)
            if len(self._compiled) > _MOST_SCHEMAS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        stops = [token_id for token_id in request.stop_token_ids if 0 <= token_id < self._vocabulary]
        return Guide(self._compiled[schema].deep_copy(), self._texts, self._bits(stops))

    def _bits(self, token_ids: list[int] | slice) -> np.ndarray:
        flags = np.zeros(self._tokenizer.vocab_size, bool)
        flags[token_ids] = True
        return np.packbits(flags, bitorder="little")

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._hf_tokenizer, self._vocabulary)
            # llguidance takes its own end for a part of the value, where it may end.
            self._texts = self._bits(slice(self._vocabulary)) & ~self._bits([self._tokenizer.eos_token])
        try:
            read = json.loads(schema, parse_int=_integer, parse_float=_fraction)
            grammar = LLMatcher.grammar_from_json_schema({**read, "x-guidance": _WRITING})
        except ValueError as error:  # nested too deeply
            raise GuideError(f"the JSON schema is not supported: {error}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise GuideError(f"the JSON schema is not supported: {_reason(matcher)}")
        return matcher


def _reason(matcher: Any) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()


def _integer(text: str) -> int:
    _check_number(text)
    return int(text)


def _fraction(text: str) -> float:
    _check_number(text)
    return float(text)


def _check_number(text: str) -> None:
    """Refuses numbers that llguidance takes for others: it rounds long, large and small ones, and the least integer of
    64 bits crashes its process."""
    number = Decimal(text)
    exact = len(number.normalize().as_tuple().digits) <= _MOST_DIGITS
    if number and not (exact and _SMALLEST <= abs(number) <= _LARGEST):
        raise GuideError(
            f"the JSON schema is not supported: {text:.40} is not kept exactly. Use numbers of at most {_MOST_DIGITS} "
            f"digits, up to {_LARGEST} and down to {_SMALLEST}"
        )


def _tokenizer(tokenizer: Any, vocabulary: int) -> Any:
    from llguidance.hf import from_tokenizer

    # llguidance wants a token that ends all texts; a guide never allows it by that name.
    end = tokenizer.eos_token_id
    if end is None:
        end = next(iter(tokenizer.all_special_ids), None)
    try:
        return from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)), end)
    except ValueError as error:
        raise GuideError(f"llguidance can't read the model's tokenizer: {error}") from error

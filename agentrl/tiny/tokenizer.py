"""The tiny model's tokenizer: 1,024 tokens, with the text split and marked up as Qwen3 does it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from agentrl.record.messages import Message

VOCABULARY_SIZE = 1024
"""256 bytes, 742 merges and Qwen3's 26 added tokens, which come last as they do in Qwen3."""

CONTEXT_LENGTH = 1024
"""Most tokens a conversation may have; the model's position limit."""

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen3's added tokens that decoding with `skip_special_tokens=True` leaves out."""

MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Qwen3's added tokens that are one token each but remain part of the text."""

ADDED_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS

# Qwen's pattern: contractions, words with the sign before them, single digits, punctuation, white space.
_PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(conversations: Iterable[Sequence[Message]]) -> PreTrainedTokenizerFast:
    """Learns the merges from `conversations`, written out by the chat template with the added tokens cut out.

    Raises:
        ValueError: the conversations hold too few different words for a vocabulary of `VOCABULARY_SIZE`.
    """
    template = _finish(_byte_level_bpe())
    boundary = re.compile("|".join(map(re.escape, ADDED_TOKENS)))

    def texts() -> Iterable[list[str]]:
        for messages in conversations:
            yield boundary.split(str(template.apply_chat_template(list(messages), tokenize=False)))

    backend = _byte_level_bpe()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    tokenizer = _finish(backend)
    if len(tokenizer) != VOCABULARY_SIZE:
        raise ValueError(
            f"the vocabulary came out at {len(tokenizer)} tokens instead of {VOCABULARY_SIZE}: "
            "train it on more varied conversations"
        )
    return tokenizer


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finish(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds Qwen3's tokens, the chat template and the fields by which the library knows how to prompt."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
        agentrl={"renderer": "qwen3", "tool_prompt": "compact"},
    )

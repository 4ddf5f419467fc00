"""A byte-level BPE tokenizer in the manner of Qwen's, small enough for a tiny vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|endoftext|>"
EOS = "<|im_end|>"
TOKENIZER_LENGTH = 384
# Qwen's own split: every digit is a word of its own, so no merge can join two digits or cross from text into one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(corpus: Iterable[str]) -> Tokenizer:
    """Learns the merges from ``corpus``; 256 bytes, the merges, then the two special tokens: 384 ids in all.

    Raises ValueError where the corpus has too few merges to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (PAD, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_LENGTH - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(specials)
    if tokenizer.get_vocab_size() != TOKENIZER_LENGTH:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {TOKENIZER_LENGTH}: enlarge it")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": model_max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

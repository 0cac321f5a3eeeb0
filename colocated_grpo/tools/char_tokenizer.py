"""A character tokenizer that needs no training and no download: one token per printable ASCII character."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, BOS, END, UNKNOWN = "<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>"
ROLES = ["system", "user", "assistant"]
CHARACTERS = ["\n", "\t", *map(chr, range(ord(" "), ord("~") + 1))]

# A role token opens a turn and <|end|>, the end-of-sequence token, closes it: a user prompt has three extra tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role'] ~ ': system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_char_tokenizer(vocab_size: int | None = None, max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Return a fast Hugging Face tokenizer that decodes encoded printable ASCII to the same text.

    `vocab_size` pads the vocabulary with unused tokens, so that every id a wider model can sample can be decoded.
    Raises ValueError if it is smaller than the alphabet.
    """
    special = [PAD, BOS, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    tokens = special + CHARACTERS
    if vocab_size is not None:
        if vocab_size < len(tokens):
            raise ValueError(f"vocab_size={vocab_size} is smaller than the {len(tokens)} tokens of the alphabet")
        tokens = tokens + [f"<|unused {index}|>" for index in range(len(tokens), vocab_size)]
    # BPE without merges never joins characters and, unlike a word-level model, needs no pre-tokenizer.
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, [], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=special[len(special) - len(ROLES) :],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Text tokenizer, chat template and alignment pieces of the demo checkpoint.

The text tokenizer is byte level, so every text can be encoded; transcripts are
plain characters. The clauses of the published instructions are tokens of their
own: spelled in characters, an instruction would be longer than a clip.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEFAULT_PROMPT = (
    "Audio transcription. Language: as spoken. Wording: verbatim, including "
    "fillers and repetitions. Formatting: punctuation and capitalization. "
    "Output: transcript only."
)
SPEAKER_PROMPT = (
    "Transcribe this audio. Include all spoken words and verbal fillers. Write "
    "numbers as spoken. Use no punctuation and no capitalization. Start every "
    "speaker turn with a speaker tag such as <spk:0>, <spk:1>, <spk:2>, etc.; "
    "assign one stable tag per speaker and keep speaker identities consistent. "
    "Output only the speaker-tagged transcript."
)
SHORT_PROMPTS = (
    "Transcribe the audio.",
    "Provide a verbatim transcript of the audio.",
)

LANGUAGES = (
    *("English", "German", "French", "Spanish", "Italian", "Portuguese", "Dutch"),
    *("Polish", "Czech", "Russian", "Hindi", "Korean", "Japanese", "Chinese"),
    *("Slovak", "Ukrainian", "Danish", "Swedish", "Finnish", "Greek", "Hungarian"),
)

_SPECIAL = [
    *("<unk>", "<s>", "</s>", "<pad>", "<think>", "</think>", "<reserved_6>"),
    *("<reserved_7>", "<reserved_8>", "<reserved_9>", "<|im_start|>", "<|im_end|>"),
    *(f"<spk:{n}>" for n in range(10)),
]

_CLAUSES = [
    "Audio transcription.",
    " Language: as spoken.",
    *(f" Language: {name}." for name in LANGUAGES),
    " Language:",
    " Wording: verbatim, including fillers and repetitions.",
    " Formatting: punctuation and capitalization.",
    " Output: transcript only.",
    "Transcribe this audio.",
    " Include all spoken words and verbal fillers.",
    " Write numbers as spoken.",
    " Use no punctuation and no capitalization.",
    " Start every speaker turn with a speaker tag such as",
    (
        ", etc.; assign one stable tag per speaker and keep speaker identities"
        " consistent."
    ),
    " Output only the speaker-tagged transcript.",
    "Transcribe the audio.",
    "Provide a verbatim transcript of the audio.",
    "system\n",
    "user\n",
    "assistant\n",
]

AUDIO_TOKEN = "<|audio|>"

# Renders the layout of the release: the system turn is always there, a user turn
# is its text, one space and the audio, and an earlier answer keeps only what
# follows its closed reasoning block. Content is a list of parts or a string; some
# callers put placeholders in front of a string, one a line, and these move back
# behind the text, where the model was trained to find them.
CHAT_TEMPLATE = """
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set audio = '<|audio|>' -%}
{%- if not messages or messages[0].role != 'system' -%}
{{- '<|im_start|>system\\n<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set ns = namespace(text='', clips=0, lines=[], head=true) -%}
{%- if message.content is string -%}
{%- set ns.text = message.content -%}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- if part is string -%}
{%- set piece = part -%}
{%- elif part.type in ('audio', 'audio_url', 'input_audio') -%}
{%- set piece = audio -%}
{%- else -%}
{%- set piece = part.text if part.text is defined else '' -%}
{%- endif -%}
{%- set joint = piece and ns.text and (piece == audio or ns.text.endswith(audio)) -%}
{%- set glue = ' ' if joint and not ns.text[-1:].isspace() else '' -%}
{%- set ns.text = ns.text + glue + piece -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}
{%- if '</think>' in ns.text -%}
{%- set ns.text = '<think></think>' + ns.text.split('</think>')[-1].lstrip('\\n') -%}
{%- elif '<think>' not in ns.text -%}
{%- set ns.text = '<think></think>' + ns.text -%}
{%- endif -%}
{%- elif message.role == 'user' and ns.text.startswith(audio + '\\n') -%}
{%- for line in ns.text.split('\\n') -%}
{%- if ns.head and line == audio -%}
{%- set ns.clips = ns.clips + 1 -%}
{%- else -%}
{%- set ns.head = false -%}
{%- set ns.lines = ns.lines + [line] -%}
{%- endif -%}
{%- endfor -%}
{%- set ns.text = ns.lines | join('\\n') + (' ' + audio) * ns.clips -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + ns.text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<think>\\n' if enable_thinking else '<think></think>' -}}
{%- endif -%}
""".strip()


def render_prompt(prompt: str, clips: int = 1, thinking: bool = False) -> str:
    """One user turn exactly as the chat template renders it."""
    audio = " ".join([AUDIO_TOKEN] * clips)
    body = f"{prompt} {audio}" if prompt and audio else prompt + audio
    end = "<think>\n" if thinking else "<think></think>"
    return (
        f"<|im_start|>system\n<|im_end|>\n<|im_start|>user\n{body}<|im_end|>\n"
        f"<|im_start|>assistant\n{end}"
    )


def build_tokenizer(directory: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` to ``directory``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(_SPECIAL)}
    for token in alphabet:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in _SPECIAL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in _CLAUSES]
    )
    # last: one past the embedding table
    tokenizer.add_special_tokens([AddedToken(AUDIO_TOKEN, special=True)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "extra_special_tokens": {"audio_token": AUDIO_TOKEN},
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    )


# A few Chinese characters let the aligner's character mode be tried; they were
# never spoken to the model.
_CJK = "你好世界今天明我是的不在有人中国一二三"


def train_pieces(sentences: Iterable[str], size: int, **options: Any) -> bytes:
    """Trains a BPE SentencePiece model, the same bytes every time.

    Args:
        sentences: What it is trained on.
        size: Pieces, the unknown one included.
        options: More of SentencePiece's own. What is given is written in the model,
            also where it is the default.

    Returns:
        The serialised model.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        character_coverage=1.0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        unk_id=0,
        num_threads=1,
        normalization_rule_name="identity",
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def build_pieces(words: list[str], size: int = 176) -> bytes:
    """Trains the alignment SentencePiece model on the vocabulary.

    Returns:
        The serialised model.
    """
    letters = "abcdefghijklmnopqrstuvwxyz'"
    sentences = [w for w in words for _ in range(50)] + list(letters)
    return train_pieces(sentences, size, required_chars=letters + _CJK)

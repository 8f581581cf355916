# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read what the decoder writes: speaker tags become turns, other markup goes."""

from collections.abc import Iterable
from dataclasses import dataclass

import regex as re

_SPEAKER_TAG = r"<spk:(?P<speaker>\d+)>"
_THINK, _END_THINK = "<think>", "</think>"


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends within a thought, so that an answer begins in one."""
    return prompt.rfind(_THINK) > prompt.rfind(_END_THINK)


@dataclass
class Turn:
    """What is said under one speaker tag.

    Attributes:
        speaker: N of `<spk:N>`, as text; None without a tag.
        text: without white space around it.
    """

    speaker: str | None
    text: str = ""


@dataclass
class Delta:
    """Text that follows what was read before.

    Attributes:
        turn: its turn, with this text in it.
        text: what is new, never empty.
        opens_turn: whether it is the first of its turn.
        opens_transcript: whether it is the first of all.
    """

    turn: Turn
    text: str
    opens_turn: bool
    opens_transcript: bool


class TranscriptReader:
    """Reads generated text with its special tokens, in one go or as it arrives.

    A thought (`<think>…</think>`) is dropped, also one that does not end. Text that
    may yet become a token is held back until it is clear what it is.

    Args:
        control_tokens: texts that are markup wherever they stand.
        thinking: the prompt ends within a thought.
        diarize: the model was asked for speaker tags, so that text before the first one
            is the first speaker's.
    """

    def __init__(
        self,
        control_tokens: Iterable[str],
        thinking: bool = False,
        diarize: bool = False,
    ) -> None:
        tokens = {*control_tokens, _THINK, _END_THINK}
        escaped = map(re.escape, sorted(tokens, key=len, reverse=True))
        self._markup = re.compile("|".join([_SPEAKER_TAG, *escaped]), re.IGNORECASE)
        # A tag with as many digits as anyone could mean.
        self._longest = max(*map(len, tokens), len("<spk:1234567>"))
        self._thinking = thinking
        # Tags count from 0, and whoever speaks first has it.
        self._untagged_speaker = "0" if diarize else None
        self._unread = ""
        self._spaces = ""
        self._turns: list[Turn] = []

    @property
    def turns(self) -> list[Turn]:
        """Turns with any text, in order."""
        return [turn for turn in self._turns if turn.text]

    @property
    def text(self) -> str:
        """The transcript without tags."""
        return " ".join(turn.text for turn in self.turns)

    @property
    def tagged_text(self) -> str:
        """The transcript as the word aligner reads it."""
        return " ".join(
            turn.text if turn.speaker is None else f"<spk:{turn.speaker}> {turn.text}"
            for turn in self.turns
        )

    def read(self, text: str, final: bool = False) -> list[Delta]:
        """Take in more generated text; `final` if it is the last."""
        self._unread += text
        deltas: list[Delta] = []
        while self._unread:
            if self._thinking:
                _, end, rest = self._unread.partition(_END_THINK)
                if not end:
                    self._unread = self._unread[-len(_END_THINK) :]
                    break
                self._thinking, self._unread = False, rest
                continue
            found = self._markup.search(self._unread)
            if found is None:
                held = 0 if final else self._start_of_markup()
                cut = len(self._unread) - held
                self._add(self._unread[:cut], deltas)
                self._unread = self._unread[cut:]
                break
            self._add(self._unread[: found.start()], deltas)
            self._unread = self._unread[found.end() :]
            if (speaker := found["speaker"]) is not None:
                self._turns.append(Turn(str(int(speaker))))
                self._spaces = ""
            elif found[0].lower() == _THINK:
                self._thinking = True
            elif found[0].lower() == _END_THINK:
                # The end of a thought whose start was not seen.
                self._turns.clear()
                deltas.clear()
        return deltas

    def _start_of_markup(self) -> int:
        """Characters at the end that may be the start of a token."""
        end = len(self._unread)
        for start in range(max(end - self._longest, 0), end):
            if self._markup.fullmatch(self._unread, start, partial=True):
                return end - start
        return 0

    def _add(self, text: str, deltas: list[Delta]) -> None:
        if not self._turns:
            self._turns.append(Turn(self._untagged_speaker))
        turn = self._turns[-1]
        # White space is held back until it turns out not to be the last.
        text = self._spaces + text if turn.text else text.lstrip()
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            opens_transcript = not any(turn.text for turn in self._turns)
            delta = Delta(turn, kept, not turn.text, opens_transcript)
            turn.text += kept
            deltas.append(delta)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of a request: vLLM's own, one more, and what they mean together."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
)
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.interfaces import SupportsTranscription

TaskType = Literal["transcribe", "translate"]

_GRANULARITIES = ("word", "segment")
_TIMED_FORMATS = ("srt", "vtt", "verbose_json", "diarized_json")
# The model translates to and from this language.
_PIVOT = "en"


def _require_file(data: Any) -> Any:
    # vLLM's own check answers 422, where OpenAI answers 400.
    if isinstance(data, dict) and isinstance(data.get("file"), str):
        raise VLLMValidationError(
            "'file' must be an uploaded file, not text.", parameter="file"
        )
    return data


class TranscriptionForm(TranscriptionRequest):
    """vLLM's transcription request, and `diarize`."""

    # In one piece: vLLM's is a union, and an unknown format breaks each part of it.
    response_format: Literal[
        "json", "text", "srt", "verbose_json", "vtt", "diarized_json"
    ] = Field(default="json")

    # Checked with the other fields; vLLM's type names its entries by number.
    timestamp_granularities: list[str] = Field(
        alias="timestamp_granularities[]", default=[]
    )

    diarize: bool = Field(default=False)
    """Tell speakers apart: labels in every `response_format`. `diarized_json` asks
    for it by itself."""

    @model_validator(mode="before")
    @classmethod
    def require_file(cls, data: Any) -> Any:
        return _require_file(data)


class TranslationForm(TranslationRequest):
    """vLLM's translation request."""

    @model_validator(mode="before")
    @classmethod
    def require_file(cls, data: Any) -> Any:
        return _require_file(data)


@dataclass(frozen=True)
class SpeechOptions:
    """What a request asks for, checked.

    Attributes:
        task: what the model does.
        response_format: as in OpenAI's API.
        words, segments: report them in `verbose_json`.
        diarize: ask the model for speaker tags and report speakers.
        language: ISO code of the speech, None if unknown.
        to_language: ISO code of a translation, None for a transcript.
        stream: answer with events.
        stream_usage: report usage with every event.
    """

    task: TaskType
    response_format: str
    words: bool
    segments: bool
    diarize: bool
    language: str | None
    to_language: str | None
    stream: bool
    stream_usage: bool

    @property
    def needs_times(self) -> bool:
        return self.response_format in _TIMED_FORMATS

    @property
    def output_language(self) -> str | None:
        """ISO code of the answer, None if unknown."""
        return self.to_language or self.language

    @classmethod
    def of(
        cls,
        request: TranscriptionRequest | TranslationRequest,
        route: TaskType,
        model_cls: type[SupportsTranscription],
    ) -> "SpeechOptions":
        """Check a request.

        Args:
            request: vLLM's, or one of the forms above.
            route: which of the two routes it came by.
            model_cls: knows the languages.

        Raises:
            VLLMValidationError: fields that contradict each other, or that nobody
                can fulfil; it names the field.
        """
        extra = request.model_extra or {}
        # Files of batch requests lose the brackets of the name on their way here.
        names = ("timestamp_granularities", "timestamp_granularities[]")
        granularities = getattr(request, names[0], None) or next(
            (extra[name] for name in names if extra.get(name)), []
        )
        diarize = request.response_format == "diarized_json" or _flag(
            getattr(request, "diarize", extra.get("diarize"))
        )
        task, language, to_language = checked_task(
            model_cls,
            language=request.language,
            to_language=request.to_language or (_PIVOT if route == "translate" else ""),
            diarize=diarize,
        )
        options = cls(
            task=task,
            response_format=request.response_format,
            words="word" in granularities,
            segments="segment" in granularities or not granularities,
            diarize=diarize,
            language=language,
            to_language=to_language,
            stream=bool(request.stream),
            stream_usage=bool(request.stream_continuous_usage_stats),
        )
        options._check(request, granularities)
        return options

    def _check(
        self, request: TranscriptionRequest | TranslationRequest, granularities: Any
    ) -> None:
        def refuse(message: str, parameter: str) -> None:
            raise VLLMValidationError(message, parameter=parameter)

        if not isinstance(granularities, list) or not set(granularities) <= set(
            _GRANULARITIES
        ):
            refuse(
                f"'timestamp_granularities[]' takes {' and '.join(_GRANULARITIES)}, "
                f"not {granularities!r}.",
                "timestamp_granularities[]",
            )
        if granularities and self.response_format != "verbose_json":
            refuse(
                "'timestamp_granularities[]' needs response_format 'verbose_json', "
                f"not {self.response_format!r}.",
                "timestamp_granularities[]",
            )
        if self.stream and self.response_format in ("srt", "vtt"):
            refuse(
                f"response_format {self.response_format!r} cannot be streamed: its "
                "times are known when all is said.",
                "stream",
            )
        if self.stream and request.use_beam_search:
            refuse("Beam search cannot be streamed.", "stream")
        if request.n != 1 and not request.use_beam_search:
            refuse(
                f"'n' is {request.n}, but a recording has one transcript. With "
                "use_beam_search it is the number of beams.",
                "n",
            )
        if self.diarize and request.use_beam_search:
            refuse("Beam search drops speaker tags.", "use_beam_search")
        if self.task == "translate" and self.words:
            refuse(
                "Words of a translation have no times in the recording.",
                "timestamp_granularities[]",
            )


def checked_task(
    model_cls: type[SupportsTranscription],
    *,
    language: str | None,
    to_language: str | None,
    diarize: bool,
) -> tuple[TaskType, str | None, str | None]:
    """What the model is to do, with its codes for the languages.

    Args:
        model_cls: knows the languages.
        language: of the speech, None or `"auto"` if unknown.
        to_language: to translate into, none for a transcript.
        diarize: tell speakers apart.

    Returns:
        The task, the language of the speech (None if unknown) and that of the
        translation (None if there is nothing to translate).

    Raises:
        VLLMValidationError: the model cannot do it; the parameter is named.
    """
    source = _checked_language(language, "language", model_cls)
    target = _checked_language(to_language, "to_language", model_cls)
    if to_language and target is None:
        raise VLLMValidationError(
            "'to_language' must be a language code: there is no translation into "
            f"{to_language!r}.",
            parameter="to_language",
        )
    if target in (None, source):
        return "transcribe", source, None
    if diarize:
        raise VLLMValidationError(
            "Speakers are told apart in transcripts only.", parameter="diarize"
        )
    if source not in (None, _PIVOT) and target != _PIVOT:
        raise VLLMValidationError(
            f"The model translates to and from English, not from {source!r} to "
            f"{target!r}.",
            parameter="to_language",
        )
    return "translate", source, target


def _checked_language(
    code: str | None, parameter: str, model_cls: type[SupportsTranscription]
) -> str | None:
    """The model's code for a language, None if it is not named.

    Raises:
        VLLMValidationError: the model does not know it; `parameter` named it.
    """
    try:
        return model_cls.validate_language(code or None)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=parameter) from error


def _flag(value: Any) -> bool:
    """A yes or no, also from a batch file, where nothing has checked it.

    Raises:
        VLLMValidationError: it is neither.
    """
    if value in (None, False, 0, "", "0", "false", "False", "no"):
        return False
    if value in (True, 1, "1", "true", "True", "yes"):
        return True
    raise VLLMValidationError(f"'diarize' is {value!r}.", parameter="diarize")

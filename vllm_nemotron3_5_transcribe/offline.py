# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Transcribe from Python with a `vllm.LLM`, with all that the audio routes give."""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.nemotron3_5_transcribe import (
    Nemotron3_5TranscribeParams,
    control_tokens,
    to_mono_waveform,
)
from vllm.model_executor.models.nemotron3_5_transcribe_alignment import (
    Alignment,
    DiarizationSegment,
    Word,
)
from vllm.multimodal.audio import resample_audio_pyav
from vllm.multimodal.media.audio import load_audio
from vllm.tokenizers import cached_tokenizer_from_config
from vllm_nemotron3_5_transcribe.alignment import AlignmentError, align
from vllm_nemotron3_5_transcribe.speech_api import limits
from vllm_nemotron3_5_transcribe.speech_api.answers import Usage
from vllm_nemotron3_5_transcribe.speech_api.protocol import checked_task
from vllm_nemotron3_5_transcribe.speech_api.segments import timed_segments
from vllm_nemotron3_5_transcribe.speech_api.transcript import (
    TranscriptReader,
    Turn,
    opens_thought,
)


@dataclass
class Transcription:
    """A transcript with everything known about it; the routes' answers hold the same.

    Attributes:
        text: without speaker tags.
        language: ISO code of the text, None if nobody has named it.
        duration: seconds of audio.
        words, diarization, tag_map, failed_tags: see `Alignment`. Empty without times,
            and a translation has no words.
        segments: sentences and turns, in order: `text`, `start`, `end`, `speaker` (N
            of its `<spk:N>` tag, as text, or None) and `aligned`, False if its times
            are a guess.
        usage: `seconds` of audio, `input_tokens`, `output_tokens`, `total_tokens`.
        finish_reason: `"stop"`, or why the transcript may be cut short.
    """

    text: str
    language: str | None
    duration: float
    words: list[Word] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    diarization: list[DiarizationSegment] = field(default_factory=list)
    tag_map: dict[str, int] = field(default_factory=dict)
    failed_tags: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = "stop"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Transcription":
        return cls(
            **{
                **values,
                "words": [Word.from_dict(word) for word in values["words"]],
                "diarization": [
                    DiarizationSegment.from_dict(segment)
                    for segment in values["diarization"]
                ],
            }
        )


def transcribe(
    llm: Any,
    audio: Any,
    *,
    sample_rate: float | None = None,
    language: str | None = None,
    prompt: str = "",
    hotwords: str = "",
    to_language: str | None = None,
    diarize: bool = False,
    times: bool = True,
    sampling_params: SamplingParams | None = None,
) -> Transcription:
    """Transcribe or translate a recording.

        llm = vllm.LLM("nvidia/NVIDIA-Nemotron-3.5-Transcribe-30B-A4B")
        result = transcribe(llm, "meeting.flac", diarize=True)
        for segment in result.segments:
            print(segment["start"], segment["speaker"], segment["text"])

    Args:
        llm: `vllm.LLM` with this model.
        audio: path, bytes of a file, or samples: (time,), (channels, time) or
            (time, channels).
        sample_rate: of samples, in Hz; the model's if None.
        language: ISO code of the speech, or `"auto"`.
        prompt: your own instruction.
        hotwords: terms to expect, separated by commas.
        to_language: ISO code to translate into.
        diarize: tell speakers apart.
        times: time words and segments. Without, the word timing head is not needed.
        sampling_params: greedy by default, and bounded by the length of the audio.
            `skip_special_tokens` is set to False: speaker tags are special tokens.

    Raises:
        VLLMValidationError: audio that is none or too long, an unknown language,
            a translation that is neither from nor into English, or its speakers.
        AlignmentError: times of a transcript are asked for, and cannot be had; see
            `align`.
    """
    model_config = llm.llm_engine.model_config
    model_cls = get_model_cls(model_config)
    task, language, to_language = checked_task(
        model_cls, language=language, to_language=to_language, diarize=diarize
    )
    stt_config = model_cls.get_speech_to_text_config(model_config, task)
    samples = _load(audio, sample_rate, stt_config.sample_rate)
    seconds = len(samples) / stt_config.sample_rate
    engine_prompt = model_cls.get_generation_prompt(
        Nemotron3_5TranscribeParams(
            audio=samples,
            stt_config=stt_config,
            model_config=model_config,
            language=language,
            hotwords=hotwords,
            task_type=task,
            request_prompt=prompt,
            to_language=to_language,
            diarize=diarize,
        )
    )
    params = (
        sampling_params.clone()
        if sampling_params
        else SamplingParams(
            temperature=0,
            max_tokens=limits.max_transcript_tokens(
                seconds, own_instruction=bool(prompt.strip())
            ),
            repetition_detection=limits.loop_detection(),
        )
    )
    params.skip_special_tokens = False
    (output,) = llm.generate([engine_prompt], params, use_tqdm=False)
    completion = output.outputs[0]

    reader = TranscriptReader(
        control_tokens(cached_tokenizer_from_config(model_config)),
        thinking=opens_thought(engine_prompt["prompt"]),
        diarize=diarize,
    )
    reader.read(completion.text, final=True)
    audio_tokens = model_cls.get_num_audio_tokens(seconds, stt_config, model_config)
    result = Transcription(
        text=reader.text,
        language=to_language or language,
        duration=round(seconds, 3),
        usage=Usage(
            seconds=seconds,
            audio_tokens=audio_tokens,
            text_tokens=len(output.prompt_token_ids) - audio_tokens,
            output_tokens=len(completion.token_ids),
        ).to_dict("tokens"),
        finish_reason=completion.finish_reason,
    )
    if not times or not reader.text:
        return result

    turns = reader.turns if diarize else [Turn(None, reader.text)]
    translated = task == "translate"
    try:
        alignment = align(
            llm,
            samples,
            reader.tagged_text if diarize else reader.text,
            language=result.language,
            diarize=diarize,
        )
    except AlignmentError:
        if not translated:
            raise
        alignment = Alignment()
    if translated:
        # The words are not what is heard, so their times mean nothing.
        alignment = Alignment(diarization=alignment.diarization)
    segments = timed_segments(turns, alignment, seconds, translated=translated)
    result.segments = [
        {
            "text": segment.text,
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "speaker": segment.speaker,
            "aligned": segment.aligned,
        }
        for segment in segments
    ]
    result.words, result.diarization = alignment.words, alignment.diarization
    result.tag_map, result.failed_tags = alignment.tag_map, alignment.failed_tags
    return result


def _load(audio: Any, sample_rate: float | None, target_rate: int) -> np.ndarray:
    """Read a file, or check samples; (samples,) float32 at the target rate.

    Raises:
        OSError: the file cannot be read.
        VLLMValidationError: it is no audio.
    """
    if isinstance(audio, (str, Path)):
        audio = Path(audio).read_bytes()
    if isinstance(audio, bytes):
        try:
            samples, rate = load_audio(io.BytesIO(audio), sr=target_rate)
        except Exception as error:
            raise VLLMValidationError(
                f"This is no audio that can be read: {error}", parameter="audio"
            ) from error
    else:
        samples, rate = audio, sample_rate or target_rate
    samples = np.ascontiguousarray(to_mono_waveform(samples, rate))
    if rate == target_rate:
        return samples
    return resample_audio_pyav(samples, orig_sr=rate, target_sr=target_rate)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much audio a request may bring, and how much text it may get."""

import math
import os

from fastapi import UploadFile

import vllm.envs as envs
from vllm.entrypoints.speech_to_text.base.utils import read_upload_with_limit
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams
from vllm.utils.mem_constants import MiB_bytes

# An hour of 48 kHz stereo at 24 bits has 989 MiB; decoded to float32, 1,318 MiB. The
# minute more is for files that say an hour and are a little longer.
_DEFAULTS = {
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": 1024,
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": 3660,
    "VLLM_MAX_AUDIO_DECODE_BYTES": 1400 * MiB_bytes,
}

# Tokens that a transcript may have for each second: twice as many as the audio has
# embeddings. The fastest speech has some 8 words a second, and where characters are
# tokens, as in the demo checkpoint, some 20 characters.
_TOKENS_PER_SECOND = 25
_TOKENS_BESIDES = 64
# An own instruction may ask for more than a transcript.
_TOKENS_OF_OWN_INSTRUCTION = 1024

# The same few tokens so many times in a row are not what was said. Longer patterns may
# be: a waiting loop plays its sentence for an hour.
_LOOP = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=64)


def admit_an_hour() -> None:
    """Raise vLLM's limits on audio in this process so that an hour passes.

    vLLM's are 25 MB and ten minutes. A variable that the user has set is left alone.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, str(value))


async def read_upload(file: UploadFile) -> bytes:
    """Read an upload.

    Raises:
        VLLMValidationError: it is too large; the message says how to raise the limit.
    """
    try:
        return await read_upload_with_limit(file)
    except VLLMValidationError as error:
        if error.parameter != "audio_filesize_mb":
            raise
        raise VLLMValidationError(
            f"The file is larger than the limit of "
            f"{envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB} MB. Set "
            "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB to increase this limit.",
            parameter="file",
        ) from error


def max_transcript_tokens(seconds: float, *, own_instruction: bool) -> int:
    """Most tokens that a recording of this length may be answered with.

    A decoder that has lost the thread repeats itself until something stops it.
    """
    tokens = math.ceil(_TOKENS_PER_SECOND * seconds) + _TOKENS_BESIDES
    return max(tokens, _TOKENS_OF_OWN_INSTRUCTION) if own_instruction else tokens


def loop_detection() -> RepetitionDetectionParams:
    """Tell the engine to stop an answer that goes round in circles."""
    return _LOOP


def clip_too_long(seconds: float) -> VLLMValidationError:
    """Refuse to cut a recording whose speakers are asked for.

    Args:
        seconds: the longest clip that is taken whole.
    """
    return VLLMValidationError(
        f"A recording whose speakers are asked for is transcribed whole, at most "
        f"{seconds:.0f} s of it: speakers cannot be followed from one piece to the "
        "next. Raise --max-model-len, or the audio length of --limit-mm-per-prompt "
        "(the model takes an hour), or split the recording.",
        parameter="file",
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read the goldens of word alignment and rebuild the logits they were made from.

`tools/reference/alignment_goldens.py` writes the file. The logits are synthetic and
not stored: noise of integer arithmetic, the same on every machine, with a peak where a
word piece is heard and a plateau where a speaker is active. So the file depends on no
checkpoint. Both environments share this module: it needs numpy alone.
"""

import base64
import functools
import json
from typing import Any

import numpy as np

from tests.goldens import GOLDENS, _hash

FILE = GOLDENS / "alignment.json"


def _noise(seed: int, *shape: int) -> np.ndarray:
    """Deterministic float32 noise between -2 and 2, in steps of 1 / 4096."""
    bits = _hash(seed, 0, int(np.prod(shape))) >> np.uint64(50)
    return ((bits.astype(np.float32) - 8192) / 4096).reshape(shape)


def build_logits(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rebuild what the models would have given.

    Args:
        case: `seed`, `mel_frames`, `subsampling`, `upsampling`, `classes` (with the
            blank), `speakers`, `peaks` (frame, class, height) and `activity`
            (speaker, first and last 10 ms frame).

    Returns:
        (frames, classes) logits of the word timing head, and (10 ms frames, speakers)
        logits of the diarizer, which fill the last encoder frame.
    """
    encoder_frames = -(-case["mel_frames"] // case["subsampling"])
    frames = encoder_frames * case["upsampling"]
    logits = _noise(case["seed"], frames, case["classes"])
    logits[:, -1] += 5
    for frame, token, height in case["peaks"]:
        logits[frame, token] += height
    speakers = _noise(
        case["seed"] + 1, encoder_frames * case["subsampling"], case["speakers"]
    )
    speakers -= 4.5
    for speaker, start, end in case["activity"]:
        speakers[start:end, speaker] += 7.5
    return logits, speakers


@functools.cache
def alignment_goldens() -> dict[str, Any]:
    """Return the file: `cases` and `tokenizers` (serialised SentencePiece models)."""
    goldens = json.loads(FILE.read_text("utf-8"))
    goldens["tokenizers"] = {
        name: base64.b64decode(proto) for name, proto in goldens["tokenizers"].items()
    }
    return goldens

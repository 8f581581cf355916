# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The two audio routes, with vLLM's decorators and bodies of the asked format."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMValidationError

from .limits import read_upload
from .protocol import TranscriptionForm, TranslationForm


class _SpeechRoute(APIRoute):
    """A route whose broken forms are answered in OpenAI's shape, too."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def handle_or_explain(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException as error:
                # Starlette's own, for a form that it cannot read; vLLM has no
                # handler for it.
                if error.status_code != HTTPStatus.BAD_REQUEST:
                    raise
                raise VLLMValidationError(
                    f"The form cannot be read: {error.detail}"
                ) from error

        return handle_or_explain


router = APIRouter(route_class=_SpeechRoute)

_MEDIA_TYPES = {
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
_RESPONSES = {
    HTTPStatus.OK.value: {
        "content": {
            kind.partition(";")[0]: {}
            for kind in ("text/event-stream", *_MEDIA_TYPES.values())
        }
    },
    HTTPStatus.BAD_REQUEST.value: {"model": ErrorResponse},
    HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse},
    HTTPStatus.INTERNAL_SERVER_ERROR.value: {"model": ErrorResponse},
}


@router.post("/v1/audio/transcriptions", responses=_RESPONSES)
@with_cancellation
@load_aware_call
async def create_transcriptions(
    request: Annotated[TranscriptionForm, Form()], raw_request: Request
) -> Response:
    """Transcribe an upload."""
    serving = raw_request.app.state.openai_serving_transcription
    audio = await read_upload(request.file)
    answer = await serving.create_transcription(audio, request, raw_request)
    return _response(answer, request.response_format)


@router.post("/v1/audio/translations", responses=_RESPONSES)
@with_cancellation
@load_aware_call
async def create_translations(
    request: Annotated[TranslationForm, Form()], raw_request: Request
) -> Response:
    """Translate an upload."""
    serving = raw_request.app.state.openai_serving_translation
    audio = await read_upload(request.file)
    answer = await serving.create_translation(audio, request, raw_request)
    return _response(answer, request.response_format)


def _response(answer: Any, response_format: str) -> Response:
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not hasattr(answer, "model_dump"):
        return StreamingResponse(answer, media_type="text/event-stream")
    if response_format in _MEDIA_TYPES:
        return Response(answer.text, media_type=_MEDIA_TYPES[response_format])
    return JSONResponse(answer.model_dump(exclude_none=True))

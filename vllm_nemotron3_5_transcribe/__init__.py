# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Glue that makes a stock vLLM serve Nemotron 3.5 Transcribe."""


def register() -> None:
    """Register the model, its config and its hooks with the installed vLLM."""

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The full speech API on vLLM's own audio routes.

* `transcript`: what the decoder writes, to what a user may read.
* `segments`: word times to segments.
* `formats`: segments to subtitles and response objects.
* `protocol`: fields of a request, checked.
* `limits`: how much audio and output a request may have.
* `serving`: vLLM's serving classes with all of this.
* `routes`, `plugin`: HTTP, and how vLLM finds it.
"""

"""`in_words_of`: refusals of the chat machinery in the words of another protocol. Used by responses and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pellucid.server.errors import ApiError


def in_words_of(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """`error` with the request's own names: `names` maps those of chat and of `SamplingParams` to them."""
    message = error.message
    for name, own_name in names.items():
        # Without an underscore, a name may be an English word.
        if "_" in name:
            message = re.sub(rf"\b{name}\b", own_name, message)
    param = None if error.param is None else names.get(error.param, error.param)
    return ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers)

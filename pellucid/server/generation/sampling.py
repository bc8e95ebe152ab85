"""A request's sampling fields, over the model's defaults, to `SamplingParams`. Called by the generating endpoints."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from pellucid.core import InvalidRequestError, SamplingParams, StructuredOutputs
from pellucid.server.errors import ApiError, bad_request, from_pellucid, quote
from pellucid.server.protocol.response_format import JsonObjectFormat, JsonSchemaFormat
from pellucid.server.protocol.sampling_fields import SamplingFields

logger = logging.getLogger(__name__)

# Fields that mean in a request what they mean in SamplingParams.
_SAME_NAME = (
    "n", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "prompt_logprobs", "stop", "stop_token_ids",
    "min_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip

# generation_config.json's name of each default, where it is another.
_CONFIG_NAMES = {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing; None leaves it to `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> SamplingDefaults:
        """From a checkpoint directory's generation_config.json; none for a GGUF file or a directory without it.

        A file or a value that makes no sense is left out with a warning: the model can be served without.
        """
        file = Path(path) / "generation_config.json"
        try:
            config = json.loads(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s: no sampling defaults taken from it: %s", file, error)
            return cls()
        if not isinstance(config, dict):
            logger.warning("%s: no sampling defaults taken from it: not a JSON object", file)
            return cls()
        return cls(**_sensible(config, file))

    def given(self) -> dict[str, float | int]:
        """The defaults that are set, by their names in `SamplingParams`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def sampling_params(request: SamplingFields, defaults: SamplingDefaults, vocab_size: int) -> SamplingParams:
    """The parameters that a chat or completion request asks for.

    Where the request gives no limit, it is the endpoint's own (16 for completions), else the model's, else None.

    Raises:
        ApiError: 400; `param` is the request's own name of the field.
    """
    asked = {name: getattr(request, name) for name in _SAME_NAME}
    asked["include_stop_str_in_output"] = _stop_is_kept(request)
    names = {}
    asked["max_tokens"], names["max_tokens"] = request.token_limit
    asked["logprobs"], names["logprobs"] = request.logprobs_limit
    if asked["max_tokens"] is None:
        asked["max_tokens"] = request.DEFAULT_MAX_TOKENS
    asked["structured_outputs"] = structured_outputs(request)
    return make_sampling_params(asked, defaults, vocab_size, names)


def make_sampling_params(
    asked: Mapping[str, Any], defaults: SamplingDefaults, vocab_size: int, names: Mapping[str, str]
) -> SamplingParams:
    """`SamplingParams` from what was asked (None: not asked) over `defaults`; without a limit up to the context length.

    `names` gives the request's names of the fields that it calls otherwise than `SamplingParams`.

    Raises:
        ApiError: 400; `param` is the request's own name of the field.
    """
    values = {name: value for name, value in asked.items() if value is not None}
    try:
        params = SamplingParams(**{"max_tokens": None, **defaults.given(), **values})
        params.check_vocabulary(vocab_size)
    except InvalidRequestError as error:
        raise _renamed(error, names) from None
    return params


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """The constraint that the request puts on its output, in whichever of the spellings.

    Several spellings of one constraint are taken as one; `response_format` of type "text" is none.

    Raises:
        ApiError: 400 for a constraint that is empty or not JSON, and for several that differ.
    """
    found: dict[str, StructuredOutputs] = {}
    for param, value in _constraints(request):
        try:
            found[param] = StructuredOutputs(**value)
        except InvalidRequestError as error:
            raise bad_request(str(error).replace("structured_outputs", param, 1), param) from None
    if not found:
        return None
    (first, outputs), *others = found.items()
    for param, other in others:
        if other != outputs:
            raise bad_request(f"{first} and {param} ask for different outputs; give one of them", param)
    return outputs


def json_schema_text(schema: Any, param: str) -> str:
    """A schema, given as JSON or as JSON text, as JSON text; equal schemas give equal texts.

    Raises:
        ApiError: 400; the text is not JSON.
    """
    try:
        value = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        return msgspec.json.encode(value).decode()
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"{param}: a schema given as text must be JSON, got {quote(schema)}", param) from None


def _constraints(request: SamplingFields) -> list[tuple[str, dict[str, Any]]]:
    """(field of the request, what it says in `StructuredOutputs`' names) for each that is given."""
    found: list[tuple[str, dict[str, Any]]] = []
    wanted = request.response_format
    if isinstance(wanted, JsonSchemaFormat):
        found.append(("response_format", {"json": json_schema_text(wanted.json_schema.json_schema, "response_format")}))
    elif isinstance(wanted, JsonObjectFormat):
        schema = wanted.schema
        asked = {"json_object": True} if schema is None else {"json": json_schema_text(schema, "response_format")}
        found.append(("response_format", asked))
    if request.structured_outputs is not None:
        given = msgspec.structs.asdict(request.structured_outputs)
        values = {name: value for name, value in given.items() if value is not None}
        if "json" in values:
            values["json"] = json_schema_text(values["json"], "structured_outputs")
        found.append(("structured_outputs", values))
    if request.json_schema is not None:
        found.append(("json_schema", {"json": json_schema_text(request.json_schema, "json_schema")}))
    if request.regex is not None:
        found.append(("regex", {"regex": request.regex}))
    if request.ebnf is not None:
        found.append(("ebnf", {"grammar": request.ebnf}))
    return found


def _stop_is_kept(request: SamplingFields) -> bool | None:
    """One thing with two names; either may say it."""
    given, other = request.include_stop_str_in_output, request.no_stop_trim
    if given is not None and other is not None and given != other:
        raise bad_request("include_stop_str_in_output and no_stop_trim disagree; give one of them", "no_stop_trim")
    return other if given is None else given


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> ApiError:
    """The refusal in the request's words."""
    message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
    param = None if error.param is None else names.get(error.param, error.param)
    return from_pellucid(InvalidRequestError(message, param))


def _sensible(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The sampling values of a generation config that `SamplingParams` takes."""
    values = {}
    for field in fields(SamplingDefaults):
        key = _CONFIG_NAMES.get(field.name, field.name)
        value = config.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{field.name: value})
        except (InvalidRequestError, OverflowError) as error:
            logger.warning("%s: %s=%r is ignored: %s", file, key, value, error)
        else:
            values[field.name] = value
    return values

"""`Malformer`: endless requests that are almost right, or not at all, from a seed. For the fuzz test of the server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CHAT = [{"role": "user", "content": "pack my box"}]
VALID: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "pack my box", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "pack my box", "max_output_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT},
    "/tokenize": {"prompt": "pack my box"},
    "/detokenize": {"tokens": [5, 6, 7]},
}

NUMBERS = (
    "0", "-0", "1", "-1", "2", "0.0", "16.0", "0.5", "1e-320", "1e400", "-1e400", "1e999999999", "NaN", "Infinity",
    "100", "128", "255", "319", "320", "129280", "2147483648", "-2147483649", "9007199254740993", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "9" * 60, "1.7976931348623157e308",
)  # fmt: skip
TEXTS = (
    '""', '" "', '"a"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\n\\r"', '"\u202e"', '"</s>"', '"<s>"',
    '"\ufffd"', '"tiny"', '"auto"', '"none"', '"required"', '"json_object"', '"json_schema"', '"user"', '"(a*)*b"',
    '"[0-9]{1,9}"', '"[a-"', '"{\\"type\\": \\"object\\"}"', '"start: \\"a\\""', '"root ::= [a-z]+"',
)  # fmt: skip
OTHERS = (
    "null", "true", "false", "[]", "{}", "[[]]", "[null]", "[1, 2]", "[-1]", "[999999]", "[\"a\"]", "[\"a\", 1]",
    '[""]', '{"": null}', '{"a": {"b": [1]}}', '{"type": "text"}', '{"type": "json_object"}', '{"type": "image_url"}',
    '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}',
    '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer", "minimum": 9, "maximum": 1}}}',
    '{"json": {"type": "object", "properties": {"a": {"enum": [1, null, "x"]}}}}', '{"choice": ["a", "b"]}',
    '{"choice": []}', '{"regex": "(((("}', '{"grammar": "start: start"}', '{"include_usage": true}',
    '{"5": 100, "6": -100}', '{"320": 1}', '{"-1": 1}', '{"5": 1e300}', '[{"role": "user", "content": "a"}]',
    '[{"role": "tool", "content": "a"}]',
    '[{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}]',
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]',
    '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}]',
    '[{"role": "user"}]', '[{"role": "", "content": null}]', '[{"type": "function", "function": {"name": "f"}}]',
    '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}]',
    '[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]',
)  # fmt: skip
EXTREMES: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (0, 1, 7), "max_completion_tokens": (1, 5), "n": (1, 2, 5, 128), "best_of": (1, 2),
    "echo": (True, False), "seed": (-(2**63), 2**63 - 1), "temperature": (0, 1e-320, 1e-9, 1, 100), "top_p": (1e-6, 1),
    "top_k": (-1, 0, 1, 2**63 - 1), "min_p": (0, 1e-300, 1), "repetition_penalty": (1e-300, 1e-6, 1, 100),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "logprobs": (0, 1, 20, True), "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "logit_bias": ({"5": 100}, {"0": -100, "319": 100}, {str(token): -100 for token in range(320)}, {}),
    "allowed_token_ids": ([5], [0, 1], list(range(320)), [319, 319]), "stop_token_ids": ([0], list(range(320)), []),
    "stop": ("a", ["e", "o", " "], "\ufffd", ["\u0000"], []), "min_tokens": (0, 3, 7), "ignore_eos": (True, False),
    "include_stop_str_in_output": (True,), "skip_special_tokens": (False, True), "return_token_ids": (True,),
    "stream": (True, True, False), "stream_options": ({"include_usage": True, "continuous_usage_stats": True},),
    "prompt": ("a", [3], [[3], [4, 5]], ["a", "b", "c"], [319] * 300, [0, 1, 0], "\u0000\ufffd\U0001f600"),
    "regex": ("a{0,9}", "[^a]*", ""), "response_format": ({"type": "json_object"}, {"type": "text"}),
    "structured_outputs": ({"choice": ["a", "bb"]}, {"regex": "[ab]{2}"}, {"json": {"enum": [1, None]}}),
    "cache_salt": ("a", "\u202e" * 200), "request_id": ("one", "two"), "continue_final_message": (True,),
    "add_generation_prompt": (False, True), "tool_choice": ("none", "auto", "required"),
    "tools": ([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],),
}  # fmt: skip
"""Values that the fields of these names may have, the outermost ones."""

METHODS = (
    "GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X", "POST POST", "",
)  # fmt: skip
PATHS = (
    "/", "//", "/v1", "/v1/", "/v1//completions", "/v1/completions/", "/v1/completions?x=%ff", "/v1/completions#a", "*",
    "/%00", "/%ff%fe", "/../../etc/passwd", "/page/../../../etc/passwd", "/page/%2e%2e%2fpage.py",
    "/v1/models/%0d%0aX:1", "/v1/models/" + "x" * 3000, "http://other/v1/completions", "/\x01", "",
    "/v1/responses/none/cancel", "/health/ready?",
)  # fmt: skip
CONNECTIONS = ("upgrade\r\nUpgrade: h2c", "Upgrade\r\nUpgrade: websocket", "close", "x, y,,")
CONTENT_TYPES = (
    "text/plain", "application/json; charset=utf-16", "application/x+json", "", "application/json" * 50, ";",
    "\xff/\xfe",
    "multipart/form-data; boundary=x", "APPLICATION/JSON",
)  # fmt: skip


@dataclass(frozen=True)
class Malformed:
    """One request. `answered`: an answer may be waited for; else it never comes to its end. `kind` is for reports."""

    data: bytes
    answered: bool
    kind: str


class Malformer:
    """Requests against `fields` (path -> names of its body's fields), always the same ones for one seed."""

    def __init__(self, seed: int, fields: Mapping[str, list[str]]) -> None:
        self._random = random.Random(seed)
        self._fields = fields
        self._paths = sorted(fields)
        self._kinds: list[tuple[int, Callable[[], Malformed]]] = [
            (8, self._extreme_fields),
            (8, self._strange_fields),
            (3, self._damaged_json),
            (2, self._not_an_object),
            (1, self._too_deep),
            (1, self._large),
            (2, self._strange_target),
            (3, self._strange_headers),
            (2, self._wrong_length),
            (1, self._broken_chunks),
        ]

    def next(self) -> Malformed:
        weights, kinds = zip(*self._kinds, strict=True)
        return self._random.choices(kinds, weights)[0]()

    # Bodies ----------------------------------------------------------------------------------------------------------

    def _extreme_fields(self) -> Malformed:
        """A body that is right, or whose fields do not go together."""
        path, choose = self._path(), self._random
        names = sorted(EXTREMES.keys() & set(self._fields[path]))
        body = dict(VALID.get(path, {}))
        for name in choose.sample(names, min(len(names), choose.randrange(1, 6))):
            body[name] = choose.choice(EXTREMES[name])
        return self._post(path, json.dumps(body).encode(), "extreme fields")

    def _strange_fields(self) -> Malformed:
        """A right body in which some fields have values that may be of any type."""
        path, choose = self._path(), self._random
        body = {name: json.dumps(value) for name, value in VALID.get(path, {}).items()}
        names = self._fields[path] or ["x"]
        for name in choose.sample(names, min(len(names), choose.choice((1, 1, 1, 2, 3)))):
            body[name] = self._value()
        if choose.random() < 0.2:
            body["stream"] = "true"
        if choose.random() < 0.05:
            body["\\u0000x\\r\\nInjected: 1"] = "1"
        pairs = [f'"{name}": {value}' for name, value in body.items()]
        if choose.random() < 0.1:
            pairs.append(choose.choice(pairs or ['"a": 1']))
        return self._post(path, ("{" + ", ".join(pairs) + "}").encode(errors="surrogatepass"), "strange fields")

    def _damaged_json(self) -> Malformed:
        path, choose = self._path(), self._random
        data = bytearray(json.dumps(VALID.get(path, {"a": 1})).encode())
        for _ in range(choose.choice((1, 1, 2, 8))):
            at = choose.randrange(len(data) + 1)
            how = choose.randrange(4)
            if how == 0:
                del data[at:]
            elif how == 1:
                data[at:at] = choose.randbytes(choose.randrange(1, 4))
            elif how == 2:
                data[at : at + 1] = bytes([choose.choice(b'{}[]",:\\\x00\xff\xc0\xed')])
            else:
                del data[at : at + choose.randrange(1, 9)]
            if not data:
                break
        return self._post(path, bytes(data), "damaged JSON")

    def _not_an_object(self) -> Malformed:
        choose = self._random
        texts = (*NUMBERS, *TEXTS, *OTHERS, "", " ", "{", "{}{}", "\ufeff{}", "//", "nul")
        data = choose.choice(texts).encode(errors="surrogatepass")
        if choose.random() < 0.3:
            data = choose.randbytes(choose.randrange(1, 200))
        return self._post(self._path(), data, "not an object")

    def _too_deep(self) -> Malformed:
        path, depth = self._path(), self._random.choice((50, 99, 101, 1000, 30_000))
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")))
        nested = opening * depth + "1" + closing * self._random.choice((depth, depth - 1))
        name = self._random.choice(self._fields[path] or ["x"])
        body = {**{key: json.dumps(value) for key, value in VALID.get(path, {}).items()}, name: nested}
        text = "{" + ", ".join(f'"{key}": {value}' for key, value in body.items()) + "}"
        return self._post(path, text.encode(), "too deep")

    def _large(self) -> Malformed:
        path, choose = self._path(), self._random
        body = dict(VALID.get(path, {}))
        name = choose.choice(list(body) or ["x"])
        body[name] = choose.choice(("a" * 20_000, [5] * 5_000, {str(i): i for i in range(2_000)}, [[1]] * 1_100))
        return self._post(path, json.dumps(body).encode(), "large")

    def _value(self) -> str:
        return self._random.choice(self._random.choice((NUMBERS, TEXTS, OTHERS)))

    # HTTP ------------------------------------------------------------------------------------------------------------

    def _strange_target(self) -> Malformed:
        choose = self._random
        path, method = self._path(), "POST"
        if choose.random() < 0.5:
            method = choose.choice(METHODS)
        else:
            path = choose.choice(PATHS)
        body = b"" if method in ("GET", "HEAD") else json.dumps(VALID.get(path, {})).encode()
        return Malformed(self._head(path, method=method, length=len(body)) + body, True, f"target {method} {path[:40]}")

    def _strange_headers(self) -> Malformed:
        choose, path = self._random, self._path()
        body = json.dumps(VALID.get(path, {})).encode()
        junk = choose.choice(
            (
                "X-Request-Timeout: " + choose.choice(("0", "-1", "nan", "inf", "1e999", "x", "\xff", "0.0001")),
                "X-Request-Id: " + choose.choice(("", "a b", "x" * 500, "\xff\xfe", "ok", "a\tb")),
                "Authorization: " + choose.choice(("Bearer", "Bearer \xff", "Basic x", "\x7f", "Digest " + "x" * 900)),
                "traceparent: " + choose.choice(("00-0-0-0", "\xff", "00-" + "f" * 32 + "-" + "f" * 16 + "-01")),
                "Accept: " + choose.choice(("*/*;q=nan", "\xff", "text/html" * 200, "")),
                "Content-Encoding: " + choose.choice(("gzip", "br", "\xff")),
                "Expect: " + choose.choice(("100-continue", "200-ok")),
                "Connection: " + choose.choice(CONNECTIONS),
                "Cookie: " + "x=" + "y" * 2000,
                "Origin: " + choose.choice(("null", "http://\xff", "*")),
                "Host: again",
                "No colon here",
                ": no name",
                "Bad Name: x",
                "X-\xe9: 1",
                "X-Null: a\x00b",
                "X-Fold: a\r\n b",
                "X-Lf: a\nX-More: b",
                "\r\n".join(f"X-{number}: {number}" for number in range(choose.choice((10, 300, 3000)))),
                "X-Long: " + "x" * choose.choice((5_000, 70_000)),
                "X-Bytes: " + choose.randbytes(20).decode("latin-1"),
                "Content-Type: " + choose.choice(CONTENT_TYPES),
            )
        )
        kind = "header " + junk[:20].encode("unicode_escape").decode()
        typed = not junk.startswith("Content-Type")
        return Malformed(self._head(path, junk, length=len(body), typed=typed) + body, True, kind)

    def _wrong_length(self) -> Malformed:
        choose, path = self._random, self._path()
        body = json.dumps(VALID.get(path, {"a": 1})).encode()
        kind = choose.randrange(5)
        if kind == 0:
            # The rest is no request, which ends the connection after the answer.
            return Malformed(self._head(path, length=len(body) // 2) + body, True, "length too short")
        if kind == 1:
            return Malformed(self._head(path, length=len(body) + 5) + body, False, "length too long")
        if kind == 2:
            bad = choose.choice(("-1", "1e3", "0x10", "", "9" * 40, "5, 5", "\xb2", "+3"))
            return Malformed(self._head(path, f"Content-Length: {bad}") + body, bad != "", f"length {bad[:9]}")
        if kind == 3:
            twice = self._head(path, f"Content-Length: {len(body) + 1}", length=len(body))
            return Malformed(twice + body, True, "two lengths")
        data = self._head(path, length=len(body)) + body
        return Malformed(data[: choose.randrange(len(data))], False, "cut off")

    def _broken_chunks(self) -> Malformed:
        choose, path = self._random, self._path()
        body = json.dumps(VALID.get(path, {})).encode()
        good = b"%x\r\n%b\r\n" % (len(body), body)
        chunks, answered = choose.choice(
            (
                (good + b"0\r\n\r\n", True),
                (good + b"0\r\nX-Trailer: 1\r\n\r\n", True),
                (b"zz\r\n" + good, True),
                (b"-1\r\n" + good, True),
                (b"f" * 20 + b"\r\n" + good, True),
                (b"1\r\n" + good + good, True),
                (good, False),
                (b"", False),
            )
        )
        junk = choose.choice(("Transfer-Encoding: chunked", "Transfer-Encoding: CHUNKED"))
        return Malformed(self._head(path, junk) + chunks, answered, "chunks")

    def _path(self) -> str:
        return self._random.choice(self._paths)

    def _post(self, path: str, body: bytes, kind: str) -> Malformed:
        return Malformed(self._head(path, length=len(body)) + body, True, f"{kind} {path}")

    def _head(
        self, path: str, junk: str = "", method: str = "POST", length: int | None = None, typed: bool = True
    ) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: test"]
        lines += ["Content-Type: application/json"] * typed
        # A request that is valid by chance must not run for long.
        lines += ["X-Request-Timeout: 1"] * ("timeout" not in junk.lower())
        lines += [] if length is None else [f"Content-Length: {length}"]
        lines += [junk] * bool(junk)
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")

"""A model that came without a tokenizer, here a bare config.json with synthetic weights: ids in, ids out."""

from __future__ import annotations

import json
from pathlib import Path

from tests import checkpoints
from tests.server.running import run_server


def test_token_ids_are_served_and_text_is_refused_with_the_remedy(tmp_path: Path) -> None:
    config, log = tmp_path / "config.json", tmp_path / "log"
    config.write_text(json.dumps(checkpoints.text_config(checkpoints.CONFIGS["v2"])))
    flags = ("--load-format", "synthetic", "--device", "cpu", "--threads", "1")
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with log.open("wb") as file, run_server(config, *flags, stderr=file) as server:
        whole = server.post("/v1/completions", asked).json["choices"][0]
        *chunks, done = server.post("/v1/completions", {**asked, "stream": True}).events
        refusals = [server.chat(), server.post("/v1/completions", {"prompt": "hello"})]
    assert len(whole["token_ids"]) == len(chunks) == 4
    assert [token_id for event in chunks for token_id in event["choices"][0]["token_ids"]] == whole["token_ids"]
    assert done == "[DONE]"
    for refused in refusals:
        assert refused.status == 400
        assert "without a tokenizer" in refused.json["error"]["message"]
        assert "token ids" in refused.json["error"]["message"]
    assert "no tokenizer: text is refused; /v1/completions takes token ids" in log.read_text()

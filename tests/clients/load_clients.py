"""The load generators and the evaluation harness: real commands, whose result files are read. Listed in `all_clients`.

A run is small on purpose: what counts here is that every request succeeds and has the length that was asked for.
"""

from __future__ import annotations

import json
from typing import Any

from tests.clients.client import Result, Run, find_one

REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 4, 64, 16

DOCUMENTS = (
    ("The capital of France is", (" Paris", " cheese"), 0),
    ("The opposite of hot is", (" seven", " cold"), 1),
    ("Cats and dogs are", (" animals", " numbers"), 0),
    ("The sun rises in the", (" spoon", " east"), 1),
)
TASK = """\
task: pellucid_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def guidellm_command(run: Run) -> list[str]:
    server = run.server
    return [
        str(run.environment.bin / "guidellm"), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},api_key={server.api_key}",
        "--tokenizer", f"kind=hf_auto,model={run.tokenizer}",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={run.folder / 'result.json'}",
    ]  # fmt: skip


def read_guidellm(run: Run, status: int) -> Result:
    [benchmark] = json.loads((run.folder / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    lengths = [request["output_tokens"] for request in benchmark["requests"]["successful"]]
    failed = totals["total"] - totals["successful"]
    return _judge(status, totals["successful"], failed, lengths)


def aiperf_command(run: Run) -> list[str]:
    server = run.server
    return [
        str(run.environment.bin / "aiperf"), "profile", "--model", server.model, "--url", server.url,
        "--api-key", server.api_key, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(run.tokenizer),
        "--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(run.folder),
    ]  # fmt: skip


def read_aiperf(run: Run, status: int) -> Result:
    result = json.loads((run.folder / "profile_export_aiperf.json").read_text())
    errors = sum(each["count"] for each in result["error_summary"])
    records = (run.folder / "profile_export.jsonl").read_text().splitlines()
    lengths = [json.loads(line)["metrics"]["usage_completion_tokens"]["value"] for line in records]
    return _judge(status, int(result["completed_request_count"]["avg"]), errors, lengths)


def genai_bench_command(run: Run) -> list[str]:
    server = run.server
    return [
        str(run.environment.bin / "genai-bench"), "benchmark", "--api-backend", "vllm", "--api-base", server.url,
        "--api-key", server.api_key, "--api-model-name", server.model, "--model-tokenizer", str(run.tokenizer),
        "--task", "text-to-text", "--traffic-scenario", f"D({PROMPT_TOKENS},{OUTPUT_TOKENS})",
        "--num-concurrency", str(CONCURRENCY), "--max-time-per-run", "1", "--max-requests-per-run", str(REQUESTS),
        "--experiment-base-dir", str(run.folder), "--experiment-folder-name", "result",
    ]  # fmt: skip


def read_genai_bench(run: Run, status: int) -> Result:
    result = json.loads(find_one(run.folder / "result", "D*.json").read_text())
    totals = result["aggregated_metrics"]
    lengths = [each["num_output_tokens"] for each in result["individual_request_metrics"]]
    # It looks at its count from time to time, and goes on in between: there may be more.
    return _judge(status, totals["num_completed_requests"], totals["num_error_requests"], lengths, at_least=True)


def lm_eval_command(run: Run) -> list[str]:
    data = run.folder / "documents.jsonl"
    documents = [{"question": question, "choices": choices, "answer": a} for question, choices, a in DOCUMENTS]
    data.write_text("\n".join(json.dumps(each) for each in documents))
    (run.folder / "task.yaml").write_text(TASK.format(data=data))
    arguments = {
        "model": run.server.model, "base_url": f"{run.server.url}/v1/completions", "tokenizer": run.tokenizer,
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    return [
        "env", f"OPENAI_API_KEY={run.server.api_key}", f"HF_DATASETS_CACHE={run.folder / 'cache'}",
        str(run.environment.bin / "lm_eval"), "--model", "local-completions", "--tasks", "pellucid_choice",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", str(run.folder), "--output_path", str(run.folder / "result"),
    ]  # fmt: skip


def read_lm_eval(run: Run, status: int) -> Result:
    result: dict[str, Any] = json.loads(find_one(run.folder / "result", "results_*.json").read_text())
    accuracy = result["results"]["pellucid_choice"]["acc,none"]
    count = result["n-samples"]["pellucid_choice"]["effective"]
    failed = {} if status == 0 else {"exit status": str(status)}
    if count != len(DOCUMENTS):
        failed["documents"] = f"{count} of {len(DOCUMENTS)} were scored"
    if accuracy != 1:
        failed["accuracy"] = f"{accuracy:g}: an ending that makes no sense was scored above one that does"
    return Result(f"{count} questions, accuracy {accuracy:g}", failed)


def _judge(status: int, completed: int, errors: int, lengths: list[int], *, at_least: bool = False) -> Result:
    failed = {} if status == 0 else {"exit status": str(status)}
    if errors:
        failed["failed requests"] = str(errors)
    if completed < REQUESTS or (completed > REQUESTS and not at_least):
        failed["requests"] = f"{completed} completed, {REQUESTS} were asked for"
    if len(lengths) != completed or any(length != OUTPUT_TOKENS for length in lengths):
        failed["output tokens"] = f"{lengths}, expected {OUTPUT_TOKENS} of each of {completed} requests"
    return Result(f"{completed} requests of {PROMPT_TOKENS}+{OUTPUT_TOKENS} tokens, {errors} failed", failed)

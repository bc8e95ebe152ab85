"""`CLIENTS`: every client program, in the order in which `run` runs them."""

from __future__ import annotations

from functools import partial

from tests.clients import load_clients
from tests.clients.client import Client
from tests.clients.environments import prepare_venv
from tests.clients.script_clients import node_client, python_client

REASONING = ("--reasoning-parser", "deepseek_r1")
"""With this parser an output begins inside reasoning, so that a model which knows none writes nothing else."""
LOCAL_COSTS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

CLIENTS: tuple[Client, ...] = (
    python_client("openai_sdk", "openai_sdk.py", "openai"),
    node_client("openai_node.mjs", "openai"),
    python_client("anthropic_sdk", "anthropic_sdk.py", "anthropic"),
    python_client("litellm_client", "litellm_client.py", "litellm", variables=LOCAL_COSTS),
    python_client("langchain_client", "langchain_client.py", "langchain-openai"),
    Client(
        name="guidellm",
        prepare=partial(prepare_venv, "guidellm", "guidellm"),
        command=load_clients.guidellm_command,
        read=load_clients.read_guidellm,
    ),
    Client(
        name="aiperf",
        prepare=partial(prepare_venv, "aiperf", "aiperf"),
        command=load_clients.aiperf_command,
        read=load_clients.read_aiperf,
        # Offline, it takes the path of a tokenizer for the name of one.
        variables={"HF_HUB_OFFLINE": ""},
    ),
    Client(
        name="genai_bench",
        prepare=partial(prepare_venv, "genai_bench", "genai-bench"),
        command=load_clients.genai_bench_command,
        read=load_clients.read_genai_bench,
    ),
    Client(
        name="lm_eval",
        prepare=partial(prepare_venv, "lm_eval", "lm-eval"),
        command=load_clients.lm_eval_command,
        read=load_clients.read_lm_eval,
    ),
    python_client("litellm_client", "reasoning_python.py", "litellm", serve_flags=REASONING, variables=LOCAL_COSTS),
    node_client("reasoning_node.mjs", "ai", serve_flags=REASONING),
)

"""The official OpenAI SDK for Python: everything it offers that the server has. Run by `run`, in its own venv."""

from __future__ import annotations

import checks
import openai_chat
import openai_endpoints
import openai_lifecycle
import openai_structured

if __name__ == "__main__":
    checks.main(
        openai_chat.Chat,
        openai_chat.Sampling,
        openai_chat.Streaming,
        openai_structured.StructuredOutput,
        openai_structured.Tools,
        openai_endpoints.Models,
        openai_endpoints.Completions,
        openai_endpoints.Responses,
        openai_lifecycle.Errors,
        openai_lifecycle.Lifecycle,
    )

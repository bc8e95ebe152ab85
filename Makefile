# make demo    build .venv and let two real models answer, with their speed and their plans
# make test    the whole CPU suite (what CI runs)
# make check   lint, types, tests
# make clients real SDKs and load generators against the server; CLIENTS="--only guidellm --keep" picks
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
QUESTION ?= What is gravity?
DEMO_MLA := $(BIN)/pellucid generate demo-mla --chat --max-tokens 160
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check lint types clients clean

# Two stamps: the demo needs less than the tests.
ENGINE := $(VENV)/.engine
DEV := $(VENV)/.dev

demo: $(ENGINE)
	@$(BIN)/pellucid generate smollm2 --chat --prompt "$(QUESTION)" --max-tokens 160 --plan
	@printf '\nThree questions for demo-mla, our own small model with latent attention (MLA) and experts (MoE):\n'
	@printf '\n> %s\n' "What does grok mean?"
	@$(DEMO_MLA) --prompt "What does grok mean?"
	@printf '\n> %s\n' "What does os.path.join do?"
	@$(DEMO_MLA) --prompt "What does os.path.join do?"
	@printf '\n> %s\n' "What is a hacker?"
	@$(DEMO_MLA) --prompt "What is a hacker?" --plan

test: $(DEV) lint types
	$(BIN)/python -m pytest

check: test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not make $(VENV); on Debian: apt install python3-venv"; exit 2; }

# torch first and by its pin. TORCH_INDEX may name an index with the CPU build, which is a tenth of the size.
$(ENGINE): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[engine]'
	@touch $@

$(DEV): $(ENGINE)
	$(PIP) --editable '.[dev]'
	@touch $@

clients: $(DEV)
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

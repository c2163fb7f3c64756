# One target for each thing to do; `make` alone lists them. The first call sets up .venv and stays quiet about it later.
#
#   ARGS="key=value …"   settings for any command, quoted as in a shell; all keys: .venv/bin/llmtrain <command> --help
#   PROMPT="…"           the text for generate, inspect and tokenize; it arrives as typed, `$` included
#   PYTHON=…             the Python to build .venv with (3.11 or newer)
#   TORCH_INDEX=…        the package index to take torch from, for another build than pip's own choice

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(RUN) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
PEERS := .venv-peers
PIP_PEERS := $(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --no-input -c constraints-peers.txt
# Several processes at once, the tests of one file in one: they share what the file starts.
TESTS := $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist loadfile
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
COMMANDS := prepare tokenizer tokenize plan pretrain finetune evaluate compare report generate inspect chat serve show-batch verify-resume bench smoke

# Free text must not meet make's own `$` or the shell: it is taken as it stands and goes by the environment.
ifeq ($(origin ARGS),command line)
override ARGS := $(value ARGS)
endif
ifeq ($(origin PROMPT),command line)
override PROMPT := $(value PROMPT)
generate inspect tokenize: export LLMTRAIN_PROMPT := $(PROMPT)
endif
unexport ARGS PROMPT
$(COMMANDS) bench-memory bench-memory-training bench-generate bench-peers: export LLMTRAIN_ARGS := $(ARGS)

.PHONY: help setup $(COMMANDS) bench-memory bench-memory-training bench-generate bench-peers checks format test-fast test test-slow test-gpu clean clean-all

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' Makefile | awk -F@ '{printf "%-22s %s\n", $$1, $$2}'
	@echo
	@sed -n 's/^#   //p' Makefile | sed 's/^/  /'

setup: $(STAMP) ## create .venv and install everything, pinned (every other target does it when needed)

$(STAMP): pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "error: there is no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V); name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@# Without ensurepip (Debian splits it off) the system's pip fills the new environment.
	@$(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) > /dev/null 2>&1 || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(RUN) install -qq pip; } || \
	  { echo "error: $(PYTHON) cannot create $(VENV); install its venv module (Debian: apt install python3-venv)" >&2; exit 2; }
	@echo "setting up $(VENV), once: 1/2 $(TORCH) (up to 3 GB with CUDA; a CPU build: TORCH_INDEX=…)" >&2
	@$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url "$(TORCH_INDEX)") "$(TORCH)"
	@echo "setting up $(VENV), once: 2/2 everything else" >&2
	@$(PIP) -e ".[dev]"
	@touch $@

prepare: $(STAMP) ## fetch a corpus and write its token shards
	@$(RUN) scripts/prepare.py

tokenizer: $(STAMP) ## train the tokenizer
	@$(RUN) scripts/tokenizer.py

tokenize: $(STAMP) ## show the tokens of PROMPT="…"
	@$(RUN) scripts/tokenize.py

plan: $(STAMP) ## what a pretraining run will take: memory, time, cost
	@$(RUN) scripts/plan.py

pretrain: $(STAMP) ## text to model folder: corpus, tokenizer, shards, training, samples
	@$(RUN) scripts/pretrain.py

finetune: $(STAMP) ## fine-tune the latest model on a task with LoRA, and compare
	@$(RUN) scripts/finetune.py

evaluate: $(STAMP) ## bits per byte and task scores of the latest model
	@$(RUN) scripts/evaluate.py

compare: $(STAMP) ## two evaluations item by item: ARGS="runs/evaluate/first runs/evaluate/second"
	@$(RUN) scripts/compare.py

report: $(STAMP) ## a page of training runs, overlaid: ARGS="runs/pretrain/first runs/pretrain/second"
	@$(RUN) scripts/report.py

generate: $(STAMP) ## continue PROMPT="…" with the latest model
	@$(RUN) scripts/generate.py

inspect: $(STAMP) ## show all that happens between PROMPT="…" and its answer, on a page
	@$(RUN) scripts/inspect_prompt.py

chat: $(STAMP) ## talk with the latest model fine-tuned for it
	@$(RUN) scripts/chat.py

serve: $(STAMP) ## answer requests over HTTP, with a page to chat on
	@$(RUN) scripts/serve.py

show-batch: $(STAMP) ## print the texts of one optimiser step: ARGS="step=…"
	@$(RUN) scripts/show_batch.py

bench: $(STAMP) ## speed, side by side with plain PyTorch and transformers
	@$(RUN) scripts/bench.py

bench-memory: $(STAMP) ## peak memory of preparing 1 GB of text against 100 MB
	@$(RUN) scripts/bench.py "which=[memory]"

bench-memory-training: $(STAMP) ## peak memory of training processes at each ZeRO stage, beside the formula
	@$(RUN) scripts/bench.py "which=[training-memory]"

bench-generate: $(STAMP) ## speed of the engine's work beside transformers, on two models (half an hour)
	@$(RUN) scripts/bench.py "which=[generate]"

# Each of the two may fail to install; the measurement then says so and goes on with the other.
$(PEERS)/.installed: constraints-peers.txt
	@$(PYTHON) -m venv --clear $(PEERS) > /dev/null 2>&1 || \
	  { $(PYTHON) -m venv --clear --without-pip $(PEERS) && $(PYTHON) -m pip --python $(PEERS)/bin/python install -qq pip; }
	@echo "setting up $(PEERS), once: 1/2 litgpt" >&2
	@$(PIP_PEERS) $(if $(TORCH_INDEX),--no-deps --index-url "$(TORCH_INDEX)") torch
	@$(PIP_PEERS) litgpt gguf safetensors numpy || echo "warning: litgpt could not be installed" >&2
	@echo "setting up $(PEERS), once: 2/2 llama.cpp, compiled here (ten minutes on two cores)" >&2
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF" $(PIP_PEERS) llama-cpp-python || \
	  echo "warning: llama.cpp could not be built: it needs CMake and a C++ compiler (Debian: apt install cmake g++)" >&2
	@touch $@

bench-peers: $(STAMP) $(PEERS)/.installed ## decoding beside litgpt and llama.cpp, installed in .venv-peers
	@$(RUN) scripts/bench.py "which=[peers]"

verify-resume: $(STAMP) ## check that an interrupted pretraining run equals one that was not
	@$(RUN) scripts/verify_resume.py

smoke: $(STAMP) ## the whole line at toy size, in under two minutes
	@$(RUN) scripts/smoke.py

checks: $(STAMP) ## formatting, lint and types
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

format: $(STAMP) ## format the code and mend what lint can
	@$(RUN) -m ruff check --fix-only .
	@$(RUN) -m ruff format .

test-fast: $(STAMP) ## the tests that take seconds
	@$(TESTS) -m "not medium and not slow and not gpu" $(ARGS)

test: $(STAMP) ## all tests but the long ones
	@$(TESTS) -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP) ## the long tests
	@$(TESTS) --no-loadscope-reorder -m "slow and not gpu and not alone" $(ARGS); code=$$?; [ $$code = 0 ] || [ $$code = 5 ] || exit $$code
	@$(RUN) -m pytest -q -m "slow and not gpu and alone" $(ARGS); code=$$?; [ $$code = 0 ] || [ $$code = 5 ] || exit $$code

test-gpu: $(STAMP) ## what needs a CUDA device, sized for a quarter of an hour
	@$(RUN) -m pytest -q -m gpu $(ARGS)

clean: ## remove caches and build products; runs/, data/ and .venv stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis llmtrain.egg-info
	@find llmtrain scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove .venv and .venv-peers too; runs/ and data/ stay
	@rm -rf $(VENV) $(PEERS)

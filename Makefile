# Everything runs in a virtual environment that is made here: Python >= 3.11 and make are enough.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# `make test PYTEST_ARGS="-m slow tests/training"`; two workers of one thread each suit two cores
PYTEST_ARGS ?= -n 2
DEMO_OUTPUT ?= outputs/demo
DEMO_ARGS ?=
BENCH_ARGS ?=

FETCH = $(RUN) scripts/fetch_assets.py
ADAPT = $(RUN) scripts/adapt.py --config scripts/configs/demo.yaml --model "$$model" --output_dir $(DEMO_OUTPUT) $(DEMO_ARGS)
RELOAD = $(RUN) scripts/adapt.py --adapter $(DEMO_OUTPUT) --evaluate_only

.PHONY: help demo test test-peft compatibility quality bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED) ## adapt SmolLM2-135M on number puzzles, then evaluate the saved adapter in a fresh process
	model="$$($(FETCH))" && $(ADAPT) && $(RELOAD)

test: $(INSTALLED) ## the tests that need no GPU and seconds rather than minutes
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_ARGS)

test-peft: $(INSTALLED) ## peft's own decoder tests, from its source distribution, on our adapter
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/peft_suite --quiet --disable-warnings

compatibility: $(INSTALLED) ## record which family and generation mode works, for the README
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/adapter/test_families.py tests/adapter/test_generation.py \
		--compatibility=model_cards/compatibility/results.json
	$(RUN) scripts/render_cards.py

quality: $(INSTALLED) ## lint and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) scripts/render_cards.py --check

bench: $(INSTALLED) ## time training with the adapter on this machine; BENCH_ARGS="--suite attention" the kernels
	$(FETCH) && $(RUN) scripts/benchmark.py $(BENCH_ARGS)

clean: ## remove the virtual environment and the tools' caches; outputs stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find hf_sparsecoding scripts tests -name __pycache__ -type d -exec rm -rf {} +

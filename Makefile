# demo, test, lint: each makes what it needs in .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
SOURCES := CMakeLists.txt pyproject.toml README.md $(shell find cmake cpp python -type f -not -path '*/__pycache__/*' -not -name '*.so')
export SEGKI_HIGHWAY_INCLUDE_DIR ?= $(wildcard $(CURDIR)/.deps/usr/include)

.PHONY: demo test ctest pytest sanitize lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/segki demo

test: ctest pytest

ctest: $(VENV)/tools.stamp
	$(BIN)/cmake --preset release
	$(BIN)/cmake --build --preset release
	$(BIN)/ctest --preset release

pytest: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/py

sanitize: $(VENV)/tools.stamp
	$(BIN)/cmake --preset asan-ubsan
	$(BIN)/cmake --build --preset asan-ubsan
	$(BIN)/ctest --preset asan-ubsan
	$(BIN)/cmake --preset tsan
	$(BIN)/cmake --build --preset tsan
	$(BIN)/ctest --preset tsan

lint: $(VENV)/lint.stamp
	git ls-files -z '*.h' '*.cc' '*.cu' | xargs -0 $(BIN)/clang-format --dry-run --Werror
	$(BIN)/ruff check python tests/py
	$(BIN)/mypy

clean:
	rm -rf build $(VENV) .deps

$(VENV)/tools.stamp: tools/fetch_debian_packages.sh
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "make: no C++ compiler found; install one (Debian: apt-get install g++)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is older than 3.10" >&2; exit 1; }
	bash tools/fetch_debian_packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "cmake>=3.25,<4" ninja
	@touch $@

# torch is named by itself, with its version: newer and default builds may bring gigabytes of GPU libraries. TORCH takes pip's words.
$(VENV)/torch.stamp: $(VENV)/tools.stamp
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(BIN)/python -m pip install --quiet $(TORCH) ".[demo]"
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(BIN)/python -m pip install --quiet $(TORCH) ".[demo,test]"
	@touch $@

$(VENV)/lint.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet $(TORCH) clang-format==14.0.6 mypy==2.4.1 ruff==0.17.6 "transformers>=5" typer rich safetensors numpy
	@touch $@

# Everything sets itself up on first use: .venv holds the package (editable), its extras and what builds it.
#   PYTHON=python3.12 make test      another interpreter
#   make demo EXTRAS=cuda13          another back end

PYTHON ?= python3
EXTRAS ?= $(if $(filter Linux,$(shell uname -s)),cpu)
PROMPT ?= The garbage collector
MAX_TOKENS ?= 64

comma := ,
BUILT_FROM := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/*.cpp csrc/cpu/*.h)

# A copied or moved checkout must not run the source that its .venv was made for.
$(shell test ! -e .venv/.ready || test "$$(cat .venv/.ready)" = "$$(pwd -P) $(EXTRAS)" || rm -f .venv/.ready)

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow wheel test-wheel clean

help:
	@echo "make demo | test | test-slow | wheel | test-wheel | clean   (docs/BUILD.md)"
	@echo "     msl-selftest (docs/HOST_EXECUTOR.md) | test-neon | test-sanitize (csrc/README.md)"

demo: .venv/.ready
	@echo "qwen-metal: generating with the demo model"
	@.venv/bin/qwen-metal generate --prompt "$(PROMPT)" --max-tokens $(MAX_TOKENS)
	@echo "qwen-metal: measuring stock and ours"
	@.venv/bin/qwen-metal bench

test: .venv/.tests
	@echo "qwen-metal: testing"
	@.venv/bin/python -m pytest -q -rs -m "not slow" --junitxml=build/test.xml

test-slow: .venv/.tests
	@echo "qwen-metal: running the slow tests"
	@.venv/bin/python -m pytest -q -rs -m slow --junitxml=build/test-slow.xml

wheel: .venv/.ready
	@echo "qwen-metal: building the sdist, and the wheel from it"
	@rm -rf dist
	@.venv/bin/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >build/wheel.log 2>&1 \
	  && .venv/bin/python -m pip wheel --no-build-isolation --no-deps -w dist dist/*.tar.gz >>build/wheel.log 2>&1 \
	  || { tail -n 20 build/wheel.log; echo "qwen-metal: no wheel; see build/wheel.log"; exit 1; }
	@echo dist/*

test-wheel: wheel .venv/.tests
	@.venv/bin/python tests/check_wheel.py dist/*.whl build/test-wheel.json "$(if $(EXTRAS),$(EXTRAS)$(comma))test,plots"

clean:
	rm -rf .venv build dist src/*.egg-info src/qwen_metal/_ext.*.so src/qwen_metal/_build.json

.venv/.ready: $(BUILT_FROM)
	@mkdir -p build
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "qwen-metal: $(PYTHON) is not Python 3.10 or later; say which with PYTHON=..."; exit 1; }
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || { \
	  echo "qwen-metal: making .venv"; \
	  $(PYTHON) -m venv --clear .venv >build/setup.log 2>&1 \
	  || { echo "qwen-metal: $(PYTHON) cannot make .venv (on Debian: install python3-venv); see build/setup.log"; exit 1; }; }
	@sed -n '/^requires = \[/,/^\]/s/^ *"\(.*\)",*$$/\1/p' pyproject.toml >build/requirements.txt
	@echo "qwen-metal: installing what builds it"
	@$(call install,-r build/requirements.txt)
	@echo "qwen-metal: installing qwen-metal[$(EXTRAS)]; compiling its extension takes minutes (build/setup.log)"
	@$(call install,--no-build-isolation -e '.$(if $(EXTRAS),[$(EXTRAS)])' -r build/requirements.txt)
	@.venv/bin/python -c 'from qwen_metal.extension import status as s; print("qwen-metal: extension", s().reason or "built for mlx " + s().mlx_version)'
	@echo "$$(pwd -P) $(EXTRAS)" >$@

# What only the tests need, of the extras test and plots.
.venv/.tests: .venv/.ready
	@echo "qwen-metal: installing what tests it"
	@.venv/bin/python -c 'from importlib.metadata import requires; \
	  print(*(r.split(";")[0] for r in requires("qwen-metal") if "test" in r.split("extra")[-1] or "plots" in r.split("extra")[-1]), sep="\n")' \
	  >build/test-requirements.txt
	@$(call install,-r build/test-requirements.txt)
	@touch $@

# pip's last error in one line; all of it in the log.
install = .venv/bin/python -m pip install --disable-pip-version-check $(1) >build/setup.log 2>&1 || { \
	  echo "qwen-metal: pip cannot install (is the package index reachable?): \
	  $$(sed -n 's/^ *ERROR: //p' build/setup.log | tail -n 1); see build/setup.log"; exit 1; }

# Targets that belong to one part of the project.
-include mk/*.mk

# make lab    everything set up, JupyterLab open on notebook 00        make test    everything set up, everything checked
#
# Nothing but a Python >= 3.10 and make is needed. The steps are in labcore/setup/, which also runs without make:
# python -m labcore.setup lab

# PYTHON=/path/to/python3.12 chooses the Python, VENV=/path where the environment goes.
PYTHON ?=
VENV ?=

# For `make lab`. Empty means: the first free port from 8888 up, open a browser, a random token. A TOKEN that merely lies
# in the shell's environment is somebody else's secret, so only `make lab TOKEN=…` counts.
PORT ?=
BROWSER ?=
TOKEN =

# Hand over to the set-up script with the first Python that is new enough, or with the one that was asked for.
define SETUP
@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python3.14 python); do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
        exec "$$python" -m labcore.setup $(1) --venv "$(VENV)" --python "$(PYTHON)"; \
    fi; \
done; \
echo "labcore: error: no Python 3.10 or newer $(if $(PYTHON),at '$(PYTHON)',found) — install one, or say where it is: make $@ PYTHON=/path/to/python3" >&2; \
exit 1
endef

.PHONY: help lab test test-fast install fetch notebooks lint lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

lab:  ## set up, fetch the model, open JupyterLab (PORT=, BROWSER=no, TOKEN=)
	$(call SETUP,lab --port "$(PORT)" --browser "$(BROWSER)" --token "$(TOKEN)")

test:  ## set up, fetch the model, run every test and re-check every notebook
	$(call SETUP,test)

test-fast:  ## set up, run the tests that need no model and no browser and take seconds
	$(call SETUP,test-fast)

install:  ## set up: environment and packages
	$(call SETUP,install)

fetch:  ## set up, fetch the default model
	$(call SETUP,fetch)

notebooks:  ## run every notebook top to bottom and store its outputs in place
	$(call SETUP,notebooks)

lint:  ## ruff over the package and the tests
	$(call SETUP,lint)

lock:  ## re-resolve requirements.lock; pins that still fit stay (maintainers; needs uv)
	cp requirements.lock requirements.lock.new
	echo setuptools | uv pip compile -q --universal --python-version 3.10 --extra lab --extra test --no-header --no-annotate \
	    pyproject.toml - -o requirements.lock.new
	(grep '^#' requirements.lock; grep -v -e '^#' -e '^nvidia-' -e '^cuda-' requirements.lock.new) > requirements.lock.new2
	mv requirements.lock.new2 requirements.lock && rm requirements.lock.new

clean:  ## remove the environment and what the tools left behind; the fetched model stays
	rm -rf $(or $(VENV),.venv) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find labcore tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

# make lab    everything set up, JupyterLab open on notebook 00        make test    everything set up, everything checked
#
# Nothing but a Python >= 3.10 and make is needed. The steps are in labcore/setup/, which also runs without make:
# python -m labcore.setup lab

# PYTHON=/path/to/python3.12 chooses the Python, VENV=/path where the environment goes. For `make lab`: PORT= (the first free
# one from 8888 up), BROWSER=no (opens none), TOKEN= (a random one). For `make test`: BROWSER_TESTS=install has apt-get install
# a Chromium where there is none; without it, the tests that need one are skipped.
#
# make hands these to the shell as variables. There they stand in double quotes, so they may hold spaces, quotes, anything.

# A TOKEN that merely lies in the shell's environment is not meant for JupyterLab: only `make lab TOKEN=…` counts.
TOKEN =

# Hand over to the set-up script with the first Python that is new enough, or with the one that was asked for.
define SETUP
@case "$$PYTHON" in \
    "") set -- python3 python3.13 python3.12 python3.11 python3.10 python3.14 python;; \
    "~/"*) set -- "$$HOME/$${PYTHON#"~/"}";; \
    *) set -- "$$PYTHON";; \
esac; \
for python; do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
        exec "$$python" -m labcore.setup $(1) --python="$$PYTHON"; \
    fi; \
done; \
printf '%s %s\n' "labcore: error: no Python 3.10 or newer $${PYTHON:+at '$$PYTHON' }found —" \
    "install one, or say where it is: make $@ PYTHON=/path/to/python3" >&2; \
exit 1
endef

.PHONY: help lab test test-fast install fetch notebooks lint lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

lab:  ## set up, fetch the model, open JupyterLab (PORT=, BROWSER=no, TOKEN=)
	$(call SETUP,lab --venv="$$VENV" --port="$$PORT" --browser="$$BROWSER" --token="$$TOKEN")

test:  ## set up, fetch the model, run every test and re-check every notebook (BROWSER_TESTS=install)
	$(call SETUP,test --venv="$$VENV")

test-fast:  ## set up, run the tests that need no model and no browser and take seconds
	$(call SETUP,test-fast --venv="$$VENV")

install:  ## set up: environment and packages
	$(call SETUP,install --venv="$$VENV")

fetch:  ## set up, fetch the default model
	$(call SETUP,fetch --venv="$$VENV")

notebooks:  ## run every notebook top to bottom and store its outputs in place
	$(call SETUP,notebooks --venv="$$VENV")

lint:  ## ruff over the package and the tests
	$(call SETUP,lint --venv="$$VENV")

lock:  ## re-resolve requirements.lock; pins that still fit stay (maintainers; needs uv)
	cp requirements.lock requirements.lock.new
	echo setuptools | uv pip compile -q --universal --python-version 3.10 --extra lab --extra test --no-header --no-annotate \
	    pyproject.toml - -o requirements.lock.new
	(grep '^#' requirements.lock; grep -v -e '^#' -e '^nvidia-' -e '^cuda-' requirements.lock.new) > requirements.lock.new2
	mv requirements.lock.new2 requirements.lock && rm requirements.lock.new

# A VENV that merely lies in the shell's environment may be another project's: only `make clean VENV=…` counts.
clean:  ## delete the environment and what the tools left behind; models, notebooks and progress stay
	$(call SETUP,clean $(if $(filter command,$(origin VENV)),--venv="$$VENV"))

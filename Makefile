# make demo: install, then the whole chain on embedded real images.   make test: install, lint, types, tests.
# make gpu: the tests that need a GPU, and a table of what each command takes on it.   make soundness: the long campaigns.
# make mutants: how many small faults in the code on which certificates rest the tests notice.
# make test-elsewhere: the tests in another order, with other thread counts and instructions, on a busy machine.
# make test-commands: types every command that a page, a hint or the code names, on small networks.
# make docs: the documentation site, in site/.   make tutorial: types it again.
# make release-check: what would be pushed, installed into an empty environment.   make test-min: the oldest dependencies.
# TORCH_INDEX: where torch and torchvision come from, together; empty for PyPI. On Linux without a GPU of NVIDIA, wheels
# for CPUs, where their index can be reached.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 || $(PYTHON) -c \
	'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5); print("$(CPU_INDEX)")' 2>/dev/null)
# one command and one index: a torchvision built for another torch breaks every `import timm` outside certvit
TORCH := "torch>=2.6,<2.14" torchvision $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# without its dependencies, of which it imports only those that certvit has, and pins others to versions of 2021
ATTACKS := "torchattacks>=3.5.1"

.PHONY: install demo test test-commands test-elsewhere test-min check gpu soundness mutants docs test-converters tutorial release-check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps $(ATTACKS)
	-$(BIN)/certvit doctor
	touch $@

install: $(VENV)/.installed

demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash examples/digits.sh
	@echo "To type certvit in this shell: source $(BIN)/activate"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# two workers of one thread each: more threads only wait for each other
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

test-commands: install
	CERTVIT_COMMANDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/project/test_printed_commands.py

# the tests as on another machine: another order, thread count and processor, and something else that wants the cores
test-elsewhere: install
	PATH="$(abspath $(BIN)):$$PATH" bash tests/elsewhere.sh

# every dependency at its lower bound of pyproject.toml
OLDEST := import re, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
	print(*(re.sub(">=([^,]+).*", r"==\1", line) for line in p))
test-min:
	$(PYTHON) -m venv --clear $(VENV)/min
	$(VENV)/min/bin/pip install --quiet $$($(PYTHON) -c '$(OLDEST)') -e ".[dev]" \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VENV)/min/bin/pip install --quiet --no-deps torchattacks==3.5.1
	$(VENV)/min/bin/python -m pytest -n 2 --dist loadscope --ignore tests/cli/test_processes.py

# what would be pushed: built, checked, installed into an empty environment, and used there; fails at the end while the
# repository has no address
PLACEHOLDER := HOST/OWNER
release-check:
	rm -rf dist
	$(PYTHON) -m venv --clear $(VENV)/build
	$(VENV)/build/bin/pip install --quiet build twine
	$(VENV)/build/bin/python -m build
	$(VENV)/build/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(VENV)/empty
	$(VENV)/empty/bin/pip install --quiet $(TORCH)
	$(VENV)/empty/bin/pip install --quiet dist/*.whl
	-$(VENV)/empty/bin/certvit doctor
	! $(VENV)/empty/bin/pip list --format=freeze | grep -iE "^(torchattacks|requests|urllib3|chardet)==|^idna==2"
	$(VENV)/build/bin/pip install --quiet pip-audit
	$(VENV)/build/bin/pip-audit --skip-editable --path $$($(VENV)/empty/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	cd $(VENV)/empty && bin/certvit init certvit_vit_digits -o init.safetensors && \
		bin/certvit finetune init.safetensors --dataset digits --loss ce --lr 2e-3 --noise 0.1 --epochs 20 -o digits.safetensors && \
		bin/certvit audit digits.safetensors --dataset digits --time-budget 30s --fail-on "clean<0.5" --html audit.html && \
		ls -l audit.html
	ls -l dist
	@! grep -rn $(PLACEHOLDER) examples/ci || { echo "not to be pushed: $(PLACEHOLDER) is no address"; exit 1; }
	@grep -q '^\[project.urls\]' pyproject.toml || { echo "not to be pushed: pyproject.toml has no [project.urls]"; exit 1; }

# without a CUDA device both say so and do nothing
gpu: install
	$(BIN)/python -m pytest -m gpu -rx -rs -q
	$(BIN)/python -m benchmarks.gpu --against-cpu

# every row of the tests, and long campaigns beside them: hostile files, edited records, killed runs, random networks
soundness: install
	$(BIN)/python -m tests.soundness.file_fuzz --count 100000
	$(BIN)/python -m tests.soundness.evidence_fuzz --count 10000
	$(BIN)/python -m tests.soundness.record_fuzz --count 20000
	$(BIN)/python -m tests.soundness.fault_fuzz --count 500
	$(BIN)/python benchmarks/soundness.py --seconds 600
	$(BIN)/python -m tests.soundness.slope_campaign --checks 1000000
	$(BIN)/python -m tests.soundness.coverage_campaign --runs 10000000
	$(BIN)/python -m tests.soundness.coverage_campaign --drawn --runs 200000
	$(BIN)/python -m tests.soundness.attack_campaign --attacks 100000
	CERTVIT_SOUNDNESS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope
	$(BIN)/python -m tests.soundness.local_campaign --seconds 600
	$(BIN)/python -m tests.soundness.local_campaign --programs --nodes 100000
	$(BIN)/python -m tests.soundness.local_campaign --programs --nodes 60000 --seed 1000000

# an hour, divided among the rooms; answers in build/mutants, from which the next call goes on
mutants: install
	$(BIN)/python -m tests.soundness.mutants --seconds 3600

# the outputs that tests/models/test_converters.py holds converted networks to, asked of transformers itself
test-converters:
	$(PYTHON) -m venv $(VENV)/transformers
	$(VENV)/transformers/bin/pip install --quiet $(TORCH)
	$(VENV)/transformers/bin/pip install --quiet -e . "transformers>=4.44" pytest
	$(VENV)/transformers/bin/python -m tests.models.transformers_logits
	$(VENV)/transformers/bin/pip install --quiet diffusers
	$(VENV)/transformers/bin/python -m tests.models.diffusers_outputs

# tools of its own, beside which certvit is looked up. The site carries the scripts of mermaid and of the search, where npm has
# them, so that pictures and search work from a disk without internet
docs: install
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install --quiet "mkdocs-material>=9.5,<10" "mkdocs>=1.6,<2" latex2mathml
	-cd $(VENV)/docs && npm pack --silent mermaid@11 && tar xzf mermaid-11*.tgz package/dist/mermaid.min.js
	-cd $(VENV)/docs && npm pack --silent iframe-worker@1 && tar xzf iframe-worker-1*.tgz package/shim/index.js
	at='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$at" > "$$($(VENV)/docs/bin/python -c "$$at")/certvit.pth"
	NO_MKDOCS_2_WARNING=1 NPM=$(abspath $(VENV))/docs/package $(VENV)/docs/bin/python -m mkdocs build --strict

tutorial: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/tutorial.py

clean:
	rm -rf $(VENV) build dist site *.egg-info demo-output

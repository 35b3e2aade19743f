# make demo: install, then the whole chain on embedded real images.   make test: install, lint, types, tests.
# make gpu: the tests that need a GPU, and a table of what each command takes on it.   make soundness: the long campaigns.
# make test-elsewhere: the tests in another order, with other thread counts and instructions, on a busy machine.
# make docs: the documentation site, in site/.   make tutorial: types it again.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-elsewhere check gpu soundness docs test-converters tutorial clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch>=2.6,<2.14"
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

install: $(VENV)/.installed

demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash examples/digits.sh

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadscope

# the tests as on another machine: another order, thread count and processor, and something else that wants the cores
test-elsewhere: install
	PATH="$(abspath $(BIN)):$$PATH" bash tests/elsewhere.sh

# without a CUDA device both say so and do nothing
gpu: install
	$(BIN)/python -m pytest -m gpu -rs -q
	$(BIN)/python -m benchmarks.gpu --against-cpu

# long campaigns beside the tests: hostile files, edited records, random networks with odd options, local certificates
soundness: install
	$(BIN)/python -m tests.soundness.file_fuzz --count 100000
	$(BIN)/python -m tests.soundness.evidence_fuzz --count 10000
	$(BIN)/python -m tests.soundness.record_fuzz --count 20000
	$(BIN)/python benchmarks/soundness.py --seconds 600
	$(BIN)/python -m tests.soundness.local_campaign --seconds 600
	$(BIN)/python -m tests.soundness.local_campaign --programs --seconds 600

# the logits that tests/models/test_converters.py holds converted networks to, asked of transformers itself
test-converters:
	$(PYTHON) -m venv $(VENV)/transformers
	$(VENV)/transformers/bin/pip install --quiet "torch>=2.6,<2.14" "transformers>=4.44" safetensors numpy
	$(VENV)/transformers/bin/python tests/models/transformers_logits.py

# tools of its own: mkdocs-material wants requests >= 2.33, torchattacks pins 2.25; certvit's packages come after them
docs: install
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install --quiet "mkdocs-material>=9.5,<10" "mkdocs>=1.6,<2"
	at='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$at" > "$$($(VENV)/docs/bin/python -c "$$at")/certvit.pth"
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --strict

tutorial: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/tutorial.py

clean:
	rm -rf $(VENV) build dist site *.egg-info demo-output

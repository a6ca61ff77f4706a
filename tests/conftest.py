"""Settings for all tests: eight CPU devices, or the GPU where `-m gpu` selects its tests.

Nothing here imports jax, or what imports it, before pytest_configure has chosen the devices. JAX's
persistent compilation cache stays off: a program compiled on another CPU may come back from it.
"""

import dataclasses
import os

import pytest
from hypothesis import settings

# One example may compile for seconds, far over hypothesis's default deadline.
settings.register_profile("jflash", deadline=None)
settings.load_profile("jflash")


def pytest_configure(config):
    selected = config.option.markexpr
    if "gpu" in selected and "not gpu" not in selected:
        os.environ["JFLASH_TESTS_ON_GPU"] = "1"
        return
    # JAX reads both when it is imported or first used; the tests' own subprocesses inherit them.
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()


def pytest_runtest_setup(item):
    """Fails a GPU test that would otherwise pass on the CPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import jax

    if jax.default_backend() != "gpu":
        pytest.fail(f"needs `pytest -m gpu` and a GPU; JAX runs on {jax.devices()}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs():
    """Keeps memory flat: modules share almost no compiled program, and JAX keeps each it made."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """Half of the time, for modules that compare what does not depend on XLA's optimisations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def small_blocks():
    """Tiles of which short sequences have several."""
    from programs import tiled

    with tiled("xla"):
        yield


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of 4 rows and one head, so that arrays of 6 rows are walked as long ones are."""
    from jflash import xla

    default = xla.default_config
    small = lambda problem: dataclasses.replace(default(problem), block_q=4, block_k=4, scores=32)
    monkeypatch.setattr(xla, "default_config", small)


@pytest.fixture
def as_users_run_it():
    """Without the annotations' own checks, which only tests have."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

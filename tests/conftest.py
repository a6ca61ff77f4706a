"""Settings for all tests: eight CPU devices, or the GPU where `-m gpu` selects its tests.

Nothing here imports jax, or what imports it, before pytest_configure has chosen the devices. JAX's
persistent compilation cache stays off: a program compiled on another CPU may come back from it.
"""

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

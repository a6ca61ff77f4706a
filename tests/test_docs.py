"""Every example in docstrings, README.md and docs/ runs; the names of modules stay out of the way."""

import ast
import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import jflash

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted(name for _, name, _ in pkgutil.walk_packages(jflash.__path__, "jflash."))
NEED_FLAX = {"jflash.nnx", "jflash.linen"}
PAGES = sorted(path for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")) if path.exists())


def in_a_fresh_process(code):
    """Runs it where warnings are errors, as here; returns what it printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_flax():
    return importlib.util.find_spec("flax") is not None


def test_there_are_modules_and_pages():
    assert {"jflash.api", "jflash.masks", "jflash.rules"} <= set(MODULES)


# An environment without Flax shows that everything else works without; its modules have no examples there.
@pytest.mark.parametrize("name", [name for name in MODULES if has_flax() or name not in NEED_FLAX])
def test_docstrings(name):
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), Examples(optionflags=doctest.ELLIPSIS)
    for test in finder.find(module, name):
        runner.run(test)
    assert runner.failures == 0, runner.report


class Examples(doctest.DocTestRunner):
    """Remembers what failed instead of printing it."""

    report = ""

    def report_failure(self, out, test, example, got):
        self.report += f"{test.name}: {example.source}expected {example.want}got {got}\n"
        super().report_failure(lambda text: None, test, example, got)

    def report_unexpected_exception(self, out, test, example, exc_info):
        self.report += f"{test.name}: {example.source}raised {exc_info[1]!r}\n"


def test_public_functions_have_an_example():
    functions = [jflash.attention, jflash.attention_with_lse, jflash.dot_product_attention, jflash.explain]
    functions += [jflash.varlen_attention, jflash.varlen_attention_with_lse, jflash.alibi_slopes]
    functions += [jflash.pack, jflash.unpack, jflash.segment_ids, jflash.segment_positions]
    missing = [f.__name__ for f in functions if ">>>" not in f.__doc__]
    assert not missing


BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """The Python blocks of a page that are meant to run here: those marked by no word."""
    return [code for mark, code in BLOCK.findall(page.read_text(encoding="utf-8")) if not mark.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages(page, monkeypatch, tmp_path):
    """The blocks of one page run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page), 1):
        if not has_flax() and re.search(r"\bflax\b|jflash\.(nnx|linen)", code):
            break  # what follows may use its names
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def test_marked_blocks_are_at_least_python():
    for page in PAGES:
        for _, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            ast.parse(code, page.name)


def test_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    fences = {"python": "x = 1", "python needs a GPU": "y = 2", "": "z", "python ": "w = 3"}
    page.write_text("text\n" + "".join(f"```{mark}\n{code}\n```\n" for mark, code in fences.items()))
    assert blocks(page) == ["x = 1\n", "w = 3\n"]


def public_names():
    return {name for name in vars(jflash) if not name.startswith("_")}


def test_no_module_is_called_like_a_public_function():
    """`from jflash.attention import attention` would hide one behind the other."""
    modules = {name.split(".")[1] for name in MODULES}
    public = {name for name in public_names() if not isinstance(getattr(jflash, name), type(jflash))}
    assert {"attention", "Causal", "explain"} <= public
    assert not modules & public


def test_the_index_is_re_exports_only():
    """Every public name of jflash is imported from a module of its own, under its own name."""
    tree = ast.parse((ROOT / "jflash" / "__init__.py").read_text(encoding="utf-8"))
    aliases = [a for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert all(a.name == a.asname for a in aliases)
    assert {a.name for a in aliases} <= public_names()


HEAVY = ["flax", "matplotlib", "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.triton"]
HEAVY += [
    "jax._src.pallas.triton",
    "jax._src.pallas.mosaic_gpu.core",
    "pallas_kernels.mosaic",
    "pallas_kernels.triton",
]


def test_import_loads_neither_flax_nor_kernels():
    code = f"""
import sys
import jflash
print([name for name in {HEAVY} if name in sys.modules])
import jax.numpy as jnp
x = jnp.ones((1, 4, 1, 8))
jflash.attention(x, x, x, jflash.Causal()).block_until_ready()
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert in_a_fresh_process(code) == "[]\n[]\n"


def test_flax_is_loaded_on_request():
    if not has_flax():
        for name in NEED_FLAX:
            with pytest.raises(ModuleNotFoundError, match="flax"):
                importlib.import_module(name)
        return
    code = "import sys, jflash; jflash.NAME.FlashMultiHeadAttention; print('flax' in sys.modules)"
    for name in ("nnx", "linen"):
        assert in_a_fresh_process(code.replace("NAME", name)) == "True\n"


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'jflash' has no attribute 'flash_attention'"):
        jflash.flash_attention  # noqa: B018


def test_annotations_are_there_for_type_checkers():
    assert (ROOT / "jflash" / "py.typed").exists() and (ROOT / "pallas_kernels" / "py.typed").exists()


def test_kernels_do_not_import_jflash():
    """Imports point one way, and implementations import neither each other nor the reference."""
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "jflash" for name in names), path

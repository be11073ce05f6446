"""The guides' code runs as it stands, links lead somewhere, and the site shows all there is."""

from __future__ import annotations

import gc
import importlib
import inspect
import re

import pytest

import mtf_gradsync
from benchmarks import page as benchmarks_page
from mtf_gradsync import compat_v1, estimator, reduce, simd, xla
from mtf_gradsync._private.libraries import tf
from tests import documents
from tests.documents import DOCUMENTS, ROOT
from tests.runtimes.cluster.processes import Processes

NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
# Run by a test of their own: several processes, or a namespace that they take as given.
APART = {
    "README.md",
    "docs/clusters.md",
    "docs/portable.md",
    "docs/processes.md",
    "docs/sync_replicas.md",
    "docs/xla.md",
}
# Run as a reader's program, in a process with the switches of the page alone.
PASTED = ["docs/guides/no_optimizer.md", "docs/guides/v1_optimizer.md"]
RUN = [name for name in NAMES if name not in {*APART, *PASTED} and documents.blocks(name)]
MISSING = {
    "docs/tpu.md": xla.why_no_tpu_compiler,
    "docs/guides/tpu_proof.md": xla.why_no_xla,
}
# Warnings of a page that it does not explain yet.
UNEXPLAINED = {"docs/tpu.md": ["Using default tf glorot_uniform_initializer"]}
OUTSIDE = "https?:|mailto:"


MARKS = {
    "docs/guides/faster.md": pytest.mark.slow,
    "docs/guides/tpu_proof.md": [pytest.mark.slow, pytest.mark.xla],
    "docs/plan.md": pytest.mark.slow,
    "docs/tpu.md": pytest.mark.tpu,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in RUN])
@pytest.mark.mostly_slow
def test_code_runs(name):
    if name in MISSING and MISSING[name]():
        pytest.skip(MISSING[name]())
    documents.run(name, unexplained=UNEXPLAINED.get(name, ()))


def unused_operation():
    operation = tf.Assert(tf.constant(True), ["text"])
    cycle = [operation]
    cycle.append(cycle)


def test_what_earlier_tests_left_is_not_the_page_s(monkeypatch):
    unused_operation()
    blocks = documents.blocks

    def blocks_after_collection(*args):
        gc.collect()
        return blocks(*args)

    monkeypatch.setattr(documents, "blocks", blocks_after_collection)
    documents.run("docs/cross_shard.md")


def test_an_operation_that_a_page_does_not_use_is_told(monkeypatch):
    code = f"import gc\nfrom {__name__} import unused_operation\nunused_operation()\ngc.collect()"
    block = documents.Block("python", code, None, "a page")
    monkeypatch.setattr(documents, "blocks", lambda path: [block])
    with pytest.raises(AssertionError, match="Object was never used"):
        documents.run("README.md")


@pytest.mark.parametrize("name", PASTED)
@pytest.mark.slow
def test_blocks_pasted_into_one_file_run_without_warnings(name, tmp_path):
    blocks = documents.blocks(name)
    script = tmp_path / "pasted.py"
    script.write_text("\n\n".join(block.code for block in blocks), encoding="utf-8")
    with Processes() as processes:
        process = processes.fork(script)
        printed = processes.wait(process)
        assert "WARNING" not in process.errors(), process.errors()
    assert printed.split() == "".join(block.printed or "" for block in blocks).split()


def slugs(path):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    return made | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    document = ROOT / name
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(OUTSIDE, target):
            continue
        path, _, anchor = target.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), target
        assert not anchor or anchor in slugs(page), target


def test_no_page_or_example_gives_adafactors_learning_rate_by_position():
    """Its first argument is another, and what is no code block is not run."""
    examples = [path for path in (ROOT / "examples").iterdir() if path.is_file()]
    for path in (*DOCUMENTS, *examples):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"AdafactorOptimizer\((?!\)|\w+=|\*|\.\.\.)[^)]*\)", text)
        assert not found, (path, found)


def test_the_site_s_navigation_has_every_page():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = re.search(r"^nav:\n(.*?)^\S", config, re.DOTALL | re.MULTILINE)[1]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    # Pages that docs/site/pages.py makes of files outside docs/.
    made = {"overview.md", "examples.md", "changelog.md", "contributing.md", "license.md"}
    assert set(listed) - made == {n[len("docs/") :] for n in NAMES if n.startswith("docs/")}


def test_the_page_of_benchmarks_is_made_from_results():
    assert benchmarks_page.PAGE.read_text(encoding="utf-8") == benchmarks_page.page()
    for path in benchmarks_page.WITH_TABLES:
        text = path.read_text(encoding="utf-8")
        assert text == benchmarks_page.with_tables(text)


def found(dotted):
    """The object that a dotted path names."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            module = getattr(module, part)
        return module
    raise ModuleNotFoundError(dotted)


@pytest.fixture(scope="module")
def reference():
    """What the API reference shows, by path."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")]
    paths = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    assert len(paths) == len(set(paths))
    return {path: found(path) for path in paths}


@pytest.mark.parametrize("package", [mtf_gradsync, compat_v1, estimator, reduce, simd, xla])
def test_the_reference_has_every_public_name(package, reference):
    for name in package.__all__:
        public = getattr(package, name)
        shown = f"{package.__name__}.{name}" in reference or any(
            public is one for one in reference.values()
        )
        assert shown or inspect.ismodule(public), f"{package.__name__}.{name}"


def test_the_reference_has_all_that_gin_binds(reference):
    page = (ROOT / "docs" / "api" / "gin.md").read_text(encoding="utf-8")
    shown = {path.rpartition(".")[2] for path in reference}
    binding = re.compile(
        r'^@gin\.configurable\((?:"(\w+)", )?module="mtf_gradsync([.\w]*)"[^)]*\)\n'
        r"(?:@.*\n)*(?:class|def) (\w+)",
        re.MULTILINE,
    )
    count = 0
    for source in sorted((ROOT / "mtf_gradsync").rglob("*.py")):
        text = source.read_text(encoding="utf-8")
        for renamed, module, name in binding.findall(text):
            assert name in shown, name
            gin_name = renamed or name
            assert f"`{gin_name}`" in page or f"`{module[1:]}.{gin_name}`" in page, gin_name
            count += 1
        assert len(binding.findall(text)) == len(re.findall(r"^@gin\.", text, re.M)), source
    assert count > 20

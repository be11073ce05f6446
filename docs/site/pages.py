"""What mkdocs does here beside its own: pages of files outside docs/, and links to them.

A guide links to ``../examples/gpt.py``, which leads somewhere on GitHub but is no page of the site.
So the README, the examples and the configs become pages, and links to them lead there.
"""

from __future__ import annotations

import ast
import json
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("examples/*.py"))
NOTEBOOK = "examples/first_steps.ipynb"
CONFIGS = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("configs/*.gin"))
# Files outside docs/, and the pages that they become.
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    **{path: f"{path}.md" for path in [NOTEBOOK, *SCRIPTS, *CONFIGS]},
}
EXAMPLES = """\
# Examples and configs

Programs to copy from, each run by a test, and the gin files of `mtf-gradsync train`.

"""
LINK = re.compile(r"(?<=\]\()[^)\s#]+")
# In docs/README.md: where the index has sections of the README, and which.
SECTIONS = re.compile(r"<!-- On the site, sections of the README: (.*) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files outside docs/, and one that lists the examples."""
    for source, page in PAGES.items():
        text = _read(source)
        if source == NOTEBOOK:
            text = _notebook(source)
        elif not source.endswith(".md"):
            language = "python" if source in SCRIPTS or source in CONFIGS else "text"
            text = f"# {source}\n\n````{language}\n{text}````\n"
        files.append(File.generated(config, page, content=text))
    rows = [f"- [{path}]({path}.md): {_about(path)}" for path in [NOTEBOOK, *SCRIPTS, *CONFIGS]]
    files.append(File.generated(config, "examples.md", content=EXAMPLES + "\n".join(rows)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages."""
    sources = {page: source for source, page in PAGES.items()}
    here = page.file.src_uri
    source = sources.get(here, f"docs/{here}")

    def page_of(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        if target in PAGES:
            target = PAGES[target]
        elif source != f"docs/{here}" and target.startswith("docs/"):
            target = target[len("docs/") :]
        else:
            return link.group()
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(page_of, SECTIONS.sub(_sections, markdown))


def _sections(names: re.Match[str]) -> str:
    """Sections of the README, with links as from a file in docs/."""
    readme = dict(re.findall(r"(?ms)^## (.+?)\n(.*?)(?=^## |\Z)", _read("README.md")))
    text = "\n".join(f"## {name}\n{readme[name]}" for name in names[1].split(", "))
    return LINK.sub(lambda m: m[0] if ":" in m[0] else posixpath.relpath(m[0], "docs"), text)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _notebook(path: str) -> str:
    """A notebook as a page: its text, and its code in blocks."""
    parts = []
    for cell in json.loads(_read(path))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts)


def _about(path: str) -> str:
    """The first sentence that a script or config says about itself."""
    if path == NOTEBOOK:
        text = _notebook(path).split("\n\n")[1]
    elif path in SCRIPTS:
        text = ast.get_docstring(ast.parse(_read(path))) or ""
    else:
        lines = [line[1:].strip() for line in _read(path).splitlines() if line.startswith("#")]
        text = " ".join(line for line in lines if not line.startswith("-*-"))
    return re.split(r"(?<=\.)\s|:\s", text)[0].replace("\n", " ").rstrip(".") + "."

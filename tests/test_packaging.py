"""What must be true of the package's metadata, for installs as well as for a checkout."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest
import setuptools

from mtf_gradsync.runtimes._common import configs_dir

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"

pytestmark = pytest.mark.skipif(not PYPROJECT.exists(), reason="not a checkout")


@pytest.fixture(scope="module")
def pyproject():
    tomllib = pytest.importorskip("tomllib", reason="the standard library has tomllib from 3.11 on")
    return tomllib.loads(PYPROJECT.read_text())


def test_every_package_is_found():
    on_disk = {
        ".".join(module.parent.relative_to(ROOT).parts)
        for module in (ROOT / "mtf_gradsync").rglob("*.py")
    }
    assert set(setuptools.find_packages(ROOT, include=["mtf_gradsync*"])) == on_disk


def test_gin_files_are_found_beside_the_package():
    assert configs_dir() == ROOT / "configs"


def test_no_gin_file_is_left_out_of_the_wheel(pyproject):
    patterns = pyproject["tool"]["setuptools"]["package-data"]["mtf_gradsync.configs"]
    configs = ROOT / "configs"
    packed = {path for pattern in patterns for path in configs.glob(pattern)}
    assert set(configs.rglob("*.gin")) == packed


def test_configs_are_searched_in_an_installed_package_first(tmp_path, monkeypatch):
    from mtf_gradsync.runtimes import _common

    installed = tmp_path / "mtf_gradsync" / "configs"
    installed.mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(_common, "_PACKAGE_DIR", installed.parent)
    assert _common.configs_dir() == installed
    installed.rmdir()
    assert _common.configs_dir() == tmp_path / "configs"
    (tmp_path / "configs").rmdir()
    with pytest.raises(FileNotFoundError, match="reinstall"):
        _common.configs_dir()


def test_console_script(pyproject):
    assert pyproject["project"]["scripts"] == {"mtf-gradsync": "mtf_gradsync_command:main"}


def test_constraints_pin_exactly():
    files = sorted((ROOT / "constraints").glob("*.txt"))
    names = [f.name for f in files]
    assert names == ["docs.txt", "t5.txt", "tf-2.12.txt", "tf-2.15.txt", "tf-2.21.txt"]
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        # A package may have another version on other Pythons.
        pin = re.compile(r'([A-Za-z0-9_.-]+)==[^\s=;]+(?:; python_version in "([\d. ]+)")?')
        pins = [pin.fullmatch(line) for line in lines]
        assert all(pins)
        for_pythons = [
            (re.sub(r"[-_.]+", "-", p[1]).lower(), python)
            for p in pins
            for python in (p[2] or "all").split()
        ]
        assert len(for_pythons) == len(set(for_pythons))
        marked = {name for name, python in for_pythons if python != "all"}
        assert not marked & {name for name, python in for_pythons if python == "all"}
        version = "2.15" if file.stem == "t5" else file.stem.partition("-")[2]
        tensorflow = [line for line in lines if line.startswith("tensorflow==")]
        # The site is made from sources; its environment has none.
        assert len(tensorflow) == bool(version)
        assert all(line.startswith(f"tensorflow=={version}.") for line in tensorflow)


def test_the_site_s_environment_has_its_extra(pyproject):
    pinned = (ROOT / "constraints" / "docs.txt").read_text().lower()
    for requirement in pyproject["project"]["optional-dependencies"]["docs"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert f"\n{name}==" in pinned


def test_console_script_is_installed():
    try:
        distribution = importlib.metadata.distribution("mtf-gradsync")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mtf-gradsync runs from a checkout that is not installed")
    scripts = {e.name: e.value for e in distribution.entry_points if e.group == "console_scripts"}
    assert scripts == {"mtf-gradsync": "mtf_gradsync_command:main"}


def test_what_the_smoke_test_imports_is_there():
    """It runs on an installed package alone, so that a moved name would be found late."""
    tree = ast.parse((ROOT / ".ci" / "smoke.py").read_text(encoding="utf-8"))
    found = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.level == 0]
    names = [(x.module, alias.name) for x in found for alias in x.names]
    assert ("mtf_gradsync.runtimes._common", "configs_dir") in names
    lost = [n for m, n in names if m != "__future__" and not hasattr(importlib.import_module(m), n)]
    assert not lost

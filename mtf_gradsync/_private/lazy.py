"""Loads modules when their names are first used, and finds moved modules by their earlier names.

`import mtf_gradsync` loads only what optimizer wrappers need. Runtimes and tools load when they are
first used (PEP 562), whichever way a program names them: ``mtf_gradsync.xla``, ``from mtf_gradsync
import xla``, or ``import mtf_gradsync.xla``. The last of these finds the module in the folder that
the module was moved to, so that no module is ever loaded twice.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, Callable, Mapping, Sequence


def lazy_names(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package whose names load when first used.

    Args:
      package: the package's name.
      places: maps each name to the full name of the module that has the name. A name of a module is
        mapped to the full name of the module itself.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(places[name])
        value = module if places[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return get, names


class _MovedPackage(ModuleType):
    """The class of a package whose modules can also be imported by earlier names.

    Python ends the import of a module by setting the module as an attribute of its package. If the
    package already has another attribute of that name, this class keeps the other attribute. For
    example, `mtf_gradsync.xla.session` is a function, and stays one.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_module and name in vars(self)):
            super().__setattr__(name, value)


class _EarlierNames(MetaPathFinder, Loader):
    """An importer that finds modules by the names that they had before their folders moved."""

    def __init__(self, moved: Mapping[str, str]):
        self._moved = moved

    def _place(self, name: str) -> str | None:
        places = [
            new + name[len(old) :]
            for old, new in self._moved.items()
            if f"{name}.".startswith(f"{old}.")
        ]
        return places[0] if places else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec that leads to the moved module; None for names that are no earlier names.

        `fullname` is the name that is imported. The import system calls this method.
        """
        place = self._place(fullname)
        found = find_spec(place) if place else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the moved module, imported by its new name; `spec` has the earlier name."""
        module = importlib.import_module(self._place(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives a moved module its own spec back, which the import system has replaced.

        The code of the module is not run again.
        """
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
        if hasattr(module, "__path__"):
            module.__class__ = _MovedPackage

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the code of a moved module, for ``python -m`` with the module's earlier name."""
        found = find_spec(self._place(fullname) or "")
        assert found is not None
        assert isinstance(found.loader, InspectLoader)
        return found.loader.get_code(found.name)


def find_moved(moved: Mapping[str, str]) -> None:
    """Lets modules be imported by earlier names; `moved` maps full earlier names to new names.

    Modules inside of a moved package are found, too, without being listed.
    """
    sys.meta_path.insert(0, _EarlierNames(moved))

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
LINKED = ("ir", "profiles", "codegen", "runtime")


def _folder(package: str) -> Path:
    """Where a package's files are: the four linked ones stand at the top."""
    _, *parts = package.split(".")
    return ROOT.joinpath(*parts) if parts and parts[0] in LINKED else ROOT.joinpath("tangram_plan", *parts)


def test_every_package_on_disk_is_installed() -> None:
    tops = {**{name: ROOT / name for name in LINKED}, "": ROOT / "tangram_plan"}
    found = set()
    for name, top in tops.items():
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(top).parts
            if name or not (parts and parts[0] in LINKED):
                found.add(".".join(filter(None, ["tangram_plan", name, *parts])))
    assert found == set(SETUP["packages"])


@pytest.mark.parametrize("package", SETUP["packages"])
def test_every_installed_package_is_a_folder_with_an_init(package: str) -> None:
    assert (_folder(package) / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_folders_at_the_top(name: str) -> None:
    link = ROOT / "tangram_plan" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    assert SETUP["package-dir"][f"tangram_plan.{name}"] == name


@pytest.mark.parametrize("name", LINKED)
def test_linked_packages_are_never_imported_by_their_bare_names(name: str) -> None:
    for path in (ROOT / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] not in LINKED, path
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & set(LINKED), path


@pytest.mark.parametrize(
    "module", ["cli", "ir", "runtime", "runtime.scorers", "runtime.vllm_plugin", "serve", "doctor"]
)
def test_importing_a_front_door_loads_nothing_heavy(module: str) -> None:
    heavy = "{'vllm', 'torch', 'triton', 'transformers', 'ortools', 'networkx', 'matplotlib', 'jinja2'}"
    code = f"import sys, tangram_plan.{module}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

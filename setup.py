"""Lets a wheel carry the compiled CPU kernels. Everything else is in pyproject.toml.

Invariant: a wheel can always be built. Without a C compiler it carries only the sources, which are then compiled at
first use; so is an editable installation.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).resolve().parent))

from isobit.kernels.cpu.build import build_libraries  # noqa: E402  (standard library only: no torch is needed here)


class BuildWithKernels(build_py):
    """Compiles the kernels into the built package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "isobit" / "kernels" / "cpu" / "lib"
        try:
            names = build_libraries(folder)
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

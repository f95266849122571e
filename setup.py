"""Builds the package, described in pyproject.toml.

With COTERIE_WHEEL_KERNELS=1 (`make wheel`) the wheel carries the native kernels for every class of
CPUs of this machine's family, and nothing is compiled where it is installed.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from coterie.kernels.cpu.compile import CARRIED, compile_for_wheel

WITH_KERNELS = os.environ.get("COTERIE_WHEEL_KERNELS") == "1"


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        carried = Path(self.build_lib) / CARRIED.relative_to(Path(__file__).parent)
        shutil.rmtree(carried, ignore_errors=True)  # an earlier build's
        if WITH_KERNELS:
            compile_for_wheel(carried)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        tag: tuple[str, str, str] = super().get_tag()
        # the modules are loaded with ctypes: any Python can
        return ("py3", "none", tag[2]) if WITH_KERNELS else tag


class OnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return WITH_KERNELS


setup(distclass=OnePlatform, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})

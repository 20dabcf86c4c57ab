"""Package mapping and C extension; everything else is in pyproject.toml.

The folders at the top level are imported as ktconvert.*; pipeline/api is ktconvert itself.
"""

import runpy

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

FOLDERS = ("pipeline", "quantizers", "layouts", "native_quant")
API = "pipeline.api"


class EditableWheel(editable_wheel):
    """Add a folder of links to sys.path instead of a finder.

    mypy does not use finders. Python does not ask them either if it starts in the directory that has the clone: there,
    it takes the clone's own directory, `ktconvert`, for the package.
    """

    def finalize_options(self):
        super().finalize_options()
        links = runpy.run_path(".ci/link_packages.py")
        links["link_packages"]()
        self.package_dir = {"": str(links["PARENT"].relative_to(links["ROOT"]))}


packages = find_packages(include=[g for f in FOLDERS for g in (f, f"{f}.*")], exclude=[API, f"{API}.*"])
setup(
    packages=["ktconvert", "ktconvert.errors", *(f"ktconvert.{package}" for package in packages)],
    package_dir={"ktconvert": API.replace(".", "/")} | {f"ktconvert.{folder}": folder for folder in FOLDERS},
    cffi_modules=["native_quant/_build.py:ffibuilder"],
    cmdclass={"editable_wheel": EditableWheel},
)

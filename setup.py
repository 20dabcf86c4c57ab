"""Package mapping and C extension; everything else is in pyproject.toml.

The folders at the top level are imported as ktconvert.*; pipeline/api is ktconvert itself.
"""

from setuptools import find_packages, setup

FOLDERS = ("pipeline", "quantizers", "layouts", "native_quant")
API = "pipeline.api"

packages = find_packages(include=[g for f in FOLDERS for g in (f, f"{f}.*")], exclude=[API])
setup(
    packages=["ktconvert", *(f"ktconvert.{package}" for package in packages)],
    package_dir={"ktconvert": API.replace(".", "/")} | {f"ktconvert.{folder}": folder for folder in FOLDERS},
    cffi_modules=["native_quant/_build.py:ffibuilder"],
)

"""The package mapping (folders at the top level, imported as ktconvert.*; pipeline/api is ktconvert itself) and the C
extension; all else is in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("pipeline", "quantizers", "layouts", "native_quant")
API = "pipeline.api"

found = find_packages(include=[g for f in FOLDERS for g in (f, f"{f}.*")], exclude=[API])
setup(
    packages=["ktconvert", *(f"ktconvert.{package}" for package in found)],
    package_dir={"ktconvert": API.replace(".", "/")} | {f"ktconvert.{folder}": folder for folder in FOLDERS},
    cffi_modules=["native_quant/_build.py:ffibuilder"],
)

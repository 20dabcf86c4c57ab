"""The package mapping (folders at the top level, imported as ktconvert.*) and the C extension; all else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("pipeline", "quantizers", "layouts", "native_quant")

setup(
    packages=[f"ktconvert.{p}" for p in find_packages(include=[g for f in FOLDERS for g in (f, f"{f}.*")])],
    package_dir={f"ktconvert.{f}": f for f in FOLDERS},
    cffi_modules=["native_quant/_build.py:ffibuilder"],
)

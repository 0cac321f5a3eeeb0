"""The subject of all checks: this machine, and the run that a command line describes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from colocated_grpo.runtime.program import Launch
from colocated_grpo.settings.adapter_files import with_adapter_settings
from colocated_grpo.settings.config_json import read_config_json
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.text_parts import text_part
from colocated_grpo.tools.doctor.atropos_state import AtroposState, read_state
from colocated_grpo.tools.doctor.gpus import Gpu, GpuListing, list_gpus, visible
from colocated_grpo.tools.doctor.imports import Imports, import_libraries


@dataclass(frozen=True)
class ModelFacts:
    """The model's config.json, or the reason why it cannot be read."""

    json: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Slow facts are found once, by the first check that needs them."""

    launch: Launch
    config: Config | None
    """None without --config, or if the settings are invalid."""
    config_errors: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(repr=False)
    package_folders: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """Folders in which installed packages are looked up."""

    @cached_property
    def listing(self) -> GpuListing:
        return list_gpus()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that a run may use."""
        return visible(self.listing.gpus, self.environment)

    @cached_property
    def imports(self) -> Imports:
        return import_libraries(self.environment)

    @cached_property
    def packages(self) -> dict[str, str]:
        """Installed packages: canonical name -> version."""
        installed = metadata.distributions(path=list(self.package_folders))
        found = [(one.metadata["Name"], one.version) for one in installed]
        # Remains of an interrupted installation have no name.
        return {canonicalize_name(name): version for name, version in reversed(found) if name}

    @cached_property
    def model(self) -> ModelFacts:
        if self.config is None:
            return ModelFacts(error="no config")
        try:
            return ModelFacts(read_config_json(self.config.model))
        except ConfigError as error:
            return ModelFacts(error=str(error))

    @cached_property
    def resolved(self) -> Config | None:
        """The config with the settings of the adapter that policy.lora.init names, where it can be read."""
        try:
            return None if self.config is None else with_adapter_settings(self.config)
        except ConfigError:
            return self.config

    @cached_property
    def atropos(self) -> AtroposState | None:
        """The state of the API server; None without an atropos entry."""
        if self.config is None or self.config.atropos is None:
            return None
        vocab_size = text_part(self.model.json or {}).get("vocab_size")
        return read_state(self.config, self.config.atropos, vocab_size)

    @property
    def ranks(self) -> int:
        """Ranks of the run, on all nodes."""
        return self.launch.ranks * self.launch.nodes

    @property
    def run_name(self) -> str:
        return Path(self.launch.config).stem

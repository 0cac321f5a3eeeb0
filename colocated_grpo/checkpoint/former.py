"""Checkpoints of earlier versions, which have only torch's pickled `.metadata`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from colocated_grpo.checkpoint.layout import Layout

METADATA_FILE = ".metadata"


class _Inert:
    """Takes the place of every class and function that a pickle names. It keeps what it is given and does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Imports nothing: every name in the pickle becomes an inert class of that name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        return type(global_name, (_Inert,), {})


def read_former_layout(folder: Path) -> Layout:
    """Return the layout in a pickled `.metadata`. Raises an exception of some kind if it has none."""
    with (folder / METADATA_FILE).open("rb") as file:
        metadata = _InertUnpickler(file).load()
    places = {
        (index.state["fqn"], index.state["offset"]): place.state
        for index, place in metadata.state["storage_data"].items()
    }
    return {
        name: {
            "dtype": entry.state["properties"].state[0].__name__,
            "size": entry.state["size"],
            "chunks": [_chunk(chunk.state, places[name, chunk.state["offsets"]]) for chunk in entry.state["chunks"]],
        }
        for name, entry in metadata.state["state_dict_metadata"].items()
        if type(entry).__name__ == "TensorStorageMetadata"
    }


def _chunk(chunk: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    return {
        "offsets": chunk["offsets"],
        "sizes": chunk["sizes"],
        "file": place["relative_path"],
        "start": place["offset"],
        "length": place["length"],
    }

"""Weight sync through files: running servers load the saved adapter, or servers restart from the saved model."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colocated_grpo.errors import RunError
from colocated_grpo.policy.export import Export
from colocated_grpo.runtime.checksums import exported_digest
from colocated_grpo.runtime.distributed import World
from colocated_grpo.servers.engine_server import EngineServer
from colocated_grpo.web.client import Unavailable

ADAPTER_NAME = "policy"


class AdapterSync:
    """Saves the adapter and loads it into every running server, beside the base weights."""

    def __init__(self, export: Export, folder: Path, servers: Sequence[EngineServer], world: World) -> None:
        """folder: must be readable by the servers. Each sync overwrites it."""
        self._export = export
        self._target = folder / "adapter"
        self._servers = servers
        self._world = world

    def sync(self) -> None:
        """Save the adapter and load it into every server. Collective. Raises RunError on every rank."""
        self._export.write(self._target)
        self._world.from_main(self._load_everywhere)

    def _load_everywhere(self) -> None:
        for server in self._servers:
            server.until_answered(partial(self.restore, server))

    def restore(self, server: EngineServer) -> bool:
        """Load the adapter of the last sync. Raises Unavailable or RequestRejected. Raises RunError if other files are
        loaded."""
        body = {"adapter_path": str(self._target.absolute()), "adapter_name": ADAPTER_NAME}
        _require_same(server, server.post("/lora/load", body)["exported"], self._target)
        return True


@dataclass(eq=False)
class RestartSync:
    """Saves the model and restarts every server from it."""

    export: Export
    folder: Path
    """Must be readable by the servers."""
    servers: Sequence[EngineServer]
    world: World
    base: str
    """The model at version 0, which servers may have loaded initially."""
    version: Callable[[], int]

    def __post_init__(self) -> None:
        # Two folders, used in turn: a server that crashes while the next model is written restarts from the last model.
        self._targets = [self.folder / "model_a", self.folder / "model_b"]
        self._current = self.base
        """Model of the last sync."""

    def sync(self) -> None:
        """Restart every server from the saved model, unless at version 0 all have the base model. Collective."""
        if self.version() == 0 and self.world.from_main(self._have_base):
            return
        self._targets.reverse()
        self.export.write(self._targets[0])
        self._current = str(self._targets[0].absolute())
        self.world.from_main(self._restart_all)

    def _have_base(self) -> bool:
        infos = [server.wait_until_ready() for server in self.servers]
        return all(info["model"] == self.base and not info["has_received_weights"] for info in infos)

    def _restart_all(self) -> None:
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(self._restart, self.servers))

    def _restart(self, server: EngineServer) -> None:
        model = self._current
        former = server.wait_until_ready()["instance"]
        accepted: set[str] = set()
        """Instances that have accepted the restart request. If an instance crashes before it accepts, another instance
        starts."""

        def restarted() -> None:
            info = server.info()
            instance = info["instance"]
            if instance != former and info["model"] == model:
                _require_same(server, info["exported"], Path(model))
                return
            if instance not in accepted:
                server.post("/bridge/restart", {"model": model})
                accepted.add(instance)
            raise Unavailable(f"it has not restarted with {model} yet")

        server.until_answered(restarted)

    def restore(self, server: EngineServer) -> bool:
        """Return True if the restarted server has the model of the last sync. Raises Unavailable."""
        return server.info()["model"] == self._current


def _require_same(server: EngineServer, loaded: str | None, folder: Path) -> None:
    """Raise RunError unless the server has loaded the files in `folder`. loaded: the server's `exported_digest`."""
    if loaded != exported_digest(folder):
        raise RunError(
            f"weight sync: the engine at {server.url} has loaded other files than {folder} holds here: it does not see "
            "the folder as the trainer has written it"
        )

"""A worker process of reward functions. `workers` starts it, sends inputs and reads results."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import socket
import sys
from io import BufferedRWPair

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.rewards.functions import load_reward, results_of
from colocated_grpo.environments.rewards.workers import DEVICE_LIBRARIES, Started
from colocated_grpo.runtime.guard_process import DUMP_SIGNAL
from colocated_grpo.runtime.parents_death import die_with
from colocated_grpo.runtime.signals import reset_in_forked_children, stop_signals


def main(descriptor: int, dumps: int, rank: int) -> None:
    die_with(rank)
    _ignore_stop_signals()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, file=dumps, all_threads=False)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        named, key = pickle.load(stream)
        try:
            functions = [load_reward(name, config, key) for name, config in named]
        except EnvironmentSetupError as error:
            _send(Started(error=str(error)), stream)
            return
        _send(Started(device_libraries=sorted(DEVICE_LIBRARIES & sys.modules.keys())), stream)
        while True:
            try:
                inputs = pickle.load(stream)
            except EOFError:
                return
            for function in functions:
                _send(results_of(function, inputs), stream)


def _send(message: object, stream: BufferedRWPair) -> None:
    pickle.dump(message, stream)
    stream.flush()


def _ignore_stop_signals() -> None:
    """A batch system sends them to every process of a job; the rank then still needs the rewards of its step."""
    for number in stop_signals():
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs that a reward starts
    reset_in_forked_children(stop_signals())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

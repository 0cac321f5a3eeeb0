"""What training on a second stream while the engine decodes would gain: `python -m colocated_grpo.benchmarks.overlap`.

A tail of a few sequences decodes while micro-batches are trained beside it, and each of the two alone. The gain is the
time that both take one after the other, over the time that they take together: 1 means that nothing is gained.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from colocated_grpo.batching import Batch, Minibatch
from colocated_grpo.benchmarks import train
from colocated_grpo.benchmarks.ranks import config_of, main_in_ranks, model_folder, rank_parser, wake_with_weights
from colocated_grpo.benchmarks.roofline import measure_roofline
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, RolloutEngine, Sampling
from colocated_grpo.runtime.distributed import World


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("overlap", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = train.add_work(rank_parser(__doc__))
    parser.add_argument("--tails", type=int, nargs="+", default=[8, 64], help="sequences that still decode")
    parser.add_argument("--tokens", type=int, default=600, help="of each of them")
    return parser


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    from colocated_grpo.build.policy import build_engine

    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, **train.sections(options), engine={"max_num_seqs": max(options.tails)})
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        engine = build_engine(config, policy, folder, world)
    config = train.settle_memory(policy, config, world)
    batch = train.pack_all(train.make_groups(options, policy.model.lm.config.vocab_size), config, world)
    wake_with_weights(engine, policy, world)
    beside = Beside(policy, engine, batch, world.device)
    rows = [beside.row(tail, options.tokens, first) for tail in options.tails for first in ("neither", "decoding")]
    engine.close()
    return {"roofline": roofline.as_dict(), "rows": rows}


@dataclass
class Beside:
    """One engine that decodes and one policy that trains, on one device."""

    policy: Policy
    engine: RolloutEngine
    batch: Batch
    device: torch.device

    def row(self, tail: int, tokens: int, first: str) -> dict[str, Any]:
        """`first`: whose kernels the device prefers."""
        self.decode(tail, 8)
        self.train_one()
        decode_alone, train_alone = self.seconds(lambda: self.decode(tail, tokens)), self.seconds(self.train_one)
        together, trained = self.together(tail, tokens, first)
        return {
            "sequences": tail,
            "tokens_each": tokens,
            "preferred": first,
            "decode_alone_seconds": decode_alone,
            "micro_batch_alone_seconds": train_alone,
            "together_seconds": together,
            "micro_batches_meanwhile": trained,
            "gain": (decode_alone + trained * train_alone) / together,
        }

    def decode(self, tail: int, tokens: int) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=tokens)
        self.engine.submit(
            Request(key=(0, index), token_ids=[1, 2, 3, 4], seed=index, sampling=sampling) for index in range(tail)
        )
        finished = 0
        while finished < tail:
            finished += len(self.engine.step())

    def train_one(self) -> None:
        minibatch = self.batch.minibatches[0]
        one = Minibatch(micro_batches=[minibatch.micro_batches[0]], counts=minibatch.counts)
        self.policy.forward_backward(one, Metrics(self.device))

    def together(self, tail: int, tokens: int, first: str) -> tuple[float, int]:
        """Seconds of decoding while another thread trains, and the micro-batches trained in them."""
        done, stop = 0, threading.Event()

        def keep_training() -> None:
            nonlocal done
            with self.stream(priority=0):
                while not stop.is_set():
                    self.train_one()
                    self.wait()
                    done += 1

        thread = threading.Thread(target=keep_training)
        self.wait()
        begin = time.perf_counter()
        thread.start()
        with self.stream(priority=-1 if first == "decoding" else 0):
            self.decode(tail, tokens)
        seconds, trained = time.perf_counter() - begin, done
        stop.set()
        thread.join()
        return seconds, trained

    def stream(self, priority: int) -> Any:
        if self.device.type == "cpu":
            return nullcontext()
        torch.cuda.set_device(self.device)  # of this thread
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=priority))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())

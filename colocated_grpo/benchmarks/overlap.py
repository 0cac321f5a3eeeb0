"""Gain from training on a second stream while the engine decodes: `python -m colocated_grpo.benchmarks.overlap`.

Times decoding of a few sequences (a batch's tail) alone, training of a micro-batch alone, and both at once. The gain is
the time of both in sequence over the time of both at once; 1 means no gain.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from colocated_grpo.batching import Batch, Minibatch
from colocated_grpo.benchmarks import train
from colocated_grpo.benchmarks.harness import config_of, main_in_ranks, model_folder, rank_parser, wake_with_weights
from colocated_grpo.benchmarks.roofline import measure_roofline
from colocated_grpo.metrics import Metrics
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, RolloutEngine, Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import JsonObject

Preferred = Literal["neither", "decoding"]
"""Work whose stream has the higher priority."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("overlap", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = train.add_work(rank_parser(__doc__))
    parser.add_argument("--tails", type=int, nargs="+", default=[8, 64], help="sequences in the tail")
    parser.add_argument("--tokens", type=int, default=600, help="tokens that each of them decodes")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    from colocated_grpo.build.policy import build_engine

    roofline = measure_roofline(world.device)
    with model_folder(options, world) as folder:
        config = config_of(folder, options, **train.sections(options), engine={"max_num_seqs": max(options.tails)})
        hf_config = read_model_config(config.model, folder)
        policy = Policy(config, hf_config, folder, world)
        engine = build_engine(config, policy, folder, world)
    config = train.settle_memory(policy, config, world)
    batch = train.pack_all(train.make_groups(options, hf_config.vocab_size), config, world)
    wake_with_weights(config, engine, policy, world)
    overlap = Overlap(policy, engine, batch, world.device)
    priorities: tuple[Preferred, ...] = ("neither", "decoding")
    rows = [overlap.row(tail, options.tokens, preferred) for tail in options.tails for preferred in priorities]
    engine.close()
    return {"roofline": roofline.as_dict(), "rows": rows}


@dataclass
class Overlap:
    """An engine that decodes and a policy that trains on one device."""

    policy: Policy
    engine: RolloutEngine
    batch: Batch
    device: torch.device

    def row(self, tail: int, tokens: int, preferred: Preferred) -> JsonObject:
        """Time decoding and training alone and together, after one short warm-up of each."""
        self.decode(tail, 8)
        self.train_one()
        decode_alone, train_alone = self.seconds(lambda: self.decode(tail, tokens)), self.seconds(self.train_one)
        together, trained = self.together(tail, tokens, preferred)
        return {
            "sequences": tail,
            "tokens_each": tokens,
            "preferred": preferred,
            "decode_alone_seconds": decode_alone,
            "micro_batch_alone_seconds": train_alone,
            "together_seconds": together,
            "micro_batches_meanwhile": trained,
            "gain": (decode_alone + trained * train_alone) / together,
        }

    def decode(self, tail: int, tokens: int) -> None:
        """Decode `tail` sequences of `tokens` tokens to their end."""
        sampling = Sampling(temperature=1.0, max_tokens=tokens)
        self.engine.submit(
            Request(key=(0, index), token_ids=[1, 2, 3, 4], seed=index, sampling=sampling) for index in range(tail)
        )
        finished = 0
        while finished < tail:
            finished += len(self.engine.step())

    def train_one(self) -> None:
        """Run forward and backward of one micro-batch."""
        minibatch = self.batch.minibatches[0]
        one = Minibatch(micro_batches=[minibatch.micro_batches[0]], counts=minibatch.counts)
        self.policy.forward_backward(one, Metrics(self.device))

    def together(self, tail: int, tokens: int, preferred: Preferred) -> tuple[float, int]:
        """Decode while another thread trains; return the seconds and the number of micro-batches trained."""
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
        with self.stream(priority=-1 if preferred == "decoding" else 0):
            self.decode(tail, tokens)
        seconds, trained = time.perf_counter() - begin, done
        stop.set()
        thread.join()
        return seconds, trained

    def stream(self, priority: int) -> AbstractContextManager[object]:
        if self.device.type == "cpu":
            return nullcontext()
        torch.cuda.set_device(self.device)  # the current device is a property of the thread
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=priority))

    def wait(self) -> None:
        """Block until this thread's current stream is idle."""
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

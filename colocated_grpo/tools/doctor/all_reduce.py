"""One of two short-lived processes that sum a tensor over gloo or NCCL, as ranks of a run do.

python -m colocated_grpo.tools.doctor.all_reduce RANK {gloo,nccl} FILE, where FILE does not exist yet.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 2
ELEMENTS = 1 << 20
TIMEOUT = timedelta(seconds=30)


def main(rank: int, backend: str, file: str) -> int:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.FileStore(file, RANKS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    numbers = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = RANKS * (RANKS + 1) / 2
    right = bool((numbers == expected).all())
    dist.destroy_process_group()
    if not right:
        print(f"the sum over both ranks is not {expected:g}", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))

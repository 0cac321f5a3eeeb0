"""Upload a folder to the Hugging Face Hub, in a process of its own. Imports nothing of this package.

The first line of stdin is the job: repo, private, message, and a folder, or null to create the repository only. One
line on stdout is the result: {"url": ...} or {"error": ...}. The process exits with its parent, when stdin ends.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from typing import Any

NOT_PUSHED = ["checksums.json"]
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9_]{6,}")


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        result = {"url": upload(**job)}
    except Exception as error:  # of the network, the Hub or the disk: the run goes on without this push
        text = " ".join(str(error).split())
        result = {"error": _TOKEN.sub("***", f"{type(error).__name__}: {text}")}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of the uploader must not delay the result


def upload(repo: str, private: bool, message: str, folder: str | None) -> str:
    """Create the repository if there is none, upload the folder, and return the address of the commit."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    created = api.create_repo(repo, private=private, exist_ok=True)
    if folder is None:
        return str(created)
    commit = api.upload_folder(
        repo_id=created.repo_id, folder_path=folder, commit_message=message, ignore_patterns=list(NOT_PUSHED)
    )
    return str(commit.commit_url)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()

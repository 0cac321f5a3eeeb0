"""Settings of pushes to the Hugging Face Hub, and rules for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from colocated_grpo.settings.base import NonNegative, Number, Section

if TYPE_CHECKING:
    from colocated_grpo.settings.schema import Config

Lines = Iterator[str]


class HubConfig(Section):
    repo: str
    """Model repository, OWNER/NAME; NAME alone belongs to the owner of the token. It is created if it does not exist.
    The token is read from HF_TOKEN, or from what `hf auth login` has stored."""
    private: bool = True
    """Create the repository as a private one. An existing repository stays as it is."""
    every: NonNegative = 0
    """Steps between pushes. 0: only the final model or adapter."""
    timeout: Number = Field(3600.0, gt=0)
    """Seconds after which a push is ended and counts as failed. The end of the run waits for the last push."""


def _something_is_pushed(config: Config) -> Lines:
    if config.hub is not None and not config.hub.every and not config.checkpoint.final:
        yield (
            f"hub.repo={config.hub.repo}: nothing would be pushed; set hub.every above 0, or checkpoint.final: true, "
            "whose final export is pushed"
        )


HUB_RULES: tuple[Callable[[Config], Lines], ...] = (_something_is_pushed,)


def check_hub(settings: HubConfig | None) -> Lines:
    """Yield a line where no push could reach the Hub. Asks nothing of the Hub itself."""
    if settings is None:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    key = f"hub.repo={settings.repo!r}"
    try:
        validate_repo_id(settings.repo)
    except HFValidationError as error:
        yield f"{key}: {str(error).split(':')[0]}"
    if constants.HF_HUB_OFFLINE:
        yield f"{key}: HF_HUB_OFFLINE is set; unset it, or remove hub"
    elif os.environ.get("RANK", "0") == "0" and not get_token():  # only rank 0 pushes
        yield f"{key}: no token; set HF_TOKEN to one that may write, or run `hf auth login`"

"""Tell people in the log which server has come up."""

import logging

from workers.readings.loads import ServerIdentity

log = logging.getLogger(__name__)


def tell_ready(url: str, identity: ServerIdentity | None) -> None:
    """Say that a server gives tokens, and what about it harms a run."""
    log.info(
        "server %s is ready: model %s, SGLang %s, cap %s, %s",
        url,
        identity and identity.model,
        identity and (identity.version or "of unknown version"),
        identity and identity.cap,
        identity and (identity.strategy or "no mamba strategy told"),
    )
    if identity and identity.auto_truncate:
        log.warning(
            "server %s cuts prompts that are too long instead of refusing them: start it "
            "without --allow-auto-truncate",
            url,
        )

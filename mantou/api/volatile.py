"""What a client writes into its system prompt that no model should read. Knows no dialect."""

from __future__ import annotations

import re

# Claude Code puts a line for billing in front of its system prompt. It says nothing to a model, and its `cch=` is
# another one on every turn, so no two prompts would begin with the same tokens.
_BILLING = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.MULTILINE)


def without_volatile(system: str) -> str:
    """A system prompt without such lines; everything else stays as it is."""
    return _BILLING.sub("", system)

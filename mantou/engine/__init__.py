"""The loop: token ids in, token ids out. Knows no text and no HTTP."""

"""Text <-> tokens: tokenizer, chat template, reasoning, the text side of a stream. No arrays, no HTTP."""

"""From logits to tokens, for all rows and positions of a step at once."""

"""Learned draft heads: a few layers that go on from the hidden states of the model they help."""

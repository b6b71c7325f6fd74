"""How large a prompt chunk may be while rows decode: by measurement, a decode step, or more where more prompts wait."""

from __future__ import annotations

_SMOOTHING = 0.2
_MOST_STEPS = 8  # decode steps that a running row waits for prompts


class Pacer:
    """Keeps running averages of a decode step's time and of the time a prompt token takes.

    `chunk` is `largest` tokens while no row decodes, else a power of two between `smallest` and `largest`.
    """

    def __init__(self, largest: int, smallest: int = 16) -> None:
        self.largest = largest
        self.smallest = min(smallest, 1 << (largest.bit_length() - 1))
        self.decode_s: float | None = None
        self.token_s: float | None = None
        self.mixed_s = 0.0  # time of steps that held both, and the prompt's part of it
        self.prompt_s = 0.0

    def chunk(self, num_decoding: int, num_prompts: int = 1) -> int:
        """Most prompt tokens of the next step, in which so many rows decode and so many prompts want to be read."""
        if not num_decoding:
            return self.largest
        fitting = 64.0  # until both are measured
        if self.decode_s and self.token_s:
            shares = min(max(num_prompts / num_decoding, 1.0), _MOST_STEPS)
            fitting = shares * self.decode_s / self.token_s
        bounded = int(min(max(fitting, self.smallest), self.largest))
        return 1 << (bounded.bit_length() - 1)

    def observe(
        self, seconds: float, num_decoding: int, num_prompt_tokens: int, decode_s: float | None = None
    ) -> None:
        """One step's wall time and what it held; `decode_s` is its decode part, known where steps run in turn."""
        if num_decoding and not num_prompt_tokens:
            self.decode_s = self._smooth(self.decode_s, seconds)
        elif num_prompt_tokens:
            if num_decoding and decode_s is not None:
                self.decode_s = self._smooth(self.decode_s, decode_s)
            decode = (self.decode_s or 0.0) if num_decoding else 0.0
            prompt = max(seconds - decode, 0.0)
            self.token_s = self._smooth(self.token_s, prompt / num_prompt_tokens)
            if num_decoding:
                self.mixed_s += seconds
                self.prompt_s += prompt

    @property
    def prompt_share(self) -> float | None:
        """Part of the time of mixed steps that went to prompts."""
        return self.prompt_s / self.mixed_s if self.mixed_s else None

    @staticmethod
    def _smooth(old: float | None, new: float) -> float:
        return new if old is None else old + _SMOOTHING * (new - old)

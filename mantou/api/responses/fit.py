"""`truncation: auto`: the newest turns of a conversation that fit the context. Knows no fields and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mantou.data import Message, Prompt

# Room that is kept for an answer whose length nobody said, as a part of the context.
_ANSWER_SHARE = 8


def fitting(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Prompt],
    context: int,
    max_tokens: int | None,
) -> Prompt:
    """The whole conversation if it leaves room for the answer, else without as few of its oldest turns as possible.

    The system message stays, a turn begins with the user, and the last turn always stays; the caller finds out
    whether that fits. Costs log2(turns) renderings.
    """
    whole = render(messages)
    wanted = max_tokens if max_tokens is not None else context // _ANSWER_SHARE
    most = context - min(max(wanted, 1), context // 2)
    if len(whole.tokens) <= most:
        return whole
    num_head = 1 if messages[0].role == "system" else 0
    head, rest = messages[:num_head], messages[num_head:]
    starts = [index for index, message in enumerate(rest) if message.role == "user" and index]
    best = whole
    low, high = 0, len(starts)  # starts[:low] are too early
    while low < high:
        middle = (low + high) // 2
        prompt = render((*head, *rest[starts[middle] :]))
        if len(prompt.tokens) <= most:
            best, high = prompt, middle
        else:
            low = middle + 1
    if best is whole and starts:
        best = render((*head, *rest[starts[-1] :]))
    return best

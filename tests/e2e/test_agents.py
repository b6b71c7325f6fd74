"""Recorded sessions of coding agents, sent again to the real server, whose model follows the script.

`tests/agents/recorded` holds what Codex, Claude Code, opencode and pi sent through every API that each can use;
`make agents` runs them live and, with ARGS=--keep, records them again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agents import traffic
from tests.agents.families import FAMILIES, write_folder
from tests.agents.live import AGENTS, MODEL
from tests.agents.sessions import WORD, session_of
from tests.agents.traffic import Exchange, Outcome
from tests.real import Server, serving

HOME = "/home/user/project"  # where the recorded agents worked


# The first family answers every agent, the others one for each dialect.
RUNS = [
    (family, name)
    for number, family in enumerate(FAMILIES)
    for name in (("codex", "claude-search", "pi-chat") if number else AGENTS)
]


@pytest.fixture(scope="module")
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("agents")
    write_folder(home / MODEL, request.param)  # here, where the starter's tokenizer is known already
    arguments = (home / MODEL, "--family", request.param)
    with serving(home, *arguments, module=("tests.agents.scripted_server",)) as server:
        yield server.ready()


def again(server: Server, exchange: Exchange) -> Exchange:
    answer = server.http.request(
        exchange.method, exchange.path, headers=dict(exchange.headers), json=exchange.body
    )
    return Exchange(
        exchange.method, exchange.path, exchange.headers, exchange.body, answer.status_code, answer.text
    )


def filled(text: str) -> str:
    return text.replace("{word}", WORD).replace("{cwd}", HOME)


@pytest.mark.parametrize(("scripted", "name"), RUNS, indirect=["scripted"])
def test_an_agents_recorded_session_runs_again_and_later_turns_hit_the_prompt_cache(
    scripted: Server, name: str
) -> None:
    answers = [again(scripted, one) for one in traffic.read(traffic.FOLDER / f"{name}.jsonl.gz")]
    assert [one.status for one in answers] == [200] * len(answers), [one.answer[:300] for one in answers]
    turns: list[Outcome] = [traffic.outcome(one) for one in answers if one.offers_tools]
    script = session_of(name).turns
    assert len(turns) == len(script)
    for turn, say in zip(turns, script, strict=True):
        assert turn.text == filled(say.text)
        assert turn.reasoning == filled(say.think)
        calls = [(tool, {key: filled(value) for key, value in given.items()}) for tool, given in say.calls]
        assert [*turn.calls] == calls
    assert not traffic.cache_misses(turns)

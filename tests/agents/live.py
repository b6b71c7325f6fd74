"""`python -m tests.agents.live [NAME ...]`: real agents run their sessions against the server with the scripted model.

Each starts in a scratch git folder, with an empty home and no way to anything but the server. Checked are its exit
status, what it printed, the file that it wrote, that no request was refused, and that later turns hit the prompt cache.
`--keep` writes the traffic of the first family to `recorded/`; `--raw FOLDER` takes all of it, answers too.
`make agents` installs the agents first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents import traffic
from tests.agents.families import FAMILIES, write_folder
from tests.agents.sessions import NOTES, PROMPT, WORD, Session, session_of
from tests.real import ROOT, Server, serving

TIMEOUT_S = 200
MODEL = "scripted"  # the model folder's name, and so its id
KEY = "a-key-of-tests"  # of the server


@dataclass(frozen=True, slots=True)
class SetUp:
    """How an agent is told to use the server. `command`: before a prompt; `resume`: the same for the last session.

    `files`: below its home.
    """

    command: Sequence[str]
    resume: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def _codex(url: str) -> SetUp:
    config = f"""\
model = "{MODEL}"
model_provider = "mantou"
check_for_update_on_startup = false

[model_providers.mantou]
name = "mantou"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "MANTOU_API_KEY"

[analytics]
enabled = false
"""
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    exec_ = ("codex", "exec", *flags)
    resume = (*exec_, "resume", "--last")
    return SetUp(exec_, resume, {".codex/config.toml": config}, {"MANTOU_API_KEY": KEY})


def _claude(url: str) -> SetUp:
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    flags = ("--allowedTools=Read,Write,ToolSearch,CronList", "-p")
    return SetUp(("claude", *flags), ("claude", "-c", *flags), env=env)


def _opencode(package: str) -> Callable[[str], SetUp]:
    def set_up(url: str) -> SetUp:
        limit = {"context": 131072, "output": 16384}
        model = {"name": MODEL, "reasoning": True, "tool_call": True, "limit": limit}
        config = {
            "$schema": "https://opencode.ai/config.json",
            "model": f"mantou/{MODEL}",
            "autoupdate": False,
            "share": "disabled",
            "provider": {
                "mantou": {
                    "npm": package,
                    "name": "mantou",
                    "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                    "models": {MODEL: model},
                }
            },
        }
        env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
        files = {".config/opencode/opencode.json": json.dumps(config, indent=2)}
        return SetUp(("opencode", "run", "--auto"), ("opencode", "run", "-c", "--auto"), files, env)

    return set_up


def _pi(api: str, path: str) -> Callable[[str], SetUp]:
    def set_up(url: str) -> SetUp:
        provider = {
            "baseUrl": f"{url}{path}",
            "api": api,
            "apiKey": KEY,
            "models": [{"id": MODEL, "reasoning": True, "contextWindow": 131072}],
        }
        env = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        files = {".pi/agent/models.json": json.dumps({"providers": {"mantou": provider}}, indent=2)}
        flags = ("--provider", "mantou", "--model", MODEL, "-p")
        return SetUp(("pi", *flags), ("pi", "-c", *flags), files, env)

    return set_up


AGENTS: Mapping[str, Callable[[str], SetUp]] = {
    "codex": _codex,
    "claude": _claude,
    "claude-search": _claude,
    "opencode-chat": _opencode("@ai-sdk/openai-compatible"),
    "opencode-responses": _opencode("@ai-sdk/openai"),
    "opencode-messages": _opencode("@ai-sdk/anthropic"),
    "pi-chat": _pi("openai-completions", "/v1"),
    "pi-responses": _pi("openai-responses", "/v1"),
    "pi-messages": _pi("anthropic-messages", ""),
}


# ------------------------------------------------------------------ one run
def _run(
    set_up: SetUp, prompts: Sequence[str], home: Path, binaries: Path
) -> list[subprocess.CompletedProcess[str]]:
    """The agent's runs in home/project, one for each prompt."""
    for name, content in set_up.files.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, "utf-8")
    project = home / "project"
    project.mkdir()
    (project / "notes.txt").write_text(NOTES, "utf-8")
    path = [str(folder) for folder in sorted(binaries.glob("*/node_modules/.bin"))]
    env = {
        "HOME": str(home),
        "PATH": os.pathsep.join((*path, os.environ["PATH"])),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **set_up.env,
    }
    subprocess.run(("git", "init", "-q"), cwd=project, env=env, check=True)
    return [
        subprocess.run(
            (*(set_up.resume if number else set_up.command), prompt),
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        for number, prompt in enumerate(prompts)
    ]


def _check(
    session: Session,
    runs: Sequence[subprocess.CompletedProcess[str]],
    home: Path,
    exchanges: Sequence[traffic.Exchange],
) -> list[str]:
    """What went wrong."""
    faults = [f"it exited with {run.returncode}" for run in runs if run.returncode]
    ends = [say.text.replace("{word}", WORD) for say in session.turns if not say.calls]
    faults += [
        f"it does not show: {end}" for run, end in zip(runs, ends, strict=True) if end not in run.stdout
    ]
    answer = home / "project" / "answer.txt"
    if session.prompts[0] == PROMPT and not (answer.exists() and answer.read_text("utf-8").strip() == WORD):
        faults.append("answer.txt is not what it should be")
    refused = [one for one in exchanges if one.status >= 400]
    faults += [f"{one.method} {one.path} got {one.status}: {one.answer[:300]}" for one in refused]
    try:
        turns = [traffic.outcome(one) for one in exchanges if one.offers_tools and one.status == 200]
    except AssertionError as error:
        return [*faults, str(error)]
    if len(turns) != len(session.turns):
        faults.append(f"{len(turns)} turns, not {len(session.turns)}")
    return faults + traffic.cache_misses(turns)


def _report(name: str, exchanges: Sequence[traffic.Exchange], faults: Sequence[str]) -> None:
    print(f"{name}: {'; '.join(faults) or 'good'}")
    for one in exchanges:
        line = f"  {one.method} {one.path} {one.status}"
        if one.generates and one.status == 200 and not faults:
            found = traffic.outcome(one)
            called = ", ".join(f"{tool}({json.dumps(given)})" for tool, given in found.calls)
            line += f"  {found.cached}/{found.prompt} tokens cached; {called or found.text}"
        print(line, flush=True)


def _session(
    name: str, family: str, home: Path, server: Server, recorded: Path, given: argparse.Namespace
) -> bool:
    """Whether all was well."""
    home.mkdir()
    session = session_of(name)
    runs = _run(AGENTS[name](server.url), session.prompts, home, given.binaries)
    server.idle()
    exchanges = [one for one in traffic.read(recorded) if one.path != "/stats"]  # those are `idle`'s
    if given.raw is not None:
        given.raw.mkdir(exist_ok=True)
        shutil.copy(recorded, given.raw / f"{name}-{family}.jsonl")
    recorded.unlink()
    faults = _check(session, runs, home, exchanges)
    _report(f"{name} with {family}", exchanges, faults)
    if faults or given.verbose:
        print(*(text for run in runs for text in (run.stdout, run.stderr)), server.log, sep="\n---\n")
    elif given.keep and family == next(iter(FAMILIES)):
        places = {
            str(home): "/home/user",
            str(given.binaries.resolve()): "/home/user/agents",
            server.url: "http://127.0.0.1:8080",
            platform.release(): "6.8.0",
        }
        # The others' licences let us pass their prompts on.
        traffic.keep(
            traffic.FOLDER / f"{name}.jsonl.gz", exchanges, places, prose=not name.startswith("claude")
        )
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *AGENTS], metavar="NAME")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    parser.add_argument("--binaries", type=Path, default=ROOT / "build" / "agents")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--raw", type=Path, help="folder that takes all exchanges with their answers")
    given = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="mantou-agents-") as scratch, ExitStack() as stack:
        for family in given.family or FAMILIES:
            home = Path(scratch) / family
            home.mkdir()
            write_folder(home / MODEL, family)  # here, where the starter's tokenizer is known already
            recorded = home / "exchanges.jsonl"
            module = ("tests.agents.scripted_server",)
            arguments = (home / MODEL, "--family", family, "--record", recorded)
            server = stack.enter_context(serving(home, *arguments, "--api-key", KEY, module=module))
            server.http.headers["authorization"] = f"Bearer {KEY}"
            server.ready()
            recorded.unlink()  # what `ready` asked
            for name in given.names or AGENTS:
                good &= _session(name, family, home / name, server, recorded, given)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

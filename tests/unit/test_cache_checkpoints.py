"""The store of answers in progress, without a model: what is found again, what is given up, and what is wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mantou.cache.checkpoint_file import file_name
from mantou.cache.checkpoints import SsdCheckpoints
from mantou.cache.disk import Disk
from mantou.cache.ssd import SsdStore
from mantou.cli.cache import app
from mantou.data import GenerationCheckpoint, MediaSpan, Request, Sampling, TokenLogprobs, ToneCurve
from mantou.engine.checkpoints import identity
from mantou.errors import ConfigError
from tests.unit.cache_rows import KEY, OTHER

ONE, TWO = b"\1" * 32, b"\2" * 32
LOGPROBS = (TokenLogprobs(7, -0.1, ((7, -0.1), (8, -2.75))), TokenLogprobs(9, -1e-9))
SAVED = GenerationCheckpoint(5, (7, 9), LOGPROBS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """Opens the folder anew each time it is called."""
    opened: list[SsdCheckpoints] = []

    def open_(**changes: Any) -> SsdCheckpoints:
        for before in opened:
            before.check_integrity()
            before.close()
        opened[:] = [SsdCheckpoints(tmp_path, 8, **changes)]
        return opened[0]

    yield open_
    for last in opened:
        last.check_integrity()
        last.close()


def found(store: SsdCheckpoints, who: bytes = ONE, seed: int = 1) -> GenerationCheckpoint | None:
    claim = store.claim(who, seed, lambda: None)
    store.flush()
    assert claim.ready
    claim.release(done=False)
    return claim.found


def save(store: SsdCheckpoints, who: bytes = ONE, checkpoint: GenerationCheckpoint = SAVED) -> None:
    claim = store.claim(who, checkpoint.seed, lambda: None)
    claim.save(checkpoint)
    claim.release(done=False)


def files(store: SsdCheckpoints) -> list[Path]:
    store.flush()
    return sorted(store.directory.iterdir())


def test_what_was_saved_is_found_at_once_and_after_a_restart(store: Any) -> None:
    first = store()
    assert found(first) is None
    save(first)
    assert found(first) == SAVED
    again = store()
    assert found(again) == SAVED and found(again, TWO) is None
    assert again.stats()["generation_checkpoints"]["resumed"] == 1


def test_the_newest_stands_for_those_before_it(store: Any) -> None:
    first = store()
    claim = first.claim(ONE, 5, lambda: None)
    for length in range(1, 40):
        claim.save(GenerationCheckpoint(5, tuple(range(length))))
    assert len(files(first)) == 1
    assert first.counts.dropped == first.counts.failed == 0
    assert store().claim(ONE, 5, lambda: None)
    found_ = found(store())
    assert found_ is not None and len(found_.tokens) == 39


def test_a_running_request_is_not_offered_to_another(store: Any) -> None:
    first = store()
    save(first)
    holder = first.claim(ONE, 6, lambda: None)
    other = first.claim(ONE, 7, lambda: None)
    first.flush()
    assert holder.found == SAVED and other.found is None
    other.save(GenerationCheckpoint(7, (1,)))
    holder.release(done=True)
    assert [path.name for path in files(first)] == [file_name(ONE, 7)]
    other.release(done=False)
    assert found(first) == GenerationCheckpoint(7, (1,))


def test_done_wins_over_a_write_that_still_waits(store: Any) -> None:
    first = store()
    claim = first.claim(ONE, 5, lambda: None)
    for length in range(1, 20):
        claim.save(GenerationCheckpoint(5, (0,) * length))
    claim.release(done=True)
    assert files(first) == [] and first.counts.removed == 1
    assert found(first) is None


def test_the_oldest_make_room_but_those_in_use_go_last(store: Any) -> None:
    first = store(max_bytes=3 * 4096)
    held = first.claim(ONE, 1, lambda: None)
    held.save(SAVED)
    for number in range(2, 6):
        save(first, bytes([number]) * 32)
    names = [path.name[:2] for path in files(first)]
    assert names == ["01", "04", "05"] and first.counts.evictions == 2
    assert [path.name[:2] for path in files(store(max_bytes=3 * 4096))] == names
    save(store(max_bytes=3 * 4096), TWO)
    assert [path.name[:2] for path in files(store(max_bytes=3 * 4096))] == ["02", "04", "05"], (
        "age outlives a restart"
    )


@pytest.mark.parametrize("place", [0.0, 0.02, 0.2, 0.45, 0.6, 0.8, 0.999])
def test_one_changed_bit_costs_the_answer_and_says_nothing_wrong(place: float, store: Any) -> None:
    first = store()
    save(first)
    (path,) = files(first)
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)
    again = store()
    assert found(again) is None
    assert again.counts.corrupt_files == 1 and files(again) == []


@pytest.mark.parametrize("change", [lambda text: text[:-3], lambda text: b"", lambda text: text + b"x"])
def test_a_file_of_another_length_is_removed(change: Callable[[bytes], bytes], store: Any) -> None:
    first = store()
    save(first)
    (path,) = files(first)
    path.write_bytes(change(path.read_bytes()))
    assert found(store()) is None


def test_a_file_under_another_name_is_not_taken_for_it(store: Any) -> None:
    first = store()
    save(first)
    (path,) = files(first)
    first.close()
    path.rename(path.with_name(file_name(TWO, 5)))
    assert found(SsdCheckpoints(first.directory.parent, 8), TWO) is None


def test_leftovers_of_a_crash_go(store: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / f"{file_name(ONE, 1)}.tmp").write_bytes(b"half")
    store()
    assert list(folder.iterdir()) == []


class Full(Disk):
    """A disk on which nothing more fits while `full`."""

    full = True

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, parts)


def test_a_full_disk_is_counted_and_the_one_before_stays(store: Any) -> None:
    disk = Full()
    first = store(disk=disk)
    claim = first.claim(ONE, 5, lambda: None)
    claim.save(SAVED)
    first.flush()
    assert first.counts.failed == 1 and first.stats()["generation_checkpoints"]["entries"] == 0
    disk.full = False
    claim.save(SAVED)
    first.flush()
    disk.full = True
    claim.save(replace(SAVED, tokens=(1, 2), logprobs=()))
    first.flush()
    claim.release(done=False)
    assert found(first) == SAVED


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--generation-checkpoint"):
        SsdCheckpoints(tmp_path / "file", 8)


# ------------------------------------------------------------------ identity
REQUEST = Request(
    "a", (1, 2, 3), Sampling(tone_curve=ToneCurve(), logit_bias=((1, 2.0),)), eos=frozenset({4, 5})
)


def test_who_asks_and_a_drawn_seed_make_no_difference() -> None:
    assert identity(REQUEST, KEY) == identity(replace(REQUEST, id="b", session="s", boundaries=(2,)), KEY)
    drawn = [replace(REQUEST, seeded=False, sampling=Sampling(seed=seed)) for seed in (1, 2)]
    assert identity(drawn[0], KEY) == identity(drawn[1], KEY)
    assert identity(REQUEST, KEY) != identity(REQUEST, OTHER)


def test_every_field_of_sampling_makes_a_difference() -> None:
    for name in (field.name for field in fields(Sampling)):
        value = getattr(REQUEST.sampling, name)
        other = None if name == "tone_curve" else ((9, 9),) if isinstance(value, tuple) else value + 1
        assert identity(
            replace(REQUEST, sampling=replace(REQUEST.sampling, **{name: other})), KEY
        ) != identity(REQUEST, KEY), name


def test_every_other_field_of_a_request_makes_a_difference() -> None:
    """A new one does so without being told."""
    for name in {field.name for field in fields(Request)} - {
        "id",
        "session",
        "boundaries",
        "sampling",
        "prompt",
    }:
        other = False if name == "seeded" else "changed"
        assert identity(replace(REQUEST, **{name: other}), KEY) != identity(REQUEST, KEY), name


def test_media_make_a_difference() -> None:
    spans = [(MediaSpan(0, 4, digest),) for digest in ("x", "y")]
    assert len({identity(replace(REQUEST, media=media), KEY) for media in ((), *spans)}) == 3


def test_the_order_of_a_set_makes_none() -> None:
    many = [8 * n for n in range(40)]
    sets = [frozenset(many), frozenset(reversed(many))]
    assert len({identity(replace(REQUEST, eos=eos), KEY) for eos in sets}) == 1


# ------------------------------------------------------------------ the command line
def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line_knows_answers_in_progress(store: Any, tmp_path: Path) -> None:
    SsdStore(tmp_path, 1 << 30).close()
    first = store()
    save(first)
    save(first, TWO)
    (bad, good) = files(first)
    first.close()
    assert "2 answers in progress" in cli("ls", tmp_path).output
    assert cli("verify", tmp_path).output == "2 of 2 files are good.\n"
    bad.write_bytes(bad.read_bytes()[:-1])
    assert cli("verify", tmp_path).exit_code == 1
    assert (
        "1 answers in progress removed" in cli("gc", tmp_path).output and not bad.exists() and good.exists()
    )
    assert cli("gc", tmp_path, "--answers").exit_code == 0 and not good.exists()
    store()

from __future__ import annotations

import threading

import pytest

from mantou.progress import ProgressBoard, Task


def test_a_task_goes_through_its_stages() -> None:
    board = ProgressBoard()
    task = board.task("org/m")
    task.stage("download", total_bytes=100, files=2)
    task.file("a.safetensors")
    task.advance(60)
    (row,) = board.snapshot()
    assert (row["repo_id"], row["state"], row["stage"], row["current_file"]) == (
        "org/m",
        "active",
        "download",
        "a.safetensors",
    )
    assert (row["received_bytes"], row["total_bytes"], row["files_done"], row["files_total"]) == (
        60,
        100,
        0,
        2,
    )
    assert row["finished_at"] is None
    task.file(None, finished=1)
    assert board.snapshot()[0]["files_done"] == 1
    task.stage("convert")
    (row,) = board.snapshot()
    assert (row["stage"], row["received_bytes"], row["total_bytes"], row["files_total"]) == (
        "convert",
        0,
        None,
        None,
    )
    task.advance(5, total_bytes=10)
    assert board.snapshot()[0]["total_bytes"] == 10
    task.done()
    (row,) = board.snapshot()
    assert (row["state"], row["bytes_per_sec"], row["error"]) == ("done", 0.0, None)
    assert row["finished_at"] >= row["started_at"]


def test_the_rate_covers_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    board = ProgressBoard()
    task = board.task("m")
    for _ in range(20):
        now += 1
        task.advance(10)
    assert board.snapshot()[0]["bytes_per_sec"] == 10
    for _ in range(10):
        now += 1
        task.advance(30)
    assert board.snapshot()[0]["bytes_per_sec"] == 30


def test_a_block_that_raises_fails_its_task() -> None:
    board = ProgressBoard()
    with pytest.raises(ValueError, match="no"), board.task("m"):
        raise ValueError("no luck")
    with board.task("n"):
        pass
    failed, done = board.snapshot()
    assert (failed["state"], failed["error"]) == ("error", "no luck")
    assert (done["state"], done["error"]) == ("done", None)


def test_an_ended_task_stays_as_it_ended() -> None:
    board = ProgressBoard()
    task = board.task("m")
    task.fail("broke")
    task.done()
    assert board.snapshot()[0]["state"] == "error"


def test_the_last_five_are_kept() -> None:
    board = ProgressBoard()
    for number in range(7):
        board.task(str(number))
    assert [row["repo_id"] for row in board.snapshot()] == ["2", "3", "4", "5", "6"]


def test_listeners_hear_every_change_until_they_stop() -> None:
    board = ProgressBoard()
    heard: list[Task] = []
    stop = board.subscribe(heard.append)
    task = board.task("m")
    task.stage("download")
    task.advance(1)
    stop()
    task.done()
    assert heard == [task] * 3


def test_many_threads_count_together() -> None:
    board = ProgressBoard()
    task = board.task("m", total_bytes=4000)
    threads = [threading.Thread(target=lambda: [task.advance(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.snapshot()[0]["received_bytes"] == 4000

"""Which checkpoints a run writes and keeps, as files in a folder; errors of the disk; writing in
the background."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from training.base import TrainState
from training.checkpoint import storage
from training.checkpoint.background import Background
from training.checkpoint.keeper import Keeper
from training.options import CheckpointOptions
from training.watchers import Ahead, Point, Report, Snapshot
from utils import RunError, UserError

TS = TrainState(
    jnp.int32(0),
    jnp.uint32(5),
    {"w": jnp.ones(3)},
    {},
    {"m": jnp.ones(3)},
    None,
    {"loss": jnp.zeros(())},
    1.0,
)
WHERE = {"elapsed": 0.0, "lined": 0, "rollbacks": 0, "stopped": False, "callbacks": []}


def a_run(epoch, epochs=99, position=0, step=None, **metrics):
    step = epoch * 10 + position if step is None else step
    finished = epoch == epochs and not position
    told = {
        "epoch": epoch,
        "completed": epoch,
        "epochs": epochs,
        "position": position,
        "step": step,
        "finished": finished,
    }
    return SimpleNamespace(**told, metrics=metrics)


def cut_of(run, replicas=1):
    record = WHERE | {
        "step": run.step,
        "epoch": run.epoch,
        "position": run.position,
        "metrics": run.metrics,
    }
    states = [
        TS._replace(step=jnp.int32(run.step), params={"w": jnp.full(3, run.step * 1.0 + r)})
        for r in range(replicas)
    ]
    return lambda: Snapshot(states, record)


def epoch_ended(keeper, run, take=None):
    """The end of an epoch, as the loop notifies the keeper of it."""
    if reply := keeper.on_epoch_end(run):
        keeper.on_save(run, take or cut_of(run), reply.save)


def ended(keeper, run):
    """The end of a run, as the loop notifies the keeper of it."""
    if reply := keeper.on_stop(run):
        keeper.on_save(run, cut_of(run), reply.save)
    keeper.on_stopped(run)


def resumed(keeper, folder):
    """A resume from the newest checkpoint of a folder."""
    keeper.on_resume(None, Point([], {}, [], storage.newest(folder)[0]))


def names(folder):
    return sorted(
        storage.checkpoints(folder), key=lambda name: (name.split("_")[0], int(name.split("_")[1]))
    )


def after(folder, losses, **options):
    """The epochs whose checkpoints are left after a run with these test losses (None: not
    evaluated)."""
    keeper = Keeper(folder, CheckpointOptions(monitor="test_loss", **options))
    for epoch, loss in enumerate(losses, 1):
        run = a_run(epoch, epochs=len(losses), **({} if loss is None else {"test_loss": loss}))
        epoch_ended(keeper, run)
    ended(keeper, run)
    return [int(name.split("_")[1]) for name in names(folder)]


@pytest.mark.parametrize(
    ("losses", "options", "kept"),
    [
        ([3, 2, 1, 2, 2, 2], {"keep": 2}, [3, 5, 6]),
        ([3, 2, 1, 2, 2, 2], {"keep": 2, "mode": "max"}, [1, 5, 6]),
        ([6, 5, 4, 3, 2, 1], {"keep": 1}, [6]),
        ([float("nan"), 3, 1, 2, 2, 2], {"keep": 1}, [3, 6]),
        (
            [3, None, None, 1, None, None],
            {"keep": 1},
            [4, 6],
        ),  # the best is an evaluated one, though not the latest
        (
            [5, 1, 3, 4, 3, 6],
            {"keep": 2, "every_epochs": 3},
            [2, 3, 6],
        ),  # the best is kept though it was not due
        ([None] * 5, {"keep": 3, "every_epochs": 2}, [2, 4, 5]),
        ([None] * 4, {"every_epochs": 0}, [4]),  # at the end alone
        ([None] * 7, {"keep": None}, [1, 2, 3, 4, 5, 6, 7]),
        ([5, 1, 4, 2, 3, 6, 7], {"keep": 1, "save_top_k": 3}, [2, 4, 5, 7]),
        ([1, 2, 3, 4, 5, 6], {"keep": 1, "save_top_k": 2}, [1, 2, 6]),
        ([2, 2, 2, 2], {"keep": 1}, [1, 4]),  # the first of equals
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, losses, options, kept):
    assert after(tmp_path, losses, **options) == kept


@pytest.mark.parametrize(
    ("monitor", "best"), [("test_accuracy", 3), ("val_loss", 1), ("test_f1", 3), ("train_rmse", 1)]
)
def test_whether_low_or_high_is_good_is_seen_from_the_name(tmp_path, monitor, best):
    keeper = Keeper(tmp_path, CheckpointOptions(monitor=monitor, keep=1))
    for epoch, value in enumerate([1, 2, 3, 2.5], 1):
        run = a_run(epoch, **{monitor: value})
        epoch_ended(keeper, run)
    keeper.wait()
    assert names(tmp_path) == [f"checkpoint-epoch_{best}", "checkpoint-epoch_4"]


def test_a_name_that_does_not_tell_must_be_told():
    with pytest.raises(
        UserError,
        match=r"checkpoint\.mode: cannot tell whether 'test_speed' is good when low or high",
    ):
        CheckpointOptions(monitor="test_speed").sign()
    assert CheckpointOptions(monitor="test_speed", mode="max").sign() == -1


def test_steps_and_seconds_are_due(monkeypatch, tmp_path):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    keeper = Keeper(tmp_path, CheckpointOptions(every_steps=7))
    ahead = [Ahead(step, 0, 0, 0.0) for step in (0, 1, 6, 7, 13)]
    assert [keeper.steps_left(each) for each in ahead] == [7, 6, 1, 7, 1]
    run = SimpleNamespace(position=4, steps=10)
    assert keeper.on_chunk(run, Report(1, [], None, (keeper,), None)).save
    assert not keeper.on_chunk(run, Report(1, [], None, (), None))
    run.position = 10  # the end of the epoch, where it is saved after the evaluation
    assert not keeper.on_chunk(run, Report(1, [], None, (keeper,), None))
    keeper = Keeper(tmp_path, CheckpointOptions(every_seconds=60))
    clock[0] = 159.0
    assert not keeper.overdue(ahead[0])
    clock[0] = 160.0
    assert keeper.overdue(ahead[0])
    keeper.on_save(a_run(1, position=3), cut_of(a_run(1, position=3)), "last")
    assert not keeper.overdue(ahead[0])
    keeper.wait()


def test_the_best_and_the_older_ones_survive_a_resume(tmp_path):
    """A keeper that goes on after epoch 5 leaves what one that was not interrupted would have
    left."""
    losses = [5, 1, 4, 2, 3, 6, 7, 0.5, 8, 9]
    options = CheckpointOptions(monitor="test_loss", keep=2, save_top_k=2)
    for folder, stop in ((tmp_path / "whole", None), (tmp_path / "cut", 5)):
        folder.mkdir()
        keeper = Keeper(folder, options)
        for epoch, loss in enumerate(losses, 1):
            run = a_run(epoch, test_loss=loss)
            epoch_ended(keeper, run)
            if epoch == stop:
                keeper.wait()
                keeper = Keeper(folder, options)
                resumed(keeper, folder)
        keeper.wait()
    assert (
        names(tmp_path / "cut")
        == names(tmp_path / "whole")
        == [f"checkpoint-epoch_{n}" for n in (2, 8, 9, 10)]
    )


def test_what_is_best_is_ranked_anew_when_the_config_has_changed(tmp_path):
    """By another metric, and fewer of them: what is no longer among the best goes as any other."""
    before = CheckpointOptions(monitor="test_accuracy", keep=1, save_top_k=3)
    keeper = Keeper(tmp_path, before)
    for epoch, (accuracy, loss) in enumerate([(0.5, 1.0), (0.9, 3.0), (0.8, 2.0), (0.1, 4.0)], 1):
        run = a_run(epoch, test_accuracy=accuracy, test_loss=loss)
        epoch_ended(keeper, run)
    keeper.wait()
    assert names(tmp_path) == [f"checkpoint-epoch_{n}" for n in (1, 2, 3, 4)]
    keeper = Keeper(tmp_path, CheckpointOptions(monitor="test_loss", keep=1))
    resumed(keeper, tmp_path)
    assert keeper.kept.best == (["checkpoint-epoch_1", 1.0],)
    run = a_run(5, test_loss=5.0)
    epoch_ended(keeper, run)
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_1", "checkpoint-epoch_5"]


def test_the_best_stays_the_best_when_its_checkpoint_is_written_again(tmp_path):
    """As of a run that keeps weights alone and is stopped at the end of its best epoch."""
    options = CheckpointOptions(monitor="test_loss", keep=1, save_optimizer_state=False)
    keeper = Keeper(tmp_path, options)
    for epoch, loss in enumerate([3.0, 1.0], 1):
        run = a_run(epoch, test_loss=loss)
        epoch_ended(keeper, run)
    ended(keeper, run)
    keeper = Keeper(tmp_path, options)
    resumed(keeper, tmp_path)
    for epoch in (3, 4):
        run = a_run(epoch, test_loss=2.0)
        epoch_ended(keeper, run)
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_2", "checkpoint-epoch_4"]


def test_a_file_that_cannot_be_deleted_costs_no_checkpoint(tmp_path, monkeypatch, caplog):
    keeper = Keeper(tmp_path, CheckpointOptions(keep=1))
    real, stuck = Path.unlink, [True]

    def unlink(path, missing_ok=False):
        if stuck[0] and path.suffix == ".params":
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    for epoch in (1, 2, 3):
        epoch_ended(keeper, a_run(epoch))
    keeper.wait()
    assert "checkpoint-epoch_1.params: cannot be deleted: Permission denied" in caplog.text
    assert keeper.kept.regular == ("checkpoint-epoch_3",)
    stuck[0] = False
    epoch_ended(keeper, a_run(4))
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_4"]


def test_weights_alone_are_kept_without_the_optimizer_but_a_stopped_run_is_saved_whole(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions(save_optimizer_state=False))
    epoch_ended(keeper, a_run(1))
    keeper.wait()
    arrays, record = storage.load(tmp_path / "checkpoint-epoch_1.params")
    assert list(arrays) == ["params/w"]
    assert not record["whole"]
    found, wrong = storage.newest(tmp_path)
    assert found is None
    assert "holds only weights" in str(wrong[0])
    ended(keeper, a_run(1))  # stopped where its weights are saved already
    assert storage.newest(tmp_path)[0].name == "checkpoint-epoch_1"
    run = a_run(1, position=4)
    ended(keeper, run)
    assert {"opt/m", "sums/loss", "step"} <= storage.load(tmp_path / "checkpoint-step_14.params")[
        0
    ].keys()
    assert storage.newest(tmp_path)[0].name == "checkpoint-step_14"
    last = a_run(2, epochs=2)
    epoch_ended(keeper, last)
    ended(keeper, last)
    assert not storage.load(tmp_path / "checkpoint-epoch_2.params")[1]["whole"]


def test_each_replica_has_its_file_and_only_all_of_them_are_a_checkpoint(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions())
    for epoch in (1, 2):
        epoch_ended(keeper, a_run(epoch), cut_of(a_run(epoch), replicas=11))
    keeper.wait()
    found, _ = storage.newest(tmp_path)
    assert found.name == "checkpoint-epoch_2"
    assert [a["params/w"][0] for a in found.arrays] == [
        20 + r for r in range(11)
    ]  # 10 comes after 9, not after 1
    (tmp_path / "checkpoint-epoch_2-replica_7.params").unlink()
    found, wrong = storage.newest(tmp_path)
    assert found.name == "checkpoint-epoch_1"
    assert "is one of 11 replicas, and some of them are missing" in str(wrong[0])


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions())
    for epoch in (1, 2, 3):
        epoch_ended(keeper, a_run(epoch))
    keeper.wait()
    for name, where in (("checkpoint-epoch_3.params", -5), ("checkpoint-epoch_2.params", 3)):
        data = bytearray((tmp_path / name).read_bytes())
        data[where] ^= 1
        (tmp_path / name).write_bytes(data)
    found, wrong = storage.newest(tmp_path)
    assert found.name == "checkpoint-epoch_1"
    assert sorted(str(error).split("/")[-1].split(":")[0] for error in wrong) == [
        "checkpoint-epoch_2.params",
        "checkpoint-epoch_3.params",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "3"}, "no valid epoch"),
        ({"lengths": None}, "no valid lengths"),
        ({"best": [["a"]]}, "no valid best"),
        ({"lengths": {"train.log": -1}}, "no valid lengths"),
        ({"callbacks": [3]}, "no valid callbacks"),
        ({"regular": [[1]]}, "no valid regular"),
        ({"replicas": 2**40}, "is one of 1099511627776 replicas"),
        ({"position": -1}, "no valid position"),
        ({"format": 3}, "was written by a newer version"),
        ({"format": 1}, "was written by an earlier version"),
        ({"step": True}, "no valid step"),
    ],
)
def test_a_record_with_a_sound_digest_may_still_be_nonsense(tmp_path, change, message):
    keeper = Keeper(tmp_path, CheckpointOptions())
    epoch_ended(keeper, a_run(1))
    keeper.wait()
    path = tmp_path / "checkpoint-epoch_1.params"
    arrays, record = storage.load(path)
    storage.save(path, arrays, record | change)
    found, wrong = storage.newest(tmp_path)
    assert found is None
    assert message in str(wrong[0])


def full_disk(monkeypatch, times=10**9):
    """os.fsync fails as on a full disk, so often."""
    left, real = [times], os.fsync

    def fsync(handle):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_stops_the_run_at_its_next_step_and_spares_the_earlier_checkpoints(
    tmp_path, monkeypatch
):
    keeper = Keeper(tmp_path, CheckpointOptions(keep=1))
    epoch_ended(keeper, a_run(1))
    keeper.wait()
    before = (tmp_path / "checkpoint-epoch_1.params").read_bytes()
    full_disk(monkeypatch)
    epoch_ended(keeper, a_run(2))
    keeper.background.join()
    with pytest.raises(
        RunError, match=r"checkpoint-epoch_2\.params: cannot be written: No space left on device"
    ):
        keeper.check()
    keeper.check()  # it is told once
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-epoch_1.params"]
    assert (tmp_path / "checkpoint-epoch_1.params").read_bytes() == before


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(),
    reason="this system does not tell which file a descriptor is of",
)
def test_the_logs_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: (
            done.append(Path(os.readlink(f"/proc/self/fd/{int(file)}")).name) or sync(file)
        ),
    )
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replaced") or replace(*paths))
    keeper = Keeper(tmp_path, CheckpointOptions())
    epoch_ended(keeper, a_run(1))
    keeper.wait()
    assert done[0] == "metrics.jsonl"
    assert done[1].startswith(".checkpoint-epoch_1.params") and done[2:] == [
        "replaced",
        tmp_path.name,
    ]


def test_or_the_run_goes_on_and_saves_again_when_there_is_room(tmp_path, monkeypatch, caplog):
    keeper = Keeper(
        tmp_path, CheckpointOptions(keep=1, monitor="test_loss", on_write_error="go_on")
    )
    full_disk(monkeypatch, times=1)
    for epoch, loss in ((1, 2.0), (2, 3.0), (3, 4.0)):
        run = a_run(epoch, test_loss=loss)
        epoch_ended(keeper, run)
    keeper.wait()
    assert names(tmp_path) == [
        "checkpoint-epoch_2",
        "checkpoint-epoch_3",
    ]  # the best of those that were written
    assert (
        "checkpoint-epoch_1.params: cannot be written: No space left on device; "
        "continuing without it" in caplog.text
    )


def test_the_state_may_be_changed_while_it_is_written(tmp_path, monkeypatch):
    """The caller has the control back at once, and never two copies of a state wait."""
    entered, leave = threading.Event(), threading.Event()
    real = storage.save

    def slow(path, tree, record):
        entered.set()
        assert leave.wait(20)
        real(path, tree, record)

    monkeypatch.setattr(storage, "save", slow)
    keeper = Keeper(tmp_path, CheckpointOptions())
    epoch_ended(keeper, a_run(1))
    assert entered.wait(20)
    assert not list(tmp_path.iterdir())
    taken = []
    threading.Timer(0.2, leave.set).start()
    epoch_ended(
        keeper,
        a_run(2),
        lambda: (
            taken.append((tmp_path / "checkpoint-epoch_1.params").exists()) or cut_of(a_run(2))()
        ),
    )
    assert taken == [True]
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_1", "checkpoint-epoch_2"]


def test_what_a_job_raises_is_raised_once_in_whoever_asks():
    background = Background()

    def fail():
        raise ZeroDivisionError

    background.start(fail)
    background.join()
    with pytest.raises(ZeroDivisionError):
        background.check()
    background.check()


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".checkpoint-epoch_3.params.77.tmp").write_bytes(b"half")
    (tmp_path / ".checkpoint-epoch_3.orbax.77.tmp").mkdir()
    (tmp_path / ".checkpoint-epoch_3.orbax.77.tmp" / "x").write_bytes(b"half")
    (
        tmp_path / ".checkpoint-epoch_2.orbax.former"
    ).mkdir()  # the one beside it was put into its place
    (tmp_path / "checkpoint-epoch_2.orbax").mkdir()
    (tmp_path / ".checkpoint-epoch_1.orbax.former").mkdir()  # the only one
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / ".notes.tmp").mkdir()  # not ours
    storage.remove_leftovers(tmp_path)
    left = [
        ".checkpoint-epoch_1.orbax.former",
        ".notes.tmp",
        "checkpoint-epoch_2.orbax",
        "metrics.jsonl",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_a_checkpoint_opens_with_the_stock_library(tmp_path):
    from safetensors import safe_open

    keeper = Keeper(
        tmp_path,
        CheckpointOptions(),
        {"config": {"title": "x"}},
        lambda params, state: {"probe/output": jnp.ones(2)},
    )
    epoch_ended(keeper, a_run(1))
    keeper.wait()
    with safe_open(tmp_path / "checkpoint-epoch_1.params", "numpy") as file:
        assert sorted(file.keys()) == [
            "lr_scale",
            "opt/m",
            "params/w",
            "probe/output",
            "seed",
            "step",
        ]
        np.testing.assert_array_equal(file.get_tensor("params/w"), np.full(3, 10.0, np.float32))
        assert {"rawtree", "sha256"} <= file.metadata().keys()

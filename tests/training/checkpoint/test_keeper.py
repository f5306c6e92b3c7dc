"""The Keeper: which checkpoints it writes and keeps, disk errors, and writing in the background."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from training.base import TrainState
from training.checkpoint import storage
from training.checkpoint.keeper import Keeper, protect
from training.checkpoint.storage import checkpoint_at
from training.observers import SAVES, Snapshot, is_due_at_end
from training.options import CheckpointOptions
from utils import RunError, UserError

PARAMS, OPT = {"w": jnp.ones(3)}, {"m": jnp.ones(3)}
TS = TrainState(jnp.int32(0), jnp.uint32(5), PARAMS, {}, OPT, None, jnp.bool(False), 1.0)
RECORD = {"elapsed": 0.0, "seconds": 0.0, "lined": 0, "stopped": False, "memories": {}}
RECORD |= {"lr_scales": {}, "todo": [False, None], "open": None}


def a_run(epoch, epochs=99, position=0, step=None, **metrics):
    """What the keeper reads of a Run; an epoch has 10 steps."""
    step = epoch * 10 + position if step is None else step
    fields = {"epoch": epoch, "completed": epoch, "epochs": epochs, "position": position}
    fields |= {"step": step, "finished": epoch == epochs and not position, "signal": None}
    history = [{"epoch": epoch, **metrics}] if fields["completed"] else []
    row = {"epoch": epoch, "step": step, "end_of_epoch": True} | metrics
    row = {} if position or not epoch else row
    return SimpleNamespace(**fields, metrics=metrics, history=history, row=row)


def snapshot_of(run, replicas=1):
    """The function that the loop passes to on_save, which returns a Snapshot of the run."""
    names = ("step", "epoch", "position", "metrics")
    record = RECORD | {name: getattr(run, name) for name in names} | {"seeds": [0] * replicas}
    states = [
        TS._replace(step=jnp.int32(run.step), params={"w": jnp.full(3, run.step * 1.0 + r)})
        for r in range(replicas)
    ]
    sums = [{"loss": np.zeros(())}] * replicas if run.position else None
    return lambda: Snapshot(states, record, sums)


def end_epoch(keeper, run, take=None):
    """Call the keeper as the loop does at the end of an epoch."""
    replies = [keeper.on_steps(run)] if is_due_at_end(keeper.every, run.epoch) else []
    replies += [reply] if (reply := keeper.on_row(run, run.row)) else []
    if replies:
        kind = max((reply["save"] for reply in replies), key=SAVES.index)
        keeper.on_save(run, take or snapshot_of(run), kind)


def end_run(keeper, run):
    """Call the keeper as the loop does at the end of a run."""
    keeper.on_save(run, snapshot_of(run), "last" if run.finished else "whole")
    keeper.on_end(run)


def resume(keeper, folder):
    """Call the keeper as the loop does when a run is resumed from the newest checkpoint."""
    keeper.continue_from(storage.newest(folder)[0])


def names(folder):
    kind_and_number = lambda name: (name.split("_")[0], int(name.split("_")[1]))  # noqa: E731
    return sorted(storage.checkpoints(folder), key=kind_and_number)


def epochs_kept(folder, losses, **options):
    """The epochs whose checkpoints remain after a run; a loss of None: not evaluated."""
    keeper = Keeper(folder, CheckpointOptions(monitor="test_loss", **options))
    for epoch, loss in enumerate(losses, 1):
        run = a_run(epoch, epochs=len(losses), **({} if loss is None else {"test_loss": loss}))
        end_epoch(keeper, run)
    end_run(keeper, run)
    return [int(name.split("_")[1]) for name in names(folder)]


@pytest.mark.parametrize(
    ("losses", "options", "kept"),
    [
        ([3, 2, 1, 2, 2, 2], {"keep": 2}, [3, 5, 6]),
        ([3, 2, 1, 2, 2, 2], {"keep": 2, "mode": "max"}, [1, 5, 6]),
        ([6, 5, 4, 3, 2, 1], {"keep": 1}, [6]),
        ([float("nan"), 3, 1, 2, 2, 2], {"keep": 1}, [3, 6]),
        ([3, None, None, 1, None, None], {"keep": 1}, [4, 6]),  # only evaluated epochs can be best
        ([5, 1, 3, 4, 3, 6], {"keep": 2, "every_epochs": 3}, [2, 3, 6]),  # best, but not due
        ([None] * 5, {"keep": 3, "every_epochs": 2}, [2, 4, 5]),
        ([None] * 4, {"every_epochs": 0}, [4]),  # only at the end
        ([None] * 7, {"keep": None}, [1, 2, 3, 4, 5, 6, 7]),
        ([5, 1, 4, 2, 3, 6, 7], {"keep": 1, "save_top_k": 3}, [2, 4, 5, 7]),
        ([1, 2, 3, 4, 5, 6], {"keep": 1, "save_top_k": 2}, [1, 2, 6]),
        ([2, 2, 2, 2], {"keep": 1}, [1, 4]),  # of equal values, the first is best
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, losses, options, kept):
    assert epochs_kept(tmp_path, losses, **options) == kept


@pytest.mark.parametrize(
    ("losses", "options", "best"),
    [
        ([2, 2, 2], {}, 1),
        ([float("nan"), 3, float("inf")], {}, 2),
        ([1, 3, 2], {"mode": "max", "save_top_k": 2, "keep": 1}, 2),
        ([float("nan"), None], {}, None),
    ],
)
def test_the_best_checkpoint_of_a_folder_is_found(tmp_path, losses, options, best):
    epochs_kept(tmp_path, losses, **options)
    if best:
        assert checkpoint_at(tmp_path, best=True) == tmp_path / f"checkpoint-epoch_{best}.params"
        return
    message = r"no checkpoint has a finite value of test_loss; name one: checkpoint-epoch_1, "
    with pytest.raises(UserError, match=message):
        checkpoint_at(tmp_path, best=True)


def test_a_lost_checkpoint_that_was_the_best_is_named(tmp_path):
    assert epochs_kept(tmp_path, [1, 2], keep=1) == [1, 2]
    (tmp_path / "checkpoint-epoch_1.params").unlink()
    why = "checkpoint-epoch_2 was not the first one: there was checkpoint-epoch_1"
    assert list(storage.evidence_of_lost(tmp_path)) == [why]


@pytest.mark.parametrize(
    ("monitor", "best"),
    [
        ("test_accuracy", 3),
        ("val_loss", 1),
        ("test_f1", 3),
        ("train_rmse", 1),
        ("val_bits_per_byte", 1),
    ],
)
def test_the_name_of_a_metric_decides_whether_low_or_high_is_good(tmp_path, monitor, best):
    keeper = Keeper(tmp_path, CheckpointOptions(monitor=monitor, keep=1))
    for epoch, value in enumerate([1, 2, 3, 2.5], 1):
        run = a_run(epoch, **{monitor: value})
        end_epoch(keeper, run)
    keeper.wait()
    assert names(tmp_path) == [f"checkpoint-epoch_{best}", "checkpoint-epoch_4"]


def test_a_metric_with_an_unclear_name_needs_a_mode():
    message = r"checkpoint\.mode: cannot tell whether 'test_speed' is good when low or high"
    with pytest.raises(UserError, match=message):
        CheckpointOptions(monitor="test_speed").sign()
    assert CheckpointOptions(monitor="test_speed", mode="max").sign() == -1


def test_checkpoints_are_due_by_epochs_steps_and_seconds(tmp_path):
    options = CheckpointOptions(every_epochs=2, every_steps=7, every_seconds=60)
    assert Keeper(tmp_path, options).every == {"epochs": 2, "steps": 7, "seconds": 60}
    assert Keeper(tmp_path, CheckpointOptions(every_epochs=0)).every == {}


def test_a_resumed_keeper_knows_the_best_and_the_older_checkpoints(tmp_path):
    """A keeper that is resumed after epoch 5 keeps the same as one that was not interrupted."""
    losses = [5, 1, 4, 2, 3, 6, 7, 0.5, 8, 9]
    options = CheckpointOptions(monitor="test_loss", keep=2, save_top_k=2)
    for folder, stop in ((tmp_path / "whole", None), (tmp_path / "cut", 5)):
        folder.mkdir()
        keeper = Keeper(folder, options)
        for epoch, loss in enumerate(losses, 1):
            run = a_run(epoch, test_loss=loss)
            end_epoch(keeper, run)
            if epoch == stop:
                keeper.wait()
                keeper = Keeper(folder, options)
                resume(keeper, folder)
        keeper.wait()
    kept = [f"checkpoint-epoch_{n}" for n in (2, 8, 9, 10)]
    assert names(tmp_path / "cut") == names(tmp_path / "whole") == kept


def test_the_best_checkpoints_are_ranked_again_when_the_config_has_changed(tmp_path):
    """By another metric, and fewer of them: one that is no longer among the best is deleted."""
    before = CheckpointOptions(monitor="test_accuracy", keep=1, save_top_k=3)
    keeper = Keeper(tmp_path, before)
    for epoch, (accuracy, loss) in enumerate([(0.5, 1.0), (0.9, 3.0), (0.8, 2.0), (0.1, 4.0)], 1):
        run = a_run(epoch, test_accuracy=accuracy, test_loss=loss)
        end_epoch(keeper, run)
    keeper.wait()
    assert names(tmp_path) == [f"checkpoint-epoch_{n}" for n in (1, 2, 3, 4)]
    within = a_run(4, position=3, test_loss=0.1)  # which earlier params had
    keeper.on_save(within, snapshot_of(within), "last")
    keeper.wait()
    keeper = Keeper(tmp_path, CheckpointOptions(monitor="test_loss", keep=1))
    resume(keeper, tmp_path)
    assert keeper.kept.best == (["checkpoint-epoch_1", 1.0],)
    run = a_run(5, test_loss=5.0)
    end_epoch(keeper, run)
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_1", "checkpoint-epoch_5"]


def test_weights_are_saved_without_the_optimizer_state_but_a_stopped_run_is_saved_whole(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions(save_optimizer_state=False))
    end_epoch(keeper, a_run(1))
    keeper.wait()
    arrays, record = storage.load(tmp_path / "checkpoint-epoch_1.params")
    assert list(arrays) == ["params/w"]
    assert not record["whole"]
    checkpoint, errors = storage.newest(tmp_path)
    assert checkpoint is None
    assert "holds only weights" in str(errors[0])
    end_run(keeper, a_run(1))  # stopped where only its weights are saved
    assert storage.newest(tmp_path)[0].name == "checkpoint-epoch_1"
    run = a_run(1, position=4)
    end_run(keeper, run)
    arrays, _ = storage.load(tmp_path / "checkpoint-step_14.params")
    assert {"opt/m", "sums/loss", "step"} <= arrays.keys()
    assert storage.newest(tmp_path)[0].name == "checkpoint-step_14"
    last = a_run(2, epochs=2)
    end_epoch(keeper, last)
    end_run(keeper, last)
    assert not storage.load(tmp_path / "checkpoint-epoch_2.params")[1]["whole"]


def test_a_checkpoint_holds_all_replicas_and_each_can_be_named(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions())
    end_epoch(keeper, a_run(2), snapshot_of(a_run(2), replicas=11))
    keeper.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-epoch_2.params"]
    checkpoint, _ = storage.newest(tmp_path)
    assert [a["params/w"][0] for a in checkpoint.arrays] == [20 + r for r in range(11)]
    first, record = storage.load_one(checkpoint.path)
    assert first["params/w"][0] == 20 and record["replica"] == 0
    last, record = storage.load_one(f"{checkpoint.path}:10")
    assert last["params/w"][0] == 30 and record["replica"] == 10
    with pytest.raises(UserError, match=r"checkpoint-epoch_2.params: holds no replica 11"):
        storage.load_one(f"{checkpoint.path}:11")


def test_a_checkpoint_that_is_there_in_both_formats_can_be_read(tmp_path):
    """As after a kill between the write in a new format and the removal of the old one."""
    for format in ("orbax", "safetensors"):
        (tmp_path / format).mkdir()
        keeper = Keeper(tmp_path / format, CheckpointOptions(format=format))
        end_epoch(keeper, a_run(1))
        keeper.wait()
        shutil.copytree(tmp_path / format, tmp_path / "both", dirs_exist_ok=True)
    checkpoint, errors = storage.newest(tmp_path / "both")
    assert checkpoint.name == "checkpoint-epoch_1" and not errors
    keeper = Keeper(tmp_path / "both", CheckpointOptions(keep=1), resumed=checkpoint)
    end_epoch(keeper, a_run(2))
    keeper.wait()
    assert [path.name for path in (tmp_path / "both").iterdir()] == ["checkpoint-epoch_2.params"]


def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions())
    for epoch in (1, 2, 3):
        end_epoch(keeper, a_run(epoch))
    keeper.wait()
    damaged = {"checkpoint-epoch_2.params": 3, "checkpoint-epoch_3.params": -5}
    for name, byte in damaged.items():
        data = bytearray((tmp_path / name).read_bytes())
        data[byte] ^= 1
        (tmp_path / name).write_bytes(data)
    checkpoint, errors = storage.newest(tmp_path)
    assert checkpoint.name == "checkpoint-epoch_1"
    assert sorted(str(e).split("/")[-1].split(":")[0] for e in errors) == list(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "3"}, "no valid epoch"),
        ({"lengths": {"train.log": -1}}, "no valid lengths"),
        ({"seeds": []}, "contradict each other, or it has no seed"),
        ({"position": -1}, "no valid position"),
        ({"facts": {"input_shape": [28, -1]}}, "no valid facts"),
        ({"metrics": {"test_loss": "x"}}, "no valid metrics"),
        ({"best": [["checkpoint-epoch_1", True]]}, "no valid best"),
        ({"epoch": 0, "position": 1}, "contradict each other"),
        ({"format": 3}, "was written by another version, in format 3"),
        ({"step": True}, "no valid step"),
    ],
)
def test_an_invalid_record_is_an_error_even_if_the_digest_is_right(tmp_path, change, message):
    keeper = Keeper(tmp_path, CheckpointOptions())
    end_epoch(keeper, a_run(1))
    keeper.wait()
    path = tmp_path / "checkpoint-epoch_1.params"
    arrays, record = storage.load(path)
    storage.save(path, arrays, record | change)
    checkpoint, errors = storage.newest(tmp_path)
    assert checkpoint is None
    assert message in str(errors[0])


@pytest.mark.parametrize(
    ("run", "level", "message"),
    [
        (a_run(0, position=3, step=3), "INFO", "checkpoint.monitor, test_loss, was not measured"),
        (a_run(1, val_loss=2.0), "WARNING", "checkpoint.monitor, test_loss, was not measured"),
        (
            a_run(1, test_loss=np.nan),
            "WARNING",
            "test_loss, was NaN or infinite",
        ),
        (a_run(1, test_loss=2.0), "INFO", "Best by test_loss: "),
    ],
)
def test_why_no_checkpoint_is_the_best(tmp_path, caplog, run, level, message):
    caplog.set_level("INFO", "main")
    keeper = Keeper(tmp_path, CheckpointOptions(monitor="test_loss"))
    end_epoch(keeper, run)
    caplog.clear()
    keeper.on_end(run)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if "Saved" not in r.getMessage()]
    assert len(lines) == 1 and lines[0][0] == level and message in lines[0][1]


def fill_disk(monkeypatch, times=10**9):
    """Make os.fsync fail as on a full disk, the next `times` times."""
    left, real = [times], os.fsync

    def fsync(handle):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_stops_the_run_and_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path, CheckpointOptions(keep=1))
    end_epoch(keeper, a_run(1))
    keeper.wait()
    before = (tmp_path / "checkpoint-epoch_1.params").read_bytes()
    fill_disk(monkeypatch)
    end_epoch(keeper, a_run(2))
    keeper.join()
    message = r"checkpoint-epoch_2\.params: cannot be written: No space left on device"
    with pytest.raises(RunError, match=message):
        keeper.check()
    keeper.check()  # raised only once
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-epoch_1.params"]
    assert (tmp_path / "checkpoint-epoch_1.params").read_bytes() == before


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(),
    reason="needs /proc to find the file of a descriptor",
)
def test_the_logs_are_flushed_to_disk_before_the_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done, real_fsync, real_replace = [], os.fsync, os.replace

    def fsync(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{int(file)}")).name)
        real_fsync(file)

    def replace(*paths):
        done.append("replaced")
        real_replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    keeper = Keeper(tmp_path, CheckpointOptions())
    end_epoch(keeper, a_run(1))
    keeper.wait()
    assert done[0] == "metrics.jsonl"
    assert done[1].startswith(".checkpoint-epoch_1.params")
    assert done[2:] == ["replaced", tmp_path.name]


def test_go_on_continues_without_a_checkpoint_that_failed(tmp_path, monkeypatch, caplog):
    options = CheckpointOptions(keep=1, monitor="test_loss", on_write_error="go_on")
    keeper = Keeper(tmp_path, options)
    fill_disk(monkeypatch, times=1)
    for epoch, loss in ((1, 2.0), (2, 3.0), (3, 4.0)):
        run = a_run(epoch, test_loss=loss)
        end_epoch(keeper, run)
    keeper.wait()
    # Epoch 2 is the best of those that were written.
    assert names(tmp_path) == ["checkpoint-epoch_2", "checkpoint-epoch_3"]
    message = "checkpoint-epoch_1.params: cannot be written: No space left on device; "
    assert message + "continuing without it" in caplog.text
    fill_disk(monkeypatch, times=1)
    end_epoch(keeper, run := a_run(99, test_loss=5.0))
    keeper.wait()
    keeper.on_save(run, snapshot_of(run), "last")  # again, as the last epoch is not on the disk
    keeper.wait()
    assert "checkpoint-epoch_99" in names(tmp_path)


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """on_save returns immediately, and there are never two copies of a state."""
    entered, leave = threading.Event(), threading.Event()
    real = storage.save

    def slow(path, tree, record):
        entered.set()
        assert leave.wait(20)
        real(path, tree, record)

    monkeypatch.setattr(storage, "save", slow)
    keeper = Keeper(tmp_path, CheckpointOptions())
    end_epoch(keeper, a_run(1))
    assert entered.wait(20)
    assert not list(tmp_path.iterdir())
    taken = []
    threading.Timer(0.2, leave.set).start()

    def take():
        taken.append((tmp_path / "checkpoint-epoch_1.params").exists())
        return snapshot_of(a_run(2))()

    end_epoch(keeper, a_run(2), take)
    assert taken == [True]
    keeper.wait()
    assert names(tmp_path) == ["checkpoint-epoch_1", "checkpoint-epoch_2"]


def test_a_checkpoint_that_an_evaluator_protects_is_deleted_once_it_is_not(tmp_path):
    keeper = Keeper(tmp_path, CheckpointOptions(keep=1))
    left = []
    for epoch in range(1, 7):
        if epoch == 3:  # the evaluator found the second one best, and reads the first one late
            protect(tmp_path, [["checkpoint-epoch_2", 0.5]], "checkpoint-epoch_1")
        if epoch == 5:
            protect(tmp_path, [["checkpoint-epoch_4", 0.25]])
        end_epoch(keeper, a_run(epoch))
        keeper.wait()
        left.append([int(name.split("_")[1]) for name in names(tmp_path)])
    assert left == [[1], [2], [2, 3], [2, 4], [4, 5], [4, 6]]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".checkpoint-epoch_3.params.77.tmp").write_bytes(b"half")
    (tmp_path / ".checkpoint-epoch_3.orbax.77.tmp").mkdir()
    (tmp_path / ".checkpoint-epoch_3.orbax.77.tmp" / "x").write_bytes(b"half")
    (tmp_path / ".checkpoint-epoch_2.orbax.former").mkdir()  # has been replaced by the next one
    (tmp_path / "checkpoint-epoch_2.orbax").mkdir()
    (tmp_path / ".checkpoint-epoch_1.orbax.former").mkdir()  # has not been replaced
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / ".notes.tmp").mkdir()  # a file of the user
    (tmp_path / ".evaluator.json.77.tmp").write_text("")  # of a process that may be running
    (tmp_path / ".metrics.csv.77.tmp").write_text("half")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / ".confusion matrix.png.78.tmp").write_text("half")
    storage.remove_leftovers(tmp_path)
    left = [
        ".checkpoint-epoch_1.orbax.former",
        ".evaluator.json.77.tmp",
        ".notes.tmp",
        "checkpoint-epoch_2.orbax",
        "metrics.jsonl",
        "pictures",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert not any((tmp_path / "pictures").iterdir())


def test_the_safetensors_library_reads_a_checkpoint(tmp_path):
    from safetensors import safe_open

    probe = lambda params, state, replica: {"probe/output": jnp.ones(2)}  # noqa: E731
    keeper = Keeper(tmp_path, CheckpointOptions(), {"config": {"title": "x"}}, probe)
    end_epoch(keeper, a_run(1))
    keeper.wait()
    with safe_open(tmp_path / "checkpoint-epoch_1.params", "numpy") as file:
        names = ["lr_scale", "opt/m", "params/w", "probe/output", "step"]
        assert sorted(file.keys()) == names
        np.testing.assert_array_equal(file.get_tensor("params/w"), np.full(3, 10.0, np.float32))
        assert {"rawtree", "sha256"} <= file.metadata().keys()

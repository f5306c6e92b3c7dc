"""Event files, read back by TensorBoard itself."""

import io

import numpy as np
from PIL import Image

from training.watching.publish import About
from training.watching.trackers.tensorboard import tensorboard

CONFIG = {
    "seed": 3,
    "model": {"name": "mlp", "args": {"sizes": [4, 2], "bias": True}},
    "optimizer": {"args": {"lr": 0.5}},
}


def started(folder, step=0):
    folder.mkdir(exist_ok=True)
    tracker = tensorboard()
    tracker.start(About(folder, "Title", CONFIG, step))
    return tracker


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0}).Reload()


def series(folder, name):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_tensorboard_reads_every_kind_of_value(tmp_path):
    tracker = started(tmp_path)
    tracker.scalars(1, {"train_loss": 0.5, "gradient_norm/blocks/0/weight": float("nan")})
    tracker.scalars(2, {"train_loss": 0.25})
    file = io.BytesIO()
    Image.new("RGB", (5, 3), (1, 2, 3)).save(file, "png")
    tracker.image(2, "confusion_matrix-test", file.getvalue())
    values = np.array([0.0, 1.0, 1.0, 3.0, np.nan, np.inf], np.float32)
    tracker.histogram(2, "weight", values)
    tracker.histogram(2, "constant", np.full(7, 1e8, np.float32))
    tracker.histogram(2, "neighbours", np.array([1.0, np.nextafter(1.0, 2.0)]))
    tracker.text(2, "samples", "Once *upon*\na time <b>")
    tracker.histogram(2, "nothing", np.array([np.nan]))
    events = read(tmp_path)  # although the file is still open
    assert series(tmp_path, "train_loss") == [(1, 0.5), (2, 0.25)]
    assert np.isnan(events.Scalars("gradient_norm/blocks/0/weight")[0].value)
    (image,) = events.Images("confusion_matrix-test")
    assert (image.step, image.width, image.height) == (2, 5, 3)
    assert image.encoded_image_string == file.getvalue()
    (event,) = events.Tensors("samples/text_summary")
    assert (event.step, event.tensor_proto.string_val) == (2, [b"    Once *upon*\n    a time <b>"])
    assert "samples/text_summary" in events.PluginTagToContent("text")
    (event,) = events.Histograms("weight")
    histogram = event.histogram_value
    moments = (histogram.num, histogram.sum, histogram.sum_squares)
    assert (event.step, histogram.min, histogram.max, *moments) == (2, 0, 3, 4, 5, 11)
    limits, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
    assert [counts[limits <= bound].sum() for bound in (0.5, 2, 3)] == [1, 3, 4]
    assert len(limits) == 64 and limits[-1] == 3
    assert events.Histograms("constant")[0].histogram_value.num == 7
    assert events.Tags()["histograms"] == ["weight", "constant", "neighbours"]
    tracker.finish({})


def test_values_after_the_step_at_which_a_run_continues_are_void(tmp_path):
    tracker = started(tmp_path)
    for step in (0, 1, 2, 3):
        tracker.scalars(step, {"loss": float(step)})
    tracker.back_to(2)
    tracker.scalars(3, {"loss": 30.0})
    tracker.scalars(4, {"loss": 40.0})
    assert series(tmp_path, "loss") == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    (file,) = tmp_path.iterdir()
    with open(file, "ab") as torn:
        torn.write(b"\x40\0\0\0\0\0\0\0torn")
    resumed = started(tmp_path, step=3)
    resumed.scalars(4, {"loss": 4.5})
    assert series(tmp_path, "loss") == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 4.5)]
    started(tmp_path).scalars(1, {"other": 1.0})  # from the start
    assert series(tmp_path, "loss") == [] and series(tmp_path, "other") == [(1, 1)]


def session_groups(folder):
    """The table of runs that TensorBoard's plugin hparams shows."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    data = MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(TBContext(data_provider=data))
    metadata = context.hparams_metadata(RequestContext(), "")
    experiment = context.experiment_from_metadata(RequestContext(), "", True, metadata, [])
    columns = [api_pb2.ColParams(metric=metric.name) for metric in experiment.metric_infos]
    request = api_pb2.ListSessionGroupsRequest(
        col_params=columns,
        allowed_statuses=[api_pb2.STATUS_SUCCESS],
        start_index=0,
        slice_size=9,
        include_metrics=True,
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    return handler.run().session_groups


def test_the_table_of_runs_has_their_configs_and_last_metrics(tmp_path):
    for name, loss in (("a", 0.25), ("b", 0.5)):
        tracker = started(tmp_path / name)
        tracker.scalars(1, {"test_loss": 0.75})
        tracker.scalars(2, {"test_loss": loss})
        tracker.finish({"test_loss": loss, "best_epoch": 4.0})
        # It is written once, although it is the last metric too.
        assert series(tmp_path / name, "test_loss") == [(1, 0.75), (2, loss)]
    metrics = {}
    for group in session_groups(tmp_path):
        (session,) = group.sessions
        pairs = group.hparams.items()
        config = {name: getattr(value, value.WhichOneof("kind")) for name, value in pairs}
        assert config == {
            "seed": 3.0,
            "model/name": "mlp",
            "model/args/sizes": "[4, 2]",
            "model/args/bias": True,
            "optimizer/args/lr": 0.5,
        }
        metrics[session.name] = {value.name.tag: value.value for value in session.metric_values}
    assert metrics == {
        "a": {"test_loss": 0.25, "best_epoch": 4.0},
        "b": {"test_loss": 0.5, "best_epoch": 4.0},
    }

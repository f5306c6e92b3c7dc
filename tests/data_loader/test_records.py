"""Record files against TensorFlow, which wrote them, and against bytes written by hand."""

import gzip
import io
import os
import pickle
import shutil
import time
from contextlib import suppress

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from data_loader.base import Arrays
from data_loader.grain import RecordFiles, _checksum
from data_loader.records import numpy_example, tf_example, write_records
from utils import UserError

pytestmark = pytest.mark.contract


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.slow
def test_encoded_images_and_labels_equal_those_that_tensorflow_wrote(tf_folder):
    digits = np.load(tf_folder / "digits.npz")
    records = RecordFiles(str(tf_folder / "train-*.tfrecord"))
    assert len(records) == 500
    for i in (0, 7, 299, 300, 499):
        x, y = tf_example(records[i], color="gray")
        np.testing.assert_array_equal(x, digits["x"][i], strict=True)
        assert y == digits["y"][i] and y.dtype == np.int32 and np.shape(y) == ()
    x, _ = tf_example(records[0], image_size=(14, 20))
    assert x.shape == (14, 20, 3) and x.dtype == np.uint8


@pytest.mark.slow
def test_numbers_and_raw_bytes_equal_those_that_tensorflow_reads(tf_folder):
    expected = np.load(tf_folder / "varied.npz")
    records = RecordFiles(str(tf_folder / "varied.tfrecord"))
    for i in range(30):
        tokens, scores = tf_example(records[i], x="tokens", y="scores")
        np.testing.assert_array_equal(tokens, expected["tokens"][i])
        np.testing.assert_array_equal(scores, expected["scores"][i], strict=True)
        assert tokens.dtype == np.int32
        pixels, label = tf_example(records[i], x="pixels", shape=(2, 3), dtype="float16")
        np.testing.assert_array_equal(pixels, expected["pixels"][i].reshape(2, 3), strict=True)
        assert label == i
    assert tf_example(records[3], x="tokens", shape=(5, 8))[0].shape == (5, 8)


def field(number, *parts):
    """A field of the wire format that holds bytes; their number has one or two bytes."""
    data = b"".join(parts)
    size = [len(data)] if len(data) < 128 else [len(data) & 127 | 128, len(data) >> 7]
    return bytes([number << 3 | 2, *size]) + data


def example_with(**features):
    """A serialized tf.train.Example of serialized features."""
    entries = [field(1, field(1, k.encode()), field(2, v)) for k, v in features.items()]
    return field(1, *entries)


@pytest.mark.slow
def test_a_truncated_or_changed_example_raises_at_most_a_user_error(tf_folder):
    record = RecordFiles(str(tf_folder / "varied.tfrecord"))[0]
    random = np.random.default_rng(0)
    for end in range(0, len(record), 3):
        with pytest.raises(UserError):
            tf_example(record[:end], x="tokens")
    for position in random.integers(0, len(record), 500):
        changed = bytearray(record)
        changed[position] ^= 1 << random.integers(8)
        with suppress(UserError):
            tf_example(bytes(changed), x="tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"x": "tokenz"},
            r"no values of a feature 'tokenz'; "
            r"its features: empty, label, pixels, scores, tokens, wide",
        ),
        ({"x": "empty"}, r"no values of a feature 'empty'"),
        ({"x": "tokens", "shape": (5, 9)}, r"'tokens' has 40 values, the shape \[5, 9\] needs 45"),
        ({"x": "pixels", "shape": (2, 3)}, r"'pixels' has 12 values, the shape \[2, 3\] needs 6"),
        ({"x": "pixels", "shape": (2, 3), "dtype": "floot"}, r"are not floot\[2, 3\]"),
        ({"x": "pixels"}, r"'pixels' is not a readable image .*; raw numbers need a `shape`"),
        ({"x": "tokens", "y": "pixels"}, r"'pixels' is b'.*a target must be numbers"),
        ({"x": "wide"}, r"'wide' has 1099511627776, which does not fit into int32"),
    ],
)
def test_unsuitable_features_are_named(tf_folder, arguments, message):
    record = RecordFiles(str(tf_folder / "varied.tfrecord"))[0]
    with pytest.raises(UserError, match=message):
        tf_example(record, **arguments)


def test_write_records_keeps_values_types_and_order(tmp_path):
    x = np.random.default_rng(0).normal(size=(25, 2, 3)).astype(np.float32)
    x = x.swapaxes(1, 2)  # each example in Fortran order
    y = np.arange(25, dtype=np.int8)
    paths = write_records(tmp_path / "new" / "train", Arrays(x, y), shards=4)
    assert [path.name for path in paths] == [
        f"train-0000{i}-of-00004.array_record" for i in range(4)
    ]
    assert sorted(os.listdir(tmp_path / "new")) == [path.name for path in paths]
    # Pickled, as when they are sent to a worker.
    records = pickle.loads(pickle.dumps(RecordFiles(str(tmp_path / "new" / "train-*"))))
    assert len(records) == 25
    for i in range(25):
        for array, expected in zip(numpy_example(records[i]), (x[i], y[i]), strict=True):
            np.testing.assert_array_equal(array, expected, strict=True)


def test_an_object_array_is_refused_and_never_unpickled():
    file = io.BytesIO()
    for _ in range(2):
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="an array of object"):
        numpy_example(file.getvalue())


def flip_a_bit(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("format", ["array_record", "tfrecord"])
def test_a_damaged_record_is_named_and_the_others_are_read(tf_folder, tmp_path, format):
    path = tmp_path / f"some.{format}"
    if format == "tfrecord":
        shutil.copy(tf_folder / "test.tfrecord", path)
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for i in range(100):
            writer.write(np.random.default_rng(i).bytes(500))
        writer.close()
    whole = [RecordFiles(str(path))[i] for i in range(100)]
    flip_a_bit(path, path.read_bytes().index(whole[40][-100:-10]))
    records, bad = RecordFiles(str(path)), []
    for i in range(100):
        try:
            assert records[i] == whole[i]
        except UserError as error:
            assert str(error).startswith(f"{path}: record {i} cannot be read (")
            assert "copy the file again" in str(error)
            bad.append(i)
    assert bad == [40]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def compress(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "ends within record 99; copy the file again"),
        (lambda path: flip_a_bit(path, 3), "neither an ArrayRecord file nor a TFRecord file"),
        (
            lambda path: flip_a_bit(path, 19 + int.from_bytes(path.read_bytes()[:8], "little")),
            "record 1 is damaged, so that the records after it",
        ),
        (
            lambda path: path.write_text("just text"),
            "neither an ArrayRecord file nor a TFRecord file",
        ),
        (compress, "the whole file is compressed.*gunzip"),
        (lambda path: path.write_bytes(b""), "has no records in its 1 files"),
        (lambda path: path.unlink(), "no such file; name one file, or several with a pattern"),
    ],
    ids=["cut", "its start", "a length", "text", "gzip", "empty", "gone"],
)
def test_a_file_that_cannot_be_indexed_is_named(tf_folder, tmp_path, damage, message):
    path = tmp_path / "some.tfrecord"
    shutil.copy(tf_folder / "test.tfrecord", path)
    damage(path)
    with pytest.raises(UserError, match=rf"some\.tfrecord: .*{message}"):
        RecordFiles(str(path))


def test_a_truncated_array_record_file_is_refused(tmp_path):
    (path,) = write_records(tmp_path / "x", Arrays(np.zeros((300, 500)), np.zeros(300)))
    truncate(path)
    with pytest.raises(UserError, match="not a complete ArrayRecord file"):
        RecordFiles(str(path))


def test_a_missing_shard_is_named_unless_the_pattern_selects_some_shards(tmp_path):
    paths = write_records(tmp_path / "x", Arrays(np.zeros(8), np.zeros(8)), shards=4)
    paths[2].unlink()
    with pytest.raises(
        UserError, match=r"x-00002-of-00004\.array_record: is missing; 3 of the 4 files are present"
    ):
        RecordFiles(str(tmp_path / "x-*"))
    assert len(RecordFiles(str(tmp_path / "x-0000[01]-of-00004.array_record"))) == 4
    assert len(RecordFiles(str(paths[3]))) == 2


def test_files_of_two_series_are_refused(tmp_path):
    examples = Arrays(np.zeros(8), np.zeros(8))
    write_records(tmp_path / "x", examples, shards=4)
    write_records(tmp_path / "x", examples, shards=2)
    with pytest.raises(UserError, match=r"x-\*: there are files of 2 and files of 4; delete"):
        RecordFiles(str(tmp_path / "x-*"))
    write_records(tmp_path / "x-other", examples, shards=3)
    assert len(RecordFiles(str(tmp_path / "x-*-of-00002*"))) == 8


def test_an_empty_file_that_should_have_a_format_is_refused(tmp_path):
    for name in ("a.tar", "a.array_record"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match=f"{name}: is empty; write or copy it again"):
            RecordFiles(str(tmp_path / name))


def test_the_index_of_a_file_is_made_from_the_lengths_of_its_records(tmp_path):
    """It is much faster than reading the file, whose data is never read."""

    length = (50_000_000).to_bytes(8, "little")
    with open(tmp_path / "sparse", "wb") as file:  # 10 GB, but with holes instead of data
        for i in range(200):
            file.seek(i * 50_000_016)
            file.write(length + _checksum(length))
        file.truncate(200 * 50_000_016)
    start = time.monotonic()
    assert len(RecordFiles(str(tmp_path / "sparse"))) == 200
    assert time.monotonic() - start < 1


def example_of(image):
    """A serialized tf.train.Example with the bytes of an image, and label 2."""
    return example_with(image=field(1, field(1, image)), label=field(3, b"\x08\x02"))

"""A script in which TensorFlow writes TFRecord files, and reads one of them as a reference."""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

Feature, Example = tf.train.Feature, tf.train.Example
FOLDER = Path(sys.argv[1])


def ints(*numbers):
    return Feature(int64_list=tf.train.Int64List(value=numbers))


def floats(*numbers):
    return Feature(float_list=tf.train.FloatList(value=numbers))


def bytes_(*parts):
    return Feature(bytes_list=tf.train.BytesList(value=parts))


def write(name, examples):
    with tf.io.TFRecordWriter(str(FOLDER / name)) as file:
        for features in examples:
            file.write(Example(features=tf.train.Features(feature=features)).SerializeToString())


def digits(images, labels):
    """Encoded images, the usual format of image datasets."""
    for image, label in zip(images, labels, strict=True):
        yield {
            "image": bytes_(tf.io.encode_png(image).numpy()),
            "label": ints(label),
            "note": bytes_(b"a", b"b"),
        }


def varied(random, count):
    """Numbers of all sizes, and raw pixels."""
    for i in range(count):
        wide = [int(n) for n in random.integers(-(2**31), 2**31, 40) >> random.integers(0, 31, 40)]
        pixels = random.normal(size=(2, 3)).astype("<f2")
        lists = {"tokens": ints(*wide), "scores": floats(*random.normal(size=5))}
        yield lists | {
            "pixels": bytes_(pixels.tobytes()),
            "label": ints(i),
            "wide": ints(2**40),
            "empty": ints(),
        }


with np.load(FOLDER / "digits.npz") as file:
    x, y = file["x"], file["y"]
write("train-00000-of-00002.tfrecord", digits(x[:300], y[:300]))
write("train-00001-of-00002.tfrecord", digits(x[300:500], y[300:500]))
write("test.tfrecord", digits(x[500:], y[500:]))
write("varied.tfrecord", varied(np.random.default_rng(0), 30))

spec = {
    "tokens": tf.io.FixedLenFeature([40], tf.int64),
    "scores": tf.io.FixedLenFeature([5], tf.float32),
}
spec |= {"pixels": tf.io.FixedLenFeature([], tf.string)}
read = [
    tf.io.parse_single_example(record, spec)
    for record in tf.data.TFRecordDataset(str(FOLDER / "varied.tfrecord"))
]
tokens, scores = (np.stack([row[name].numpy() for row in read]) for name in ("tokens", "scores"))
pixels = np.stack([tf.io.decode_raw(row["pixels"], tf.float16).numpy() for row in read])
np.savez(FOLDER / "varied.npz", tokens=tokens, scores=scores, pixels=pixels)

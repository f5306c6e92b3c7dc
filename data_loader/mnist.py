"""MNIST, the handwritten digits of LeCun, Cortes and Burges."""

from typing import Literal

from data_loader.base import Data
from data_loader.digits import digits
from data_loader.idx import idx_data
from utils.forms import LocalPath, checked

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
DIGESTS = {  # md5 of the unpacked files
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@checked
def mnist(dir: LocalPath = "data", offline: Literal["digits", "error"] = "error") -> Data:
    """MNIST from `dir` or `dir`/mnist, else downloaded; `offline` is the fallback if that fails."""
    stand_in = digits if offline == "digits" else None
    return idx_data("mnist", (dir, f"{dir}/mnist"), MIRRORS, DIGESTS, stand_in)

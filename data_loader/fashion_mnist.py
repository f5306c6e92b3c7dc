"""Fashion-MNIST, Zalando's images of clothes in MNIST's format."""

from data_loader.base import Data
from data_loader.idx import idx_data
from utils.forms import LocalPath, checked

MIRRORS = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
DIGESTS = {  # md5 of the gzip-compressed files
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
CLASSES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@checked
def fashion_mnist(dir: LocalPath = "data/fashion_mnist") -> Data:
    """Fashion-MNIST from `dir`, else downloaded; its file names are the same as those of MNIST."""
    return idx_data("fashion_mnist", (dir,), MIRRORS, DIGESTS, classes=CLASSES)

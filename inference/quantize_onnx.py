"""Quantize ONNX files with onnxruntime's tools."""

import tempfile
from pathlib import Path

from file_io import atomic_write
from inference.packages import needed, quiet
from utils import RunError, UserError, first_line

CONVOLUTIONS = ["Conv", "ConvTranspose"]
# The ops that are quantized; a normalization or a softmax would lose its small numbers.
PRODUCTS = [*CONVOLUTIONS, "MatMul", "Gemm"]


def quantize_onnx(source, path, precision, samples=None):
    """Write the float32 file `source` as float16, dynamic or int8; inputs and outputs stay float32.

    int8 is calibrated with `samples`, a list of {input: array}.
    """
    write = {"float16": to_float16, "dynamic": to_dynamic, "int8": to_int8}.get(precision)
    if write is None:
        raise UserError(f"unknown precision {precision!r}; choose from float16, dynamic and int8")
    if precision == "int8" and not samples:
        raise UserError("int8 needs samples of real inputs, which show how large its numbers are")
    needed("onnx", "onnxruntime")
    # The tools write files of their own beside their input.
    with quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            data = checked(write(Path(source), Path(folder), samples))
        except Exception as error:  # the tools have no error class of their own
            raise RunError(
                f"{source}: onnxruntime cannot convert it to {precision}: {first_line(error)}"
            ) from error
    atomic_write(path, data)


def checked(model):
    """The bytes of a model that passes ONNX's full check."""
    import onnx

    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def to_float16(source, folder, samples):
    """Weights and intermediate results in float16; inputs and outputs in float32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    model = OnnxModel(convert_float_to_float16(onnx.load(source), keep_io_types=True))
    model.topological_sort()  # the converter appends the casts of the inputs at the end
    return model.model


def to_dynamic(source, folder, samples):
    """Weights in 8 bits; the ranges of the activations are measured at run time.

    The weights are unsigned: on x86 processors without VNNI, ONNX Runtime's products of unsigned
    activations and signed weights overflow 16 bits (off by 0.080 of the output's scale in a small
    model; unsigned 0.022).
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = prepared(source, folder)
    quantize_dynamic(
        model,
        folder / "dynamic.onnx",
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=first_convolutions(model),
        per_channel=True,
        weight_type=QuantType.QUInt8,
    )
    return onnx.load(folder / "dynamic.onnx")


def to_int8(source, folder, samples):
    """Convolutions and products in int8, as pairs of QuantizeLinear and DequantizeLinear.

    Weights have one scale per channel. The output of a MatMul stays in float, since the
    normalization that follows needs more than 8 bits.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    model = prepared(source, folder)
    quantize_static(
        model,
        folder / "int8.onnx",
        reader(samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=first_convolutions(model),
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
    )
    return onnx.load(folder / "int8.onnx")


def prepared(source, folder):
    """The path of a copy with named nodes and inferred shapes, which the tools need."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(source)
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    quant_pre_process(
        model, folder / "prepared.onnx", skip_symbolic_shape=True, skip_optimization=True
    )
    return folder / "prepared.onnx"


def first_convolutions(path):
    """The names of the convolutions that take the input itself.

    They have few weights and lose much accuracy: on the sample, a stem in int8 makes the largest
    error 0.37 of the logits' scale instead of 0.12, since the normalization that follows magnifies
    the rounding of an empty background.
    """
    import onnx

    graph = onnx.load(path).graph
    raw, names = {value.name for value in graph.input}, []
    for node in graph.node:
        if raw.isdisjoint(node.input):
            continue
        if node.op_type in CONVOLUTIONS:
            names.append(node.name)
        elif node.op_type not in PRODUCTS:
            raw.update(node.output)
    return names


def reader(samples):
    """The samples as the tools read them: one by one, then None."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        remaining = iter(samples)

        def get_next(self):
            return next(self.remaining, None)

    return Reader()

"""Write a traced function as an ONNX file."""

from inference.lowering.onnx_ops import LAYERS, PRIMITIVES
from inference.lowering.onnx_ops.graph import graph_proto
from inference.lowering.onnx_ops.target import OnnxTarget
from inference.lowering.onnx_ops.tidy import tidy
from inference.lowering.walk import Walk, located
from utils import atomic_write

OPSETS = range(18, 24)


def write_onnx(traced, path, opset=20):
    """Write a traced function as an ONNX file that passes ONNX's full check."""
    model = onnx_model(traced, opset)
    check(model)
    atomic_write(path, model.SerializeToString())


def onnx_model(traced, opset=20):
    """A traced function as a ModelProto; raises Missing for a primitive without a table entry."""
    from onnx import helper

    target = OnnxTarget(LAYERS, PRIMITIVES, opset, traced.inputs)
    target.taken.update(traced.outputs)
    with located(walk := Walk(target)):
        outputs = walk.outputs(traced, {name: name for name in traced.inputs})
        for name, value in outputs.items():
            target.result(value, name)
    tidy(target)
    opsets = [helper.make_opsetid("", opset)]
    graph = graph_proto(target.scopes[0], "model", target.weights)
    version = helper.find_min_ir_version_for(opsets)  # most runtimes read the oldest version
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=version, producer_name="rawtree"
    )


def check(model):
    """Check every node against its schema, and every shape."""
    import onnx

    onnx.checker.check_model(model, full_check=True)

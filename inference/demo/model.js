// The model, run by ONNX Runtime in WebAssembly. Both are parts of this page.
const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const ARRAYS = {float32: Float32Array, uint8: Uint8Array, int8: Int8Array, int32: Int32Array, int64: BigInt64Array};
const SIZE = facts.shape.reduce((a, b) => a * b, 1);  // of an example
const ready = load().catch((error) => { throw new Error(`The model does not run here: ${error.message ?? error}`); });

async function load() {
  const source = new Blob([await unpack("runtime")], {type: "text/javascript"});
  const ort = await import(URL.createObjectURL(source));
  ort.env.wasm.numThreads = 1;  // more need headers that only a server can send
  ort.env.wasm.wasmBinary = await unpack("program");
  const session = await ort.InferenceSession.create(await unpack("model"), {executionProviders: ["wasm"]});
  const {name, type, shape: [batch]} = session.inputMetadata[0];
  if (session.inputNames.length > 1) throw new Error(`it takes ${session.inputNames.join(" and ")}; this page gives one input`);
  if (batch > 1) throw new Error(`it takes ${batch} examples at once; this page gives one`);
  if (!(type in ARRAYS)) throw new Error(`it takes ${type}; this page gives ${Object.keys(ARRAYS).join(", ")}`);
  const array = (values) => type === "int64" ? BigInt64Array.from(values, BigInt) : ARRAYS[type].from(values);
  const tensor = (values, shape) => new ort.Tensor(type, array(values), shape);
  await session.run({[name]: tensor(new Array(SIZE).fill(0), [1, ...facts.shape])});  // the first run takes longer
  return {session, name, tensor, output: session.outputMetadata[0].shape};
}

// The bytes that a part of the page holds, compressed and as base64.
async function unpack(id) {
  const text = atob($(id).textContent);
  $(id).remove();
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// The first output for one example or several, given as the numbers that the model takes, nested or not.
async function run(values) {
  const {session, name, tensor} = await ready;
  const flat = Array.isArray(values) ? values.flat(Infinity) : values;
  if (!flat.length || flat.length % SIZE) throw new Error(`${flat.length} numbers; an example has ${facts.shape.join(" × ")}`);
  const outputs = await session.run({[name]: tensor(flat, [flat.length / SIZE, ...facts.shape])});
  return outputs[session.outputNames[0]];
}

window.predict = async (values) => Array.from((await run(values)).data, Number);

// What all pages share: the model, run by ONNX Runtime in WebAssembly. The page contains both.
const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const ARRAYS = {
  float32: Float32Array, uint8: Uint8Array,
  int8: Int8Array, int32: Int32Array, int64: BigInt64Array,
};

// Open the model, and return what `prepare` makes of it.
async function openModel(prepare) {
  try {
    const source = new Blob([await unpack("runtime")], {type: "text/javascript"});
    const ort = await import(URL.createObjectURL(source));
    ort.env.wasm.numThreads = 1;  // more threads need HTTP headers, which a local file has not
    ort.env.wasm.wasmBinary = await unpack("program");
    const options = {executionProviders: ["wasm"]};
    return await prepare(ort, await ort.InferenceSession.create(await unpack("model"), options));
  } catch (error) {
    throw new Error(`The model does not run here: ${error.message ?? error}`);
  }
}

// The bytes of an element of the page, which are compressed and encoded as base64.
async function unpack(id) {
  const text = atob($(id).textContent);
  $(id).remove();
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const report = (error) => { $("problem").textContent = error.message ?? error; };

// Run an action and show its error message, if it fails.
async function attempt(action) {
  $("problem").textContent = "";
  try {
    await action();
  } catch (error) {
    report(error);
  }
}

// Runs a model that takes one example, or a batch of them.
const SIZE = facts.shape.reduce((a, b) => a * b, 1);  // of one example
const ready = openModel(async (ort, session) => {
  const {name, type, shape: [batch]} = session.inputMetadata[0];
  check(session, type, batch);
  const array = (values) =>
    type === "int64" ? BigInt64Array.from(values, BigInt) : ARRAYS[type].from(values);
  const tensor = (values, shape) => new ort.Tensor(type, array(values), shape);
  const zeros = tensor(new Array(SIZE).fill(0), [1, ...facts.shape]);
  await session.run({[name]: zeros});  // the first run is slower
  return {session, name, type, tensor, output: session.outputMetadata[0].shape};
});

// Raise if this page cannot provide the model's input.
function check(session, type, batch) {
  const fail = (takes, gives) => {
    throw new Error(`it takes ${takes}; this page provides ${gives}`);
  };
  if (session.inputNames.length > 1) fail(session.inputNames.join(" and "), "one input");
  if (batch > 1) fail(`${batch} examples at once`, "one");
  if (!(type in ARRAYS)) fail(type, Object.keys(ARRAYS).join(", "));
}

// The first output for one or more examples; `values` may be nested.
async function run(values) {
  const {session, name, tensor} = await ready;
  const flat = Array.isArray(values) ? values.flat(Infinity) : values;
  if (!flat.length || flat.length % SIZE) {
    throw new Error(`${flat.length} numbers; an example has ${facts.shape.join(" × ")}`);
  }
  const outputs = await session.run({[name]: tensor(flat, [flat.length / SIZE, ...facts.shape])});
  return outputs[session.outputNames[0]];
}

window.predict = async (values) => Array.from((await run(values)).data, Number);

// Lets the model write, as inference/generate.py does: its decode step takes a token and the cache,
// and returns the logits of the next token, and the cache with this token.
const HALF = Math.floor(facts.context / 2) || 1;  // tokens that are read again at its end
const ready = openModel(async (ort, session) => {
  const caches = session.inputMetadata.filter(({name}) => name !== "token");
  const empty = () => Object.fromEntries(caches.map(({name, type, shape: [, ...rest]}) =>
    [name, new ort.Tensor(type, new ARRAYS[type](rest.reduce((a, b) => a * b, 1)), [1, ...rest])]));
  const step = async (token, cache) => {
    const input = new ort.Tensor("int32", [token], [1]);
    const outputs = await session.run({token: input, ...cache});
    const next = caches.map(({name}) => [name, outputs[`next/${name}`]]);
    return [outputs.logits.data, Object.fromEntries(next)];
  };
  await step(0, empty());  // the first run is slower
  return {empty, step};
});

// Yields {read, of}, the tokens of the text that were read, and up to `count` {token}s that follow
// it, which choose(logits) draws. When the text has filled the context, which `full` says, the
// second half of it is read again.
async function* tokensAfter(text, count, choose) {
  const {empty, step} = await ready;
  let cache = null, logits, position = facts.context;
  for (let made = 0; made < count; made++) {
    let full = false;
    if (position === facts.context) {  // before the first token, and when the cache is full
      full = cache !== null;
      text = full ? text.slice(-HALF) : [...text];
      cache = empty();
      position = text.length - 1;
      for (let i = 0; i < position; i++) {
        [, cache] = await step(text[i], cache);
        yield {read: i + 1, of: position};
      }
    }
    [logits, cache] = await step(text.at(-1), cache);
    const token = choose(logits);
    text.push(token);
    position++;
    yield {token, full};
  }
}

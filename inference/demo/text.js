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

// The form of a language model: a prompt, which the model continues.
const MOMENT = 30;  // ms after which the browser may show the text and receive a click
const OPTIONS = ["tokens", "temperature", "topK", "topP", "seed"];
let running = null;  // {stopped} while the model writes
let shown = "";  // the prompt, and the text after it
const tokenizer = unpack("tokenizer").then((bytes) =>
  tokenizerOf(JSON.parse(new TextDecoder().decode(bytes))));
// Of a prompt that is too long, the model reads the last tokens.
const readable = (tokens) => tokens.length > facts.context ? tokens.slice(-HALF) : tokens;

// Yields what happens while the model continues a prompt: {read, of} for each token that it reads,
// {piece, full} for each that it writes, and {piece, ended} after the last one.
async function* written(prompt, {tokens = 200, seed = 0, ...options} = {}) {
  const known = await tokenizer, textOf = textDecoder(), random = randomNumbers(seed);
  // A model may have more tokens than its tokenizer, for speed; they are never drawn.
  const choose = (logits) =>
    draw(logits.slice(0, known.count), {temperature: 1, ...options}, random);
  const start = readable(firstTokens(known, prompt));
  let ended = false;
  for await (const {token, full, ...reading} of tokensAfter(start, tokens, choose)) {
    if (token !== undefined && (ended = token === known.end)) break;
    yield token === undefined ? reading : {piece: textOf(known.bytesOf(token)), full};
  }
  yield {piece: textOf(), ended};
}

window.write = async (prompt, options) => {
  let text = prompt;
  for await (const {piece} of written(prompt, options)) text += piece ?? "";
  return text;
};

async function writeText() {
  if (running || !$("form").reportValidity()) return;
  const prompt = $("prompt").value, set = OPTIONS.filter((id) => $(id).value !== "");
  const options = Object.fromEntries(set.map((id) => [id, Number($(id).value)]));
  setRunning({stopped: false});
  await attempt(async () => {
    await ready;
    await showPrompt(prompt);
    $("status").textContent = await showText(written(prompt, options), running);
  });
  setRunning(null);
}

// Show the text as it is written; returns how it ended.
async function showText(events, state) {
  let count = 0, fulls = 0, start = performance.now(), pause = start;
  const end = (text) => fulls === 0 ? text : `${text}. The context of ${facts.context} tokens was ` +
    `full ${fulls === 1 ? "once" : `${fulls} times`}, where you see ┊: there the model has ` +
    `forgotten all but the last ${tokensOf(HALF)}.`;
  for await (const {read, of, piece, full, ended} of events) {
    if (performance.now() > pause + MOMENT) {
      await new Promise((done) => setTimeout(done));
      pause = performance.now();
    }
    if (state.stopped) return end(`Stopped after ${tokensOf(count)}`);
    if (read) {
      if (!count) start = performance.now();
      $("progress").textContent = `${read} of ${tokensOf(of)} read`;
      continue;
    }
    fulls += full === true;
    showPiece(piece, full);
    if (ended) return end(`The model ended the text after ${tokensOf(count)}`);
    if (ended === undefined) $("progress").textContent = tokensOf(++count);
  }
  const speed = Math.round(1000 * count / (performance.now() - start));
  return end(`${tokensOf(count)}, ${speed} per second`);
}

const tokensOf = (count) => count === 1 ? "1 token" : `${count} tokens`;

function showPiece(piece, full) {
  shown += piece;
  if (full) $("text").append(element("span", "full", ""));
  $("text").append(piece);
}

async function showPrompt(prompt) {
  const [unread, read] = parts(await tokenizer, prompt);
  shown = prompt;
  $("text").replaceChildren(element("span", "unread", unread), element("b", "", read));
}

// (the part of a prompt that is too long for the model, the part that it reads)
function parts({encode, bytesOf}, prompt) {
  const tokens = encode(prompt), textOf = textDecoder();
  const unread = tokens.slice(0, tokens.length - readable(tokens).length);
  const size = textOf(unread.flatMap((token) => [...bytesOf(token)])).length;
  return [prompt.slice(0, size), prompt.slice(size)];
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  Object.assign(made, {className, textContent: text});
  return made;
}

// Say how many tokens the prompt has, and what it has that the model does not know.
const countTokens = () => attempt(async () => {
  const prompt = $("prompt").value;
  $("count").textContent = "";
  const {length} = (await tokenizer).encode(prompt);
  const place = `the model has room for ${facts.context}`;
  $("count").textContent = length <= facts.context ? `${tokensOf(length)}; ${place}`
    : `${tokensOf(length)}, but ${place}: it reads the last ${HALF}`;
});

function setRunning(state) {
  running = state;
  $("write").disabled = state !== null;
  $("stop").disabled = state === null;
  $("reuse").disabled = state !== null || !shown;
  $("text").ariaBusy = state !== null;
  $("progress").textContent = "";
  if (state) $("status").textContent = "";
}

function startText() {
  const stop = () => { if (running) running.stopped = true; };
  const submit = (event) => { event.preventDefault(); writeText(); };
  $("form").addEventListener("submit", submit);
  $("prompt").addEventListener("input", countTokens);
  $("stop").addEventListener("click", stop);
  $("reuse").addEventListener("click", () => {
    $("prompt").value = shown;
    $("prompt").focus();
    countTokens();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  });
  Promise.all([countTokens(), ready.catch(report)]).then(() => {
    if (!running) $("progress").textContent = "";
  });
}

startText();

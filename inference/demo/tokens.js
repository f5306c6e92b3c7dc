// The tokenizers of data_loader/tokenizers: {end, count, encode(text) -> tokens, bytesOf(token)}. A
// token may end within a character, so its text is known only together with what follows.
const KINDS = {bytes: byteTokenizer, characters: characterTokenizer, bpe: bpeTokenizer};
const tokenizerOf = (known) => ({...KINDS[known.type](known), end: known.end, count: known.count});
const utf8 = (text) => new TextEncoder().encode(text);

// The tokens of a prompt; those of a new document begin after the end of another one.
function firstTokens({end, encode}, prompt) {
  if (prompt) return encode(prompt);
  if (end !== null) return [end];
  throw new Error("The prompt is empty, and this model knows no mark between two texts, after " +
    "which a new one could begin: type a beginning.");
}

// A function that returns the text of more bytes, and at the end the rest.
function textDecoder() {
  const decoder = new TextDecoder("utf-8", {ignoreBOM: true});  // a mark that begins a text is text
  return (bytes) => bytes ? decoder.decode(Uint8Array.from(bytes), {stream: true})
    : decoder.decode();
}

function byteTokenizer() {
  return {encode: (text) => [...utf8(text)], bytesOf: (token) => token < 256 ? [token] : []};
}

function characterTokenizer({alphabet}) {
  const characters = [...alphabet];
  const tokens = new Map(characters.map((character, token) => [character, token]));
  const encode = (text) => [...text].map((character, place, all) => {
    if (tokens.has(character)) return tokens.get(character);
    const before = all.slice(0, place), lines = before.filter((x) => x === "\n").length;
    const code = character.codePointAt().toString(16).toUpperCase().padStart(4, "0");
    throw new Error(`Line ${lines + 1}, column ${place - before.lastIndexOf("\n")}: the model ` +
      `never saw the character “${character}” (U+${code}). It knows ${characters.length} others.`);
  });
  return {encode, bytesOf: (token) => utf8(characters[token] ?? "")};
}

// Byte-pair encoding. The bytes of a token are written as `letters`, one for each byte.
function bpeTokenizer({tokens, merges, letters, patterns, special, whole}) {
  const ids = new Map(tokens.map((name, token) => [name, token]));
  const ranks = new Map(merges.map((pair, rank) => [pair, rank]));
  const bytes = new Map([...letters].map((letter, byte) => [letter, byte]));
  const names = Object.keys(special).sort((a, b) => b.length - a.length);  // the longest wins
  const marks = names.map((name) => name.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|");
  const regexes = patterns.map((pattern) => new RegExp(pattern, "gu"));
  const known = new Map();  // {piece: its tokens}

  const encode = (text) => (marks ? split(text, new RegExp(marks, "gu")) : [text]).flatMap(
    (part) => Object.hasOwn(special, part) ? special[part] : regexes.reduce(
      (pieces, regex) => pieces.flatMap((piece) => split(piece, regex)), [part],
    ).flatMap(encodePiece));

  function encodePiece(piece) {
    if (!known.has(piece)) {
      const word = Array.from(utf8(piece), (byte) => [...letters][byte]);
      const name = word.join("");
      const parts = whole && ids.has(name) ? [name] : joined(word, ranks);
      known.set(piece, parts.map((part) => ids.get(part)));
    }
    return known.get(piece);
  }

  function bytesOf(token) {
    const name = [...tokens[token] ?? ""];
    return name.every((letter) => bytes.has(letter)) ? name.map((letter) => bytes.get(letter))
      : utf8(tokens[token]);
  }
  return {encode, bytesOf};
}

// The matches of a regex, and what is between them.
function split(text, regex) {
  const pieces = [];
  let end = 0;
  for (const {0: match, index} of text.matchAll(regex)) {
    pieces.push(text.slice(end, index), match);
    end = index + match.length;
  }
  return [...pieces, text.slice(end)].filter((piece) => piece);
}

// Join the two neighbors whose pair has the smallest rank, until no pair has one.
function joined(parts, ranks) {
  const rank = (i) =>
    i + 1 < parts.length ? ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity : Infinity;
  const all = parts.map((_, i) => rank(i));
  while (all.length) {
    let best = 0;
    for (let i = 1; i < all.length; i++) if (all[i] < all[best]) best = i;
    if (all[best] === Infinity) break;
    parts.splice(best, 2, parts[best] + parts[best + 1]);
    all.splice(best, 1);
    for (const i of [best - 1, best]) if (i >= 0) all[i] = rank(i);
  }
  return parts;
}

// How the next token is drawn, as `draw` in inference/generate.py, but from other random numbers.
function draw(logits, {temperature, topK, topP}, random) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  if (temperature === 0) return logits.indexOf(largest);
  let weights = Float64Array.from(logits, (x) => Math.exp((x - largest) / temperature));
  const descending = () => weights.slice().sort().reverse();
  const keepFrom = (lowest) => { weights = weights.map((x) => x >= lowest ? x : 0); };
  if (topK && topK < weights.length) keepFrom(descending()[topK - 1]);
  let sum = weights.reduce((a, b) => a + b);
  if (topP && topP < 1) {  // the fewest tokens that together have this probability
    const ordered = descending();
    let last = 0, before = ordered[0];
    while (before < topP * sum && last + 1 < ordered.length) before += ordered[++last];
    keepFrom(ordered[last]);
    sum = weights.reduce((a, b) => a + b);
  }
  let rest = random() * sum, token = 0;
  for (let i = 0; i < weights.length && rest >= 0; i++) {
    if (weights[i] === 0) continue;  // it is never drawn, even where rounding leaves a rest
    rest -= weights[i];
    token = i;
  }
  return token;
}

// A function that returns numbers from 0 to 1, without 1, which depend on the seed: mulberry32.
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

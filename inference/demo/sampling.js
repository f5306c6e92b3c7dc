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

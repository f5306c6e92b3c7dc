// Any other input, entered as JSON.
function startNumbers() {
  const submit = () => attempt(async () => request(await numbersIn($("values").value)));
  $("wanted").textContent = facts.shape.join(" × ");
  $("values").value = JSON.stringify(zeros(facts.shape));
  $("run").addEventListener("click", submit);
  submit();
}

// All numbers in a JSON text; raises where the model's array would hold another value.
async function numbersIn(text) {
  const values = [JSON.parse(text)].flat(Infinity), {type} = await ready;
  for (const value of values) {
    if (typeof value !== "number") throw new Error(`${JSON.stringify(value)} is not a number`);
    if (!fits(value, type)) throw new Error(`${value} is not a number of type ${type}`);
  }
  return values;
}

const fits = (value, type) => type === "float32" ||
  (type === "int64" ? Number.isSafeInteger(value) : ARRAYS[type].of(value)[0] === value);

const zeros = ([size, ...rest]) =>
  size === undefined ? 0 : Array.from({length: size}, () => zeros(rest));

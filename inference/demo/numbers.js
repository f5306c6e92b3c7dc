// Any other input, as JSON.
function startNumbers() {
  const read = () => attempt(() => ask([JSON.parse($("values").value)]));
  $("wanted").textContent = facts.shape.join(" × ");
  $("values").value = JSON.stringify(zeros(facts.shape));
  $("run").addEventListener("click", read);
  read();
}

const zeros = ([size, ...rest]) => size === undefined ? 0 : Array.from({length: size}, () => zeros(rest));

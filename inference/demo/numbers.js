// Any other input, entered as JSON.
function startNumbers() {
  const submit = () => attempt(() => request([JSON.parse($("values").value)]));
  $("wanted").textContent = facts.shape.join(" × ");
  $("values").value = JSON.stringify(zeros(facts.shape));
  $("run").addEventListener("click", submit);
  submit();
}

const zeros = ([size, ...rest]) =>
  size === undefined ? 0 : Array.from({length: size}, () => zeros(rest));

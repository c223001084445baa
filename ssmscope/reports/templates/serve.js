(() => {
  "use strict";
  const at = (id) => document.getElementById(`ssmscope-${id}`);
  const numbers = [...document.querySelectorAll("[data-number]")].map((one) => +one.dataset.number);
  let asked = null; // the texts that are shown, not those that are being typed
  let turns = 0, pending = 0;
  const latest = {}; // the last call of each part of the page: earlier answers come too late

  async function call(name, part, given) {
    const turn = latest[part] = ++turns;
    let found;
    document.body.classList.toggle("working", ++pending > 0);
    try {
      const answer = await fetch(name, {method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify(given)});
      found = answer.ok ? await answer.json() : await answer.text();
    } catch {
      found = "the server does not answer";
    }
    document.body.classList.toggle("working", --pending > 0);
    if (latest[part] !== turn) return null;
    if (typeof found !== "string") return found;
    const line = document.createElement("p");
    line.className = "refusal";
    line.textContent = found;
    return [line.outerHTML, "", "", ""];
  }

  function put(id, html) { at(id).innerHTML = html; }

  function options(verb) {
    const fields = [...document.querySelectorAll(`[data-verb="${verb}"] [data-option]`)];
    return Object.fromEntries(fields.filter((one) => one.type !== "radio" || one.checked)
      .map((one) => [one.dataset.option, one.type === "checkbox" ? one.checked : one.value]));
  }

  function show(number, given, edited) {
    put(`given-${number}`, given);
    put(`edited-${number}`, edited);
  }

  async function answer(number) {
    latest[`change ${number}`] = ++turns;
    put(`explained-${number}`, "");
    const found = await call("answer", `heatmaps ${number}`, {number, ...asked, layer: at(`layer-${number}`).value,
      heatmap: options("heatmap"), effect: options("effect")});
    if (!found) return;
    const [prediction, given, edited, change] = found;
    put(`prediction-${number}`, prediction);
    show(number, given, edited);
    put(`change-${number}`, change);
    explained(number);
    at(`change-${number}`).parentElement.hidden = at(`edited-${number}`).parentElement.hidden = !change;
    for (const side of ["given", "edited"]) {
      at(`${side}-${number}-token`).value = "";
      row(number, side);
    }
  }

  async function heatmaps(number) {
    if (!asked) return;
    const found = await call("heatmaps", `heatmaps ${number}`, {number, ...asked, layer: at(`layer-${number}`).value,
      heatmap: options("heatmap")});
    if (found) show(number, found[0], found[1]);
  }

  async function change(number) {
    if (!asked) return;
    const found = await call("change", `change ${number}`, {number, ...asked, effect: options("effect")});
    if (found) put(`change-${number}`, found[0]);
  }

  async function explained(number) {
    if (!asked) return;
    const found = await call("explained", `explained ${number}`, {number, ...asked, explain: options("explain")});
    if (found) put(`explained-${number}`, found[0]);
  }

  async function row(number, side) {
    const text = asked?.[side === "given" ? "text" : "edited"], part = `${side}-${number}-row`;
    if (!text?.trim() || !at(`${side}-${number}`).innerHTML) return put(part, "");
    const found = await call("row", part, {number, text, position: at(`${side}-${number}-token`).value,
      layer: +at(`attention-${number}`).value, attention: options("attention")});
    if (found) put(part, found[0]);
  }

  function rows(number) { for (const side of ["given", "edited"]) row(number, side); }

  function analyze() {
    asked = {text: at("text").value, edited: at("edited").value};
    numbers.forEach(answer);
  }

  const follow = {heatmap: heatmaps, explain: explained, attention: rows, effect: change};
  for (const form of document.querySelectorAll("[data-verb]"))
    form.addEventListener("change", () => numbers.forEach(follow[form.dataset.verb]));
  for (const number of numbers) {
    at(`layer-${number}`).addEventListener("change", () => heatmaps(number));
    at(`attention-${number}`).addEventListener("change", () => rows(number));
    for (const side of ["given", "edited"]) {
      const panel = at(`${side}-${number}`), field = at(`${side}-${number}-token`);
      field.addEventListener("input", () => row(number, side));
      panel.addEventListener("click", (event) => {
        const token = event.target.closest(".tokens > span");
        if (!token) return;
        for (const one of panel.querySelectorAll(".chosen")) one.classList.remove("chosen");
        token.classList.add("chosen");
        field.value = [...token.parentElement.children].filter((one) => one.tagName === "SPAN").indexOf(token);
        row(number, side);
      });
    }
  }
  at("analyze").addEventListener("click", analyze);
  for (const field of [at("text"), at("edited")])
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
      event.preventDefault();
      analyze();
    });
  if (at("text").value) analyze();
})();
